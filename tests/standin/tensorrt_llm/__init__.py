"""A stand-in for the package tensorrt_llm, where that can't be installed.

It implements the part of the LLM API that release.yaml records, for the release that file records, and nothing else: an
argument, a field or a method that isn't recorded is an error here. Its "model" writes a fixed text, a byte a token, so
that most characters are cut by a token's end. A prompt that ends with <think> is answered with some thinking first, a
guide with a JSON object that names it.

release.yaml is looked for in STANDIN_RELEASE, then beside this package (in a model's version folder).
STANDIN_TOKENS_PER_S paces each request; STANDIN_FAIL_AFTER kills the engine after so many tokens;
TLLM_INCREMENTAL_DETOKENIZATION_BACKEND chooses a detokenizer, as there. Under trtllm-llmapi-launch, which
tests/standin/launcher stands in for, all ranks load in STANDIN_LOAD_S, but STANDIN_HANGING_RANK never does.
"""

from __future__ import annotations

from tensorrt_llm._record import RECORD
from tensorrt_llm.llmapi import LLM, GuidedDecodingParams, SamplingParams

__version__ = RECORD["release"]
__all__ = ["LLM", "GuidedDecodingParams", "SamplingParams", "__version__"]
