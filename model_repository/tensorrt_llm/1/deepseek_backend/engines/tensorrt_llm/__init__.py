"""TensorRT-LLM's PyTorch backend through its LLM API: the production engine.

`loading` turns model.yaml and the release record into a running LLM, `translation` is between our requests and its;
`engine` runs them on an event loop, that of `loop_thread`; `increments` makes steps of what comes; `faults` tells what
a failure means.
"""

from deepseek_backend.engines.tensorrt_llm.tensorrt_llm_engine import TensorRTLLMEngine

__all__ = ["TensorRTLLMEngine"]
