"""Starts what serves, watches it, and leaves nothing of it behind.

Needs the standard library and Linux's /proc, Python 3.10 or newer, and nothing else: it runs as it is in a stock
container, also as process 1. `supervise.py` beside it is the command.
"""
