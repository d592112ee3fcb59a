"""Prompts whose greedy decoding on the random checkpoint is the same on every machine and in every batch."""

DEMO_PROMPTS = (
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
)
DEMO_MAX_TOKENS = 48
"""Number of generated tokens per prompt for which that holds."""
