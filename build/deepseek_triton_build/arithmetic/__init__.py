"""Numbers that follow from a plan: GPU memory, load time and the requests of a warm-up."""

from deepseek_triton_build.arithmetic.gpu_memory import (
    ASSUMED_RATE,
    ENGINE_START_S,
    GIB,
    PREFETCH_SHARE,
    Budget,
    load_s,
    minimum_gpus,
    ready_within_s,
)
from deepseek_triton_build.arithmetic.warmup_shapes import shapes_for_llm_args
