"""Starts the server of this repository, watches it, and leaves no process of it behind.

It needs Linux's /proc, Python 3.10 or newer and the standard library, and nothing else: it runs in a stock container,
also as process 1. `supervise.py` beside this folder is its command line.
"""
