"""Records of requests, and the figures they make."""
