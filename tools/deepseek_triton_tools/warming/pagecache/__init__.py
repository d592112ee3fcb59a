"""The page cache of the kernel: what it holds, and how files are brought into it and kept there."""
