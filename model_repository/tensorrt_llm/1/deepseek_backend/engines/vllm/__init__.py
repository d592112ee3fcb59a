"""vLLM through its AsyncLLM, for production where vLLM is preferred."""

from deepseek_backend.engines.vllm.vllm_engine import VllmEngine

__all__ = ["VllmEngine"]
