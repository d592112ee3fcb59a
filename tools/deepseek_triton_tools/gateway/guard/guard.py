"""Who may ask, for which model, and how much in a minute."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from deepseek_triton_tools.gateway.guard.api_keys import Caller, KeysFileError, digest_of, parse_keys
from deepseek_triton_tools.gateway.guard.rate_table import RateBudget, RateTable
from deepseek_triton_tools.gateway.protocol.openai_errors import OpenAIError

_LOOK_S = 1.0
"""How often the file is looked at, if requests come."""
_BYTES_A_TOKEN = 4
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
    """The keys of a file, which is read again when it changes, and their limits."""

    def __init__(self, keys_file: Path, limits_file: Path | None = None) -> None:
        """`limits_file` is RateTable's, which several processes share. Raises KeysFileError and OSError."""
        self._path = keys_file
        self._seen = _signature(keys_file)
        self._callers = read_keys(keys_file)
        self._look_at_s = time.monotonic() + _LOOK_S
        self._table = RateTable(limits_file)

    def close(self) -> None:
        self._table.close()

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> Caller:
        """Whose key the headers have, as ASGI gives them. Raises OpenAIError 401."""
        self._read_again()
        given = next((value for name, value in headers if name == b"authorization"), b"").decode("latin-1")
        scheme, _, key = given.partition(" ")
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
        num_prompt_tokens = num_bytes // _BYTES_A_TOKEN
        num_tokens = num_prompt_tokens + (most_tokens or 0)
        budgets = self._table.charge(caller.digest, limits, (1, num_tokens))
        headers = _headers(budgets)
        for unit, budget in zip(_UNITS, budgets, strict=True):
            if budget is not None and budget.missing_for_s > 0:
                wait_s = max(one.missing_for_s for one in budgets if one is not None)
                raise _too_many(unit, budget, 1 if unit == "requests" else num_tokens, wait_s, headers)
        return Reservation(num_tokens, num_prompt_tokens, headers)

    def settle(self, caller: Caller, reserved: Reservation, num_used: int) -> None:
        """Count the tokens that were used in place of those that were reserved. More than the budget has is a debt."""
        if caller.tokens_per_minute is not None and num_used != reserved.num_tokens:
            amounts = (0, num_used - reserved.num_tokens)
            self._table.charge(caller.digest, (None, caller.tokens_per_minute), amounts, force=True)

    def _read_again(self) -> None:
        now_s = time.monotonic()
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + _LOOK_S
        try:
            signature = _signature(self._path)
            if signature == self._seen:
                return
            self._seen = signature
            self._callers = read_keys(self._path)
            _log.warning("%s was read again; keys: %d", self._path, len(self._callers))
        except (OSError, KeysFileError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            _log.warning("%s has changed, but the keys of before stay: %s", self._path, reason)


def read_keys(path: Path) -> Mapping[bytes, Caller]:
    """Raises KeysFileError and OSError."""
    try:
        return parse_keys(path.read_text("utf-8"))
    except UnicodeDecodeError as error:
        raise KeysFileError("expected UTF-8") from error


def _signature(path: Path) -> tuple[int, int, int]:
    status = os.stat(path)
    return status.st_mtime_ns, status.st_size, status.st_ino


def _unauthorized(message: str, code: str | None) -> OpenAIError:
    return OpenAIError(401, message, code=code, headers=((b"www-authenticate", b"Bearer"),))


def _too_many(
    unit: str, budget: RateBudget, num_asked: int, wait_s: float, headers: tuple[tuple[bytes, bytes], ...]
) -> OpenAIError:
    return OpenAIError(
        429,
        f"this API key has {budget.limit} {unit} per minute: {budget.remaining} left, {num_asked} needed; try again in "
        f"{_duration(wait_s)}",
        kind=unit,
        code="rate_limit_exceeded",
        retry_after_s=wait_s,
        headers=headers,
    )


def _headers(budgets: Iterable[RateBudget | None]) -> tuple[tuple[bytes, bytes], ...]:
    return tuple(
        (f"x-ratelimit-{what}-{unit}".encode(), str(value).encode())
        for unit, budget in zip(_UNITS, budgets, strict=True)
        if budget is not None
        for what, value in zip(_TOLD, (budget.limit, budget.remaining, _duration(budget.full_in_s)), strict=True)
    )


def _duration(seconds: float) -> str:
    """A time as OpenAI writes it: 20ms, 1.5s, 6m0s."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{rest / 1000:g}s" if minutes else f"{rest / 1000:g}s"
