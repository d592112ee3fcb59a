"""Holds what training begins with: the network's dimensions, and special tokens as DeepSeek's tokenizers spell them.

The form is DeepSeek-V3's, with the head sizes that production's kernels need. Tensor parallelism over 1, 2 and 4 GPUs
divides the heads, the vocabulary and every FP8 block. Over 8 it would halve a block of q_b_proj (one head of 192 rows),
so 8 GPUs need attention data parallelism; they get one expert each.
"""

import json
from typing import Any

from deepseek_backend.engines.tags import DSML
from deepseek_triton_build import model_repository

CONFIG: dict[str, Any] = json.loads((model_repository() / "tensorrt_llm/1/tiny/config.json").read_text("utf-8"))
"""The content of config.json. Another one is trained by changing the file of the embedded checkpoint first."""

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
SPECIAL_TOKENS = (BOS, EOS, PAD)
"""Ids 0 to 2. skip_special_tokens takes these three out of a text."""

THINK, END_THINK = "<think>", "</think>"
USER, ASSISTANT, REMINDER = "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>"
CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, END_CALL, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
OUTPUTS, END_OUTPUTS = "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"
OUTPUT, END_OUTPUT = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"

MARKER_TOKENS = (
    *(THINK, END_THINK, "<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>", USER, ASSISTANT, "<|EOT|>"),
    *(CALLS, END_CALLS, CALL, END_CALL, OUTPUTS, END_OUTPUTS, OUTPUT, END_OUTPUT, SEPARATOR, REMINDER, DSML),
)
"""The last ids. skip_special_tokens leaves these in the text, as in DeepSeek's own tokenizers."""
