"""Runs a DeepSeek-V3 checkpoint in numpy, on the CPU. It is the embedded default, and the measure of other engines."""

import ctypes
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from deepseek_backend.config import BackendConfig
from deepseek_backend.engines.base import (
    EMBEDDED_FIELDS,
    Capabilities,
    EngineHealth,
    EngineStats,
    FinishReason,
    Step,
    StepSink,
    group_by_sink,
    require,
)
from deepseek_backend.engines.generate_request import GenerateRequest, Messages
from deepseek_backend.engines.prompting import render_chat
from deepseek_backend.engines.reference.checkpoint_loading import LoadedCheckpoint, load_checkpoint
from deepseek_backend.engines.reference.continuous_batch import BatchedGeneration, ContinuousBatch
from deepseek_backend.engines.reference.deepseek_model import ModelRunner
from deepseek_backend.engines.reference.guides import GUIDED, NO_TAGS, Guides, unsupported_guides
from deepseek_backend.errors import BackendError, ConfigError, EngineError, UnavailableError, describe

logger = logging.getLogger(__name__)

_FUNCTIONS = ("openblas_set_num_threads64_", "scipy_openblas_set_num_threads64_", "openblas_set_num_threads")
"""Names of the function in the builds of OpenBLAS: numpy's wheels until 1.26 and from then on, and distributions'."""
_DEFAULT_MAX_SEQ_LEN = 4096
_SAMPLING_FIELDS = EMBEDDED_FIELDS | {
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "bad", "logit_bias")
}


def set_blas_threads(number: int) -> None:
    """Let each product of matrices in this process use `number` threads. Without OpenBLAS, a warning is logged."""
    mapped = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    paths = {fields[5] for fields in mapped if len(fields) == 6 and "openblas" in Path(fields[5]).name}
    functions = [
        function for path in paths for name in _FUNCTIONS if (function := getattr(ctypes.CDLL(path), name, None))
    ]
    for function in functions:
        function(number)
    if not functions:
        logger.warning("numpy does not use OpenBLAS here: num_threads has no effect; set the threads of its BLAS")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """`triton_config.engine_options`. The engine chooses a value for None at its start."""

    max_num_seqs: int = 32
    """Limit on requests in the running batch; further ones wait."""
    max_seq_len: int | None = None
    """Limit on prompt plus generated tokens. Default: the model's max_position_embeddings, 4,096 at most."""
    num_threads: int | None = None
    """Number of threads of one matrix product. Default: OpenBLAS's choice, which is one for each core."""


def parse_options(values: Mapping[str, Any]) -> EngineOptions:
    """Check the options.

    :raises ConfigError: with every problem found.
    """
    known = {option.name for option in fields(EngineOptions)}
    problems = [f"{name}: unknown option; known: {', '.join(sorted(known))}" for name in values if name not in known]
    for name in ("max_num_seqs", "max_seq_len", "num_threads"):
        least = 2 if name == "max_seq_len" else 1
        value = values.get(name, least)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            problems.append(f"{name}: expected a whole number from {least}, got {value!r}")
    if problems:
        raise ConfigError([f"triton_config.engine_options.{problem}" for problem in problems])
    return EngineOptions(**values)


class ReferenceEngine:
    """An `Engine` around a ContinuousBatch, which one thread drives."""

    def __init__(self, config: BackendConfig) -> None:
        """Check the options; `start` loads the model.

        :raises ConfigError: when an engine option is unknown or out of range.
        """
        self._config = config
        self._options = parse_options(config.engine_options)
        # `start` sets these before it starts the thread; `stop` drops them after the thread has ended.
        self._checkpoint: LoadedCheckpoint | None = None
        self._capabilities: Capabilities | None = None
        self._load_seconds: Mapping[str, float] = {}
        self._batch: ContinuousBatch | None = None
        self._thread: threading.Thread | None = None
        # These hand requests over to the thread. _wake guards them.
        self._wake = threading.Condition()
        self._arrivals: list[BatchedGeneration] = []
        self._aborts: set[str] = set()
        self._down = "the engine has not been started"
        """Why no request is served; empty while requests are served. The thread ends when it is set."""
        # One call of a sink at a time. Reentrant: a sink may submit, which may be refused at once.
        self._delivery = threading.RLock()

    def start(self) -> None:
        """Load the checkpoint and start the thread.

        :raises EngineError: when it can't be loaded, or its context is shorter than max_seq_len.
        """
        options = self._options
        if options.num_threads is not None:
            set_blas_threads(options.num_threads)
        checkpoint = load_checkpoint(self._config.model, version_dir=self._config.version_dir)
        longest = checkpoint.max_position_embeddings
        max_seq_len = min(longest, _DEFAULT_MAX_SEQ_LEN) if options.max_seq_len is None else options.max_seq_len
        if max_seq_len > longest:
            raise EngineError(
                f"engine_options.max_seq_len is {max_seq_len}, more than the checkpoint's max_position_embeddings, "
                f"{longest}"
            )
        unsupported = unsupported_guides()
        self._capabilities = Capabilities(
            sampling_fields=_SAMPLING_FIELDS | GUIDED - unsupported.keys(),
            max_seq_len=max_seq_len,
            max_prompt_bytes=max_seq_len * checkpoint.longest_token_bytes,
            bos_token=checkpoint.bos_token,
            priority=True,
            unsupported=unsupported,
            formats_refused=NO_TAGS,
        )
        self._checkpoint = checkpoint
        end = min(checkpoint.eos_token_ids, default=-1)
        self._guides = Guides(checkpoint.tokenizer, vocab_size=checkpoint.vocab_size, eos_token_id=end)
        self._load_seconds = checkpoint.load_seconds
        runner = ModelRunner(checkpoint.model, options.max_num_seqs)
        self._batch = ContinuousBatch(runner, checkpoint.tokenizer, options.max_num_seqs)
        self._down = ""
        self._thread = threading.Thread(target=self._run, args=(self._batch,), name="reference-engine", daemon=True)
        self._thread.start()

    @property
    def capabilities(self) -> Capabilities:
        return require(self._capabilities, "capabilities are known after start()")

    @property
    def tokenizer(self) -> LoadedCheckpoint:
        """The loaded checkpoint.

        :raises UnavailableError: when no request is served.
        """
        checkpoint = self._checkpoint
        if checkpoint is None or self._down:
            raise UnavailableError(self._down)
        return checkpoint

    @property
    def load_seconds(self) -> Mapping[str, float]:
        return self._load_seconds

    def render_chat(self, messages: Messages, template_kwargs: Mapping[str, Any]) -> str:
        return render_chat(self.tokenizer.template, messages, template_kwargs)

    def submit(self, request: GenerateRequest, sink: StepSink) -> None:
        """Tokenize in the caller's thread, and leave the rest to the engine's thread."""
        try:
            generation = BatchedGeneration(request, sink, self.tokenizer, self._guides, self.capabilities.max_seq_len)
            with self._wake:
                if self._down:
                    raise UnavailableError(self._down)
                self._arrivals.append(generation)
                self._wake.notify()
        except BackendError as error:
            self._refuse(request, sink, error)
        except Exception as error:
            # The tokenizer may raise anything, and must not end the caller's thread.
            logger.exception("a request can't be read")
            self._refuse(request, sink, EngineError(f"the request can't be read: {describe(error)}"))

    def _refuse(self, request: GenerateRequest, sink: StepSink, error: BackendError) -> None:
        with self._delivery:
            sink.on_steps([(request, Step(error=error))])

    def abort(self, request_id: str) -> None:
        with self._wake:
            if not self._down:  # else it would stay there for ever
                self._aborts.add(request_id)
                self._wake.notify()

    drop = abort  # it holds no KV cache of a request that has ended

    def health(self) -> EngineHealth:
        if not self._down and not (self._thread and self._thread.is_alive()):
            return EngineHealth(alive=False, reason="the engine's thread has ended")
        return EngineHealth(alive=not self._down, reason=self._down)

    def stats(self) -> EngineStats:
        """Return the numbers. A KV block is one token here: the cache grows with its content, up to the total."""
        batch = self._batch
        if batch is None:
            return EngineStats(num_running=0, num_waiting=0)
        return EngineStats(
            num_running=batch.num_running,
            num_waiting=batch.num_waiting + len(self._arrivals),
            kv_blocks_used=batch.num_cached_tokens,
            kv_blocks_total=self._options.max_num_seqs * self.capabilities.max_seq_len,
            tokens_per_block=1,
        )

    def stop(self) -> None:
        with self._wake:
            self._down = self._down or "the engine has been stopped"
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
        self._thread = self._batch = self._checkpoint = None

    # --- the engine's thread ------------------------------------------------------------------------------------------

    def _run(self, batch: ContinuousBatch) -> None:
        try:
            while not self._down:
                self._iterate(batch)
            self._end(batch, finish_reason="cancelled")
        except Exception as error:
            # Every open request must hear of it, whatever the model has raised.
            logger.exception("the engine has failed")
            with self._wake:
                self._down = f"the engine has failed: {describe(error)}"
            self._end(batch, error=EngineError(self._down))

    def _iterate(self, batch: ContinuousBatch) -> None:
        """Wait for work, run one iteration, and deliver its steps."""
        with self._wake:
            while not (self._down or self._arrivals or self._aborts or batch.num_running or batch.num_waiting):
                self._wake.wait()
            arrivals, self._arrivals = self._arrivals, []
            aborts, self._aborts = self._aborts, set()
        batch.add(arrivals)
        if aborts:
            batch.cancel(aborts)
        if not self._down:
            batch.iterate()
        self._deliver(batch)

    def _end(
        self, batch: ContinuousBatch, *, finish_reason: FinishReason | None = None, error: EngineError | None = None
    ) -> None:
        """Deliver the last step of every open request."""
        with self._wake:
            arrivals, self._arrivals = self._arrivals, []
        for generation in [*batch.close(), *arrivals]:
            batch.steps.append((generation, generation.step(finish_reason=finish_reason, error=error)))
        self._deliver(batch)

    def _deliver(self, batch: ContinuousBatch) -> None:
        steps, batch.steps = batch.steps, []
        with self._delivery:
            for sink, its_steps in group_by_sink(steps):
                sink.on_steps(its_steps)
