"""LLM, with the recorded signature."""

import asyncio
import inspect
import itertools
import json
import math
import time
from pathlib import Path

from tensorrt_llm._detokenizer import Detokenizer
from tensorrt_llm._engine import Engine, Responses, Sequence
from tensorrt_llm._launched import launched_ranks
from tensorrt_llm._record import RECORD, Sampler, is_met
from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.llmapi.llm_args import checked_llm_args, mtp_layers
from tensorrt_llm.llmapi.result import GenerationResult, RequestError
from tensorrt_llm.sampling_params import SamplingParams
from tensorrt_llm.tokenizer import StandinTokenizer

_DEFAULT_MAX_SEQ_LEN = 4096
_DEFAULT_MAX_BATCH_SIZE = 2048


class RequestOutput(GenerationResult):
    _ids = itertools.count(1)

    def __init__(self, prompt, *args):
        super().__init__(*args)
        self.request_id = next(self._ids)
        self.prompt = prompt


class LLM:
    """Loads at once, or as its launcher's ranks do. Arguments that the release lacks are refused, also in sections."""

    def __init__(self, **kwargs):
        self._llm_args = checked_llm_args(kwargs)
        self._refuse_to_load()
        self._sampler = Sampler(self._llm_args)
        self._session = self._llm_args["mpi_session"]
        sizes = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
        world_size = math.prod(self._llm_args[name] for name in sizes)
        if self._session is not None and self._session.n_workers != world_size:
            raise ValueError("the MPI session's world is not as large as the model's")
        self._ranks = launched_ranks(world_size)
        self._tokenizer = None if self._llm_args["skip_tokenizer_init"] else StandinTokenizer()
        max_batch_size = self._llm_args["max_batch_size"] or _DEFAULT_MAX_BATCH_SIZE
        self._executor = Engine(
            1 + mtp_layers(self._llm_args),
            max_batch_size,
            keeps_statistics=bool(self._llm_args["enable_iter_perf_stats"]),
        )

        self._context_numbers = itertools.count(1)

    @property
    def tokenizer(self):
        return self._tokenizer

    @property
    def llm_id(self):
        return f"standin-{id(self):x}"

    def generate_async(self, *args, **kwargs):
        given = _SIGNATURE.bind(self, *args, **kwargs).arguments
        if self._executor is None or self._executor.is_shutdown():
            raise RuntimeError("LLM is shutting down")
        loop = asyncio.get_running_loop()  # RuntimeError without a loop, as an async queue can't be made then
        params = given.get("sampling_params") or SamplingParams()
        self._refuse(params)
        inputs = given["inputs"]
        prompt, prompt_token_ids = self._tokenized(inputs, params)
        stream_interval = self._llm_args.get("stream_interval", 1) if given.get("streaming") else None
        sequence = Sequence(prompt_token_ids, params, stream_interval, self._sampler, Responses(loop))
        unserved = self._take_part(sequence, given.get("disaggregated_params"), inputs, params)
        output = RequestOutput(prompt, sequence, prompt_token_ids, self._detokenizer(params, stream_interval))
        limit = self._llm_args["max_seq_len"] or _DEFAULT_MAX_SEQ_LEN
        room = limit - len(prompt_token_ids)
        if unserved:
            sequence.fail(unserved)
        elif room <= 0:
            sequence.fail(f"`default_max_tokens` ({room}) must be greater than 0, max_seq_len is {limit}")
        else:
            self._executor.submit(sequence)
        return output

    def shutdown(self):
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None
        if self._ranks is not None:
            self._ranks.shutdown()
            self._ranks = None
        if self._session is not None:
            self._session.shutdown()

    async def get_stats_async(self, timeout=2):
        """Yield iterations as they come, until there is none for `timeout` seconds.

        Every other one is JSON, because a reader has to take both forms.
        """
        if not self._llm_args["enable_iter_perf_stats"]:
            raise RuntimeError("iteration statistics need enable_iter_perf_stats")
        last = time.monotonic()
        for number in itertools.count():
            while self._executor is not None and (row := _next(self._executor.iterations)) is None:
                if timeout is not None and time.monotonic() - last > timeout:
                    return
                await asyncio.sleep(0.01)
            if self._executor is None:
                return
            last = time.monotonic()
            yield json.dumps(row) if number % 2 else row

    def _refuse_to_load(self):
        model = Path(self._llm_args["model"])
        if model.is_dir() and not (model / "config.json").is_file():
            raise OSError(f"{model} does not appear to have a file named config.json")
        if not model.is_dir() and len(model.parts) == 1:
            raise OSError(f"{model} is not a local folder and is not a valid model identifier")
        if RECORD["default_backend"] == "tensorrt" and self._llm_args["backend"] != "pytorch":
            raise ValueError(f"no TensorRT engine: expected backend 'pytorch', got {self._llm_args['backend']!r}")
        for need in RECORD["sampler"]["needs"]:
            if "value" in need and self._llm_args["guided_decoding_backend"] and not is_met(need, self._llm_args):
                raise ValueError(f"guided decoding {need['why']}")

    def _take_part(self, sequence, part, inputs, params):
        """Make a sequence that of one server's part; return why the worker refuses it, or ""."""
        if part is None or part.request_type in (None, "context_and_generation"):
            return ""
        if not (self._llm_args["cache_transceiver_config"] or {}).get("backend"):
            raise ValueError(f"{part.request_type} needs a cache_transceiver_config with a backend")
        if params.guided_decoding is not None or params.logprobs:
            raise NotImplementedError("not established for a part of a request")
        if part.request_type == "generation_only":
            if isinstance(inputs, str) or not part.first_gen_tokens or not part.opaque_state:
                raise ValueError("generation_only needs the token ids of the prompt, the first ones and opaque_state")
            sequence.go_on(part.opaque_state, part.first_gen_tokens)
            return ""
        params.max_tokens = 1  # in the caller's object, as TensorRT-LLM does it
        sequence.hold = self._hold
        is_ordered = self._llm_args["disable_overlap_scheduler"]
        return "" if is_ordered else "Context only requests are not supported when the overlap scheduler is enabled"

    def _hold(self, num_blocks):
        assert self._executor is not None
        return DisaggregatedParams(
            request_type="context_only",
            ctx_request_id=next(self._context_numbers),
            opaque_state=self._executor.kv_sender.hold(num_blocks),
        )

    def _detokenizer(self, params, stream_interval):
        return Detokenizer(params, stream_interval) if params.detokenize and self._tokenizer is not None else None

    def _tokenized(self, inputs, params):
        if isinstance(inputs, str):
            if self._tokenizer is None:
                raise ValueError("tokenizer is required to tokenize string prompt")
            return inputs, self._tokenizer.encode(inputs, params.add_special_tokens)
        if isinstance(inputs, list) and set(map(type, inputs)) <= {int}:
            vocab_size = math.inf if self._tokenizer is None else len(self._tokenizer.tokenizer)
            if inputs and not (min(inputs) >= 0 and max(inputs) < vocab_size):
                raise AssertionError("a token id outside the vocabulary fails on the GPU and takes the engine along")
            return None, inputs
        raise TypeError(f"The inputs must be type str or list of int, but got {type(inputs)}")

    def _refuse(self, params):
        """Refuse fields that the release refuses or ignores. Finding these is the purpose of this stand-in."""
        sampler = self._sampler
        given = {name for name, row in RECORD["sampling_params"].items() if getattr(params, name) != row["default"]}
        for name in given - sampler.honoured - sampler.fatal:
            if name in sampler.without_argument:
                raise RequestError(f"{name} is not enabled: {sampler.without_argument[name]} is not set")
            raise ValueError(f"{sampler.name} of TensorRT-LLM {RECORD['release']} ignores {name}")
        for conflict in RECORD["sampler"]["conflicts"]:
            if given >= set(conflict["fields"]):
                raise ValueError(f"{' and '.join(conflict['fields'])}: {conflict['why']}")
        if "logprobs" in given - sampler.fatal and params.logprobs > sampler.most_logprobs:
            raise ValueError(f"PyTorch backend currently only supports `logprobs=1`. Received `{params.logprobs}`.")
        if params.n > 1 or (params.best_of or 1) > 1:
            raise NotImplementedError("the stand-in has one output")


def _next(rows):
    return None if rows.empty() else rows.get()


def _parameter(name):
    default = inspect.Parameter.empty if name == "inputs" else False if name == "streaming" else None
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)


_SIGNATURE = inspect.Signature([_parameter("self").replace(default=inspect.Parameter.empty)])
_SIGNATURE = _SIGNATURE.replace(
    parameters=[*_SIGNATURE.parameters.values(), *map(_parameter, RECORD["generate_async"]["parameters"])]
)
LLM.generate_async.__signature__ = _SIGNATURE  # type: ignore[attr-defined]
