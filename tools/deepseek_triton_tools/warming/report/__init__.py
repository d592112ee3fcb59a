"""What a warm-up tells people and programs."""
