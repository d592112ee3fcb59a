"""A stand-in for the package tensorrt_llm, which can't be installed here.

It implements the part of the LLM API that release.yaml records for its release, and nothing else: an argument, a field
or a method that isn't recorded is an error. Its "model" writes a fixed text, one byte a token, so that tokens split
most characters. A prompt that ends with <think> gets some reasoning first, and a guide gets a JSON object that names
it. Two of its servers can share requests, as the record says; no data goes between them (_kv_transfer.py).

STANDIN_RELEASE names release.yaml; else it lies beside this package, in a model's version folder.
STANDIN_TOKENS_PER_S paces each request, and STANDIN_FAIL_AFTER is the number of tokens after which the engine dies.
TLLM_INCREMENTAL_DETOKENIZATION_BACKEND chooses a detokenizer, as in TensorRT-LLM. tests/standin/launcher stands in for
trtllm-llmapi-launch: under it all ranks load in STANDIN_LOAD_S seconds, except STANDIN_HANGING_RANK, which never does.
"""

from tensorrt_llm._record import RECORD
from tensorrt_llm.llmapi import LLM, GuidedDecodingParams, SamplingParams

__version__ = RECORD["release"]
__all__ = ["LLM", "GuidedDecodingParams", "SamplingParams", "__version__"]
