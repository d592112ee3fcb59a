"""The checks of one machine. Standard library only: `doctor` sends this folder to other hosts."""
