"""Warming a server that runs: requests in the shapes that users will send."""
