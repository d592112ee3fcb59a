"""Checks `engine_options` of the simulated engine, and fills in the values of the preset."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deepseek_backend.engines.simulated import presets
from deepseek_backend.engines.simulated.scheduler import BatchLimits
from deepseek_backend.errors import ConfigError

NEUTRAL = {"max_batch_size": 1024, "max_num_tokens": 8192, "max_seq_len": 163840, "kv_cache_tokens": 4 << 20}
"""Limits without a preset, which are generous and of no real deployment."""
KV_TRANSFER_TIMEOUT_MS = 600_000
"""The same as `build --profile disagg` writes for TensorRT-LLM."""
KV_TRANSFER_GBPS = 400.0
"""One port of InfiniBand NDR for each GPU. Source: NVIDIA DGX H100/H200 User Guide: ConnectX-7, 400 Gb/s, eight of
them for eight GPUs."""
_TOKENS_PER_BLOCK = 32  # TensorRT-LLM's default
_NEUTRAL_KV_TOKEN_BYTES = presets.NUM_LAYERS * presets.LATENT * presets.BYTES["bf16"]


_COUNT = (presets.is_count, "a whole number above 0")
_COUNT_OR_NULL = (lambda value: value is None or presets.is_count(value), "a whole number above 0, or null")
_POSITIVE = (lambda value: presets.is_number(value) and value > 0, "a number above 0")
RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "preset": (lambda value: True, ""),  # `find_preset` checks it
    "pace": (lambda value: value in ("real", "none"), "real or none"),
    "speed": _POSITIVE,
    "text": (lambda value: value in ("filler", "stamps", "dictated"), "filler, stamps or dictated"),
    "max_batch_size": _COUNT,
    "max_num_tokens": _COUNT,
    "max_seq_len": (lambda value: presets.is_count(value, 2), "a whole number above 1"),
    "tokens_per_block": _COUNT,
    "kv_cache_tokens": _COUNT,
    "eos_after": _COUNT_OR_NULL,
    "kv_transfer_gbps": _POSITIVE,
    "kv_transfer_timeout_ms": _COUNT_OR_NULL,
    "transfer_host": (
        lambda value: isinstance(value, str) and value not in ("", "0.0.0.0", "::"),
        "an address of this host at which generation servers reach it",
    ),
    "load_seconds": (presets.is_number, "a number of seconds, 0 or more"),
    "fail_load": (lambda value: isinstance(value, bool), "true or false"),
    "fail_after": _COUNT_OR_NULL,
    "hang_after": _COUNT_OR_NULL,
    "crash_after": _COUNT_OR_NULL,
}
"""Option -> whether a value is right, and what is expected. docs/configuration.md says what each one means."""


@dataclass(frozen=True, kw_only=True)
class SimulatedOptions:
    """The checked options, from `parse_options`."""

    preset: str | None
    """Name of the deployment whose pace is kept."""
    deployment: presets.PacedDeployment | None
    """That deployment; None where every iteration takes NEUTRAL_STEP_S."""
    limits: BatchLimits
    max_seq_len: int
    """Limit on prompt plus generated tokens, at most the KV cache of one rank, so that every admitted request fits."""
    paced: bool
    """Whether to sleep until the modelled time; else iterations follow each other at once."""
    speed: float
    text: str
    """filler, stamps or dictated."""
    eos_after: int | None
    kv_token_bytes: float
    kv_transfer_gbps: float
    kv_transfer_timeout_ms: int | None
    """It is real time, whatever the speed."""
    transfer_host: str
    load_seconds: float
    fail_load: bool
    fault: str
    """The fault that comes first: fail, hang or crash; "" for none."""
    fault_after: float
    """Number of tokens of all requests after which it comes."""

    def transfer_seconds(self, num_tokens: int) -> float:
        """Return how long the KV cache of a prompt takes from a context server to here."""
        if not self.paced:
            return 0.0
        return num_tokens * self.kv_token_bytes * 8 / (self.kv_transfer_gbps * 1e9) / self.speed


def parse_options(options: Mapping[str, Any]) -> SimulatedOptions:
    """Return the checked options.

    :raises ConfigError: with every problem found.
    """
    problems = [
        f"{name}: unknown option; known: {', '.join(sorted(RULES))}"
        if name not in RULES
        else f"{name}: expected {RULES[name][1]}, got {value!r}"
        for name, value in options.items()
        if name not in RULES or not RULES[name][0](value)
    ]
    try:
        preset = presets.find_preset(options.get("preset"))
    except ValueError as error:
        problems.append(f"preset: {error}")
    if not problems:
        values = NEUTRAL if preset is None else {**vars(preset), "kv_cache_tokens": preset.deployment.kv_cache_tokens}
        values = {name: options.get(name, values[name]) for name in NEUTRAL}
        tokens_per_block = options.get("tokens_per_block", _TOKENS_PER_BLOCK)
        limits = BatchLimits(
            max_batch_size=values["max_batch_size"],
            max_num_tokens=values["max_num_tokens"],
            tokens_per_block=tokens_per_block,
            num_blocks=values["kv_cache_tokens"] // tokens_per_block,
            num_draft_tokens=preset.deployment.num_draft_tokens if preset else 0,
            tokens_per_step=preset.tokens_per_step if preset else 1.0,
        )
        decode_tokens = limits.max_batch_size * limits.tokens_per_row
        if decode_tokens > limits.max_num_tokens:
            problems.append(
                f"max_num_tokens: expected at least {decode_tokens}, which a full batch decodes each iteration "
                f"({limits.max_batch_size} rows of {limits.tokens_per_row}), got {limits.max_num_tokens}"
            )
        if limits.num_blocks * limits.tokens_per_block < 2:
            problems.append("kv_cache_tokens: expected at least one block (tokens_per_block) and 2 tokens")
    if problems:
        raise ConfigError([f"engine_options.{problem}" for problem in problems])
    name = options.get("preset")
    faults = {kind: after for kind in ("fail", "hang", "crash") if (after := options.get(f"{kind}_after")) is not None}
    fault = min(faults, key=faults.__getitem__, default="")
    return SimulatedOptions(
        preset=str(name["title"]) if isinstance(name, Mapping) else name,
        deployment=preset.deployment if preset else None,
        limits=limits,
        max_seq_len=min(values["max_seq_len"], limits.num_blocks * limits.tokens_per_block),
        paced=options.get("pace", "real" if preset else "none") == "real",
        speed=float(options.get("speed", 1.0)),
        text=options.get("text", "filler"),
        eos_after=options.get("eos_after"),
        kv_token_bytes=preset.deployment.kv_token_bytes if preset else _NEUTRAL_KV_TOKEN_BYTES,
        kv_transfer_gbps=float(options.get("kv_transfer_gbps", KV_TRANSFER_GBPS)),
        kv_transfer_timeout_ms=options.get("kv_transfer_timeout_ms", KV_TRANSFER_TIMEOUT_MS),
        transfer_host=options.get("transfer_host", "127.0.0.1"),
        load_seconds=float(options.get("load_seconds", 0.0)),
        fail_load=options.get("fail_load", False),
        fault=fault,
        fault_after=faults.get(fault, math.inf),
    )
