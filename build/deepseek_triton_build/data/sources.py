"""Names of the documents and files of TensorRT-LLM that most reasons and rules rest on."""

GUIDE = "TensorRT-LLM examples/models/core/deepseek_v3/README.md"
DEPLOYMENT = "TensorRT-LLM deployment guide for DeepSeek-R1"
LLM_ARGS = "TensorRT-LLM tensorrt_llm/llmapi/llm_args.py"
PY_EXECUTOR_CREATOR = "TensorRT-LLM tensorrt_llm/_torch/pyexecutor/py_executor_creator.py"
