"""What the backend counts, and its way to /metrics."""
