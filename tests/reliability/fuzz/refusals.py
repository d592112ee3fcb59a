"""The judgement of a target: a parser may refuse its input, by its own errors, in one line that is not long."""

from collections.abc import Iterator
from contextlib import contextmanager

LONGEST_MESSAGE = 20_000
"""Characters. No message has nearly as many, so a longer one has quoted its input without an end."""


@contextmanager
def may_refuse(*errors: type[Exception]) -> Iterator[None]:
    try:
        yield
    except errors as error:
        check_message(str(error))


def check_message(message: str) -> None:
    assert message.strip(), "an error without a text"
    assert len(message) <= LONGEST_MESSAGE, f"an error of {len(message):,} characters: {message[:300]!r}"
    assert "\n" not in message.strip(), f"an error of several lines: {message[:300]!r}"
