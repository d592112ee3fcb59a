"""Rules G: context and generation servers, which hand over the KV cache (disaggregated serving)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from deepseek_triton_build.arithmetic.gpu_memory import ready_within_s
from deepseek_triton_build.rules.rule import Deployment, RuleTable, UnknownFactError, Violation

RULES = RuleTable()
CONTEXT, GENERATION = "context", "generation"
"""The sides of a pair, which are also the names of their folders."""
_TRANSCEIVER = "cache_transceiver_config"
_BACKEND = f"{_TRANSCEIVER}.backend"
BUFFER = f"{_TRANSCEIVER}.max_tokens_in_buffer"
_REUSE = "kv_cache_config.enable_block_reuse"


@dataclass(frozen=True, kw_only=True)
class ServerPair:
    """A context server and a generation server, and what joins them. A rule that needs an unknown fact finds nothing.

    The key of a violation begins with the side, CONTEXT or GENERATION, that the setting is of.
    """

    context: Deployment
    generation: Deployment

    @property
    def load_limit_s(self) -> int:
        """Seconds within which all servers have to be ready."""
        return max(ready_within_s(d.checkpoint.weight_bytes) for d in self.sides.values() if d.checkpoint is not None)

    def well_typed(self) -> "ServerPair":
        """Return the pair without the settings whose values are of a wrong type."""
        return replace(self, context=self.context.well_typed(), generation=self.generation.well_typed())

    @property
    def sides(self) -> Mapping[str, Deployment]:
        return {CONTEXT: self.context, GENERATION: self.generation}

    def differing(self, *keys: str) -> Iterator[tuple[str, Any, Any]]:
        """Yield each of the keys for which the two sides have different values, with the values."""
        for key in keys:
            try:
                ours, theirs = self.context.get(key), self.generation.get(key)
            except UnknownFactError:
                continue
            if ours != theirs:
                yield key, ours, theirs


@RULES.error("G001")
def _release(pair: ServerPair) -> Iterator[Violation]:
    for side, d in pair.sides.items():
        if d.release is not None and d.is_before("1.0.0"):
            message = f"the {side} server has TensorRT-LLM {d.release.version}, in which no hand-over is proven"
            yield Violation(None, message, "use 1.0.0 or newer")


@RULES.error("G002")
def _transceiver(pair: ServerPair) -> Iterator[Violation]:
    for side, d in pair.sides.items():
        if not d.is_before("1.0.0") and d.get(_BACKEND) is None:
            message = f"the {side} server has no {_BACKEND}, so that it transfers no KV cache"
            yield Violation(f"{side}.{_BACKEND}", message, f"set {_BACKEND}: UCX")


@RULES.error("G003")
def _overlap(pair: ServerPair) -> Iterator[Violation]:
    key = "disable_overlap_scheduler"
    if not pair.context.get(key):
        message = "the context server runs with the overlap scheduler, which does not work there"
        yield Violation(f"{CONTEXT}.{key}", message, f"set {key}: true")


@RULES.warning("G004")
def _graphs(pair: ServerPair) -> Iterator[Violation]:
    if pair.context.has_cuda_graphs:
        message = "the context server captures CUDA graphs, which it never runs"
        yield Violation(f"{CONTEXT}.cuda_graph_config", message, "set cuda_graph_config: null")


@RULES.error("G005")
def _pipeline(pair: ServerPair) -> Iterator[Violation]:
    if not pair.generation.layout.attention_dp:
        yield from _stages(pair, "tensor parallelism {} on the generation server, may hang")


@RULES.warning("G015")
def _pipeline_to_attention_dp(pair: ServerPair) -> Iterator[Violation]:
    if pair.generation.layout.attention_dp:
        yield from _stages(pair, "attention DP on {} ranks of the generation server: whether it hangs is not known")


def _stages(pair: ServerPair, of: str) -> Iterator[Violation]:
    """Find pipeline stages on the context server, with more than one rank `of` the generation server."""
    releases = [d.release for d in pair.sides.values() if d.release is not None]
    is_known = any(not release.is_before("1.2.0") and release.is_before("1.3.0") for release in releases)
    stages, ranks = pair.context.pipeline_parallel_size, pair.generation.layout.tensor_parallel_size
    if is_known and stages > 1 and ranks > 1:
        message = f"{stages} pipeline stages on the context server, with {of.format(ranks)}"
        fix = "use tensor parallelism on the context server too"
        yield Violation(f"{CONTEXT}.pipeline_parallel_size", message, fix)


@RULES.error("G006")
def _same_cache(pair: ServerPair) -> Iterator[Violation]:
    context, generation = pair.context, pair.generation
    if context.has_fp8_kv != generation.has_fp8_kv:
        kinds = ["FP8" if d.has_fp8_kv else "16 bits" for d in (context, generation)]
        message = f"the KV cache has {kinds[0]} on the context server and {kinds[1]} on the generation server"
        yield Violation(f"{GENERATION}.kv_cache_config.dtype", message, "use one dtype on both")
    if context.tokens_per_block != generation.tokens_per_block:
        message = f"KV blocks have {context.tokens_per_block} tokens on the context server and "
        message += f"{generation.tokens_per_block} on the generation server"
        key = f"{GENERATION}.kv_cache_config.tokens_per_block"
        yield Violation(key, message, "use one size on both")
    variants = [d.variant.name for d in (context, generation) if d.variant is not None]
    if len(set(variants)) > 1:
        message = f"the context server has {variants[0]} and the generation server {variants[1]}"
        yield Violation(f"{GENERATION}.model", message, "serve one model on both")


@RULES.error("G007")
def _same_drafts(pair: ServerPair) -> Iterator[Violation]:
    context, generation = (d.num_draft_tokens for d in (pair.context, pair.generation))
    if context != generation:
        key = "speculative_config.num_nextn_predict_layers"
        message = f"the context server drafts {context} tokens a step and the generation server {generation}"
        yield Violation(f"{GENERATION}.{key}", message, "use the same speculative_config on both")


@RULES.error("G008")
def _beams(pair: ServerPair) -> Iterator[Violation]:
    key = "max_beam_width"
    for side, d in pair.sides.items():
        if (width := d.get(key) or 1) > 1:
            message = f"the {side} server has {key} {width:,}, and only one beam can be handed over"
            yield Violation(f"{side}.{key}", message, f"remove {key}")


@RULES.error("G009")
def _buffer(pair: ServerPair) -> Iterator[Violation]:
    longest = longest_prompt(pair.context)
    for side, d in pair.sides.items():
        # A smaller buffer ends in a deadlock that only a restart ends (ai-dynamo/dynamo#4327).
        size = d.get(BUFFER)
        if longest and size is not None and size < longest:
            message = f"{BUFFER} {size:,} on the {side} server is less than the longest prompt, {longest:,} tokens"
            yield Violation(f"{side}.{BUFFER}", message, f"set it to {buffer_tokens(longest)} or more")


def longest_prompt(d: Deployment) -> int | None:
    """Return the tokens of the longest prompt that a server computes; None where only max_seq_len bounds it and nobody
    said how long prompts are."""
    if d.get("enable_chunked_prefill"):
        return d.isl
    # Without chunks a prompt is computed in one iteration, so longer ones than isl are taken too.
    return min(filter(None, (d.get("max_num_tokens"), d.get("max_seq_len"))), default=None)


def buffer_tokens(prompt: int) -> int:
    """Return the size of a transfer buffer for prompts of up to `prompt` tokens, in whole KV blocks of 64."""
    return -(-prompt // 64) * 64


@RULES.warning("G010")
def _reuse(pair: ServerPair) -> Iterator[Violation]:
    d = pair.context
    if d.release is not None and not d.is_before("1.2.0") and d.get(_REUSE):
        message = f"{_REUSE} on the context server: a candidate of 1.2.0 lost blocks that were still to be sent, and "
        message += f"whether {d.release.version} does is not known"
        yield Violation(f"{CONTEXT}.{_REUSE}", message, f"set {_REUSE}: false")


@RULES.warning("G011")
def _same_length(pair: ServerPair) -> Iterator[Violation]:
    for key, context, generation in pair.differing("max_seq_len"):
        if context and generation and generation < context:
            message = f"{key} is {context:,} on the context server and {generation:,} on the generation server"
            yield Violation(f"{GENERATION}.{key}", message, f"set {key}: {context} on both")


@RULES.warning("G012")
def _transfer_timeout(pair: ServerPair) -> Iterator[Violation]:
    key, longest = f"{_TRANSCEIVER}.kv_transfer_timeout_ms", longest_prompt(pair.context)
    for side, d in pair.sides.items():
        timeout = d.get(key)
        # 60 s were too short for prompts of 32K to 128K tokens (NVIDIA/TensorRT-LLM#13868).
        if timeout is not None and timeout <= 60_000 and longest and longest >= 32_768:
            message = f"{key} {timeout:,} on the {side} server is too short for prompts of {longest:,} tokens"
            yield Violation(f"{side}.{key}", message, f"raise it above 60000, or remove {key}")


@RULES.error("G013")
def _same_backend(pair: ServerPair) -> Iterator[Violation]:
    for key, context, generation in pair.differing(_BACKEND):
        if context and generation:  # a missing one: G002
            message = f"{key} is {context} on the context server and {generation} on the generation server"
            yield Violation(f"{GENERATION}.{key}", message, f"set {key}: {context} on both")


@RULES.error("G014")
def _same_release(pair: ServerPair) -> Iterator[Violation]:
    context, generation = pair.context.release, pair.generation.release
    if context is not None and generation is not None and context.version != generation.version:
        message = f"the context server runs TensorRT-LLM {context.version} and the generation server "
        message += generation.version
        yield Violation(GENERATION, message, "build both sides anew with one build --profile disagg")
