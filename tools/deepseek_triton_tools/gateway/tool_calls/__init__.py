"""Finds calls of tools in a model's text while it streams, in the three forms that DeepSeek's checkpoints write."""
