"""What the bench runs: loads, who carries them, and the targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bench._harness import Target

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


@dataclass(frozen=True)
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
_GENERATING = (*_STREAMING, TRITON_HTTP, TRITON_HTTP_AIO)

CPU_RATIO = 1.15
_PER_CHUNK = tuple(
    Target(who=ours, measure="cpu_ms_per_1000_chunks", versus=raw, at_most=CPU_RATIO) for ours, raw in PAIRS
)
_PER_REQUEST = tuple(
    Target(who=ours, measure="cpu_ms_per_request", versus=raw, at_most=CPU_RATIO) for ours, raw in PAIRS
)
_BESIDE_TRITON_HTTP = tuple(
    target
    for name in (OURS_HTTP, OURS_GRPC)
    for target in (
        Target(who=name, measure="requests_per_s", versus=TRITON_HTTP, at_least=1),
        Target(who=name, measure="cpu_ms_per_request", versus=TRITON_HTTP, at_most=1),
    )
)

_ALL = (
    Case("stream-64", "stream", PACED, 64, 64, 200, _STREAMING, _PER_CHUNK),
    Case("stream-1", "stream", FLAT, 8, 1, 5000, _STREAMING),
    Case("generate-64", "generate", FLAT, 2000, 64, 8, _GENERATING, (*_PER_REQUEST, *_BESIDE_TRITON_HTTP)),
)
CASES = {case.name: case for case in _ALL}
