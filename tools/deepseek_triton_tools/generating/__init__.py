"""Prompts in, completions out: one, a conversation, or a batch of JSON Lines."""
