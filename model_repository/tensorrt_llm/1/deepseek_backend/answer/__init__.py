"""One request under way: its states, the text of its sequences, and its responses."""
