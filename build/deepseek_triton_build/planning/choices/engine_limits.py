"""The settings of batch, token and length limits, CUDA graphs, and the KV transfer buffer of disaggregated servers."""

from __future__ import annotations

from collections.abc import Iterable

from deepseek_triton_build.data.planned_settings import DEPLOYMENT, GUIDE, Setting
from deepseek_triton_build.planning.batch_sizes import LONGEST_ANSWER, Sizes, seq_len_for
from deepseek_triton_build.planning.target import Target
from deepseek_triton_build.rules.disaggregation import BUFFER, buffer_tokens, longest_prompt
from deepseek_triton_build.rules.rule import Deployment
from deepseek_triton_build.rules.size_limits import OOM_NUM_TOKENS


def limit_settings(target: Target, sizes: Sizes) -> Iterable[Setting]:
    per = " on each rank" if sizes.layout.attention_dp else ""
    further = "".join(f"; {why}" for why in (sizes.shrunk, target.request.why_measured("--concurrency")) if why)
    yield Setting(
        "max_batch_size",
        sizes.max_batch_size,
        f"requests that decode together{per}, {sizes.max_concurrency:,} in all{further}",
    )
    less = f"; {OOM_NUM_TOKENS} if memory runs out" if sizes.max_num_tokens > OOM_NUM_TOKENS else ""
    yield Setting(
        "max_num_tokens",
        sizes.max_num_tokens,
        f"tokens of one iteration: {_num_tokens_reason(target, sizes)}{less}",
        source=GUIDE,
    )
    yield Setting(
        "max_seq_len",
        sizes.max_seq_len,
        f"prompt and answer together{_answer_reason(target, sizes)}; the model reads up to "
        f"{target.architecture.max_position_embeddings:,}",
    )
    yield Setting("enable_chunked_prefill", sizes.chunked_prefill, _chunked_reason(target, sizes))


def _answer_reason(target: Target, sizes: Sizes) -> str:
    """Say why max_seq_len is short though nobody asked for these lengths."""
    asked = target.request.workload.isl or target.request.workload.osl
    if asked or sizes.max_seq_len != seq_len_for(sizes.max_num_tokens):
        return ""
    return f": no prompt is longer than {sizes.max_num_tokens:,}, and answers have up to {LONGEST_ANSWER:,}"


def _num_tokens_reason(target: Target, sizes: Sizes) -> str:
    if sizes.chunked_prefill:
        return "longer prompts are processed in chunks of this size, a whole number of KV blocks"
    draft = f" x {1 + sizes.num_draft_tokens}" if sizes.num_draft_tokens else ""
    decoding = f"{sizes.max_batch_size}{draft}"
    longest = "no prompt that it computes itself" if target.takes_over else "no prompt"
    return f"a whole prompt of {sizes.workload.isl:,} beside {decoding} that decode; {longest} may be longer than this"


def _chunked_reason(target: Target, sizes: Sizes) -> str:
    if target.architecture.is_sparse and sizes.chunked_prefill:
        return "V3.2 crashes in iterations above 8,192 tokens, so longer prompts need it, though the guide turns it off"
    if sizes.chunked_prefill:
        return "for prompts longer than max_num_tokens; supported for MLA on this GPU and release"
    where = ", if it has to compute them itself" if target.takes_over else ""
    longer = f"prompts of more than {sizes.max_num_tokens:,} tokens are refused{where}"
    if target.architecture.is_sparse:
        return f"off, as the guide's known issues say for V3.2-Exp; {longer}"
    if sizes.layout.attention_dp and target.release.is_before("1.1"):
        return f"off: with attention DP it hung before 1.1.0 (NVIDIA/TensorRT-LLM#5267); {longer}"
    if target.recipe.value("enable_chunked_prefill"):
        return f"off: TensorRT-LLM {target.release.version} lacks it for MLA on {target.gpu.name}; {longer}"
    return f"off, as published; {longer}"


def cuda_graph_settings(sizes: Sizes, recipe: dict[str, Setting]) -> Iterable[Setting]:
    if "cuda_graph_config" in recipe:
        return
    if "cuda_graph_config.enable_padding" not in recipe and not sizes.as_published:
        yield Setting(
            "cuda_graph_config.enable_padding",
            True,
            "a batch between two captured sizes runs in the next larger graph",
            source=DEPLOYMENT,
        )
    if not sizes.graph_sizes:
        yield Setting(
            "cuda_graph_config.max_batch_size",
            sizes.graph_max_batch_size,
            "the same as max_batch_size, because larger batches would run without a graph",
            source=DEPLOYMENT,
        )


def transfer_settings(target: Target, sizes: Sizes, recipe: dict[str, Setting]) -> Iterable[Setting]:
    if BUFFER not in recipe:
        return
    limits = {"enable_chunked_prefill": sizes.chunked_prefill, "max_num_tokens": sizes.max_num_tokens}
    longest = longest_prompt(Deployment(settings=limits, isl=target.request.workload.isl)) or 0
    yield Setting(
        BUFFER,
        max(recipe[BUFFER].value, buffer_tokens(longest)),
        "at least the longest prompt, in whole KV blocks",
        source="TensorRT-LLM 1.2.0 documentation, features/disagg-serving",
    )
