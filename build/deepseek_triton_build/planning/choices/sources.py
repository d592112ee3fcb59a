"""The documents that most reasons rest on."""

GUIDE = "TensorRT-LLM examples/models/core/deepseek_v3/README.md"
DEPLOYMENT = "TensorRT-LLM deployment guide for DeepSeek-R1"
