"""The page cache: what is in it, and how files get into it and stay there."""
