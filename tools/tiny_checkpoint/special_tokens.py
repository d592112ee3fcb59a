"""DeepSeek's special tokens, as its tokenizers spell them."""

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
SPECIAL_TOKENS = (BOS, EOS, PAD)
"""Ids 0 to 2. skip_special_tokens takes these three out of a text."""

THINK, END_THINK = "<think>", "</think>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, END_CALL, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
OUTPUTS, END_OUTPUTS = "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"
OUTPUT, END_OUTPUT = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"

MARKER_TOKENS = (
    *(THINK, END_THINK, "<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>", USER, ASSISTANT, "<|EOT|>"),
    *(CALLS, END_CALLS, CALL, END_CALL, OUTPUTS, END_OUTPUTS, OUTPUT, END_OUTPUT, SEPARATOR),
)
"""The last ids. skip_special_tokens leaves these in the text, as in DeepSeek's own tokenizers."""
