"""A VllmEngine in this process, and a sink that holds it to the rules of the engine protocol."""

import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

from deepseek_backend.config import parse_config
from deepseek_backend.engines.base import Step
from deepseek_backend.engines.generate_request import GenerateRequest, SamplingParams
from deepseek_backend.engines.vllm import VllmEngine
from deepseek_triton_build import model_repository
from deepseek_triton_build.data.vllm import load_vllm
from support.vllm_arguments import COMMON_ARGUMENTS, installed_version, reference_arguments

TIMEOUT_S = 120
TINY = model_repository() / "tensorrt_llm/1/tiny"


@dataclass
class StepLog:
    """A sink that keeps every step, and holds the engine to the rules of the protocol."""

    calls: list[list[tuple[str, Step]]] = field(default_factory=list)
    broken_rules: list[str] = field(default_factory=list)
    steps: dict[str, list[Step]] = field(default_factory=dict)
    on_first_step: Callable[[str], object] | None = None
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _busy: threading.Lock = field(default_factory=threading.Lock)

    def on_steps(self, steps):
        if not self._busy.acquire(blocking=False):
            self.broken_rules.append("two calls at a time")
        try:
            self._add(steps)
        finally:
            self._busy.release()

    def _add(self, steps):
        self.calls.append([(request.request_id, step) for request, step in steps])
        names = [request.request_id for request, _ in steps]
        if not steps or len(set(names)) < len(names):
            self.broken_rules.append(f"a call with {names}")
        for request, step in steps:
            before = self.steps.setdefault(request.request_id, [])
            if before and is_last(before[-1]):
                self.broken_rules.append(f"{request.request_id}: a step after the last")
            if step.text.endswith("\ufffd") and not is_last(step):
                self.broken_rules.append(f"{request.request_id}: a part of a character")
            if request.sampling.logprobs is not None and len(step.logprobs) != len(step.token_ids):
                self.broken_rules.append(f"{request.request_id}: {len(step.logprobs)} logprobs")
            with self._changed:
                before.append(step)
                self._changed.notify_all()
            if len(before) == 1 and self.on_first_step is not None:
                self.on_first_step(request.request_id)

    def wait(self, *names, timeout_s=TIMEOUT_S):
        """Return the last steps of the requests."""
        with self._changed:
            done = self._changed.wait_for(lambda: all(self._is_done(name) for name in names), timeout_s)
        assert done, f"no last step: {[name for name in names if not self._is_done(name)]}"
        assert self.broken_rules == []
        return [self.steps[name][-1] for name in names]

    def _is_done(self, name):
        return bool(self.steps.get(name)) and is_last(self.steps[name][-1])

    def text(self, name):
        return "".join(step.text for step in self.steps[name])

    def token_ids(self, name):
        return [token_id for step in self.steps[name] for token_id in step.token_ids]


def is_last(step):
    return step.finish_reason is not None or step.error is not None


def a_request(name, prompt="The capital of France is", max_tokens=40, **fields):
    given = {key: fields.pop(key) for key in ("priority", "wants_steps", "prompt_token_ids") if key in fields}
    sampling = SamplingParams(max_tokens=max_tokens, **fields)
    return GenerateRequest(
        request_id=name,
        prompt="" if "prompt_token_ids" in given else prompt,
        sampling=sampling,
        max_tokens=max_tokens,
        **given,
    )


def answered(engine, *requests):
    """Submit the requests, and return their steps when all have had their last."""
    log = StepLog()
    for request in requests:
        engine.submit(request, log)
    log.wait(*(request.request_id for request in requests))
    return log


@contextmanager
def running_engine(folder, *, model=TINY, release=None, **arguments):
    """A VllmEngine that is started, and stopped at the end."""
    ours = arguments.pop("triton_config", {})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "release.yaml").write_text(release or load_vllm(installed_version()).text, encoding="utf-8")
    document = {
        "model": str(model),
        **COMMON_ARGUMENTS,
        **reference_arguments(),
        **arguments,
        "triton_config": {"engine": "vllm", **ours},
    }
    engine = VllmEngine(parse_config(document, version_dir=folder))
    try:
        engine.start()
        yield engine
    finally:
        engine.stop()
