"""This machine: memory, mounts, ports, processes.

Standard library only, because `doctor` sends this folder to other hosts.
"""
