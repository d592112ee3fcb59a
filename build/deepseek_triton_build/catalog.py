"""Known models and their checkpoints, GPUs, profiles, TensorRT-LLM releases and Triton containers, engine variables.

The figures lie as YAML in `data/`, each with its source.
"""

from deepseek_triton_build.data.catalog import (
    PRECISION_ALIASES,
    PRECISIONS,
    Architecture,
    Gpu,
    KnownCheckpoint,
    Variant,
    checkpoint_named,
    cut_summary,
    find_gpu,
    find_precision,
    find_variant,
    foreign_weights,
    full_name,
    gpus,
    how_to_plan,
    precision_in_name,
    title_of,
    variant_of_folder,
    variant_of_model,
    variants,
)
from deepseek_triton_build.data.known_variables import nearest_variable
from deepseek_triton_build.data.planned_settings import is_engine_variable, is_for_every_rank
from deepseek_triton_build.data.profiles import DEFAULT_PROFILE, Profile, Recipe, profiles
from deepseek_triton_build.data.releases import (
    CANDIDATES,
    DEFAULT_RELEASE,
    READABLE_RELEASES,
    RELEASES,
    Release,
    container_tag,
    containers,
    last_image,
    load_release,
    release_for_container,
    release_image_name,
    tags_with,
    version_numbers,
    without_image,
)
from deepseek_triton_build.data.vllm import (
    DEFAULT_VLLM,
    VLLM_VERSIONS,
    VllmVersion,
    container_month,
    load_vllm,
    vllm_containers,
    vllm_drivers,
    vllm_for_container,
    vllm_image_name,
    vllm_tags_with,
)
