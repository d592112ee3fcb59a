"""Facts about a generated folder and the checkpoint it serves."""
