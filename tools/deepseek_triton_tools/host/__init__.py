"""This machine: its memory, mounts, ports, processes and signals.

This folder imports the standard library and tool_errors only, because `doctor` sends it to other hosts.
"""
