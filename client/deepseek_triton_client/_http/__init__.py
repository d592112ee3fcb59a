"""Triton's generate extension over HTTP, on sockets of our own."""
