"""Reads model.yaml.

LLM arguments stand at the top level, exactly as upstream's own backend would read them. Our own keys stand under
`triton_config` only. `load_config` reports every problem at once.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from deepseek_backend.contract import INT32_MAX, MAX_STREAM_INTERVAL_MS, SAMPLING_BY_NAME
from deepseek_backend.errors import UNREADABLE_YAML, ConfigError
from deepseek_backend.field_values import check_value, quoted

ENGINE_NAMES = ("tensorrt_llm", "vllm", "reference", "simulated")
CHAT_ENCODINGS = ("v4-preview", "v4-0731", "v4.1")


@dataclass(frozen=True, kw_only=True)
class WarmupConfig:
    """Requests that the engine gets before the model is ready (key `warmup`)."""

    shapes: tuple[tuple[int, int], ...]
    """Pairs (requests sent at once, prompt tokens of each), in the order in which they are sent."""
    max_tokens: int = 8
    """Tokens of each answer."""
    max_rounds: int = 5
    """Most times that one shape is sent, if its time does not become steady before."""
    max_s: float = 300
    """Most seconds for the whole warm-up; shapes that are not warm by then stay cold."""


@dataclass(frozen=True, kw_only=True)
class BackendConfig:
    """Everything under `triton_config`, and the LLM arguments beside it."""

    engine: str = "tensorrt_llm"
    """tensorrt_llm, vllm, reference or simulated."""
    decoupled: bool = True
    """A copy of config.pbtxt's transaction policy for upstream's model.py; the two must agree. True: a request may get
    several responses, as streams need. False: each gets one, which is all that ModelInfer and /infer can carry."""
    max_batch_size: int = 0
    """A copy of config.pbtxt's value, as above. 0: the engine batches, Triton does not."""
    default_max_tokens: int = 256
    """max_tokens of a request that gives none."""
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling fields for requests that don't give them, from generation_config or the model card. They are checked."""
    unknown_parameters: str = "error"
    """Treatment of an unknown request parameter: error, warn or ignore."""
    ignored_parameters: tuple[str, ...] = ()
    """Shell-style patterns of request parameters that are ignored, for headers that a proxy forwards."""
    cancellation_check_period_ms: int = 100
    """How often each open request is asked whether its client has gone; less often beyond 100 open requests."""
    stream_mode: str = "delta"
    """Content of a stream's chunks where the request does not say: delta or cumulative."""
    stream_interval: int | None = None
    """Number of tokens for which a stream's text may wait, to leave together, where the request does not say. None: no
    such number. TensorRT-LLM's own stream_interval is something else: an argument of the engine, at the top level."""
    stream_interval_ms: int | None = None
    """Milliseconds for which a stream's text may wait, where the request does not say. None: no such time. Text leaves
    as soon as either bound is reached, and at once where neither is given."""
    chat_encoding: str | None = None
    """Which of DeepSeek-V4's encodings conversations are written in, one of CHAT_ENCODINGS. None: that of config.json's
    model_type and the folder's name, or the chat template."""
    separate_reasoning: bool = False
    """Put the model's reasoning into reasoning_output, where the request does not say."""
    default_timeout_ms: int | None = None
    """timeout_ms of a request that gives none. It also ends a plain /generate whose client has gone, which Triton can't
    see."""
    max_inflight: int | None = None
    """Most sequences accepted and not yet answered; one more is refused with UNAVAILABLE. None: no limit."""
    max_inflight_tokens: int | None = None
    """Most tokens of these sequences together, prompts and max_tokens. None: no limit."""
    hang_s: int = 300
    """Seconds without a token, while requests are open, after which the model is not ready."""
    on_fatal: str = "exit"
    """Action when the engine is dead. exit: end tritonserver, with a code other than 0, after fatal_grace_s.
    unready: go on and refuse everything."""
    fatal_grace_s: int = 2
    """Seconds in which the error responses can leave before tritonserver is ended."""
    drain_s: int | None = None
    """Seconds that open requests have when tritonserver is told to exit. None: --exit-timeout-secs less five."""
    metrics_period_s: float = 1.0
    """Seconds between two updates of the metrics on Triton's /metrics."""
    warmup: WarmupConfig | None = None
    """Requests of the backend's own between the load and READY. None: there are none; the first users wait longer."""
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the engine. Each engine checks its own."""
    llm_args: Mapping[str, Any] = field(default_factory=dict)
    """The top level of model.yaml without triton_config."""
    version_dir: Path = Path()
    """The folder of model.yaml and release.yaml. A relative `model` path starts from here."""

    @property
    def model(self) -> str:
        return str(self.llm_args.get("model", ""))

    @property
    def resolved_model(self) -> str:
        """The absolute path of a model folder relative to the version folder; any other `model` as it is."""
        local = self.version_dir / self.model
        return str(local.resolve()) if local.is_dir() else self.model


STREAM_MODES = ("delta", "cumulative")
_ON_FATAL = ("exit", "unready")
_UNKNOWN_PARAMETERS = ("error", "warn", "ignore")


def load_config(path: Path) -> BackendConfig:
    """Read the configuration in the YAML file at `path`.

    :raises ConfigError: with every problem found.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"{path}: can't be read: {error.strerror}"]) from error
    except (yaml.YAMLError, *UNREADABLE_YAML) as error:
        raise ConfigError([f"{path}: not YAML: {' '.join(str(error).split())}"]) from error
    if not isinstance(document, dict):
        raise ConfigError([f"{path}: expected a mapping of LLM arguments, got {type(document).__name__}"])
    return parse_config(document, version_dir=path.parent)


def parse_config(document: Mapping[str, Any], *, version_dir: Path) -> BackendConfig:
    """Return `document` as a configuration.

    :raises ConfigError: with every problem found.
    """
    ours = document.get("triton_config") or {}
    if not isinstance(ours, dict):
        raise ConfigError([f"triton_config: expected a mapping, got {type(ours).__name__}"])
    problems = _problems("triton_config", ours, _CHECKS)
    if not document.get("model"):
        problems.append("model: expected a checkpoint's folder or name, got nothing")
    if problems:
        raise ConfigError(problems)
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in ours.items()}
    values["default_sampling"] = {
        name: check_value(SAMPLING_BY_NAME[name], value) for name, value in ours.get("default_sampling", {}).items()
    }
    if (warmup := ours.get("warmup")) is not None:
        values["warmup"] = WarmupConfig(**{**warmup, "shapes": tuple(map(tuple, warmup["shapes"]))})
    llm_args = {key: value for key, value in document.items() if key != "triton_config"}
    return BackendConfig(**values, llm_args=llm_args, version_dir=version_dir)


def _whole(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _between(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def _or_null(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or holds(value)


_Checks: TypeAlias = Mapping[str, tuple[Callable[[Any], bool], str]]

_CHECKS: _Checks = {
    "engine": (lambda value: value in ENGINE_NAMES, f"one of {', '.join(ENGINE_NAMES)}"),
    "decoupled": (lambda value: isinstance(value, bool), "true or false"),
    "max_batch_size": (_whole(0, 0), "0: the engine batches, Triton does not"),
    "default_max_tokens": (_whole(1, INT32_MAX), "a whole number from 1"),
    "default_sampling": (lambda value: isinstance(value, dict), "a mapping"),
    "unknown_parameters": (lambda value: value in _UNKNOWN_PARAMETERS, f"one of {', '.join(_UNKNOWN_PARAMETERS)}"),
    "ignored_parameters": (
        lambda value: isinstance(value, list) and all(isinstance(pattern, str) for pattern in value),
        "a list of patterns",
    ),
    "cancellation_check_period_ms": (_whole(1, 60_000), "a whole number of milliseconds from 1 to 60,000"),
    "stream_mode": (lambda value: value in STREAM_MODES, f"one of {', '.join(STREAM_MODES)}"),
    "stream_interval": (_or_null(_whole(1, INT32_MAX)), "a whole number of tokens from 1, or null"),
    "stream_interval_ms": (
        _or_null(_whole(1, MAX_STREAM_INTERVAL_MS)),
        f"a whole number of milliseconds from 1 to {MAX_STREAM_INTERVAL_MS:,}, or null",
    ),
    "chat_encoding": (_or_null(lambda value: value in CHAT_ENCODINGS), f"one of {', '.join(CHAT_ENCODINGS)}, or null"),
    "separate_reasoning": (lambda value: isinstance(value, bool), "true or false"),
    "default_timeout_ms": (_or_null(_whole(1, INT32_MAX)), "a whole number of milliseconds from 1, or null"),
    "max_inflight": (_or_null(_whole(1, INT32_MAX)), "a whole number from 1, or null"),
    "max_inflight_tokens": (_or_null(_whole(1, 2**63)), "a whole number from 1, or null"),
    "hang_s": (_whole(1, 86_400), "a whole number of seconds from 1 to 86,400"),
    "on_fatal": (lambda value: value in _ON_FATAL, f"one of {', '.join(_ON_FATAL)}"),
    "fatal_grace_s": (_whole(0, 600), "a whole number of seconds from 0 to 600"),
    "drain_s": (_or_null(_whole(0, 86_400)), "a whole number of seconds from 0 to 86,400, or null"),
    "metrics_period_s": (_between(0.1, 3600), "a number of seconds from 0.1 to 3,600"),
    "engine_options": (lambda value: isinstance(value, dict), "a mapping"),
    "warmup": (_or_null(lambda value: isinstance(value, dict)), "a mapping, or null"),
}
"""Key -> (check of its value, the expected value in words)."""


WARMUP_MAX_REQUESTS = 65_536
WARMUP_MAX_TOKENS = 2**22
"""Most tokens of all prompts of a shape. They are made before the first one is sent, which takes half a second and
150 MB at this size. Batches of DeepSeek are much smaller: 8,192 tokens on each of 72 GPUs are a seventh of it."""


def _are_shapes(value: Any) -> bool:
    if not isinstance(value, list) or not all(isinstance(shape, list) and len(shape) == 2 for shape in value):
        return False
    is_batch, is_length = _whole(1, WARMUP_MAX_REQUESTS), _whole(1, WARMUP_MAX_TOKENS)
    return bool(value) and all(
        is_batch(batch) and is_length(length) and batch * length <= WARMUP_MAX_TOKENS for batch, length in value
    )


_WARMUP_CHECKS: _Checks = {
    "shapes": (
        _are_shapes,
        "a list of pairs [requests, prompt tokens] of whole numbers from 1, at most "
        f"{WARMUP_MAX_REQUESTS:,} requests and {WARMUP_MAX_TOKENS:,} tokens in all",
    ),
    "max_tokens": (_whole(1, INT32_MAX), "a whole number from 1"),
    "max_rounds": (_whole(1, 1000), "a whole number from 1 to 1,000"),
    "max_s": (_between(1, 86_400), "a number of seconds from 1 to 86,400"),
}
"""The same for the keys under warmup."""


def _problems(where: str, values: Mapping[str, Any], checks: _Checks) -> list[str]:
    """Return what is wrong with the keys at `where` and their values."""
    problems = []
    for key, value in values.items():
        if key not in checks:
            problems.append(f"{where}.{key}: unknown key{nearest(key, checks)}; known: {', '.join(sorted(checks))}")
        elif not checks[key][0](value):
            problems.append(f"{where}.{key}: expected {checks[key][1]}, got {quoted(value)}")
        elif key == "default_sampling":
            problems += _sampling_problems(value)
        elif key == "warmup" and value is not None:
            if "shapes" not in value:
                problems.append(f"{where}.warmup.shapes: expected a list of pairs, got nothing")
            problems += _problems(f"{where}.warmup", value, _WARMUP_CHECKS)
    return problems


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ", did you mean X?" for an unknown name; "" where none is near."""
    match = difflib.get_close_matches(str(name), list(known), n=1)
    return f", did you mean {match[0]}?" if match else ""


def _sampling_problems(defaults: Mapping[str, Any]) -> list[str]:
    problems = []
    for name, value in defaults.items():
        if name not in SAMPLING_BY_NAME:
            hint = nearest(name, SAMPLING_BY_NAME)
            problems.append(f"triton_config.default_sampling.{name}: no such sampling field{hint}")
            continue
        try:
            check_value(SAMPLING_BY_NAME[name], value)
        except ValueError as error:
            problems.append(f"triton_config.default_sampling.{error}")
    return problems
