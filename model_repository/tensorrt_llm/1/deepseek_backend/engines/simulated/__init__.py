"""The simulated engine: it paces tokens as a given deployment would, without a GPU."""

from deepseek_backend.engines.simulated.simulated_engine import SimulatedEngine

__all__ = ["SimulatedEngine"]
