"""The tags around calls, as the models write them. `｜` is U+FF5C and `▁` U+2581.

V3, R1 (fenced):     calls begin, call begin, `function`, separator, name, newline, JSON in a fence, call end, calls end
V3.1, V3.2-Exp:      calls begin, call begin, name, separator, JSON, call end, calls end
V3.2 and later:      DSML, with a tag for each call and each argument

Sources: the chat templates of DeepSeek-V3-0324, R1-0528 and V3.1, and encoding_dsv32.py of V3.2. DSML's outer tag is
`function_calls` in V3.2, `tool_calls` in V4 (encoding_dsv4.py) and ` calls` in V4.1 (encoding.py), whose other tags
have a space at the same place.
"""

from __future__ import annotations

CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
CALL_BEGIN = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCED_TYPE = "function"
"""The word in the name's place in the fenced form."""

_DSML_OUTER = ("function_calls", "tool_calls", " calls")
_SPACES = ("", " ")

DSML_CALLS_BEGIN = tuple(f"<｜DSML｜{word}>" for word in _DSML_OUTER)
DSML_CALLS_END = tuple(f"</｜DSML｜{word}>" for word in _DSML_OUTER)
DSML_CALL_BEGIN = tuple(f'<｜DSML｜{space}invoke name="' for space in _SPACES)
DSML_CALL_END = tuple(f"</｜DSML｜{space}invoke>" for space in _SPACES)
DSML_PARAMETER_BEGIN = tuple(f'<｜DSML｜{space}parameter name="' for space in _SPACES)
DSML_PARAMETER_END = tuple(f"</｜DSML｜{space}parameter>" for space in _SPACES)

AFTER_PARAMETER = DSML_PARAMETER_BEGIN + DSML_CALL_END + DSML_CALL_BEGIN + DSML_CALLS_END
"""A parameter has ended only if its end tag is followed by one of these, so a value may have the end tag in it."""

OPENINGS = (CALLS_BEGIN, CALL_BEGIN, *DSML_CALLS_BEGIN, *DSML_CALL_BEGIN)
CLOSINGS = (CALL_END, CALLS_END, *DSML_CALL_END, *DSML_CALLS_END)
