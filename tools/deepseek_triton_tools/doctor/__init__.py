"""The checks of `deepseek-triton doctor`: what is wrong with a machine, before a model is loaded on it.

    report = examine(Machine(), Expected())

The checks are also sent to other hosts and into containers, where a bare `python3` runs them: the modules in
`hosts.SENT` import the standard library and `host/` only (a test holds that).
"""
