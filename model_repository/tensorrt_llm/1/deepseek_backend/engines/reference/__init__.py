"""Real forward passes of transformers' model code, on the CPU or one GPU.

`checkpoint_loading` loads the checkpoint, and `model_runner` computes over the `slot_cache`. `continuous_batch` lets
requests (each a `batched_generation`) join and leave between iterations. `token_sampling` chooses tokens,
`token_logprobs` gives their log-probabilities, and `detokenizer` makes text. `reference_engine` runs all of it on a
thread.
"""

from deepseek_backend.engines.reference.reference_engine import ReferenceEngine

__all__ = ["ReferenceEngine"]
