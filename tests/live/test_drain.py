"""A server that is told to exit: new requests are refused, open ones get their time, and then what they have so far."""

import threading

import pytest

from deepseek_triton_tools.server.server_process import ServerProcess
from support.client_kinds import SCHEMES, STYLES, ClientKind
from support.servers import build, change_yaml
from support.waiting import PATIENCE_S

LONG_ANSWER = 4000  # about 25 s of the twin's pace


@pytest.fixture
def draining_repository(tmp_path):
    preset = "h200x8-r1-fp8-max-throughput"
    repository = build(tmp_path / "repository", "tiny", "--engine", "simulated", "--preset", preset)
    change_yaml(repository / "tensorrt_llm/1/model.yaml", drain_s=1)
    return repository


class Answers:
    """A request of each kind from each client_kind, answered in the background."""

    def __init__(self, server, loop):
        self.finish_reasons = []
        self.texts = []
        self.began = threading.Semaphore(0)
        self._threads = [
            threading.Thread(target=self._ask, args=(ClientKind(scheme, style, loop), server, streamed))
            for scheme in SCHEMES
            for style in STYLES
            for streamed in (True, False)
        ]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        for _ in range(4):
            assert self.began.acquire(timeout=30)
        return self

    def __exit__(self, *_):
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _ask(self, client_kind, server, streamed):
        with client_kind.client(server) as client:
            if streamed:
                self._stream(client)
                return
            completion = client.generate("whole", max_tokens=LONG_ANSWER)
            self._note(completion.text, completion.finish_reason)

    def _stream(self, client):
        with client.stream("in pieces", max_tokens=LONG_ANSWER) as stream:
            chunks = []
            for chunk in stream:
                if not chunks:
                    self.began.release()
                chunks.append(chunk)
        self._note("".join(chunk.text for chunk in chunks), chunks[-1].finish_reason)

    def _note(self, text, finish_reason):
        self.texts.append(text)
        self.finish_reasons.append(finish_reason)


def test_open_requests_get_their_text_so_far_and_the_server_ends_with_0(draining_repository, client_loop):
    with ServerProcess.serving(draining_repository) as server:
        with Answers(server, client_loop) as answers:
            server.request_stop()
        code = server.wait()

    assert answers.finish_reasons == ["cancelled"] * 8
    assert all(answers.texts)
    assert code == 0
