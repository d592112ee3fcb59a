"""vLLM through its AsyncLLM, for production where vLLM is preferred.

`vllm_release` reads the version record, and `vllm_start` makes a running AsyncLLM of model.yaml. `vllm_engine` serves
requests on an event loop of its own: `request_fields` turns a request into vLLM's own, `core_connection` takes the
outputs of an iteration from the engine core (`generate_calls` takes them by vLLM's public way), and `growing_answer`
makes steps of them.
"""

from deepseek_backend.engines.vllm.vllm_engine import VllmEngine

__all__ = ["VllmEngine"]
