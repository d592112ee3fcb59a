"""TensorRT-LLM's PyTorch backend through its LLM API: the production engine.

`loading` makes a running LLM of model.yaml and the release record. `tensorrt_llm_engine` serves requests on the event
loop of `loop_thread`: `translation` turns a request into TensorRT-LLM's own, `output_increments` makes steps of its
output, and `faults` tells what a failure means.
"""

from deepseek_backend.engines.tensorrt_llm.tensorrt_llm_engine import TensorRTLLMEngine

__all__ = ["TensorRTLLMEngine"]
