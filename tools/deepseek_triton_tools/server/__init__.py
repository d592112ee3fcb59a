"""A running tritonserver: its process, its log, and waiting for its models."""
