"""Triton's generate extension over HTTP, with h11 on the client's own sockets."""
