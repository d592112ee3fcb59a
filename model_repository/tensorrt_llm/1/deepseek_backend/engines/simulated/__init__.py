"""The digital twin: paces tokens as a given deployment would, without a GPU.

`scheduler` decides who moves in an iteration, `deployment` how long it takes, `babble` what the text is and `logprobs`
what is said of its tokens; `generation` is one request of all that, and `engine` puts them on a thread.
"""

from deepseek_backend.engines.simulated.simulated_engine import SimulatedEngine

__all__ = ["SimulatedEngine"]
