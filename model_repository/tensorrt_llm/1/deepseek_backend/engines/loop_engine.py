"""The engines of TensorRT-LLM and vLLM stand on this: a thread that runs an asyncio loop, and an engine around it."""

import asyncio
import importlib
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from deepseek_backend.config import BackendConfig
from deepseek_backend.engines.base import Capabilities, Step, StepSink, group_by_sink, require
from deepseek_backend.engines.generate_request import GenerateRequest, Messages
from deepseek_backend.engines.prompting import PromptTokenizer
from deepseek_backend.errors import ASK_ANOTHER, BackendError, ConfigError, EngineError, UnavailableError, describe
from deepseek_backend.release import is_release, version_mismatch_allowed

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 20.0
"""Seconds that `stop` waits for a thread that may be stuck in the engine."""
END_TIMEOUT_S = 10.0
"""Seconds that a stop waits until every request has ended."""
NUM_TOKENIZER_THREADS = 4
MAX_SHORT_PROMPT = 500
"""Most characters of a prompt that the loop thread tokenises itself: half a millisecond. Another thread costs a tenth
of one, there and back."""


class LoopThread:
    """The thread and its loop. Every call that `call` accepts is made, also when `stop` comes at the same moment."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop, guarded by _lock; None before `start` and after `stop`."""
        self._calls: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        """Calls that the loop has been woken for, guarded by _lock. To wake it costs a system call."""

    @property
    def running(self) -> bool:
        return self._loop is not None

    def start(self, first: Callable[[], None]) -> None:
        """Run `first` in the thread and wait for it. Its exception is raised here, after the thread has ended."""
        begun: Future[None] = Future()

        def work() -> None:
            loop = asyncio.new_event_loop()
            asyncio.set_event_loop(loop)
            try:
                first()
            except BaseException as error:
                # Also SystemExit: `start` waits for the result.
                loop.close()
                begun.set_exception(error)
                return
            with self._lock:
                self._loop = loop
            begun.set_result(None)
            loop.run_forever()
            loop.close()

        # A daemon thread, because the process has to end even when this thread is stuck.
        self._thread = threading.Thread(target=work, name=self._name, daemon=True)
        self._thread.start()
        error = begun.exception()
        if error is not None:
            self._thread.join()
            raise error

    def call(self, function: Callable[..., object], *args: Any) -> bool:
        """Have the thread call `function`; return False when it takes no calls, before `start` and after `stop`."""
        with self._lock:
            if self._loop is None:
                return False
            self._calls.append((function, args))
            if len(self._calls) == 1:
                self._loop.call_soon_threadsafe(self._make_calls)
        return True

    def _make_calls(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, []
        for function, args in calls:
            try:
                function(*args)
            except Exception:
                # The other calls have their requests to serve.
                logger.exception("a call of the thread %s failed", self._name)

    def run(self, function: Callable[[], Coroutine[Any, Any, None]], timeout_s: float) -> None:
        """Run a coroutine function in the thread, and wait for it.

        :raises TimeoutError: when it takes longer.
        """
        with self._lock:
            if self._loop is None:
                return
            future = asyncio.run_coroutine_threadsafe(function(), self._loop)
        future.result(timeout_s)

    def stop(self) -> None:
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is None or self._thread is None:
            return
        # One turn of the loop later, so that everything that the last calls schedule runs too.
        loop.call_soon_threadsafe(loop.call_soon, loop.stop)
        self._thread.join(JOIN_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("the thread %s has not ended in %g s", self._name, JOIN_TIMEOUT_S)


@dataclass(eq=False)
class OpenEntry:
    """A request that has not had its last step. The loop thread owns it."""

    request: GenerateRequest
    sink: StepSink
    task: asyncio.Task[None] | None = None
    """Serves it."""


Entry = TypeVar("Entry", bound=OpenEntry)


class LoopEngine(ABC, Generic[Entry]):
    """An `Engine` over a package that serves requests on an asyncio loop.

    The loop thread makes the package's own engine. It owns every request and makes every call to a sink, except
    refusals after it has ended; other threads only schedule calls on it. All but short prompts are tokenised in a small
    pool of threads, so that a long prompt delays no token.
    """

    def __init__(self, config: BackendConfig, *, package: str, entry_class: Callable[..., Entry]) -> None:
        """`package`: name of the package as messages have it."""
        self._config = config
        self._package = package
        self._entry_class = entry_class
        self._allow_version_mismatch = version_mismatch_allowed(config.engine_options, engine=config.engine)
        self._tokenizer: PromptTokenizer
        self._capabilities: Capabilities | None = None
        """The last thing that a start finds out."""
        self._load_seconds: dict[str, float] = {}
        self._llm: Any = None
        self._tokenizers = ThreadPoolExecutor(NUM_TOKENIZER_THREADS, thread_name_prefix="tokenizer")
        self._loop = LoopThread(config.engine)
        self._stopping = threading.Lock()
        # One call of a sink at a time. Reentrant: a sink may submit, which may be refused at once.
        self._delivery = threading.RLock()
        # Only the loop thread writes the following ones.
        self._fatal = ""
        """Why the engine is dead, in one line; empty while it is alive. Set once."""
        self._open: dict[str, Entry] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        try:
            self._start()
        except BaseException as error:
            # Also Ctrl-C: the model may have loaded, and would hold the GPUs.
            self.stop()
            if isinstance(error, Exception) and not isinstance(error, BackendError | ConfigError):
                raise EngineError(f"{self._package} can't serve {self._config.model}: {describe(error)}") from error
            raise

    def _import(self, name: str, *, version: str, where: str, option: str) -> Any:
        """Import the package, and check its version.

        :param version: the one that the repository was generated for.
        :param where: where the package is to be had.
        :param option: option of `deepseek-triton build` that names a version.
        :raises EngineError: when it can't be imported, or is of another version and the options don't allow that.
        """
        try:
            package = importlib.import_module(name)
        except ImportError as error:
            raise EngineError(f"{name} can't be imported: {describe(error)}; {where}") from error
        installed = str(package.__version__)
        if not is_release(installed, version):
            if not self._allow_version_mismatch:
                raise EngineError(
                    f"this repository was generated for {self._package} {version}, but {installed} is installed; "
                    f"generate it again with {option}, or set triton_config.engine_options: "
                    "{allow_version_mismatch: true}"
                )
            logger.warning("%s %s runs a repository generated for %s", self._package, installed, version)
        return package

    def _start_loop(self, make_llm: Callable[[], Any]) -> None:
        """Start the loop's thread, and make the LLM in it, because an LLM looks for its thread's loop.

        :raises EngineError: with the cause in one line.
        """

        def make() -> None:
            try:
                self._llm = make_llm()
            except ConfigError:
                raise
            except BaseException as error:
                # Also SystemExit.
                logger.debug("loading failed", exc_info=error)
                raise EngineError(f"{self._package} can't load {self._config.model}: {describe(error)}") from error

        self._loop.start(make)

    @property
    def capabilities(self) -> Capabilities:
        return require(self._capabilities, "the engine is used before start()")

    @property
    def tokenizer(self) -> PromptTokenizer:
        require(self._capabilities, "the engine is used before start()")
        return self._tokenizer

    @property
    def load_seconds(self) -> Mapping[str, float]:
        return self._load_seconds

    def render_chat(self, messages: Messages, template_kwargs: Mapping[str, Any]) -> str:
        return self.tokenizer.render_chat(messages, template_kwargs)

    def submit(self, request: GenerateRequest, sink: StepSink) -> None:
        require(self._capabilities, "submit() before start()")
        if not self._loop.call(self._accept, self._entry_class(request, sink)):
            with self._delivery:
                sink.on_steps([(request, Step(error=UnavailableError(f"the engine is stopped{ASK_ANOTHER}")))])

    def abort(self, request_id: str) -> None:
        self._loop.call(self._abort, request_id)

    drop = abort  # neither package has a call that frees the KV cache of a request that has ended

    def stop(self) -> None:
        with self._stopping:  # a second caller waits for the first
            if not self._loop.running:
                return
            try:
                self._loop.run(self._end_requests, END_TIMEOUT_S)
            except Exception:
                # Whatever the error, the GPUs have to be released.
                logger.exception("the open requests can't be ended")
            finally:
                self._tokenizers.shutdown(wait=False, cancel_futures=True)
                self._shut_down()
                self._loop.stop()

    @abstractmethod
    def _start(self) -> None:
        """Load the model, and set everything that serving needs."""

    @abstractmethod
    def _shut_down(self) -> None:
        """End the package's own engine."""

    # Everything below runs on the loop thread.

    @abstractmethod
    async def _serve(self, entry: Entry) -> None:
        """Serve one request; a failure ends it, and is not raised."""

    @abstractmethod
    def _finish(self, entry: Entry, step: Step) -> None:
        """End a request with its last step."""

    @abstractmethod
    def _abort(self, request_id: str) -> None: ...

    @abstractmethod
    async def _end_requests(self) -> None:
        """Abort every request, wait for its end, and refuse all further ones."""

    def _accept(self, entry: Entry) -> None:
        self._open[entry.request.request_id] = entry
        if self._fatal:
            self._finish(entry, Step(error=UnavailableError(self._fatal)))
        else:
            entry.task = self._keep(self._serve(entry))

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Return a task for `work`, and hold it until it is done: the loop holds only weak references."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _send(self, steps: Iterable[tuple[Entry, Step]]) -> None:
        """Deliver steps, in one call for each sink."""
        with self._delivery:
            for sink, its_steps in group_by_sink(steps):
                try:
                    sink.on_steps(its_steps)
                except Exception:
                    # A faulty receiver must not end the loop that serves all requests.
                    logger.exception("the receiver of %d steps failed", len(its_steps))

    async def _cancel_tasks(self) -> None:
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def is_short(request: GenerateRequest) -> bool:
    """Whether the loop thread tokenises the prompt itself."""
    return request.prompt_token_ids is None and len(request.prompt) <= MAX_SHORT_PROMPT
