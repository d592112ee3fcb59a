"""TensorRT-LLM's PyTorch backend through its LLM API: the production engine."""

from deepseek_backend.engines.tensorrt_llm.tensorrt_llm_engine import TensorRTLLMEngine

__all__ = ["TensorRTLLMEngine"]
