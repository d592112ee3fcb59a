"""vLLM through its AsyncLLM.

Guides of guided decoding are checked in the pool of threads that tokenises prompts, so that they delay no token.

Outputs of the engine core, which is a process of its own, are read an iteration at a time (`CoreConnection`), or
through AsyncLLM.generate() where the installed vLLM is not like its record. Text is made here in both cases, and the
steps are the same. An answer whose request wants no steps is kept until it is whole.

An abort ends the request here at once, with the text so far; vLLM is told to drop it. Every request ends with
UNAVAILABLE when the engine core has died, which is seen at once.

vllm is imported in `start`. The record in release.yaml says which vLLM the repository was generated for.
"""

import asyncio
import importlib
import logging
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import TimeoutError as CallTimeoutError
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

from tokenizers import Tokenizer

from deepseek_backend.config import BackendConfig
from deepseek_backend.contract import SAMPLING_BY_NAME
from deepseek_backend.engines.base import Capabilities, EngineHealth, EngineStats, Step, timed
from deepseek_backend.engines.loop_engine import LoopEngine, is_short
from deepseek_backend.engines.prompting import PromptTokenizer, check_ids, check_prompt_length
from deepseek_backend.engines.vllm import open_answer
from deepseek_backend.engines.vllm.loading import VllmRelease, make_llm, prepare_process, read_vllm_release
from deepseek_backend.engines.vllm.request_paths import CoreConnection, GenerateCalls, RankChoice, SchedulerNumbers
from deepseek_backend.errors import ASK_ANOTHER, BackendError, EngineError, UnavailableError, describe

logger = logging.getLogger(__name__)

CORE_DIED = "vLLM's engine core has died"
CONNECT_TIMEOUT_S = 60.0
"""Seconds that the engine core, which has just loaded, gets for its first answer."""
EXIT_TIMEOUT_S = 15.0
"""Seconds that vLLM's processes get to end; vLLM itself kills them after 5."""


@dataclass(frozen=True)
class _VllmClasses:
    """Everything that the engine needs of vLLM's modules."""

    sampling_params: Any
    structured_outputs: Any
    delta: Any
    """The output kind of generate()."""
    dead: type[Exception]
    """The error that means that the engine core is dead."""
    refusals: tuple[type[Exception], ...]
    """The errors that mean that the client is at fault."""
    retryable: tuple[type[Exception], ...]
    """The errors that mean that another server may take the request; vLLM has had them since 0.33.0."""

    @classmethod
    def find(cls) -> "_VllmClasses":
        sampling = importlib.import_module("vllm.sampling_params")
        errors = importlib.import_module("vllm.exceptions")
        return cls(
            sampling.SamplingParams,
            sampling.StructuredOutputsParams,
            sampling.RequestOutputKind.DELTA,
            importlib.import_module("vllm.v1.engine.exceptions").EngineDeadError,
            # Its refusals were ValueErrors before it had a class of its own for them.
            (ValueError, getattr(errors, "VLLMClientError", ValueError)),
            (errors.RetryableRequestError,) if hasattr(errors, "RetryableRequestError") else (),
        )


class VllmEngine(LoopEngine[open_answer.OpenAnswer]):
    """An `Engine` over AsyncLLM."""

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config, package="vLLM", entry_class=open_answer.OpenAnswer)
        self._processes: Sequence[BaseProcess] = ()
        """vLLM's engine cores and the coordinator of data parallelism, which are children of this process."""
        self._release: VllmRelease
        self._decoder: Tokenizer
        """The tokenizer without its Python parts, which makes text of tokens."""
        self._vllm: _VllmClasses
        self._connection: open_answer.RequestPath
        self._numbers = SchedulerNumbers()
        self._ranks = RankChoice(0)

    def _start(self) -> None:
        release = read_vllm_release(self._config.version_dir)
        prepare_process()
        with timed(self._load_seconds, "import"):
            package = self._import("vllm", version=release.version, where=release.where, option="--vllm")
            self._vllm = _VllmClasses.find()
        with timed(self._load_seconds, "load"):
            others = multiprocessing.active_children()
            self._start_loop(partial(make_llm, self._config, self._numbers))
            self._processes = [process for process in multiprocessing.active_children() if process not in others]
        logger.info("vLLM %s has loaded %s", package.__version__, self._config.model)
        self._release = release
        differences = release.differences(self._llm)
        capabilities = self._find_out(str(package.__version__))
        try:
            self._loop.run(partial(self._connect, differences), CONNECT_TIMEOUT_S)
        except CallTimeoutError as error:
            raise EngineError(
                f"vLLM's engine core has loaded {self._config.model}, but does not answer within {CONNECT_TIMEOUT_S:g} "
                "s; the server's log has the cause"
            ) from error
        self._capabilities = capabilities

    def _find_out(self, version: str) -> Capabilities:
        """Set the tokenizers, and return what the engine can do."""
        inner = self._llm.get_tokenizer()
        decoder: Any = getattr(inner, "backend_tokenizer", None)
        if decoder is None:
            raise EngineError("the checkpoint has no tokenizer.json, of which this engine makes text")
        self._decoder, self._tokenizer = decoder, PromptTokenizer(inner)
        unsupported = open_answer.unsupported_fields(self._release, self._config.llm_args)
        if not hasattr(self._vllm.sampling_params, open_answer.BANNED):
            unsupported["bad"] = f"vLLM {self._release.version} has no place for the tokens of the words"
        max_seq_len = int(self._llm.vllm_config.model_config.max_model_len)
        return Capabilities(
            sampling_fields=frozenset(SAMPLING_BY_NAME.keys() - unsupported.keys() - {"best_of"}),
            max_seq_len=max_seq_len,
            max_prompt_bytes=self._tokenizer.max_prompt_bytes(max_seq_len),
            bos_token=self._tokenizer.bos_token,
            priority="priority" not in unsupported,
            version=version,
            whole_answers=True,
            formats_refused=unsupported.get("guided_structural_tag", ""),
            unsupported=unsupported,
        )

    async def _connect(self, differences: Sequence[str]) -> None:
        """Choose the way to the engine cores, and begin to read their outputs.

        :param differences: how the installed vLLM differs inside from its record.
        """
        text = self._tokenizer.text
        if self._release.spreads_by_reports:
            parallel = self._llm.vllm_config.parallel_config
            is_of_node = parallel.local_engines_only
            self._ranks = RankChoice(parallel.data_parallel_size_local if is_of_node else parallel.data_parallel_size)
        if differences:
            logger.warning(
                "the installed vLLM is not like its record, so that a token costs several times as much: %s",
                "; ".join(differences),
            )
            self._connection = GenerateCalls(self._llm, text, self._deliver)
        else:
            tasks = await self._llm.get_supported_tasks()
            as_error = self._as_backend_error
            self._connection = CoreConnection(self._llm, tasks, self._numbers, text, self._deliver, as_error)

        async def read() -> None:
            try:
                await self._connection.read()
            except Exception as error:
                logger.debug("reading vLLM's outputs has failed", exc_info=error)
                reason = CORE_DIED if isinstance(error, self._vllm.dead) else describe(error)
                self._fail(f"{reason}; the server's log has the cause")

        self._keep(read())

    def health(self) -> EngineHealth:
        if not self._loop.running:
            return EngineHealth(alive=False, reason="the engine is not running")
        return EngineHealth(alive=not self._fatal, reason=self._fatal, worked_at_s=self._connection.worked_at_s)

    def stats(self) -> EngineStats:
        cache = self._llm.vllm_config.cache_config if self._llm is not None else None
        return self._numbers.engine_stats(
            num_open=len(self._open),
            num_blocks=(cache and cache.num_gpu_blocks) or 0,
            tokens_per_block=(cache and cache.block_size) or 0,
        )

    def _shut_down(self) -> None:
        """End vLLM's processes: it tells them to end, and kills them when they have not after some seconds."""
        try:
            self._llm.shutdown()
        except Exception:
            # The loop has to end all the same.
            logger.exception("vLLM has not shut down as it should")
        # After the death of one of several cores, a thread of vLLM's is still ending the others.
        end_s = time.monotonic() + EXIT_TIMEOUT_S
        for process in self._processes:
            process.join(max(0.0, end_s - time.monotonic()))
            if process.is_alive():
                logger.error("vLLM's process %d has not ended in %g s: killing it", process.pid, EXIT_TIMEOUT_S)
                process.kill()

    # Everything below runs on the loop thread.

    async def _serve(self, entry: open_answer.OpenAnswer) -> None:
        """Serve one request: until vLLM has it, or by the public way until its last step."""
        try:
            request = entry.request
            if is_short(request) and not open_answer.guide(request.sampling) and not request.sampling.bad:
                prepared = self._prepare(entry)
            else:
                running = asyncio.get_running_loop()
                prepared = await running.run_in_executor(self._tokenizers, self._prepare, entry)
            if entry.is_open:
                entry.rank = self._ranks.take()
                await self._connection.submit(entry, prepared)
        except Exception as error:
            # It ends this request only, unless the engine core is dead.
            if isinstance(error, self._vllm.dead):
                self._fail(f"{CORE_DIED}; the server's log has the cause")  # the reader may notice seconds later
            self._connection.flush()
            self._finish(entry, Step(error=self._as_backend_error(entry, error)))

    def _prepare(self, entry: open_answer.OpenAnswer) -> Any:
        """Return the request in vLLM's form. Any thread may call it.

        :raises RequestError: when it can't be served.
        """
        request = entry.request
        token_ids = self._tokenizer.prompt_token_ids(request)
        max_seq_len = self.capabilities.max_seq_len
        check_prompt_length(len(token_ids), max_seq_len - 1, limit="max_model_len")
        check_ids(request.sampling.logit_bias or (), self._tokenizer.vocab_size, field="logit_bias")
        arguments = open_answer.sampling_arguments(
            request,
            max_tokens=min(request.max_tokens, max_seq_len - len(token_ids)),
            max_temperature=self._release.max_temperature,
            word_token_ids=partial(self._tokenizer.encode, add_special_tokens=False),
        )
        entry.answer = open_answer.GrowingAnswer(request, self._decoder, len(token_ids), entry.arrived_s)
        prompt = {"type": "token", "prompt_token_ids": token_ids}
        try:
            if guided := open_answer.guide(request.sampling):
                arguments["structured_outputs"] = self._vllm.structured_outputs(**guided)
            params = self._vllm.sampling_params(output_kind=self._vllm.delta, **arguments)
            # vLLM takes the smallest number first.
            return self._connection.prepare(entry, prompt, params, -request.priority)
        except self._vllm.refusals as error:
            raise open_answer.refusal(error, request.sampling) from error

    def _as_backend_error(self, entry: open_answer.OpenAnswer, error: Exception) -> BackendError:
        if isinstance(error, BackendError):
            return error
        if isinstance(error, self._vllm.dead):
            return UnavailableError(CORE_DIED)
        cause = error.__cause__ or error  # generate() puts an exception of its own around it, without a message
        for each in (error, cause):  # by the public way the refusal comes from generate(); 0.27 wraps its ValueErrors
            if isinstance(each, self._vllm.refusals):
                return open_answer.refusal(each, entry.request.sampling)
        if isinstance(cause, self._vllm.retryable):
            return UnavailableError(f"vLLM can't take the request now: {describe(cause).rstrip('.')}{ASK_ANOTHER}")
        logger.error("a request failed in vLLM", exc_info=error)
        return EngineError(f"vLLM failed: {describe(cause)}")

    def _deliver(self, steps: Sequence[tuple[open_answer.OpenAnswer, Step]]) -> None:
        """Deliver the steps of one iteration whose requests have not ended, in one call for each sink."""

        def still_open() -> Iterator[tuple[open_answer.OpenAnswer, Step]]:
            for pair in steps:
                entry, step = pair
                if not entry.is_open:
                    continue
                if step.finish_reason is not None or step.error is not None:
                    entry.is_open = False
                    del self._open[entry.request.request_id]
                    self._ranks.give_back(entry.rank)
                    if step.error is not None and not self._fatal:  # vLLM may not know of it, and would go on
                        self._keep(self._drop([entry]))
                yield pair

        self._send(still_open())

    def _finish(self, entry: open_answer.OpenAnswer, step: Step) -> None:
        self._deliver([(entry, step)])

    def _abort(self, request_id: str) -> None:
        entry = self._open.get(request_id)
        if entry is not None:
            self._cancel([entry])
            self._keep(self._drop([entry]))

    def _cancel(self, entries: Sequence[open_answer.OpenAnswer]) -> None:
        """End requests with their text so far."""
        self._connection.flush()
        self._deliver(
            [(entry, entry.answer.cancel() if entry.answer else Step(finish_reason="cancelled")) for entry in entries]
        )

    async def _drop(self, entries: Sequence[open_answer.OpenAnswer]) -> None:
        try:
            await self._connection.abort(entries)
        except Exception:
            # They have had their last steps.
            logger.exception("vLLM can't abort %d requests", len(entries))

    def _fail(self, reason: str) -> None:
        """Declare the engine dead: answer every request, and refuse all further ones."""
        if self._fatal:
            return
        self._fatal = reason
        self._connection.flush()
        logger.critical("%s; answering %d open requests with UNAVAILABLE", reason, len(self._open))
        self._deliver([(entry, Step(error=UnavailableError(reason))) for entry in list(self._open.values())])

    async def _end_requests(self) -> None:
        self._fatal = self._fatal or f"the engine is stopping{ASK_ANOTHER}"
        if entries := list(self._open.values()):
            self._cancel(entries)
            await self._drop(entries)
        await self._cancel_tasks()
