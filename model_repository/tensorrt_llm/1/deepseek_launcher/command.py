"""Reads options out of the command line that is to be run, which other programs define."""

from __future__ import annotations

from collections.abc import Sequence

_FALSE = ("0", "false", "off", "no")


def option(command: Sequence[str], name: str) -> str | None:
    """Return the last value given as `NAME VALUE` or `NAME=VALUE`; None when the option is not there."""
    value = None
    for word, following in zip(command, [*command[1:], ""], strict=True):
        given, equals, rest = word.partition("=")
        if given == name:
            value = rest if equals else following
    return value


def is_turned_off(command: Sequence[str], name: str) -> bool:
    return (option(command, name) or "").lower() in _FALSE


def seconds(command: Sequence[str], name: str, default: float) -> float:
    """Return the option's value; `default` when it is not there or is no number."""
    try:
        return float(option(command, name) or default)
    except ValueError:
        return default
