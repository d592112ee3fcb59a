"""What the bench runs: loads, the systems that carry them, and the targets."""

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from bench._harness import Target

Protocol: TypeAlias = Literal["gRPC", "HTTP"]

OURS = "ours"
DELTA = "minimal-delta"
CUMULATIVE = "minimal-cumulative"
ENGINE = "engine"
"""The simulated engine alone, consumed in its own process."""
TRTLLM_1, TRTLLM_10 = "trtllm-1", "trtllm-10"
"""Ours on the stand-in for TensorRT-LLM, with the LLM argument stream_interval."""
PEER, PEER_10 = "peer", "peer-10"
PEERS = (PEER, PEER_10)
"""A model of others on the stand-in, with stream_interval 1 and 10."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One load."""

    name: str
    num_streams: int
    num_tokens: int
    """Of each stream."""
    systems: tuple[str, ...]
    protocol: Protocol = "gRPC"
    streaming: bool = True
    """False: each answer comes in one response."""
    rate: float | None = None
    """Tokens a second of each stream; None: flat out."""
    open_s: float = 0.0
    """The streams are opened evenly over so long."""
    targets: tuple[Target, ...] = ()

    @property
    def ideal_s(self) -> float | None:
        """From the first request to the last token, if nothing ever waited."""
        return self.open_s + self.num_tokens / self.rate if self.rate else None

    @property
    def title(self) -> str:
        pace = f"{self.rate:g} tokens/s each" if self.rate else "flat out"
        opened = f", opened over {self.open_s:g} s" if self.open_s else ""
        at_once = "" if self.streaming else " at once"
        return f"{self.num_streams:,} x {self.num_tokens:,} tokens{at_once}, {pace}{opened}, {self.protocol}"


_MINIMAL = (OURS, CUMULATIVE, DELTA)
_TRTLLM = (TRTLLM_1, PEER, TRTLLM_10, PEER_10)


def _of(who: str, measure: str, versus: str = "", **limit: float) -> Target:
    return Target(who=who, measure=measure, versus=versus, **limit)


_ALL_THERE = _of(OURS, "undelivered", at_most=0)
_BESIDE_MINIMAL = (
    _ALL_THERE,
    _of(OURS, "tokens_per_s", CUMULATIVE, at_least=20),
    _of(OURS, "chunks_min", at_least=5),
    _of(OURS, "ttft_ms", CUMULATIVE, at_most=0.1),
)
_LONG = (_ALL_THERE, _of(OURS, "tokens_per_s", at_least=80_000), _of(OURS, "tokens_per_s", ENGINE, at_least=0.5))
_BOTH = (TRTLLM_1, TRTLLM_10)
_BESIDE_PEER = (
    *(_of(system, "undelivered", at_most=0) for system in _BOTH),
    *(_of(system, "tokens_per_s", PEER, at_least=5) for system in _BOTH),
    _of(TRTLLM_10, "tokens_per_s", PEER_10, at_least=1),
)
_AT_ONCE_BESIDE_PEER = (
    *(_of(system, "undelivered", at_most=0) for system in _BOTH),
    *(_of(system, "tokens_per_s", PEER, at_least=1) for system in _BOTH),
    *(_of(system, "stub_cpu", PEER, at_most=1) for system in _BOTH),
)
_BESIDE_IDEAL_1024 = (
    _ALL_THERE,
    _of(OURS, "over_ideal", at_most=1.03),
    _of(OURS, "lag_ms", at_most=250),
    _of(OURS, "lag_p99_ms", at_most=1000),
)
_BESIDE_IDEAL_7168 = (_ALL_THERE, _of(OURS, "over_ideal", at_most=1.05), _of(OURS, "lag_p99_ms", at_most=3000))
_LITTLE_LAG = (_ALL_THERE, _of(OURS, "lag_ms", at_most=2))


def _over_http(case: Case) -> Case:
    return replace(case, name=f"{case.name}-http", protocol="HTTP")


def _at_once(case: Case) -> Case:
    through = _through_trtllm(case)
    return replace(through, name=f"{through.name}-at-once", streaming=False, targets=_AT_ONCE_BESIDE_PEER)


def _through_trtllm(case: Case) -> Case:
    return replace(case, name=f"{case.name}-trtllm", systems=_TRTLLM, targets=_BESIDE_PEER)


_FLAT_20 = Case(name="flat-20", num_streams=256, num_tokens=20, systems=_MINIMAL)
_FLAT_200 = Case(name="flat-200", num_streams=256, num_tokens=200, systems=_MINIMAL, targets=_BESIDE_MINIMAL)
_FLAT_2000 = Case(name="flat-2000", num_streams=256, num_tokens=2000, systems=(OURS, ENGINE), targets=_LONG)
_PACED_1024 = Case(
    name="paced-1024", num_streams=1024, num_tokens=200, rate=20, open_s=2, systems=(OURS,), targets=_BESIDE_IDEAL_1024
)
_PACED_7168 = Case(
    name="paced-7168",
    num_streams=7168,
    num_tokens=300,
    rate=6.02,
    open_s=10,
    systems=(OURS,),
    targets=_BESIDE_IDEAL_7168,
)
_ONE = Case(name="one", num_streams=1, num_tokens=500, rate=100, systems=(OURS, DELTA), targets=_LITTLE_LAG)

_ALL = (
    *(_FLAT_200, _over_http(_FLAT_200), _through_trtllm(_FLAT_200), _at_once(_FLAT_200)),
    *(_FLAT_2000, _over_http(_FLAT_2000), _through_trtllm(_FLAT_2000), _at_once(_FLAT_2000)),
    *(_at_once(case) for case in (_FLAT_20, replace(_FLAT_20, name="flat-20-4000", num_streams=4000))),
    _at_once(replace(_FLAT_200, name="flat-200-4000", num_streams=4000)),
    *(_PACED_1024, _over_http(_PACED_1024), _PACED_7168),
    *(_ONE, _over_http(_ONE)),
)
CASES = {case.name: case for case in _ALL}
