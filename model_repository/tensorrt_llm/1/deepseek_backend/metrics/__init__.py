"""What the backend counts, and how the numbers get to /metrics."""
