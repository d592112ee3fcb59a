"""SamplingParams and GuidedDecodingParams: dataclasses with the recorded fields, types as text and defaults."""

import dataclasses
import os

from tensorrt_llm._record import RECORD


def _validate(self):
    """Make the checks of 1.2.1's SamplingParams._validate."""
    if self.top_p is not None and not 0 <= self.top_p <= 1:
        raise ValueError(f"require 0 <= top_p <= 1, got top_p={self.top_p}")
    if self.top_k is not None and self.top_k < 0:
        raise ValueError(f"require top_k >= 0, got top_k={self.top_k}")
    if self.temperature is not None and self.temperature < 0:
        raise ValueError(f"require temperature >= 0, got temperature={self.temperature}")
    if (self.best_of or self.n) < self.n:
        raise ValueError(f"best_of ({self.best_of}) cannot be less than n ({self.n})")
    if (self.best_of or self.n) > 1 and self._greedy_decoding and "TLLM_ALLOW_N_GREEDY_DECODING" not in os.environ:
        raise ValueError(f"Greedy decoding in the LLM API does not allow multiple returns, got best_of={self.best_of}")


def _greedy(self):
    """Make the release's test for greedy decoding, which up to 1.1 ignores the temperature."""
    values = RECORD["sampler"]["greedy"]["values"]
    given = {name: getattr(self, name) for name in values if getattr(self, name) is not None}
    if RECORD["sampler"]["greedy"]["rule"] == "all":
        return all(value == values[name] for name, value in given.items())
    return not given or any(value == values[name] for name, value in given.items())


SamplingParams = dataclasses.make_dataclass(
    "SamplingParams",
    [(name, row["type"], row["default"]) for name, row in RECORD["sampling_params"].items()],
    kw_only=True,
    slots=True,
    namespace={"__post_init__": _validate, "_greedy_decoding": property(_greedy)},
)

GuidedDecodingParams = dataclasses.make_dataclass(
    "GuidedDecodingParams",
    [(name, "Any", False if name == "json_object" else None) for name in RECORD["guided_decoding_params"]],
    kw_only=True,
    slots=True,
)
