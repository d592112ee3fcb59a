"""Checks `engine_options` of the simulated engine, and fills in the values of the preset."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deepseek_backend.engines.simulated.presets import (
    BYTES,
    LATENT,
    NUM_LAYERS,
    PacedDeployment,
    Preset,
    find_preset,
    preset_name,
)
from deepseek_backend.engines.simulated.scheduler import BatchLimits
from deepseek_backend.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SimulatedOptions:
    """The checked options, from `parse_options`."""

    preset: str | None
    """Name of the deployment whose pace is kept."""
    deployment: PacedDeployment | None
    """That deployment; None where every iteration takes NEUTRAL_STEP_S."""
    limits: BatchLimits
    max_seq_len: int
    """Limit on prompt plus generated tokens, at most the KV cache of one rank, so that every admitted request fits."""
    paced: bool
    """Whether to sleep until the modelled time; else iterations follow each other at once."""
    speed: float
    """Factor of speed: 2.0 halves every modelled duration."""
    stamped: bool
    """Whether the text of a token is the time at which it was made (`stamp`) instead of filler text."""
    dictated: bool
    """Whether a prompt may say its answer itself (`dictation`)."""
    eos_after: int | None
    """Number of tokens of a request, the last of which is the end token. None: every request runs to its max_tokens."""
    kv_token_bytes: float
    """Bytes of one token's KV cache."""
    kv_transfer_gbps: float
    """Gigabits a second at which a KV cache comes from a context server."""
    kv_transfer_timeout_ms: int | None
    """Time after which a context server frees a KV cache that has not been fetched; None for never. It is real time,
    whatever the speed."""
    transfer_host: str
    """Address at which generation servers reach this one."""
    load_seconds: float
    """Seconds that `start` takes."""
    fail_load: bool
    """Whether `start` fails, after load_seconds."""
    fail_after: int | None
    """Number of tokens of all requests after which the engine dies in order: it answers every open and every further
    request with the error. Only the first of the three faults that is reached happens."""
    hang_after: int | None
    """Number of tokens after which the engine hangs: no token comes, no request and no abort is answered, and its
    health still says that it is alive. `stop` ends it."""
    crash_after: int | None
    """Number of tokens after which the engine's thread ends: its health says so, and no request is answered."""

    @property
    def fault(self) -> tuple[float, str]:
        """The first fault: the number of tokens after which it happens (math.inf for none), and fail, hang or crash."""
        faults = {"fail": self.fail_after, "hang": self.hang_after, "crash": self.crash_after}
        return min(((after, name) for name, after in faults.items() if after is not None), default=(math.inf, ""))

    def transfer_seconds(self, num_tokens: int) -> float:
        """Return how long the KV cache of a prompt takes from a context server to here."""
        if not self.paced:
            return 0.0
        return num_tokens * self.kv_token_bytes * 8 / (self.kv_transfer_gbps * 1e9) / self.speed


NEUTRAL = {"max_batch_size": 1024, "max_num_tokens": 8192, "max_seq_len": 163840, "kv_cache_tokens": 4 << 20}
"""Limits without a preset, which are generous and of no real deployment."""

KV_TRANSFER_TIMEOUT_MS = 600_000
"""The same as `build --profile disagg` writes for TensorRT-LLM."""

_TOKENS_PER_BLOCK = 32  # TensorRT-LLM's default

KV_TRANSFER_GBPS = 400.0
"""One port of InfiniBand NDR for each GPU. Source: NVIDIA DGX H100/H200 User Guide: ConnectX-7, 400 Gb/s, eight of
them for eight GPUs."""
_NEUTRAL_KV_TOKEN_BYTES = NUM_LAYERS * LATENT * BYTES["bf16"]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


_COUNT = (_is_count, "a whole number above 0")
_COUNT_OR_NULL = (lambda value: value is None or _is_count(value), "a whole number above 0, or null")

_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "pace": (lambda value: value in ("real", "none"), "real or none"),
    "speed": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    "text": (lambda value: value in ("filler", "stamps", "dictated"), "filler, stamps or dictated"),
    "max_batch_size": _COUNT,
    "max_num_tokens": _COUNT,
    "max_seq_len": (lambda value: _is_count(value) and value >= 2, "a whole number above 1"),
    "tokens_per_block": _COUNT,
    "kv_cache_tokens": _COUNT,
    "eos_after": _COUNT_OR_NULL,
    "kv_transfer_gbps": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    "kv_transfer_timeout_ms": _COUNT_OR_NULL,
    "transfer_host": (
        lambda value: isinstance(value, str) and value not in ("", "0.0.0.0", "::"),
        "an address of this host at which generation servers reach it",
    ),
    "load_seconds": (lambda value: _is_number(value) and value >= 0, "a number of seconds, 0 or more"),
    "fail_load": (lambda value: isinstance(value, bool), "true or false"),
    "fail_after": _COUNT_OR_NULL,
    "hang_after": _COUNT_OR_NULL,
    "crash_after": _COUNT_OR_NULL,
}


def parse_options(given: Mapping[str, Any]) -> SimulatedOptions:
    """Return the checked options.

    :raises ConfigError: with every problem found.
    """
    problems = [
        f"engine_options.{name}: {problem}" for name, value in given.items() if (problem := _problem(name, value))
    ]
    if problems:
        raise ConfigError(problems)
    preset = find_preset(given.get("preset"))
    limits, max_seq_len = _limits(given, preset)
    problems = _limit_problems(limits)
    if problems:
        raise ConfigError(problems)
    return SimulatedOptions(
        preset=preset_name(given.get("preset")),
        deployment=preset.deployment if preset else None,
        limits=limits,
        max_seq_len=min(max_seq_len, limits.num_blocks * limits.tokens_per_block),
        paced=given.get("pace", "real" if preset else "none") == "real",
        speed=float(given.get("speed", 1.0)),
        stamped=given.get("text", "filler") == "stamps",
        dictated=given.get("text", "filler") == "dictated",
        eos_after=given.get("eos_after"),
        kv_token_bytes=preset.deployment.kv_token_bytes if preset else _NEUTRAL_KV_TOKEN_BYTES,
        kv_transfer_gbps=float(given.get("kv_transfer_gbps", KV_TRANSFER_GBPS)),
        kv_transfer_timeout_ms=given.get("kv_transfer_timeout_ms", KV_TRANSFER_TIMEOUT_MS),
        transfer_host=given.get("transfer_host", "127.0.0.1"),
        load_seconds=float(given.get("load_seconds", 0.0)),
        fail_load=given.get("fail_load", False),
        fail_after=given.get("fail_after"),
        hang_after=given.get("hang_after"),
        crash_after=given.get("crash_after"),
    )


def _problem(name: str, value: Any) -> str:
    if name == "preset":
        return _preset_problem(value)
    if name not in _RULES:
        return f"unknown option; known: {', '.join(sorted([*_RULES, 'preset']))}"
    accepts, expected = _RULES[name]
    return "" if accepts(value) else f"expected {expected}, got {value!r}"


def _preset_problem(value: Any) -> str:
    try:
        find_preset(value)
    except ValueError as error:
        return str(error)
    return ""


def _limits(given: Mapping[str, Any], preset: Preset | None) -> tuple[BatchLimits, int]:
    """Return the scheduler's limits, and max_seq_len."""
    values = dict(NEUTRAL)
    if preset:
        values = {name: getattr(preset, name) for name in ("max_batch_size", "max_num_tokens", "max_seq_len")}
        values["kv_cache_tokens"] = preset.deployment.kv_cache_tokens
    values.update((name, given[name]) for name in NEUTRAL if name in given)
    tokens_per_block = given.get("tokens_per_block", _TOKENS_PER_BLOCK)
    limits = BatchLimits(
        max_batch_size=values["max_batch_size"],
        max_num_tokens=values["max_num_tokens"],
        tokens_per_block=tokens_per_block,
        num_blocks=values["kv_cache_tokens"] // tokens_per_block,
        num_draft_tokens=preset.deployment.num_draft_tokens if preset else 0,
        tokens_per_step=preset.tokens_per_step if preset else 1.0,
    )
    return limits, values["max_seq_len"]


def _limit_problems(limits: BatchLimits) -> list[str]:
    problems = []
    decode_tokens = limits.max_batch_size * limits.tokens_per_row
    if decode_tokens > limits.max_num_tokens:
        problems.append(
            f"engine_options.max_num_tokens: expected at least {decode_tokens}, which a full batch decodes each "
            f"iteration ({limits.max_batch_size} rows of {limits.tokens_per_row}), got {limits.max_num_tokens}"
        )
    if limits.num_blocks * limits.tokens_per_block < 2:
        problems.append("engine_options.kv_cache_tokens: expected at least one block (tokens_per_block) and 2 tokens")
    return problems
