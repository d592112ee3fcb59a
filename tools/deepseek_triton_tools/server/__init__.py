"""A tritonserver that runs: its process, its log, and waiting for its models."""
