"""The settings of a plan, under canonical keys, each with its reason. What the recipe leaves open is decided here."""

from __future__ import annotations

from deepseek_triton_build.arithmetic.gpu_memory import Budget
from deepseek_triton_build.data.planned_settings import Setting
from deepseek_triton_build.data.profiles import ANY_WORKLOAD
from deepseek_triton_build.planning.batch_sizes import Sizes
from deepseek_triton_build.planning.choices.decoding import output_settings, speculation_settings
from deepseek_triton_build.planning.choices.engine_limits import cuda_graph_settings, limit_settings, transfer_settings
from deepseek_triton_build.planning.choices.kv_cache_and_experts import kv_cache_settings, moe_settings
from deepseek_triton_build.planning.choices.parallel_settings import model_settings, parallelism_settings
from deepseek_triton_build.planning.layout import WIDE_EP
from deepseek_triton_build.planning.target import Target


def choose_settings(target: Target, sizes: Sizes, budget: Budget) -> dict[str, Setting]:
    """Return canonical key -> setting: the recipe's settings, completed, and replaced where they had to change."""
    chosen = {setting.key: setting for setting in target.recipe.settings}
    rows: list[Setting] = [
        *model_settings(target),
        *parallelism_settings(target, sizes, budget),
        *limit_settings(target, sizes),
        *cuda_graph_settings(sizes, chosen),
        *kv_cache_settings(target, sizes, budget, chosen),
        *moe_settings(target, sizes),
        *speculation_settings(target, sizes, chosen),
        *transfer_settings(target, sizes, chosen),
        *output_settings(target, sizes, chosen),
    ]
    computed = {setting.key: setting for setting in rows}
    for key in _contradicted(sizes, chosen):
        del chosen[key]
    return _merged(target, sizes, chosen, computed)


_EXPLAINED_BY_KERNEL = ("kv_cache_config.dtype", "moe_config.backend")
"""Keys whose kernel depends on the GPU and the batch, which a recipe's own reason can't say."""
_EXPLAINED_BY_LAYOUT = ("moe_expert_parallel_size", "enable_attention_dp", "max_batch_size", "max_num_tokens")
"""Keys whose reason in a recipe holds on the recipe's own GPUs only."""
_EXPLAINED_BY_WORKLOAD = (
    "enable_attention_dp",
    "max_batch_size",
    "max_num_tokens",
    "max_seq_len",
    "enable_chunked_prefill",
    "cuda_graph_config.max_batch_size",
    "kv_cache_config.free_gpu_memory_fraction",
)
"""Keys whose reason in a recipe holds for the recipe's own workload only."""


def _merged(
    target: Target, sizes: Sizes, recipe: dict[str, Setting], computed: dict[str, Setting]
) -> dict[str, Setting]:
    """Merge the settings. A recipe's setting keeps its reason and source while its value and reason still hold."""
    explained: tuple[str, ...] = _EXPLAINED_BY_KERNEL
    if not _has_the_recipes_layout(target, sizes):
        explained += _EXPLAINED_BY_LAYOUT
    if sizes.shrunk or (target.request.workload != ANY_WORKLOAD and not target.is_as_published):
        explained += _EXPLAINED_BY_WORKLOAD
    merged = dict(recipe)
    for key, setting in computed.items():
        if key not in recipe or recipe[key].value != setting.value or key in explained:
            merged[key] = setting
    return merged


def _has_the_recipes_layout(target: Target, sizes: Sizes) -> bool:
    recipe, layout = target.recipe, sizes.layout
    return (
        recipe.num_gpus in (None, target.num_gpus)
        and layout.pipeline_parallel_size == 1
        and layout.attention_dp == recipe.value("enable_attention_dp", False)
        and layout.expert_parallel_size == recipe.value("moe_expert_parallel_size", layout.expert_parallel_size)
        and sizes.expert_slots == recipe.value("moe_config.load_balancer.num_slots", 0)
    )


def _contradicted(sizes: Sizes, recipe: dict[str, Setting]) -> list[str]:
    """Return the keys of the recipe that don't go with the sizes."""
    gone = []
    if not sizes.layout.attention_dp:
        gone += [key for key in recipe if key.startswith("attention_dp_config.")]
    if not sizes.graph_sizes:
        gone += [key for key in recipe if key == "cuda_graph_config.batch_sizes"]
    if not sizes.num_draft_tokens:
        gone += [key for key in recipe if key.startswith("speculative_config.")]
    if sizes.moe_backend != WIDE_EP:
        gone += [key for key in recipe if key.startswith("moe_config.load_balancer.")]
    if sizes.moe_max_num_tokens is None:
        gone += [key for key in recipe if key == "moe_config.max_num_tokens"]
    return gone
