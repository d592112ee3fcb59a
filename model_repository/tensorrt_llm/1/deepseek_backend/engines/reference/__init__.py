"""Real forward passes of DeepSeek-V3 in numpy, on the CPU."""

from deepseek_backend.engines.reference.reference_engine import ReferenceEngine

__all__ = ["ReferenceEngine"]
