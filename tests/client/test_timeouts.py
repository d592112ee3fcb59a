"""Time limits. The servers fall silent, so that a limit must run out; how long that takes is not looked at."""

import math
import threading
import time

import pytest

from deepseek_triton_client import Client, DeadlineExceeded, InvalidRequest, Timeouts
from deepseek_triton_client._timeouts import Watchdog

LONG_S = 1000.0


@pytest.mark.parametrize("limit", [0, -1, math.nan, math.inf, 1e10])
def test_a_limit_is_a_length_of_time(limit):
    with pytest.raises(InvalidRequest, match=r"timeouts\.total"):
        Timeouts(total=limit)


@pytest.mark.parametrize(
    ("timeouts", "limit"),
    [
        (Timeouts(first_token=0.01), "first_token"),
        (Timeouts(total=0.01), "total"),
        (Timeouts(first_token=0.01, total=LONG_S), "first_token"),
        (Timeouts(first_token=LONG_S, total=0.01), "total"),
    ],
)
def test_the_tightest_limit_interrupts(timeouts, limit):
    interrupted = threading.Event()
    watchdog = Watchdog(timeouts, started=time.monotonic(), interrupt=interrupted.set)
    watchdog.expect(first=True)
    assert interrupted.wait(30)
    assert watchdog.expired == limit
    watchdog.stop()


def test_a_limit_that_comes_nearer_is_noticed():
    """The thread sleeps towards the first token's far limit when the near one for the second is set."""
    interrupted = threading.Event()
    timeouts = Timeouts(first_token=LONG_S, between_tokens=0.01)
    watchdog = Watchdog(timeouts, started=time.monotonic(), interrupt=interrupted.set)
    watchdog.expect(first=True)
    watchdog.relax()
    watchdog.expect(first=False)
    assert interrupted.wait(30)
    assert watchdog.expired == "between_tokens"
    watchdog.stop()


def test_time_between_waits_is_the_callers_own():
    watchdog = Watchdog(Timeouts(between_tokens=0.02), started=time.monotonic(), interrupt=lambda: None)
    watchdog.expect(first=True)
    watchdog.relax()
    time.sleep(0.05)
    watchdog.stop()
    assert watchdog.expired is None


def test_without_limits_there_is_no_thread():
    watchdog = Watchdog(Timeouts(), started=time.monotonic(), interrupt=lambda: None)
    assert "deepseek-triton-watchdog" not in [thread.name for thread in threading.enumerate()]
    watchdog.expect(first=True)
    watchdog.relax()
    watchdog.stop()


def test_http_first_token(http_server):
    http_server.script(http_server.silence)
    with Client(http_server.url, timeouts=Timeouts(first_token=0.05)) as client:
        with pytest.raises(DeadlineExceeded, match=r"no read within 0.05 s"), client.stream("hi", request_id="r1"):
            pass
        assert http_server.gone.wait(30)


@pytest.mark.parametrize("timeouts", [Timeouts(between_tokens=0.1), Timeouts(total=1)])
def test_http_in_the_middle(http_server, timeouts):
    def one_chunk(handler):
        http_server.start(handler)
        http_server.send(handler, b'data: {"text_output": "a"}\n\n')
        http_server.silence(handler)

    http_server.script(one_chunk)
    with Client(http_server.url, timeouts=timeouts) as client:
        with client.stream("hi", request_id="r1") as stream:
            assert next(stream).text == "a"
            with pytest.raises(DeadlineExceeded, match=r"timeouts\.(between_tokens of 0\.1|total of 1) s") as caught:
                next(stream)
        assert caught.value.request_id == "r1"
        assert http_server.gone.wait(30)


def test_http_the_first_tokens_limit_does_not_hold_for_later_ones(http_server):
    def slow_second(handler):
        http_server.start(handler)
        http_server.send(handler, b'data: {"text_output": "a"}\n\n')
        assert not http_server.release.wait(1.2)  # longer than the limit
        http_server.send(handler, b'data: {"text_output": "b", "finish_reason": "stop"}\n\n')
        http_server.send(handler, b"")

    http_server.script(slow_second)
    with Client(http_server.url) as client, client.stream("hi", timeouts=Timeouts(first_token=1)) as stream:
        assert [chunk.text for chunk in stream] == ["a", "b"]


def test_generate_has_a_total_only(http_server):
    http_server.script(http_server.silence)
    timeouts = Timeouts(first_token=0.01, between_tokens=0.01, total=0.1)
    with Client(http_server.url, timeouts=timeouts) as client, pytest.raises(DeadlineExceeded, match=r"0\.1 s"):
        client.generate("hi")


@pytest.mark.parametrize("limit", ["first_token", "total"])
def test_grpc_before_the_first_token(grpc_server, limit):
    grpc_server.script(lambda request, context: silence(grpc_server))
    with Client(grpc_server.url, timeouts=Timeouts(**{limit: 0.1})) as client:
        with pytest.raises(DeadlineExceeded), client.stream("hi", request_id="r1") as stream:
            next(stream)
        assert grpc_server.gone.wait(30)


def test_grpc_between_tokens(grpc_server):
    grpc_server.script(lambda request, context: silence(grpc_server, grpc_server.response(text_output="a")))
    with Client(grpc_server.url, timeouts=Timeouts(between_tokens=0.1)) as client:
        with client.stream("hi") as stream:
            assert next(stream).text == "a"
            with pytest.raises(DeadlineExceeded, match=r"timeouts\.between_tokens"):
                next(stream)
        assert grpc_server.gone.wait(30)


def silence(server, *responses):
    yield from responses
    server.gone.wait(30)
