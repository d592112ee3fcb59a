"""The checks of one machine. Standard library and `host/` only: `doctor` sends this folder to other hosts."""
