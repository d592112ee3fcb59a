"""The tags that DeepSeek's models write: around calls of tools, and around their reasoning.

`｜` is U+FF5C and `▁` is U+2581. In DeepSeek's vocabulary each of those of V3 to V3.2-Exp is one token, and none of
them is special. Sources: the tokenizers and chat templates of DeepSeek-V3, R1 and V3.1, V3.2's encoding, and
deepseek-recipe 0.2.0 for V4 and V4.1.
"""

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
RESULTS_BEGIN, RESULTS_END = "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"
RESULT_BEGIN, RESULT_END = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"
DSML = "｜DSML｜"
DSML_BEGIN, DSML_END = f"<{DSML}function_calls>", f"</{DSML}function_calls>"
V4_CALLS, V41_CALLS = "tool_calls", " calls"
"""Tags of blocks of calls; those of a call and its parameters have the same blank before them, or none."""

BEGINNINGS = (CALLS_BEGIN, DSML_BEGIN, f"<{DSML}{V4_CALLS}>", f"<{DSML}{V41_CALLS}>")
"""A model that writes one of these has ended its reasoning, also without its closing tag."""


OPENING = "<think>"
CLOSING = "</think>"
WHITE_SPACE = " \t\r\n"
"""White space between tags and text. It is not all of Unicode's, because a Chinese paragraph may begin with U+3000."""


def ends_inside(prompt: str) -> bool:
    """Return whether the prompt ends with an opening tag and white space.

    Reasoning that a client has begun itself, with text after the tag, is not recognised: a prompt may also talk about
    the tag, and then its answer would be taken for reasoning.
    """
    return prompt.rstrip(WHITE_SPACE).endswith(OPENING)
