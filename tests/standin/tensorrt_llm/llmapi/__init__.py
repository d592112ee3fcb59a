"""The LLM API's public names, as far as they are recorded."""

from tensorrt_llm._record import RECORD
from tensorrt_llm.llmapi.llm import LLM, RequestOutput
from tensorrt_llm.llmapi.mpi_session import MpiCommSession
from tensorrt_llm.llmapi.result import CompletionOutput, RequestError
from tensorrt_llm.sampling_params import GuidedDecodingParams, SamplingParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "GuidedDecodingParams",
    "MpiCommSession",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
]

if "disaggregated_params" in RECORD:  # a release without it has not the name
    from tensorrt_llm.disaggregated_params import DisaggregatedParams

    __all__ += ["DisaggregatedParams"]
