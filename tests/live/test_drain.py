"""A server that is told to exit: new requests are refused, open ones get their time, and then what they have so far."""

import threading
from concurrent.futures import ThreadPoolExecutor

from deepseek_triton_tools.server.server_process import ServerProcess
from support.client_kinds import SCHEMES, STYLES, ClientKind
from support.servers import twin
from support.waiting import PATIENCE_S

LONG_ANSWER = 4000  # about 25 s of the twin's pace


def test_open_requests_get_their_text_so_far_and_the_server_ends_with_0(tmp_path, client_loop):
    """Whole and streamed, of each kind of client."""
    repository = twin(tmp_path / "repository", "--preset", "h200x8-r1-fp8-max-throughput", drain_s=1)
    kinds = [ClientKind(scheme, style, client_loop) for scheme in SCHEMES for style in STYLES]
    began = threading.Semaphore(0)

    def ask(client_kind, streamed):
        with client_kind.client(server) as client:
            if not streamed:
                return client.generate("whole", max_tokens=LONG_ANSWER)
            with client.stream("in pieces", max_tokens=LONG_ANSWER) as stream:
                next(stream)
                began.release()
                return stream.completion()

    with ServerProcess.serving(repository) as server, ThreadPoolExecutor(2 * len(kinds)) as pool:
        asked = [pool.submit(ask, client_kind, streamed) for client_kind in kinds for streamed in (True, False)]
        for _ in kinds:
            assert began.acquire(timeout=30)
        server.request_stop()
        answers = [each.result(PATIENCE_S) for each in asked]
        code = server.wait()

    assert [answer.finish_reason for answer in answers] == ["cancelled"] * 8
    assert all(answer.text for answer in answers)
    assert code == 0
