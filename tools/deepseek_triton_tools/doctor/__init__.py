"""The checks of `deepseek-triton doctor`: what is wrong with a machine, before a model is loaded on it.

    report = examine(Machine(), Expected())

This folder holds the local side: it reaches other hosts, packs the checks for them and compares their reports.
`machine/` holds the checks themselves. It is also sent to other hosts and into containers, where a bare `python3` runs
it; so it imports the standard library and `host/` only (`packing.SENT` is the list, a test holds it).
"""
