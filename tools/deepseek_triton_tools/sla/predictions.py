"""TTFT and TPOT of a server at a load, from the table of its iterations.

TPOT, aggregated: a decoding iteration at the mean context, and what the prompts of the other requests of the rank add,
each once while the request decodes: decode(isl + osl / 2) / a + (rows - 1) x (prompt - decode) / osl, with a tokens for
each iteration. A generation server has no such prompts, and waits for the KV cache once.

TTFT: the rest of the iteration that runs, the wait for prompts before, and the prompt itself. The wait is that of an
M/D/1 queue, requests that arrive at random and prompts that take equally long: u x prompt / (2 x (1 - u)) with the
share u of the time that prompts take, and at most all other requests of the rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepseek_backend.engines.simulated.presets import MTP_3_TOKENS_PER_STEP, PaceTable
from deepseek_backend.engines.simulated.simulated_options import KV_TRANSFER_GBPS

TOKENS_PER_STEP = {0: 1.0, 1: 1.92, 2: 2.58, 3: MTP_3_TOKENS_PER_STEP}
"""Draft tokens -> tokens of an iteration, by the table of autoregressive MTP layers in TensorRT-LLM's tech blog 1."""
FEW_USERS = 4
THROUGHPUT_MARGIN = 1.25
LATENCY_MARGIN = 1.6
"""Factors on every computed time: from FEW_USERS + 1 users of a server, and below. They are what the published runs of
8 x H200 and 8 x B200 took longer than AIConfigurator's tables say (docs/sla.md)."""

_MOST_BUSY = 0.9
"""Share of the time that a context server may be busy."""


@dataclass(frozen=True, kw_only=True)
class SlaWorkload:
    """Tokens of each request."""

    isl: int
    osl: int


@dataclass(frozen=True, kw_only=True)
class PacedServer:
    """A server whose iterations are known."""

    table: PaceTable
    max_num_tokens: int
    tokens_per_step: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Times:
    """Computed means of a request in ms, without margin."""

    ttft_ms: float
    tpot_ms: float

    def e2el_ms(self, osl: int) -> float:
        return self.ttft_ms + (osl - 1) * self.tpot_ms

    def slower(self, margin: float) -> Times:
        return Times(ttft_ms=self.ttft_ms * margin, tpot_ms=self.tpot_ms * margin)


def margin_for(users: int) -> float:
    """The factor on times of a server with so many users."""
    return LATENCY_MARGIN if users <= FEW_USERS else THROUGHPUT_MARGIN


def prompt_ms(server: PacedServer, isl: int, rows: float = 0.0, context: float = 0.0) -> tuple[float, int]:
    """Return the duration of a prompt beside `rows` decoding ones, and in how many iterations it runs."""
    budget = max(1, int(server.max_num_tokens - rows * (1 + server.table.num_draft_tokens)))
    done, chunks, total = 0, 0, 0.0
    while done < isl:
        tokens = min(budget, isl - done)
        total += server.table.step_ms(rows, context, tokens, tokens * (done + tokens / 2))
        done, chunks = done + tokens, chunks + 1
    return total, chunks


def aggregated_times(server: PacedServer, workload: SlaWorkload, rows: int) -> Times:
    """Return the times on a server each rank of which has `rows` requests."""
    isl, osl = workload.isl, workload.osl
    context = isl + osl / 2
    decode = server.table.step_ms(rows, context)
    prompt, chunks = prompt_ms(server, isl, rows - 1, context)
    added = max(0.0, prompt - chunks * decode)
    tpot = decode / server.tokens_per_step + (rows - 1) * added / osl
    busy = min(0.99, rows * prompt / (prompt + osl * tpot))
    wait = min(busy * prompt / (2 * (1 - busy)), (rows - 1) * prompt) if rows > 1 else 0.0
    residual = decode / 2 if rows > 1 else 0.0
    return Times(ttft_ms=residual + wait + prompt, tpot_ms=tpot)


def burst_ttft_ms(server: PacedServer, workload: SlaWorkload, requests: float) -> float:
    """Return the mean TTFT where a rank's requests all come at once: several prompts run in an iteration, and the last
    one waits for all others."""
    tokens = min(server.max_num_tokens, requests * workload.isl)
    iteration = server.table.step_ms(0, 0, tokens, tokens * workload.isl / 2)
    return iteration * (max(1.0, workload.isl / tokens) + requests * workload.isl / tokens) / 2


def generation_tpot_ms(server: PacedServer, workload: SlaWorkload, rows: int) -> float:
    """Return TPOT on a generation server each rank of which has `rows` requests. The first token there waits for the KV
    cache, which comes at KV_TRANSFER_GBPS."""
    decode = server.table.step_ms(rows, workload.isl + workload.osl / 2) / server.tokens_per_step
    transfer = workload.isl * server.table.kv_token_bytes * 8 / (KV_TRANSFER_GBPS * 1e6)
    return decode + transfer / workload.osl


def context_ttft_ms(server: PacedServer, workload: SlaWorkload, busy: float) -> float:
    """Return TTFT on a context server whose ranks are busy for this share of the time."""
    prompt, _ = prompt_ms(server, workload.isl)
    return prompt + busy * prompt / (2 * (1 - busy))


def context_busy(server: PacedServer, workload: SlaWorkload, ttft_ms: float) -> float:
    """Return the largest share of the time that a context server may be busy to keep `ttft_ms`; 0 where it can't."""
    prompt, _ = prompt_ms(server, workload.isl)
    wait = ttft_ms - prompt
    return 0.0 if wait <= 0 else min(_MOST_BUSY, 2 * wait / (prompt + 2 * wait))
