"""The simulated engine: it paces tokens as a given deployment would, without a GPU.

`scheduler` decides which requests advance in an iteration, and `deployment_model` how long the iteration takes.
`filler_text` gives the text and `made_up_logprobs` the log-probabilities. `simulated_generation` is one request of all
that, and `simulated_engine` runs them on a thread.
"""

from deepseek_backend.engines.simulated.simulated_engine import SimulatedEngine

__all__ = ["SimulatedEngine"]
