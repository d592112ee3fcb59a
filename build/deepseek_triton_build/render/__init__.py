"""A plan -> the text of its files. Deterministic: the same plan gives the same bytes."""
