"""Which connections are kept and used again, over real sockets."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from deepseek_triton_client._blocking_runtime import run
from deepseek_triton_client._core.client_settings import Connection, Endpoint, Settings
from deepseek_triton_client._core.transport import Input
from deepseek_triton_client._http import connection_pool
from deepseek_triton_client._http.asyncio_socket import AsyncioSocket, _within
from deepseek_triton_client._http.connection_pool import Pool
from deepseek_triton_client._http.http_transport import HttpTransport
from support.drivers import DRIVERS

INPUTS = [Input("text_input", "BYTES", ["hi"])]
ANSWER = {"text_output": "好"}


@pytest.fixture(params=DRIVERS)
def driver(request):
    driver = DRIVERS[request.param]()
    yield driver
    driver.close()


@pytest.fixture
def transport(driver, http_server):
    return driver.transport(http_server.url)


@pytest.fixture
def clock(monkeypatch):
    """A clock for the pool."""
    now = [1000.0]

    class Clock:
        @staticmethod
        def monotonic():
            return now[0]

    monkeypatch.setattr(connection_pool, "time", Clock)
    return now


async def ask(transport):
    stream = transport.open("r1", INPUTS, connect_s=10)
    responses = []
    try:
        while (outputs := await stream.receive()) is not None:
            responses.append(outputs)
    finally:
        await stream.close()
    return responses


def test_one_connection_serves_one_request_after_the_other(http_server, driver, transport):
    """An error status does not cost the connection."""
    statuses = (http_server.body(200, b""), http_server.body(400, b"{}"))
    http_server.script(*[http_server.events(ANSWER)] * 5, *statuses, http_server.events(ANSWER))
    for _ in range(5):
        assert driver.run(ask(transport)) == [ANSWER]
    assert [driver.run(transport.server_ready(10)) for _ in range(2)] == [True, False]
    assert driver.run(ask(transport)) == [ANSWER]
    assert http_server.num_connections == 1


def test_a_response_that_is_not_read_to_its_end_costs_the_connection(http_server, driver, transport):
    def answer_half(handler):
        handler.start_chunked()
        handler.send_chunk(b'data: {"text_output": "\xe5\xa5\xbd"}\n\n')
        http_server.release.wait(30)

    http_server.script(answer_half, http_server.events(ANSWER))
    stream = transport.open("r1", INPUTS, connect_s=10)
    assert driver.run(stream.receive()) == ANSWER
    driver.run(stream.close())
    assert driver.run(ask(transport)) == [ANSWER]
    assert http_server.num_connections == 2


def test_a_server_that_says_it_will_close_or_has_closed_is_believed(http_server, driver, transport):
    def answer_and_leave(handler):
        http_server.events(ANSWER)(handler)
        handler.close_connection = True

    http_server.script(http_server.body(200, b"", Connection="close"), answer_and_leave, http_server.events(ANSWER))
    driver.run(transport.server_ready(10))
    assert driver.run(ask(transport)) == [ANSWER]
    assert http_server.num_connections == 2
    http_server.await_closed(2)
    assert driver.run(ask(transport)) == [ANSWER]
    assert http_server.num_connections == 3


def test_a_connection_on_which_something_came_unasked_is_not_used_again(http_server, driver, transport):
    """A proxy's farewell to an idle connection must not be taken for the answer to the next request."""

    def answer_and_farewell(handler):
        http_server.events(ANSWER)(handler)
        assert http_server.release.wait(30)
        handler.wfile.write(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
        http_server.gone.set()

    http_server.script(answer_and_farewell, http_server.events(ANSWER))
    assert driver.run(ask(transport)) == [ANSWER]
    http_server.release.set()
    assert http_server.gone.wait(30)
    assert driver.run(ask(transport)) == [ANSWER]
    assert http_server.num_connections == 2


def test_a_question_is_asked_again_where_an_idle_connection_turns_out_to_be_dead(http_server, driver, transport):
    http_server.script(http_server.events(ANSWER), http_server.raw(b""), http_server.body(200, b""))
    driver.run(ask(transport))
    assert driver.run(transport.server_ready(10)) is True
    assert http_server.num_connections == 2


def test_a_generation_is_never_sent_twice(http_server, driver, transport):
    http_server.script(http_server.events(ANSWER), http_server.raw(b""), http_server.events(ANSWER))
    driver.run(ask(transport))
    with pytest.raises(Exception, match="closed it before the end"):
        driver.run(ask(transport))
    assert len(http_server.requests) == 2


def test_connections_that_idled_too_long_are_closed(http_server, driver, clock):
    transport = driver.transport(http_server.url, connection=Connection(keepalive_s=30))
    http_server.script(*[http_server.events(ANSWER)] * 3)
    driver.run(ask(transport))
    clock[0] += 29
    driver.run(ask(transport))
    assert http_server.num_connections == 1
    clock[0] += 31
    driver.run(ask(transport))
    http_server.await_closed(1)
    assert http_server.num_connections == 2


def test_the_last_one_used_is_used_next_and_the_others_grow_old(http_server, driver, clock):
    transport = driver.transport(http_server.url, connection=Connection(keepalive_s=30))
    together = threading.Barrier(8)

    def all_at_once(handler):
        together.wait(30)
        http_server.events(ANSWER)(handler)

    http_server.script(*[all_at_once] * 8, *[http_server.events(ANSWER)] * 4)
    waiting = [driver.start(ask(transport)) for _ in range(8)]
    assert [each.result(30) for each in waiting] == [[ANSWER]] * 8
    for _ in range(4):
        clock[0] += 10
        driver.run(ask(transport))
    http_server.await_closed(7)
    assert http_server.num_connections == 8


def test_closing_closes_what_idles_and_what_comes_back_later(http_server, driver, transport):
    http_server.script(http_server.events(ANSWER), http_server.events(ANSWER))
    driver.run(ask(transport))
    stream = transport.open("r1", INPUTS, connect_s=10)
    driver.run(stream.receive())
    assert driver.run(stream.receive()) is None
    driver.run(transport.close())
    driver.run(stream.close())
    http_server.await_closed(1)


def test_many_threads_share_a_transport(http_server):
    driver = DRIVERS["blocking"]()
    http_server.script(*[http_server.events(ANSWER)] * 16 * 10)
    transport = driver.transport(http_server.url)
    with ThreadPoolExecutor(16) as threads:
        many = [threads.submit(lambda: [run(ask(transport)) for _ in range(10)]) for _ in range(16)]
        assert all(each.result(60) == [[ANSWER]] * 10 for each in many)
    assert http_server.num_connections <= 16
    driver.close()


def test_many_tasks_share_a_transport(http_server):
    async def together(transport):
        return await asyncio.gather(*(ask(transport) for _ in range(64)))

    driver = DRIVERS["asyncio"]()
    http_server.script(*[http_server.events(ANSWER)] * 64)
    assert driver.run(together(driver.transport(http_server.url))) == [[ANSWER]] * 64
    driver.close()


def test_a_second_event_loop_makes_connections_of_its_own(http_server):
    http_server.script(*[http_server.events(ANSWER)] * 2)
    endpoint = Endpoint.parse(http_server.url)
    transport = HttpTransport(endpoint, Settings(endpoints=(endpoint,), model_name="tensorrt_llm"), AsyncioSocket)
    loops = [asyncio.new_event_loop() for _ in range(2)]
    for loop in loops:
        assert loop.run_until_complete(ask(transport)) == [ANSWER]
    loops[1].run_until_complete(transport.close())
    for loop in loops:
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
    assert http_server.num_connections == 2


class Fake:
    """A connection that stays idle until told otherwise."""

    is_connected = True
    is_idle = True

    def __init__(self):
        self.closed = False

    async def close(self):
        self.closed = True


def test_giving_one_back_looks_at_no_more_than_have_grown_old(clock):
    pool = Pool(30)
    connections = [Fake() for _ in range(10)]
    for each in connections:
        run(pool.give_back(each))
        clock[0] += 4
    assert [each.closed for each in connections] == [True] * 2 + [False] * 8
    assert len(pool) == 8
    clock[0] += 60
    assert run(pool.take()) is None
    assert all(each.closed for each in connections)


def test_a_cancellation_that_comes_with_the_result_is_not_lost():
    """asyncio.wait_for loses the cancellation before Python 3.12."""

    async def both_at_once():
        arrived = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(_within(arrived, 10))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        arrived.set_result("connected")
        task.cancel()
        await asyncio.wait({task})
        return task.cancelled()

    assert asyncio.run(both_at_once())
