"""A client that goes away stops the work: the twin serves one request at a time, so the next one shows it.

How a client can go, and what the server counts then, is test_client_leaving's.
"""

import httpx
import pytest

from deepseek_triton_client import DeadlineExceeded, Timeouts
from support.servers import url
from support.wire import LONG_ANSWER


@pytest.mark.parametrize("how", ["leave the block", "break off by time limit"])
def test_leaving_frees_the_place(client_kind, simulated_server, how):
    with client_kind.client(simulated_server) as client:
        if how == "leave the block":
            with client.stream("first", max_tokens=LONG_ANSWER) as stream:
                next(iter(stream))
        else:
            with pytest.raises(DeadlineExceeded):
                client.generate("first", max_tokens=LONG_ANSWER, timeouts=Timeouts(total=0.5))

        # Its place taken, this would wait for the 25 s of the first: far over the limit.
        assert client.generate("second", max_tokens=4, timeouts=Timeouts(total=12)).num_output_tokens == 4


def test_stop_by_id_ends_a_running_request_and_answers_both(client_kind, simulated_server):
    """By a plain body of /generate; the client's own `cancel` is test_client_errors'."""
    address = f"{url(simulated_server, 'http')}/v2/models/tensorrt_llm/generate"
    with (
        client_kind.client(simulated_server) as client,
        client.stream("first", max_tokens=LONG_ANSWER, request_id="job-9") as stream,
    ):
        chunks = iter(stream)
        next(chunks)
        stopped = httpx.post(address, json={"id": "job-9", "stop": True}, timeout=20)
        *_, last = chunks

    assert "[E_CANCELLED] request cancelled by client" in stopped.json()["error"]
    assert last.finish_reason == "cancelled"
