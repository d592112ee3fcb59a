"""Output for people (tables, text, a status line), and the lines that they type."""
