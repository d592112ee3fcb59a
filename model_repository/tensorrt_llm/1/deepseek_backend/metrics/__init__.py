"""The backend's counts, and how the numbers get to /metrics."""
