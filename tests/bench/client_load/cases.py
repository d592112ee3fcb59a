"""What the bench runs: loads, who carries them, and the targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verb = Literal["stream", "generate"]

FLAT, PACED, TWIN = "tensorrt_llm", "paced", "twin"
"""The models of the one server: the backend on the simulated engine without a pace, with one, and not decoupled."""

TOKENS_PER_S = 40
"""Of each stream of PACED: slow enough that no token waits for the next, so each is a chunk."""

OURS_GRPC, OURS_HTTP = "AsyncClient grpc", "AsyncClient http"
OURS_GRPC_SYNC, OURS_HTTP_SYNC = "Client grpc", "Client http"
OURS = (OURS_GRPC, OURS_HTTP, OURS_GRPC_SYNC, OURS_HTTP_SYNC)
RAW_GRPC, RAW_GRPC_SYNC = "tritonclient.grpc.aio", "tritonclient.grpc"
RAW_HTTP, RAW_HTTP_SYNC = "httpx.AsyncClient", "httpx.Client"
TRITON_HTTP = "tritonclient.http infer"
"""Its only public way to a text. Triton refuses it on a decoupled model, so it asks TWIN."""
TRITON_HTTP_AIO = "tritonclient.http.aio infer"
"""The same over aiohttp."""
TRITON_POST = "tritonclient.http _post"
"""A private method of it, to /generate of the model that all others ask."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What one contender's median must keep to."""

    contender: str
    measure: str
    """A field of measures.Measures; of imports, milliseconds."""
    versus: str
    """The contender it is held against, by one of:"""
    at_most: float | None = None
    """Its median over the other's."""
    at_least: float | None = None
    at_most_more: float | None = None
    """Its median less the other's."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One load."""

    name: str
    verb: Verb
    model: str
    num_requests: int
    concurrency: int
    num_tokens: int
    """Of each answer."""
    contenders: tuple[str, ...]
    targets: tuple[Target, ...] = ()

    @property
    def title(self) -> str:
        pace = f", {TOKENS_PER_S} tokens/s each" if self.model == PACED else ""
        together = f"{self.concurrency} at a time" if self.concurrency > 1 else "one after the other"
        return f"{self.verb} {self.num_requests:,} x {self.num_tokens:,} tokens, {together}{pace}"


PAIRS = ((OURS_GRPC, RAW_GRPC), (OURS_HTTP, RAW_HTTP), (OURS_GRPC_SYNC, RAW_GRPC_SYNC), (OURS_HTTP_SYNC, RAW_HTTP_SYNC))
"""Ours, and the library by itself."""

_STREAMING = tuple(name for pair in PAIRS for name in pair)
_GENERATING = (*_STREAMING, TRITON_HTTP, TRITON_HTTP_AIO, TRITON_POST)

CPU_RATIO = 1.15
_PER_CHUNK = tuple(
    Target(contender=ours, measure="cpu_ms_per_1000_chunks", versus=raw, at_most=CPU_RATIO) for ours, raw in PAIRS
)
_PER_REQUEST = tuple(
    Target(contender=ours, measure="cpu_ms_per_request", versus=raw, at_most=CPU_RATIO) for ours, raw in PAIRS
)
_BESIDE_TRITON_HTTP = tuple(
    target
    for name in (OURS_HTTP, OURS_GRPC)
    for target in (
        Target(contender=name, measure="requests_per_s", versus=TRITON_HTTP, at_least=1),
        Target(contender=name, measure="cpu_ms_per_request", versus=TRITON_HTTP, at_most=1),
    )
)

_ALL = (
    Case(
        name="stream-64",
        verb="stream",
        model=PACED,
        num_requests=64,
        concurrency=64,
        num_tokens=200,
        contenders=_STREAMING,
        targets=_PER_CHUNK,
    ),
    Case(
        name="stream-1",
        verb="stream",
        model=FLAT,
        num_requests=8,
        concurrency=1,
        num_tokens=5000,
        contenders=_STREAMING,
    ),
    Case(
        name="generate-64",
        verb="generate",
        model=FLAT,
        num_requests=2000,
        concurrency=64,
        num_tokens=8,
        contenders=_GENERATING,
        targets=(*_PER_REQUEST, *_BESIDE_TRITON_HTTP),
    ),
)
CASES = {case.name: case for case in _ALL}
