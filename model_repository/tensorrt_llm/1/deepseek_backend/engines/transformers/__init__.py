"""Real forward passes of the checkpoint's own model code, on CPU or one GPU.

`checkpoint` loads, `model_runner` computes over the `slot_cache`, `continuous_batch` lets requests (each a
`generation`) join and leave between iterations, `sampling` picks tokens, `logprobs` tells how likely they were,
`detokenizer` makes text; `engine` puts them on a thread.
"""

from deepseek_backend.engines.transformers.transformers_engine import TransformersEngine

__all__ = ["TransformersEngine"]
