"""The file of API keys: whose each is, what it may use, and how much in a minute."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

_PREFIX = "sha256:"
_HASH = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[\w.@+-]{1,64}")
_WORDS = ("name", "requests_per_minute", "tokens_per_minute", "models", "admin")
_LARGEST_LIMIT = 10**12


class KeysFileError(ValueError):
    """A file of keys is wrong. The message names each line, and never holds a key."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever has a key. None is no limit: every model, any number of requests and of tokens."""

    name: str
    digest: bytes
    """SHA-256 of the key."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    models: frozenset[str] | None = None
    admin: bool = False
    """May see the servers' addresses, and the names of keys."""

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models


def new_key(name: str) -> tuple[str, str]:
    """A key that nobody has, and its line for the file. Raises ValueError for a name that the file can't have."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"expected a name of at most 64 letters, digits and . _ @ + -, got {name!r:.80}")
    key = f"sk-{secrets.token_urlsafe(32)}"
    return key, f"{_PREFIX}{digest_of(key).hex()} name={name}"


def digest_of(key: str) -> bytes:
    """A fast hash is enough: keys are random, so there is nothing to guess."""
    return hashlib.sha256(key.encode()).digest()


def parse_keys(text: str) -> Mapping[bytes, Caller]:
    """Digest -> caller. A file of comments only lets nobody in. Raises KeysFileError with all problems."""
    if not text.strip():
        raise KeysFileError("it is empty; a file that shall let nobody in has a comment, such as # nobody")
    callers: dict[bytes, Caller] = {}
    problems: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        try:
            caller = _caller(fields)
            if caller.digest in callers:
                raise ValueError(f"the key of {callers[caller.digest].name} stands here again")
            callers[caller.digest] = caller
        except ValueError as error:
            problems.append(f"line {number}: {error}")
    if problems:
        raise KeysFileError("; ".join(problems))
    return callers


def _caller(fields: list[str]) -> Caller:
    digest = fields[0].removeprefix(_PREFIX)
    if not fields[0].startswith(_PREFIX) or not _HASH.fullmatch(digest):
        raise ValueError(
            f"expected {_PREFIX} and 64 lower-case hexadecimal digits first; deepseek-triton gateway --new-key NAME "
            "prints such a line"
        )
    given: dict[str, str] = {}
    for position, field in enumerate(fields[1:], 2):
        word, equals, value = field.partition("=")
        if word not in _WORDS or not equals or not value or word in given:
            # The field itself is not shown: it may be a key in the wrong place.
            raise ValueError(
                f"field {position}: expected one of {', '.join(_WORDS)}, each at most once, as in WORD=VALUE"
            )
        given[word] = value
    if not _NAME.fullmatch(given.get("name", "")):
        raise ValueError("expected name= with at most 64 letters, digits and . _ @ + -")
    if given.get("admin", "yes") != "yes":
        raise ValueError("admin: expected yes, or no such word")
    models = given.get("models")
    return Caller(
        given["name"],
        bytes.fromhex(digest),
        _limit(given, "requests_per_minute"),
        _limit(given, "tokens_per_minute"),
        None if models is None else frozenset(models.split(",")),
        "admin" in given,
    )


def _limit(given: Mapping[str, str], word: str) -> int | None:
    value = given.get(word)
    if value is None:
        return None
    if not re.fullmatch(r"[0-9]{1,13}", value) or not 1 <= int(value) <= _LARGEST_LIMIT:
        raise ValueError(f"{word}: expected a whole number from 1 to {_LARGEST_LIMIT}")
    return int(value)
