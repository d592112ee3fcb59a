"""The tags between which DeepSeek's models write calls of tools.

`｜` is U+FF5C and `▁` is U+2581. In DeepSeek's vocabulary each of those of V3 to V3.2-Exp is one token, and none of
them is special. Sources: the tokenizers and chat templates of DeepSeek-V3, R1 and V3.1, and V3.2's encoding.
"""

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
RESULTS_BEGIN, RESULTS_END = "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"
RESULT_BEGIN, RESULT_END = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"
DSML = "｜DSML｜"
DSML_BEGIN, DSML_END = f"<{DSML}function_calls>", f"</{DSML}function_calls>"

BEGINNINGS = (CALLS_BEGIN, DSML_BEGIN)
"""A model that writes one of these has ended its reasoning, also without its closing tag."""
