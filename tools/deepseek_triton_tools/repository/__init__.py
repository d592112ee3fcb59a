"""Facts about a generated model repository and the checkpoints that it serves."""
