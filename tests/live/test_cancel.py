"""A client that goes away stops the work: the twin serves one request at a time, so the next one shows it."""

import pytest

from deepseek_triton_client import Timeouts

LONG_ANSWER = 4000  # about 25 s of the twin's pace


@pytest.mark.parametrize("how", ["leave the block", "break off by time limit"])
def test_leaving_a_stream_frees_its_place(simulated, how):
    limits = Timeouts(total=1.0) if how == "break off by time limit" else None
    if limits:
        from deepseek_triton_client import DeadlineExceeded

        with pytest.raises(DeadlineExceeded):
            simulated.generate("first", max_tokens=LONG_ANSWER, timeouts=limits)
    else:
        with simulated.stream("first", max_tokens=LONG_ANSWER) as stream:
            next(iter(stream))

    # Its place taken, this would wait for the 25 s of the first: far over the limit.
    assert simulated.generate("second", max_tokens=4, timeouts=Timeouts(total=12)).num_output_tokens == 4


def test_stop_by_id_ends_a_running_request_and_answers_both(simulated_server):
    import httpx
    from servers import url

    from deepseek_triton_client import Client

    address = f"{url(simulated_server, 'http')}/v2/models/tensorrt_llm/generate"
    with (
        Client(url(simulated_server, "grpc")) as client,
        client.stream("first", max_tokens=LONG_ANSWER, request_id="job-9") as stream,
    ):
        chunks = iter(stream)
        next(chunks)
        stopped = httpx.post(address, json={"id": "job-9", "stop": True}, timeout=20)
        *_, last = chunks

    assert stopped.status_code == 200
    assert last.finish_reason == "cancelled"
