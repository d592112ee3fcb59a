"""Who may ask, for which model, and how much in a minute.

The use of each key in the last minute stands in a file that all processes of a gateway map into their memory.

A budget is a bucket that holds what a minute allows and is refilled steadily. Its whole state is the time at which it
will be full again. So a row whose times have passed says nothing, and another key may have it.
"""

import fcntl
import hashlib
import logging
import math
import mmap
import os
import re
import secrets
import struct
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from deepseek_triton_tools.gateway.openai_fields import OpenAIError
from deepseek_triton_tools.gateway.settings import GatewaySettings
from deepseek_triton_tools.tool_errors import nearest

_NUM_ROWS = 16_384
"""How many keys can be used within the same minute or two. 512 KiB."""
_ROW = struct.Struct("=16sdd")
"""The beginning of the key's digest; when the budgets of requests and of tokens will be full, in seconds of
time.monotonic(), which is the same in all processes."""
_NUM_PROBED = 16
"""How many rows a key may be in."""
_MINUTE_S = 60.0
_ROUNDING_S = 1e-6
"""Sums of floating-point seconds may miss by this much."""


@dataclass(frozen=True, slots=True)
class RateBudget:
    """One budget after a charge, in its own unit: requests or tokens."""

    limit: int
    remaining: int
    """0 also where more was used than there was."""
    full_in_s: float
    missing_for_s: float
    """How long until the refused charge would fit; 0 where it was made."""


class RateTable:
    """The budgets of all keys. Charges take the file's lock for microseconds; it ends with the process that has it."""

    def __init__(self, path: Path | None) -> None:
        """Open the table at `path`, and make it where there is none; None for a table of this process only."""
        if path is None:
            # One process needs no file, but flock and mmap below need a descriptor.
            self._file = os.memfd_create("rate_table")
        else:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, _NUM_ROWS * _ROW.size)
        self._rows = mmap.mmap(self._file, _NUM_ROWS * _ROW.size)

    def close(self) -> None:
        self._rows.close()
        os.close(self._file)

    def charge(
        self, digest: bytes, limits: tuple[int | None, int | None], amounts: tuple[int, int], *, force: bool = False
    ) -> list[RateBudget | None]:
        """Take `amounts` of requests and tokens from the budgets that have a limit: all of them, or none where one
        lacks it. An amount above the limit needs a full budget.

        force: take them even so, which may leave a debt; a negative amount gives back.
        """
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            now = time.monotonic()
            offset = self._row(digest)
            key, *times = _ROW.unpack_from(self._rows, offset)
            full_at = [max(now, at) for at in times] if key == digest[:16] else [now, now]
            # A budget that is full at `at` has room for `amount` once what it would be full at is a minute away.
            missing_s = [
                0.0 if limit is None or force else at + _MINUTE_S * min(amount / limit, 1) - now - _MINUTE_S
                for at, limit, amount in zip(full_at, limits, amounts, strict=True)
            ]
            if max(missing_s) <= _ROUNDING_S:
                full_at = [
                    at if limit is None else at + _MINUTE_S * amount / limit
                    for at, limit, amount in zip(full_at, limits, amounts, strict=True)
                ]
                _ROW.pack_into(self._rows, offset, digest[:16], *full_at)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        budgets: list[RateBudget | None] = [None, None]
        for index, limit in enumerate(limits):
            if limit is not None:
                full_in_s, missing = max(0.0, full_at[index] - now), missing_s[index]
                remaining = max(0, int(limit * (1 - full_in_s / _MINUTE_S) + 1e-6))
                budgets[index] = RateBudget(limit, remaining, full_in_s, missing if missing > _ROUNDING_S else 0.0)
        return budgets

    def _row(self, digest: bytes) -> int:
        """The offset of the key's row, or of one that it may have."""
        first = int.from_bytes(digest[16:20], "big")
        offsets = [(first + step) % _NUM_ROWS * _ROW.size for step in range(_NUM_PROBED)]
        for offset in offsets:
            if self._rows[offset : offset + 16] == digest[:16]:
                return offset
        # The row that is full soonest. With fewer keys than rows it is full already.
        return min(offsets, key=lambda offset: max(_ROW.unpack_from(self._rows, offset)[1:]))


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
    for word in (limits := ("requests_per_minute", "tokens_per_minute")):
        value = given.get(word, "1")
        if not re.fullmatch(r"[0-9]{1,13}", value) or not 1 <= int(value) <= _LARGEST_LIMIT:
            raise ValueError(f"{word}: expected a whole number from 1 to {_LARGEST_LIMIT}")
    requests, tokens = (int(given[word]) if word in given else None for word in limits)
    models = frozenset(given["models"].split(",")) if "models" in given else None
    return Caller(given["name"], bytes.fromhex(digest), requests, tokens, models, "admin" in given)


BYTES_A_TOKEN = 4
"""About what DeepSeek's tokenizer makes of English text."""
_UNITS = ("requests", "tokens")
_TOLD = ("limit", "remaining", "reset")
RATE_LIMIT_HEADERS = tuple(f"x-ratelimit-{what}-{unit}" for unit in _UNITS for what in _TOLD)
"""OpenAI's headers, which answers to keys with limits have."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reservation:
    """The amounts that a request has taken from its key's budgets."""

    num_tokens: int
    num_prompt_tokens: int
    """How many of them are the estimate of the prompt."""
    headers: tuple[tuple[bytes, bytes], ...]
    """RATE_LIMIT_HEADERS of the limits that there are, for the response."""


class Guard:
    """The keys of a file, and their limits."""

    def __init__(self, keys_file: Path, settings: GatewaySettings) -> None:
        """Raises KeysFileError and OSError."""
        self._path = keys_file
        self._models = {model.name for model in settings.models}
        self._seen = _signature(keys_file)
        self._callers = self._read()
        self._table = RateTable(settings.shared_folder and settings.shared_folder / "limits")

    def close(self) -> None:
        self._table.close()

    def look(self) -> None:
        """Read the file again if it has changed."""
        signature = _signature(self._path)
        if signature == self._seen:
            return
        self._seen = signature
        try:
            self._callers = self._read()
            _log.warning("%s was read again; keys: %d", self._path, len(self._callers))
        except (OSError, KeysFileError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            _log.warning("%s has changed, but the keys of before stay: %s", self._path, reason)

    def _read(self) -> Mapping[bytes, Caller]:
        callers = read_keys(self._path)
        # A model without a name here has the one that its servers will tell.
        for caller in () if "" in self._models else callers.values():
            for model in sorted(set(caller.models or ()) - self._models):
                meant = nearest(model, self._models)
                _log.warning("%s: the key of %s is for %r, no model here%s", self._path, caller.name, model, meant)
        return callers

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> Caller:
        """Whose key the headers have, as ASGI gives them. Raises OpenAIError 401."""
        header = next((value for name, value in headers if name == b"authorization"), b"").decode("latin-1")
        scheme, _, key = header.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthorized("expected an API key in the header Authorization: Bearer KEY", None)
        # Looking up a digest tells no timing of use: nobody can choose a key by the digest that it will have.
        caller = self._callers.get(digest_of(key.strip()))
        if caller is None:
            raise _unauthorized("this API key is not known here, or no longer", "invalid_api_key")
        return caller

    def check_model(self, caller: Caller, model: str) -> None:
        """Raises OpenAIError 403 for a model that the key isn't for."""
        if not caller.may_use(model):
            allowed = ", ".join(sorted(caller.models or ()))
            raise OpenAIError(
                403, f"this API key may not use the model {model!r}; it may use {allowed}", code="model_not_found"
            )

    def reserve(self, caller: Caller, num_bytes: int, most_tokens: int | None) -> Reservation:
        """Count a request, and as many tokens as it may use: an estimate of the prompt, by the size of the request's
        body, and `most_tokens` of all answers where the client gave it. Raises OpenAIError 429."""
        limits = (caller.requests_per_minute, caller.tokens_per_minute)
        if limits == (None, None):
            return Reservation(0, 0, ())
        num_prompt_tokens = num_bytes // BYTES_A_TOKEN
        num_tokens = num_prompt_tokens + (most_tokens or 0)
        budgets = self._table.charge(caller.digest, limits, (1, num_tokens))
        headers = tuple(
            (f"x-ratelimit-{what}-{unit}".encode(), str(value).encode())
            for unit, budget in zip(_UNITS, budgets, strict=True)
            if budget is not None
            for what, value in zip(_TOLD, (budget.limit, budget.remaining, _duration(budget.full_in_s)), strict=True)
        )
        wait_s = max(budget.missing_for_s for budget in budgets if budget is not None)
        for unit, budget, amount in zip(_UNITS, budgets, (1, num_tokens), strict=True):
            if budget is not None and budget.missing_for_s > 0:
                raise OpenAIError(
                    429,
                    f"this API key has {budget.limit} {unit} per minute: {budget.remaining} left, {amount} needed; "
                    f"try again in {_duration(wait_s)}",
                    kind=unit,
                    code="rate_limit_exceeded",
                    retry_after_s=wait_s,
                    headers=headers,
                )
        return Reservation(num_tokens, num_prompt_tokens, headers)

    def settle(self, caller: Caller, reserved: Reservation, num_used: int) -> None:
        """Count the tokens that were used in place of those that were reserved. More than the budget has is a debt."""
        if caller.tokens_per_minute is not None and num_used != reserved.num_tokens:
            amounts = (0, num_used - reserved.num_tokens)
            self._table.charge(caller.digest, (None, caller.tokens_per_minute), amounts, force=True)


def read_keys(path: Path) -> Mapping[bytes, Caller]:
    """Raises KeysFileError and OSError."""
    try:
        return parse_keys(path.read_text("utf-8"))
    except UnicodeDecodeError as error:
        raise KeysFileError("expected UTF-8") from error


def _signature(path: Path) -> tuple[int, ...]:
    """Another one when the file, or who may read it, has changed."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_ctime_ns, status.st_size, status.st_ino


def _unauthorized(message: str, code: str | None) -> OpenAIError:
    return OpenAIError(401, message, code=code, headers=((b"www-authenticate", b"Bearer"),))


def _duration(seconds: float) -> str:
    """A time as OpenAI writes it: 20ms, 1.5s, 6m0s."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{rest / 1000:g}s" if minutes else f"{rest / 1000:g}s"
