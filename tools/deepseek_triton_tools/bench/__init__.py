"""Load on a server, and what it measured: `deepseek-triton bench`."""
