"""The tasks that `eval` knows by name, and the user's own."""
