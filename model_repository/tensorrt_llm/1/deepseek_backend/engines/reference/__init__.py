"""Real forward passes of DeepSeek-V3 in numpy, on the CPU.

`checkpoint_loading` reads the folder, with `deepseek_config`, `tensor_files` and `chat_template`. `deepseek_model` is
the forward pass, made of `latent_attention`, `feed_forward` and `rotary_embedding`, and `model_runner` computes it over
the `latent_cache`. `continuous_batch` lets requests (each a `batched_generation`) join and leave between iterations.
`token_sampling` chooses tokens, `token_logprobs` gives their log-probabilities, and `detokenizer` makes text.
`reference_engine` runs all of it on a thread.
"""

from deepseek_backend.engines.reference.reference_engine import ReferenceEngine

__all__ = ["ReferenceEngine"]
