"""A TensorRT-LLM engine on the stand-in."""

import threading
from contextlib import ExitStack, contextmanager

from deepseek_backend.config import parse_config
from deepseek_triton_build.catalog import load_release
from standin.loading import standin
from support.engine_driver import EngineDriver, driven

WAIT_S = 60.0
"""Time limit of a wait; only a failing test reaches it."""


class Harness(EngineDriver):
    """An engine on the stand-in, and its requests."""

    max_tokens = 1000

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
            return stack.enter_context(driven(parse_config(document, version_dir=version_dir), Harness))

        yield make
