"""Deployments whose pace the simulated engine keeps: those that it knows by name, and those that a document describes.

A named one computes how long an iteration of DeepSeek-V3/R1 takes on a node: a roofline of its parts, and a time per
layer. Each part (attention projections, cached attention, prompt attention, dense and shared experts, routed experts,
output head) takes the longer of the bytes it reads over memory bandwidth and its FLOPs over the tensor cores' rate; the
parts and the exchange between GPUs add up. Routed experts read the weights of the experts that the batch touches: few
at batch 1, all 256 from a few hundred tokens on. Imbalance between experts, CUDA graph padding and the host are not
modelled. A document, which a model.yaml holds, has durations that were looked up elsewhere, in tables.

Four numbers were fitted, once, to the five totals of "How to get best performance on DeepSeek-R1 in TensorRT LLM"
(NVIDIA TensorRT-LLM documentation; `PRESETS` has the runs), by least largest relative error, and rounded:

* MEMORY_EFFICIENCY and MATH_EFFICIENCY, the reached share of the data sheet's rates, the same for both GPU types;
* `GpuSpeeds.layer_overhead_s`, one for each GPU type.

With them the model meets the five totals within 3%. A further figure was not fitted: for 8 x B200, batch 1, without
MTP, the model says 113 tokens/s where "Pushing Latency Boundaries: Optimizing DeepSeek-R1 Performance on NVIDIA B200
GPUs" (TensorRT-LLM tech blog 1) measured 111."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from deepseek_backend.engines.simulated.scheduler import RankLoad

MEMORY_EFFICIENCY = 0.85
MATH_EFFICIENCY = 0.26
"""Reached share of the tensor cores' rate, and of NVLink's."""

BYTES = {"nvfp4": 0.5625, "fp8": 1.0, "bf16": 2.0}
"""Bytes of one value. NVFP4 has a one-byte scale for each 16 values of 4 bits."""

# The shape of DeepSeek-V3 and R1, from their config.json.
HIDDEN = 7168
HEADS = 128
LATENT = 512 + 64  # kv_lora_rank + qk_rope_head_dim: the values that MLA caches per token and layer
NUM_LAYERS = 61
NUM_DENSE_LAYERS = 3
NUM_EXPERTS = 256
EXPERTS_PER_TOKEN = 8
PROJECTIONS = (
    HIDDEN * 1536 + 1536 * HEADS * (128 + 64) + HIDDEN * LATENT + 512 * HEADS * (128 + 128) + HEADS * 128 * HIDDEN
)
"""Attention weights of one layer: q_a, q_b, kv_a, kv_b, o."""
EXPERT = 3 * HIDDEN * 2048
DENSE = 3 * HIDDEN * 18432
EMBEDDING = 129280 * HIDDEN

# FLOPs of scores and values for a query token and a token that it attends to, in one layer, over all heads.
DECODE_PAIR_FLOPS = 2 * HEADS * (LATENT + 512)  # with absorbed weights, on the latent itself
PREFILL_PAIR_FLOPS = 2 * HEADS * (128 + 64 + 128)

WORKSPACE_BYTES = 5.4e9
"""Bytes of the activations on each GPU. "Optimizing DeepSeek R1 Throughput on NVIDIA Blackwell GPUs" (TensorRT-LLM tech
blog 3) gives about 80 GB for weights and activations of FP4 R1 under attention DP; 74.6 GB of it are the weights."""


@dataclass(frozen=True, kw_only=True)
class GpuSpeeds:
    """A GPU's data sheet: bytes, bytes/s, dense FLOP/s (half of the printed number where that is with sparsity)."""

    memory_bytes: float
    bandwidth: float
    nvlink: float
    """Bytes/s in each direction."""
    flops: Mapping[str, float]
    """Dense FLOP/s by precision."""
    layer_overhead_s: float
    """Fitted: seconds of a layer for any batch, however small: kernel starts, synchronisation, network latency."""


B200 = GpuSpeeds(
    memory_bytes=180e9,
    bandwidth=8.0e12,
    nvlink=900e9,
    flops={"nvfp4": 9000e12, "fp8": 4500e12, "bf16": 2250e12},
    layer_overhead_s=133e-6,
)
H200 = GpuSpeeds(
    memory_bytes=141e9, bandwidth=4.8e12, nvlink=450e9, flops={"fp8": 1979e12, "bf16": 989e12}, layer_overhead_s=228e-6
)


@dataclass(frozen=True, kw_only=True)
class DeploymentModel:
    """A checkpoint on the GPUs of one node.

    With attention_dp each GPU is a rank that holds all attention weights and the KV cache of its own requests. Without
    it, attention is tensor parallel, and all GPUs together are one rank. Routed experts are spread over all GPUs in
    both cases."""

    gpu: GpuSpeeds
    num_gpus: int = 8
    expert_precision: str
    """Precision of the routed, dense and shared experts."""
    attention_precision: str
    kv_precision: str
    attention_dp: bool = False
    num_draft_tokens: int = 0
    """MTP depth. Each draft counts as one more layer and one more output head, in the main model's precision."""
    kv_memory_fraction: float = 0.9
    """Share of the memory left by weights and workspace that the KV cache takes."""

    @property
    def num_ranks(self) -> int:
        return self.num_gpus if self.attention_dp else 1

    @property
    def kv_token_bytes(self) -> float:
        """Bytes that the KV cache of one token takes on each GPU that holds it."""
        return self._num_cached_layers * LATENT * BYTES[self.kv_precision]

    @property
    def kv_cache_tokens(self) -> int:
        """Number of tokens in the KV cache of one rank. Under tensor parallelism every GPU holds all of MLA's cache."""
        num_layers = self._num_cached_layers
        routed = (num_layers - NUM_DENSE_LAYERS) * NUM_EXPERTS * EXPERT / self.num_gpus
        weights_bytes = (
            num_layers * PROJECTIONS / self._shards * BYTES[self.attention_precision]
            + 2 * EMBEDDING / self._shards * BYTES["bf16"]
            + (self._ffn_parameters(num_layers) + routed) * BYTES[self.expert_precision]
        )
        free_bytes = self.gpu.memory_bytes - weights_bytes - WORKSPACE_BYTES
        return int(self.kv_memory_fraction * free_bytes / self.kv_token_bytes)

    def step_seconds(self, loads: Sequence[RankLoad]) -> float:
        """Return the duration of an iteration; `loads` has one for each rank. The experts wait for the slowest rank."""
        num_tokens = sum(self._num_tokens(load) for load in loads)
        return (
            max(self._attention_seconds(load) for load in loads)
            + self._expert_seconds(num_tokens)
            + self._exchange_seconds(num_tokens)
            + self._num_layers * self.gpu.layer_overhead_s
        )

    @property
    def _shards(self) -> int:
        return 1 if self.attention_dp else self.num_gpus

    @property
    def _num_cached_layers(self) -> int:
        return NUM_LAYERS + (self.num_draft_tokens > 0)  # every draft comes from the one MTP layer

    @property
    def _num_layers(self) -> int:
        """Number of layers that an iteration runs."""
        return NUM_LAYERS + self.num_draft_tokens

    @property
    def _num_moe_layers(self) -> int:
        return self._num_layers - NUM_DENSE_LAYERS

    def _ffn_parameters(self, num_layers: int) -> float:
        """Return the number of parameters of dense and shared experts on one GPU."""
        return (NUM_DENSE_LAYERS * DENSE + (num_layers - NUM_DENSE_LAYERS) * EXPERT) / self._shards

    def _num_tokens(self, load: RankLoad) -> int:
        return load.num_decodes * (1 + self.num_draft_tokens) + load.prefill_tokens

    def _attention_seconds(self, load: RankLoad) -> float:
        """Return the time for a rank's own tokens: attention, dense and shared experts, output head."""
        layers, shards, num_queries = self._num_layers, self._shards, 1 + self.num_draft_tokens
        num_tokens = self._num_tokens(load)
        cache_bytes = load.context_tokens * LATENT * BYTES[self.kv_precision] * layers
        decode_flops = load.context_tokens * num_queries * DECODE_PAIR_FLOPS * layers / shards
        prefill_flops = load.prefill_pairs * PREFILL_PAIR_FLOPS * layers / shards
        return (
            self._matmul(PROJECTIONS * layers / shards, num_tokens, self.attention_precision)
            + self._roofline(cache_bytes, decode_flops, self.kv_precision)
            + self._roofline(0, prefill_flops, "bf16")
            + self._matmul(self._ffn_parameters(layers), num_tokens, self.expert_precision)
            + num_queries * self._matmul(EMBEDDING / shards, load.num_decodes, "bf16")
        )

    def _expert_seconds(self, num_tokens: int) -> float:
        touched = NUM_EXPERTS * (1 - (1 - EXPERTS_PER_TOKEN / NUM_EXPERTS) ** num_tokens)
        on_gpu = self._num_moe_layers * EXPERT / self.num_gpus
        return self._roofline(
            touched * on_gpu * BYTES[self.expert_precision],
            2 * num_tokens * EXPERTS_PER_TOKEN * on_gpu,
            self.expert_precision,
        )

    def _exchange_seconds(self, num_tokens: int) -> float:
        """Return the time of all-gather and reduce-scatter around the experts (attention DP), or two all-reduces."""
        if self.attention_dp:
            gathered = BYTES["nvfp4" if self.expert_precision == "nvfp4" else "bf16"]  # FP4 all-gather: tech blog 3
            values_bytes = self._num_moe_layers * (gathered + BYTES["bf16"])
        else:
            values_bytes = self._num_layers * 4 * BYTES["bf16"]
        others = (self.num_gpus - 1) / self.num_gpus
        return num_tokens * HIDDEN * values_bytes * others / (self.gpu.nvlink * MATH_EFFICIENCY)

    def _matmul(self, parameters: float, num_tokens: int, precision: str) -> float:
        return self._roofline(parameters * BYTES[precision], 2 * parameters * num_tokens, precision)

    def _roofline(self, num_bytes: float, flops: float, precision: str) -> float:
        memory_s = num_bytes / (self.gpu.bandwidth * MEMORY_EFFICIENCY)
        math_s = flops / (self.gpu.flops[precision] * MATH_EFFICIENCY)
        return max(memory_s, math_s)


@dataclass(frozen=True, slots=True)
class Grid:
    """Values over two axes, linear between the points. Below an axis its first point holds; above, the last line goes
    on."""

    rows: tuple[float, ...]
    columns: tuple[float, ...]
    values: tuple[tuple[float, ...], ...]

    def at(self, row: float, column: float) -> float:
        above, share = _place(self.rows, row)
        right, along = _place(self.columns, column)
        low, high = self.values[above - 1], self.values[above]
        first = low[right - 1] + along * (low[right] - low[right - 1])
        last = high[right - 1] + along * (high[right] - high[right - 1])
        return first + share * (last - first)


def _place(points: Sequence[float], value: float) -> tuple[int, float]:
    """Return the number of the point that ends the stretch of `value`, and its place there: 0 begin, 1 end."""
    number = min(max(bisect_right(points, value), 1), len(points) - 1)
    begin, end = points[number - 1], points[number]
    return number, max(0.0, (value - begin) / (end - begin))


@dataclass(frozen=True, kw_only=True)
class PaceTable:
    """A deployment, as `DeploymentModel` is one, whose durations were looked up elsewhere.

    It belongs to one layout of one model on one kind of GPU. All numbers are of one rank, and all ranks are taken to
    have the same work: prompts that are spread unevenly cost what the same tokens cost on all ranks together.
    """

    num_ranks: int
    num_draft_tokens: int
    kv_cache_tokens: int
    """Number of tokens in the KV cache of one rank."""
    kv_token_bytes: float
    """Bytes of a token in the KV cache."""
    decode: Grid
    """Milliseconds of an iteration without prompts, over decoding rows and over the mean number of cached tokens."""
    prompt: Grid
    """Milliseconds of an iteration with prompts, over decoding rows (from 0) and over the tokens of one prompt."""
    pair_ns: Grid
    """Nanoseconds of each pair of tokens beyond those of one whole prompt, for later chunks, over the same tokens."""

    def step_seconds(self, loads: Sequence[RankLoad]) -> float:
        """Return the duration of an iteration; `loads` has one for each rank."""
        ranks = len(loads)
        rows = sum([load.num_decodes for load in loads])
        context = sum([load.context_tokens for load in loads]) / rows if rows else 0.0
        tokens = sum([load.prefill_tokens for load in loads]) / ranks
        pairs = sum([load.prefill_pairs for load in loads]) / ranks if tokens else 0.0
        return self.step_ms(rows / ranks, context, tokens, pairs) / 1000

    def step_ms(self, rows: float, context: float, tokens: float = 0.0, pairs: float | None = None) -> float:
        """Return the duration in ms of an iteration on ranks with equal work.

        :param rows: decoding rows of a rank, each with `context` cached tokens.
        :param tokens: prompt tokens of a rank.
        :param pairs: pairs of a prompt token and a token that it attends to. None: those of one whole prompt.
        """
        decode = self.decode.at(rows, context) if rows else 0.0
        if not tokens:
            return decode
        beyond = 0.0 if pairs is None else pairs - tokens**2 / 2
        prompt = self.prompt.at(rows, tokens) + beyond * self.pair_ns.at(0, tokens) * 1e-6
        # Prompts were measured beside rows of the shortest context.
        longer = decode - self.decode.at(rows, self.decode.columns[0]) if rows else 0.0
        return max(prompt + longer, decode)


def read_table(
    document: Mapping[str, Any], *, num_ranks: int, num_draft_tokens: int, kv_cache_tokens: int, kv_token_bytes: float
) -> PaceTable:
    """Make a table of the part `pace` of a preset file.

    :raises ValueError: for another document; it says what is wrong.
    """
    parts = ("batches", "contexts", "decode", "prompt_batches", "tokens", "prompt", "pair_ns")
    if not isinstance(document, Mapping) or set(document) != set(parts):
        raise ValueError(f"expected a mapping with {', '.join(parts)}")
    decode = _grid(document, "decode", "batches", "contexts")
    prompt = _grid(document, "prompt", "prompt_batches", "tokens")
    pairs = _numbers("pair_ns", document["pair_ns"], len(prompt.columns))
    return PaceTable(
        num_ranks=num_ranks,
        num_draft_tokens=num_draft_tokens,
        kv_cache_tokens=kv_cache_tokens,
        kv_token_bytes=kv_token_bytes,
        decode=decode,
        prompt=prompt,
        pair_ns=Grid(rows=(0, 1), columns=prompt.columns, values=(pairs, pairs)),
    )


def _grid(document: Mapping[str, Any], name: str, rows: str, columns: str) -> Grid:
    axes = [_numbers(axis, document[axis]) for axis in (rows, columns)]
    for axis, points in zip((rows, columns), axes, strict=True):
        if len(points) < 2 or sorted(set(points)) != list(points):
            raise ValueError(f"{axis}: expected two or more rising numbers, got {list(points)}")
    lines = document[name]
    if not isinstance(lines, list) or len(lines) != len(axes[0]):
        raise ValueError(f"{name}: expected a list of {len(axes[0])} lists, one for each of {rows}")
    values = tuple(_numbers(f"{name}[{number}]", line, len(axes[1])) for number, line in enumerate(lines))
    return Grid(rows=axes[0], columns=axes[1], values=values)


def _numbers(name: str, values: Any, length: int | None = None) -> tuple[float, ...]:
    if not isinstance(values, list) or not all(map(is_number, values)):
        raise ValueError(f"{name}: expected a list of numbers from 0")
    if length is not None and len(values) != length:
        raise ValueError(f"{name}: expected {length} numbers, got {len(values)}")
    return tuple(values)


def is_number(value: Any) -> bool:
    """Whether it is a number from 0 that is not infinite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def is_count(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


MTP_3_TOKENS_PER_STEP = 2.82
"""Tokens per iteration with three drafts. Source: "Pushing Latency Boundaries: Optimizing DeepSeek-R1 Performance on
NVIDIA B200 GPUs" (TensorRT-LLM tech blog 1), table of autoregressive MTP layers."""


PacedDeployment = DeploymentModel | PaceTable


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A deployment, and the scheduler's limits of each rank."""

    deployment: PacedDeployment
    max_batch_size: int
    max_num_tokens: int = 8192
    max_seq_len: int = 163840
    tokens_per_step: float = 1.0


_b200_fp4 = partial(DeploymentModel, gpu=B200, expert_precision="nvfp4", attention_precision="bf16")
_h200_fp8 = partial(DeploymentModel, gpu=H200, expert_precision="fp8", attention_precision="fp8", kv_precision="bf16")

# Each is a run of "How to get best performance on DeepSeek-R1 in TensorRT LLM", with the limits of its command line.
# Limits that the command line does not give are TensorRT-LLM's defaults; max_seq_len is the checkpoint's.
PRESETS = {
    "b200x8-r1-fp4-min-latency": Preset(
        deployment=_b200_fp4(kv_precision="bf16", num_draft_tokens=3),
        max_batch_size=1,
        tokens_per_step=MTP_3_TOKENS_PER_STEP,
    ),
    "b200x8-r1-0528-fp4-fp8kv-max-throughput": Preset(
        deployment=_b200_fp4(kv_precision="fp8", attention_dp=True, kv_memory_fraction=0.93),
        max_batch_size=896,
        max_num_tokens=2048,
    ),
    "b200x8-r1-fp4-max-throughput": Preset(
        deployment=_b200_fp4(kv_precision="bf16", attention_dp=True, kv_memory_fraction=0.85),
        max_batch_size=384,
        max_num_tokens=1536,
    ),
    "h200x8-r1-fp8-min-latency": Preset(
        deployment=_h200_fp8(num_draft_tokens=3), max_batch_size=1, tokens_per_step=MTP_3_TOKENS_PER_STEP
    ),
    "h200x8-r1-fp8-max-throughput": Preset(
        deployment=_h200_fp8(attention_dp=True, kv_memory_fraction=0.8), max_batch_size=128, max_num_tokens=1151
    ),
}

_COUNTS = {
    **dict.fromkeys(("num_ranks", "kv_cache_tokens", "max_batch_size", "max_num_tokens", "max_seq_len"), 1),
    "num_draft_tokens": 0,
}
"""Whole numbers of a document -> the least."""
_PARTS = ("title", "source", *_COUNTS, "kv_token_bytes", "tokens_per_step", "pace")


def find_preset(preset: Any) -> Preset | None:
    """Return the preset of a name or a document.

    :raises ValueError: for any other value; it says what is wrong.
    """
    if preset is None:
        return None
    if isinstance(preset, str) and preset in PRESETS:
        return PRESETS[preset]
    if not isinstance(preset, Mapping):
        raise ValueError(f"expected null or one of {', '.join(PRESETS)}, or a mapping, got {preset!r:.100}")
    if set(preset) != set(_PARTS):
        raise ValueError(f"expected a mapping with {', '.join(_PARTS)}, got {', '.join(map(str, preset))}")
    for name, least in _COUNTS.items():
        if not is_count(preset[name], least):
            raise ValueError(f"{name}: expected a whole number from {least}, got {preset[name]!r:.100}")
    per_step, most, token_bytes = preset["tokens_per_step"], 1 + preset["num_draft_tokens"], preset["kv_token_bytes"]
    if not is_number(per_step) or not 1 <= per_step <= most:
        raise ValueError(f"tokens_per_step: expected a number from 1 to {most}, got {per_step!r:.100}")
    if not is_number(token_bytes) or not token_bytes:
        raise ValueError(f"kv_token_bytes: expected a number above 0, got {token_bytes!r:.100}")
    sizes = {name: preset[name] for name in ("num_ranks", "num_draft_tokens", "kv_cache_tokens")}
    limits = {name: preset[name] for name in ("max_batch_size", "max_num_tokens", "max_seq_len")}
    table = read_table(preset["pace"], kv_token_bytes=float(token_bytes), **sizes)
    return Preset(deployment=table, tokens_per_step=float(per_step), **limits)
