"""The tags between which DeepSeek writes its reasoning, and whether a prompt ends inside them."""

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
