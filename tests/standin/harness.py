"""A TensorRT-LLM engine on the stand-in, with a sink that keeps what it delivers."""

import threading
from contextlib import ExitStack, contextmanager

from deepseek_backend.config import parse_config
from deepseek_backend.engines.generate_request import GenerateRequest, SamplingParams
from deepseek_backend.engines.tensorrt_llm import TensorRTLLMEngine
from deepseek_triton_build.catalog import load_release
from standin.loading import standin

WAIT_S = 60.0
"""Time limit of a wait; only a failing test reaches it."""


OWN_FIELDS = {"prompt_token_ids", "wants_steps", "request_type", "handover"}


class Sink:
    """A sink that keeps the steps, call by call."""

    def __init__(self):
        self.calls = []
        self.fail = False
        self._changed = threading.Condition()

    def on_steps(self, steps):
        with self._changed:
            self.calls.append(list(steps))
            self._changed.notify_all()
        if self.fail:
            raise RuntimeError("the receiver broke")

    def steps_of(self, request):
        return [step for call in list(self.calls) for owner, step in call if owner is request]

    def wait_for(self, condition):
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_S), "the expected steps did not come"

    def result(self, request):
        """Wait for the request's last step, and return all its steps."""
        self.wait_for(lambda: any(step.finish_reason or step.error for step in self.steps_of(request)))
        return self.steps_of(request)


class Harness:
    """An engine and its requests."""

    def __init__(self, engine):
        self.engine = engine
        self.sink = Sink()
        self._count = 0

    def submit(self, prompt="Why?", *, max_tokens=1000, **sampling):
        """Submit a request: fields that are no sampling field are the request's own."""
        self._count += 1
        own = {name: sampling.pop(name) for name in OWN_FIELDS & sampling.keys()}
        prompt = "" if own.get("prompt_token_ids") is not None else prompt
        params = SamplingParams(**sampling)
        request = GenerateRequest(
            request_id=f"r{self._count}", prompt=prompt, max_tokens=max_tokens, sampling=params, **own
        )
        self.engine.submit(request, self.sink)
        return request

    def run(self, prompt="Why?", **kwargs):
        return self.sink.result(self.submit(prompt, **kwargs))

    @contextmanager
    def held_loop(self):
        """Hold the engine's loop within the block, while TensorRT-LLM goes on."""
        held, release = threading.Event(), threading.Event()
        self.engine._loop.call(lambda: held.set() or release.wait(WAIT_S))
        assert held.wait(WAIT_S)
        try:
            yield
        finally:
            release.set()

    @property
    def kv_sender(self):
        """The stand-in's KV caches that no generation server has fetched."""
        return self.engine._llm._executor.kv_sender

    def waiting(self, request):
        """Return the responses to `request` that were not read yet."""
        return self.engine._open[request.request_id].output._sequence.responses

    def text(self, prompt="Why?", **kwargs):
        return "".join(step.text for step in self.run(prompt, **kwargs))


def guided_llm_args(release):
    """Return the LLM arguments that `release` needs for guided decoding."""
    needs = load_release(release).record["sampler"]["needs"]
    return {need["llm_arg"]: need.get("value", "xgrammar") for need in needs}


@contextmanager
def engines(folder):
    """Start engines of a release, with further LLM arguments, and stop them at the end."""
    with ExitStack() as stack:

        def make(release="1.2.1", *, installed=None, options=None, **llm_args):
            version_dir = folder / release
            version_dir.mkdir(exist_ok=True)
            (version_dir / "release.yaml").write_text(load_release(release).text)
            other = folder / "installed.yaml"
            other.write_text(load_release(installed or release).text)
            stack.enter_context(standin(other))
            document = {"model": "somewhere/R1", "max_seq_len": 4096, "enable_chunked_prefill": True, **llm_args}
            document["triton_config"] = {"engine_options": options or {}}
            engine = TensorRTLLMEngine(parse_config(document, version_dir=version_dir))
            stack.callback(engine.stop)
            engine.start()
            return Harness(engine)

        yield make
