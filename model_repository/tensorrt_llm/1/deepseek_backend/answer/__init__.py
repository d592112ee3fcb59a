"""One active request: its states, the text of its sequences, and its responses."""
