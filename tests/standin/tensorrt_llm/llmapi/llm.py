"""LLM, by the recorded signature, and its RequestOutput."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from typing import Any

from tensorrt_llm._engine import Engine, Sequence
from tensorrt_llm._record import RECORD, honoured_fields, selected_sampler
from tensorrt_llm.llmapi.llm_args import checked_llm_args, mtp_layers
from tensorrt_llm.llmapi.result import GenerationResult, RequestError
from tensorrt_llm.sampling_params import SamplingParams
from tensorrt_llm.tokenizer import StandinTokenizer

_DEFAULT_MAX_SEQ_LEN = 4096


class RequestOutput(GenerationResult):
    _ids = itertools.count(1)

    def __init__(self, prompt: str | None, *args: Any) -> None:
        super().__init__(*args)
        self.request_id = next(self._ids)
        self.prompt = prompt


class LLM:
    """Loads at once. Arguments the release doesn't have are refused, in sections too."""

    def __init__(self, **kwargs: Any) -> None:
        self._llm_args = checked_llm_args(kwargs)
        self._sampler = selected_sampler(self._llm_args)
        self._tokenizer = None if self._llm_args["skip_tokenizer_init"] else StandinTokenizer()
        self._executor: Engine | None = Engine(1 + mtp_layers(self._llm_args))

    @property
    def tokenizer(self) -> StandinTokenizer | None:
        return self._tokenizer

    @property
    def llm_id(self) -> str:
        return f"standin-{id(self):x}"

    def generate_async(self, *args: Any, **kwargs: Any) -> RequestOutput:
        given = _SIGNATURE.bind(self, *args, **kwargs).arguments
        if self._executor is None or self._executor.is_shutdown():
            raise RuntimeError("LLM is shutting down")
        loop = asyncio.get_running_loop()  # RuntimeError without one, as an async queue can't be made then
        params = given.get("sampling_params") or SamplingParams()
        self._refuse_what_the_sampler_ignores(params)
        inputs = given["inputs"]
        prompt, prompt_token_ids = self._tokenized(inputs, params)
        stream_interval = self._llm_args["stream_interval"] if given.get("streaming") else None
        sequence = Sequence(prompt_token_ids, params, stream_interval)
        output = RequestOutput(prompt, sequence, prompt_token_ids, params, loop)
        limit = self._llm_args["max_seq_len"] or _DEFAULT_MAX_SEQ_LEN
        if len(prompt_token_ids) >= limit:
            sequence.fail(RequestError(f"The prompt length {len(prompt_token_ids)} exceeds max_seq_len {limit}"))
        else:
            self._executor.submit(sequence)
        return output

    def shutdown(self) -> None:
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    def _tokenized(self, inputs: Any, params: Any) -> tuple[str | None, list[int]]:
        if isinstance(inputs, str):
            if self._tokenizer is None:
                raise ValueError("tokenizer is required to tokenize string prompt")
            return inputs, self._tokenizer.encode(inputs, params.add_special_tokens)
        if isinstance(inputs, list) and all(isinstance(token, int) for token in inputs):
            return None, inputs
        raise TypeError(f"The inputs must be type str or list of int, but got {type(inputs)}")

    def _refuse_what_the_sampler_ignores(self, params: Any) -> None:
        """The real samplers say nothing: an accepted and ignored field is what this stand-in is there to find."""
        honoured = honoured_fields(self._sampler)
        for name, row in RECORD["sampling_params"].items():
            if getattr(params, name) != row["default"] and name not in honoured:
                raise ValueError(f"{self._sampler} of TensorRT-LLM {RECORD['release']} ignores {name}")


def _parameter(name: str) -> inspect.Parameter:
    default = inspect.Parameter.empty if name == "inputs" else False if name == "streaming" else None
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)


_SIGNATURE = inspect.Signature([_parameter("self").replace(default=inspect.Parameter.empty)])
_SIGNATURE = _SIGNATURE.replace(
    parameters=[*_SIGNATURE.parameters.values(), *map(_parameter, RECORD["generate_async"]["parameters"])]
)
LLM.generate_async.__signature__ = _SIGNATURE  # type: ignore[attr-defined]
