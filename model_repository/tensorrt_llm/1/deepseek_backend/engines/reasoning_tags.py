"""The tags between which DeepSeek writes its reasoning, and whether a prompt ends inside them."""

OPENING = "<think>"
CLOSING = "</think>"
WHITE_SPACE = " \t\r\n"
"""White space between tags and text. It is not all of Unicode's: a Chinese paragraph may begin with U+3000."""


def ends_inside(prompt: str) -> bool:
    """The prompt's last tag is an opening one, with nothing but white space after it.

    Thinking that a client has begun itself, with text after the tag, is not looked for: a prompt may just as well speak
    of the tag, and then the answer would be taken for thinking.
    """
    return prompt.rstrip(WHITE_SPACE).endswith(OPENING)
