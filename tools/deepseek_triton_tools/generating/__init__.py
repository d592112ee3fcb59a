"""A batch of JSON Lines, and requests and completions as JSON."""
