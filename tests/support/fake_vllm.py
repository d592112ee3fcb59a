"""A vLLM without GPU, model and processes: its engine core does what a test says.

Its modules, classes, fields and parameters are those of a version's record, so that the engine under test finds what it
would find in that vLLM. tests/with_vllm runs the engine on vLLM itself.
"""

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import json
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import yaml
from tokenizers import Tokenizer

from deepseek_backend.config import parse_config
from deepseek_triton_build.data.vllm import load_vllm
from support.engine_driver import EngineDriver, driven
from support.random_checkpoint import build_tokenizer
from support.waiting import wait_for

MAX_MODEL_LEN = 100
"""Where no argument says it."""
NUM_BLOCKS = 500
TOKENS_PER_BLOCK = 64
TOKENIZER = Tokenizer.from_str(json.dumps(build_tokenizer()))


class EngineDeadError(Exception):
    def __init__(self, *args, suppress_context=False, **kwargs):
        super().__init__("EngineCore encountered an issue.")


class VLLMValidationError(ValueError):
    def __init__(self, message, *, parameter=None):
        super().__init__(message)
        self.parameter = parameter


class GenerationError(Exception):
    pass


class RetryableRequestError(GenerationError):
    pass


class FakeTokenizer:
    """The parts of transformers' tokenizer that the engine uses."""

    backend_tokenizer = TOKENIZER

    def __len__(self):
        return TOKENIZER.get_vocab_size()

    def encode(self, text, *, add_special_tokens):
        return list(TOKENIZER.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids, *, skip_special_tokens):
        return str(TOKENIZER.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def get_vocab(self):
        return dict(TOKENIZER.get_vocab())

    def apply_chat_template(self, conversation, *, tokenize, add_generation_prompt):
        return "".join(f"{message['role']}: {message['content']}\n" for message in conversation)


class FakeCore:
    """The engine core, and both ways to its outputs. A test calls `emit` and `die`; any thread may."""

    def __init__(self):
        self.loop = asyncio.get_event_loop()
        self.outputs = asyncio.Queue()
        self.prompts = {}
        """Id that the engine gave -> prompt of each request that came."""
        self.params = {}
        self.priorities = {}
        self.ranks = {}
        self.aborted = []
        self.is_dead = False
        self.token_s = None
        """Seconds between two tokens of an answer that comes by itself; None for none."""
        self.refuse = None
        """The error with which the next requests are refused."""
        self._queues = {}
        self._num_cached = {}

    def emit(self, *outputs, scheduler_stats=None):
        """Send the outputs of one iteration: fields of an EngineCoreOutput, with the engine's own id as request_id."""
        self.loop.call_soon_threadsafe(lambda: self.emit_now(*outputs, scheduler_stats=scheduler_stats))

    def emit_now(self, *outputs, scheduler_stats=None):
        """Do the same on the loop thread."""
        self._emit([SimpleNamespace(**{**EMPTY_OUTPUT, **output}) for output in outputs], scheduler_stats)

    def die(self):
        self.loop.call_soon_threadsafe(self._die)

    def _emit(self, rows, scheduler_stats):
        if self._queues:
            for row in rows:
                if row.prefill_stats is not None:
                    self._num_cached[row.request_id] = row.prefill_stats.num_cached_tokens
                if (error := getattr(row, "error", None)) is not None:
                    self._queues[row.request_id].put_nowait(error.to_exception())
                elif row.request_id in self._queues:
                    num_cached = self._num_cached.get(row.request_id, 0)
                    self._queues[row.request_id].put_nowait(_request_output(row, num_cached))
            return
        for row in rows:
            row.request_id = f"{row.request_id}-core"
        outputs = SimpleNamespace(
            outputs=rows, timestamp=time.monotonic(), scheduler_stats=scheduler_stats, engine_index=0
        )
        self.outputs.put_nowait(outputs)

    def _die(self):
        self.is_dead = True
        for queue in (self.outputs, *self._queues.values()):
            queue.put_nowait(EngineDeadError())

    def accept(self, request_id, prompt, params, priority, rank):
        if self.refuse is not None:
            raise self.refuse
        self.prompts[request_id], self.params[request_id] = prompt["prompt_token_ids"], params
        self.priorities[request_id], self.ranks[request_id] = priority, rank
        if self.token_s is not None:
            self._later(request_id, params, 1)

    def _later(self, request_id, params, number):
        self.loop.call_later(self.token_s, self._generate, request_id, params, number)

    def _generate(self, request_id, params, number):
        """Give the next token of an answer, which is the same every time."""
        if self.is_dead or request_id in self.aborted:
            return
        token_id = 40 + number % 20
        stop = token_id if token_id in (params.stop_token_ids or ()) else None
        reason = "length" if number == params.max_tokens else "stop" if stop else None
        row = {"request_id": request_id, "new_token_ids": [token_id], "finish_reason": reason, "stop_reason": stop}
        self.emit_now(row)
        if reason is None:
            self._later(request_id, params, number + 1)

    # What CoreConnection calls.

    async def get_output_async(self):
        outputs = await self.outputs.get()
        if isinstance(outputs, Exception):
            raise outputs
        return outputs

    async def add_request_async(self, request):
        if self.is_dead:
            raise EngineDeadError
        params, rank = request.sampling_params, request.data_parallel_rank
        self.accept(request.external_req_id, request.prompt, params, request.priority, rank)

    async def abort_requests_async(self, request_ids):
        self.aborted += [request_id.removesuffix("-core") for request_id in request_ids]

    # What AsyncLLM.generate() does.

    async def read(self, request_id):
        queue = self._queues[request_id] = asyncio.Queue()
        try:
            while True:
                output = await queue.get()
                if isinstance(output, Exception):
                    raise output
                yield output
                if output.outputs[0].finish_reason is not None:
                    return
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(request_id)
            raise


class FakeInputProcessor:
    def process_inputs(self, request_id, prompt, params, supported_tasks, priority=0):
        assert supported_tasks == ("generate",)
        return SimpleNamespace(request_id=request_id, prompt=prompt, sampling_params=params, priority=priority)

    @staticmethod
    def assign_request_id(request):
        request.external_req_id, request.request_id = request.request_id, f"{request.request_id}-core"


class FakeAsyncLLM:
    load_error = None

    def __init__(self, args, stat_loggers):
        if self.load_error is not None:
            raise self.load_error
        self.args = args
        self.stat_loggers = [make(None, 0) for make in stat_loggers]
        self.engine_core = FakeCore()
        self.input_processor = FakeInputProcessor()
        self.num_shutdowns = 0
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=args.max_model_len or MAX_MODEL_LEN),
            cache_config=SimpleNamespace(num_gpu_blocks=NUM_BLOCKS, block_size=TOKENS_PER_BLOCK),
            parallel_config=SimpleNamespace(
                data_parallel_size=args.data_parallel_size or 1,
                data_parallel_size_local=args.data_parallel_size_local or args.data_parallel_size or 1,
                local_engines_only=bool(args.data_parallel_hybrid_lb),
            ),
        )

    @classmethod
    def from_engine_args(cls, args, stat_loggers):
        return cls(args, stat_loggers)

    def get_tokenizer(self):
        return FakeTokenizer()

    async def get_supported_tasks(self):
        return ("generate",)

    async def check_health(self):
        if self.engine_core.is_dead:
            raise EngineDeadError

    async def generate(self, prompt, sampling_params, request_id, *, priority, data_parallel_rank):
        self.engine_core.accept(request_id, prompt, sampling_params, priority, data_parallel_rank)
        async with contextlib.aclosing(self.engine_core.read(request_id)) as outputs:
            async for output in outputs:
                yield output

    def shutdown(self):
        self.num_shutdowns += 1


EMPTY_OUTPUT = {
    "new_token_ids": [],
    "new_logprobs": None,
    "new_prompt_logprobs_tensors": None,
    "finish_reason": None,
    "stop_reason": None,
    "events": None,
    "prefill_stats": None,
}


def _request_output(row, num_cached):
    """Return the RequestOutput that AsyncLLM makes of an output of the core."""
    completion = SimpleNamespace(
        token_ids=row.new_token_ids,
        finish_reason=row.finish_reason,
        stop_reason=row.stop_reason,
        logprobs=None if row.new_logprobs is None else _mapped(row.new_logprobs),
    )
    prompt = row.new_prompt_logprobs_tensors
    return SimpleNamespace(
        outputs=[completion],
        metrics=None,
        num_cached_tokens=num_cached,
        prompt_logprobs=None if prompt is None else [None, *_mapped(prompt)],
    )


def _mapped(arrays):
    """Return arrays of log-probabilities as vLLM gives them out: token id -> its log-probability and rank."""
    return [
        {
            token_id: SimpleNamespace(logprob=value, rank=place)
            for token_id, value, place in zip(ids, values, [rank, *range(1, len(ids))], strict=True)
        }
        for ids, values, rank in zip(*(field.tolist() for field in arrays[:3]), strict=True)
    ]


@functools.cache
def recorded_vllm(version):
    return yaml.load(load_vllm(version).text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def install(monkeypatch, version, *, installed=None):
    """Make `import vllm` find a vLLM like the record of `version`; its own version is `installed`."""
    record = recorded_vllm(version)
    names = {"vllm", "vllm.exceptions", "vllm.engine.arg_utils", "vllm.v1.engine.async_llm"}
    names |= {name.partition(":")[0] for name in record["interfaces"]}
    modules = {name: ModuleType(name) for name in names}
    for name, fields in record["interfaces"].items():
        module, _, path = name.partition(":")
        _add(modules[module], path.split("."), fields)
    modules["vllm"].__version__ = installed or version
    modules["vllm.exceptions"].VLLMValidationError = VLLMValidationError
    if "error" in record["interfaces"]["vllm.v1.engine:EngineCoreOutput"]:
        modules["vllm.exceptions"].RetryableRequestError = RetryableRequestError
    modules["vllm.v1.engine.async_llm"].AsyncLLM.from_engine_args = _recorded(
        FakeAsyncLLM.from_engine_args, record["interfaces"]["vllm.v1.engine.async_llm:AsyncLLM.from_engine_args"]
    )
    modules["vllm.v1.engine.exceptions"].EngineDeadError = EngineDeadError
    sampling = modules["vllm.sampling_params"]
    sampling.SamplingParams = _strict("SamplingParams", [*record["sampling_params"], "_bad_words_token_ids"])
    sampling.StructuredOutputsParams = _strict("StructuredOutputsParams", record["structured_outputs"])
    sampling.RequestOutputKind.DELTA = "delta"
    modules["vllm.engine.arg_utils"].AsyncEngineArgs = dataclasses.make_dataclass(
        "AsyncEngineArgs", [(name, Any, None) for name in record["arguments"]]
    )
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def _add(owner, path, fields):
    """Add a class with these fields, or a method with these parameters."""
    *classes, last = path
    for name in classes:
        if not hasattr(owner, name):
            setattr(owner, name, type(name, (), {}))
        owner = getattr(owner, name)
    if classes:
        setattr(owner, last, _recorded(lambda *_: None, fields))
    else:
        setattr(owner, last, type(last, (), {"_fields": tuple(fields)}))


def _recorded(function, parameters):
    """Return `function` with another signature."""

    def call(*args, **kwargs):
        return function(*args, **kwargs)

    names = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in parameters]
    call.__signature__ = inspect.Signature(names)
    return call


def _strict(name, fields):
    """Return a class that takes these fields only, and refuses what vLLM refuses first."""

    def init(self, **given):
        if unknown := given.keys() - set(fields):
            raise TypeError(f"{name} has no {sorted(unknown)}")
        self.__dict__.update(given)

    return type(name, (), {**dict.fromkeys(fields), "__init__": init})


class FakedEngine(EngineDriver):
    """An engine on the fake vLLM, and its requests."""

    @property
    def core(self):
        return self.engine._llm.engine_core

    def accepted(self, **request):
        """Submit a request, and wait until the core has it."""
        submitted = self.submit(**request)
        wait_for(lambda: submitted.request_id in self.core.prompts, lambda: self.steps_of(submitted))
        return submitted

    def emit(self, request, token_ids, finish_reason=None, **output):
        """Send an output of the core to this request alone."""
        self.core.emit(out(request, token_ids, finish_reason, **output))


def out(request, token_ids=(), finish_reason=None, **output):
    """Return the fields of an EngineCoreOutput."""
    tokens = {"new_token_ids": list(token_ids), "finish_reason": finish_reason}
    return {"request_id": request.request_id, **tokens, **output}


@contextlib.contextmanager
def faked_engine(folder, monkeypatch, *, version="0.24.0", installed=None, public=False, options=None, **llm_args):
    """Start an engine on the fake vLLM; stop it at the end.

    :param public: the record differs from what is installed, so that the engine takes vLLM's public way.
    """
    install(monkeypatch, version, installed=installed)
    text = load_vllm(version).text
    if public:
        text = text.replace('"vllm.v1.engine:EngineCoreOutput": [', '"vllm.v1.engine:EngineCoreOutput": [other, ')
    (folder / "release.yaml").write_text(text, encoding="utf-8")
    document = {"model": "m", **llm_args, "triton_config": {"engine": "vllm", "engine_options": dict(options or {})}}
    with driven(parse_config(document, version_dir=folder), FakedEngine) as faked:
        yield faked
