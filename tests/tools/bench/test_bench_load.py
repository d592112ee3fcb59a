"""The load processes against a real server that answers at a known pace. No test leans on how long something took."""

import asyncio
import itertools
import math
import os
import signal
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_triton_tools.bench.load_run import LoadProcesses, conversations_needed, due_times
from deepseek_triton_tools.bench.result import RequestRecord
from deepseek_triton_tools.bench.servers import OpenAITarget
from deepseek_triton_tools.bench.targets import TargetSettings, counted_chunks
from deepseek_triton_tools.bench.workload import BenchRequest, LoadPoint
from deepseek_triton_tools.tool_errors import ToolError
from support.asgi_server import serving_app
from support.paced_server import paced_server

BOTH = ("triton-http", "openai")


@pytest.fixture(scope="module")
def processes():
    """Two of them, because two must give the same records as one."""
    with LoadProcesses(2) as made:
        yield made


@pytest.fixture(scope="module")
def server():
    with paced_server("--first-ms", "2", "--step-ms", "1", "--tokens", "3") as address:
        yield address


def target_of(address, endpoint="triton-http", **more):
    url = f"http://{address}/v1" if endpoint == "openai" else f"http://{address}"
    return TargetSettings(urls=(url,), endpoint=endpoint, model="tensorrt_llm", **more)


def plain(number, tokens=8, prompt=(5, 6, 7)):
    return [(BenchRequest(prompt=prompt, output_tokens=tokens),)] * number


def run(processes, target, point, conversations, on_progress=lambda _: None):
    return processes.run(target, point, conversations, seed=1, on_progress=on_progress)


def test_closed_loop_counts_every_token(processes, server):
    """Chunks hold three tokens, but for the last one of eight."""
    for endpoint in BOTH:
        point = LoadPoint(num_requests=20, num_warmup=4, concurrency=5)
        found = run(processes, target_of(server, endpoint), point, plain(24))

        assert [record.index for record in found.records] == list(range(4, 24))
        for record in found.records:
            assert (record.outcome, record.finish_reason, record.due_s) == ("completed", "length", None)
            assert list(record.chunk_tokens) == [3, 3, 2]
            assert (record.num_input_tokens, record.num_output_tokens) == (3, 8)
            assert record.sent_s < record.chunk_s[0] <= record.chunk_s[-1] <= record.ended_s
        assert not found.interrupted
        assert found.delays_ms


def test_a_closed_loop_never_has_more_under_way(processes, server):
    found = run(processes, target_of(server), LoadPoint(num_requests=30, concurrency=3), plain(30)).records
    moments = sorted([(record.sent_s, 1) for record in found] + [(record.ended_s, -1) for record in found])
    assert max(itertools.accumulate(change for _, change in moments)) <= 3


def test_chats_and_texts(processes, server):
    for endpoint, chat in itertools.product(BOTH, (False, True)):
        target = target_of(server, endpoint, chat=chat)
        found = run(processes, target, LoadPoint(num_requests=2, concurrency=1), plain(2, prompt="Hello"))
        assert {record.outcome for record in found.records} == {"completed"}, found.records


def test_an_open_loop_sends_when_it_is_due(processes, server):
    point, conversations = LoadPoint(num_requests=40, rate=200.0), plain(40)
    found = run(processes, target_of(server), point, conversations).records
    assert [record.due_s for record in found] == due_times(point, conversations, 1)
    assert all(record.sent_s >= record.due_s for record in found)
    # A trace has its own times.
    trace = [(BenchRequest(prompt=(1,), output_tokens=2, at_s=at / 100),) for at in range(6)]
    found = run(processes, target_of(server), LoadPoint(num_requests=6), trace).records
    assert [record.due_s for record in found] == [at / 100 for at in range(6)]


@pytest.mark.slow
def test_a_limit_makes_requests_due_later(processes, server):
    """All are due at once, but two at a time are allowed: the waiting is not this client's lag."""
    point = LoadPoint(num_requests=10, rate=math.inf, concurrency=2)
    found = run(processes, target_of(server), point, plain(10)).records
    assert sum(record.due_s > 0 for record in found) >= 8


@pytest.mark.slow
def test_a_loop_goes_on_for_its_duration(processes, server):
    closed = LoadPoint(num_requests=4, concurrency=4, duration_s=0.5)
    found = run(processes, target_of(server), closed, plain(conversations_needed(closed))).records
    assert len(found) > 4
    assert [record.index for record in found] == list(range(len(found)))
    assert {record.outcome for record in found} == {"completed"}

    opened = LoadPoint(num_requests=5, rate=100.0, duration_s=0.4)
    needed = conversations_needed(opened)
    found = run(processes, target_of(server), opened, plain(needed)).records
    assert 5 < len(found) < needed
    assert all(record.due_s < 0.4 for record in found)


@pytest.mark.slow
def test_failures_inside_streams(processes):
    with paced_server("--break-every", "4", "--first-ms", "1", "--step-ms", "1") as address:
        for endpoint, words in zip(BOTH, ("[E_INTERNAL] the engine has died", "the engine has died"), strict=True):
            with LoadProcesses(1) as one:
                point = LoadPoint(num_requests=40, concurrency=4)
                found = run(one, target_of(address, endpoint), point, plain(40)).records
            failed = [record for record in found if record.outcome == "failed"]
            assert [record.error for record in failed] == [words] * 10
            assert all(len(record.chunk_s) == 1 for record in failed)
    # A conversation ends with a failed turn; the first stream was the trial.
    with paced_server("--break-every", "2", "--first-ms", "1") as address, LoadProcesses(1) as one:
        conversation = (BenchRequest(prompt="Hi", output_tokens=2),) * 3
        found = run(one, target_of(address), LoadPoint(num_requests=1, concurrency=1), [conversation]).records
    assert [record.outcome for record in found] == ["failed"]


@pytest.mark.slow
def test_users_who_leave_are_cancelled_requests_and_a_time_limit_fails_them(processes):
    with paced_server("--first-ms", "1", "--step-ms", "60000") as address:
        point = LoadPoint(num_requests=6, concurrency=6, leave_share=1.0, leave_after_s=0.3)
        found = run(processes, target_of(address), point, plain(6)).records
        assert {record.outcome for record in found} == {"cancelled"}
        assert sum(len(record.chunk_s) for record in found) > 0
        for endpoint in BOTH:
            target = target_of(address, endpoint, timeout_s=0.5)
            found = run(processes, target, LoadPoint(num_requests=2, concurrency=2), plain(2)).records
            assert {record.outcome for record in found} == {"failed"}, endpoint
            assert all(record.error for record in found)


@pytest.mark.slow
def test_turns_follow_the_text_so_far(processes, server):
    """The paced server counts a prompt's ids. Its answers have no ids, which a real server's would add."""
    conversation = (BenchRequest(prompt=(1, 2), output_tokens=4, wait_s=0.01),) * 3
    found = run(processes, target_of(server), LoadPoint(num_requests=2, concurrency=2), [conversation] * 2).records
    turns = [(index, turn, 2 * (turn + 1)) for index in range(2) for turn in range(3)]
    assert [(record.index, record.turn, record.num_input_tokens) for record in found] == turns
    for first, second in itertools.pairwise(found):
        assert first.index != second.index or first.ended_s < second.sent_s


@pytest.mark.slow
def test_a_server_that_is_not_there_is_told_before_the_run():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for endpoint in BOTH:
            with LoadProcesses(2) as two, pytest.raises(ToolError, match="the server can't be measured: http"):
                run(two, target_of(address, endpoint), LoadPoint(num_requests=3, concurrency=3), plain(3))


@pytest.mark.slow
def test_ctrl_c_leaves_what_was_measured(processes):
    def interrupt(progress):
        if progress.inflight and not raised:
            raised.append(progress)
            os.kill(os.getpid(), signal.SIGINT)

    raised = []
    with paced_server("--first-ms", "1", "--step-ms", "20") as address:
        point = LoadPoint(num_requests=1000, concurrency=4)
        found = run(processes, target_of(address), point, plain(1000, tokens=10), interrupt)
    assert found.interrupted
    assert 0 < len(found.records) < 1000
    assert {record.outcome for record in found.records} >= {"cancelled"}


@pytest.mark.slow
def test_processes_share_the_work_of_a_closed_loop(server):
    """Each of three processes has a place; the one that is faster sends more, so that none waits for another."""
    with LoadProcesses(3) as three:
        found = run(three, target_of(server), LoadPoint(num_requests=50, concurrency=4), plain(50)).records
    assert [record.index for record in found] == list(range(50))


def test_arrivals():
    def gaps(burstiness):
        due = due_times(LoadPoint(num_requests=1, rate=100.0, burstiness=burstiness), plain(20_000), 3)
        assert due == sorted(due)
        assert due[-1] == pytest.approx(200, rel=0.1)
        return [later - earlier for earlier, later in itertools.pairwise(due)]

    def variation(gaps):
        """The standard deviation over the mean: 1 for a Poisson process."""
        mean = sum(gaps) / len(gaps)
        return math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean

    assert variation(gaps(1000.0)) < 0.05
    assert variation(gaps(1.0)) == pytest.approx(1, rel=0.05)
    assert variation(gaps(0.1)) == pytest.approx(math.sqrt(10), rel=0.1)


@pytest.mark.slow
@settings(max_examples=40)
@given(
    chunks=st.lists(st.tuples(st.floats(0, 100), st.integers(0, 9)), max_size=20).map(sorted), total=st.integers(0, 100)
)
def test_chunks_hold_all_tokens_and_each_some(chunks, total):
    times, tokens = [time for time, _ in chunks], [number for _, number in chunks]
    for wanted in (total if chunks else 0, sum(tokens)):
        found_times, found_tokens = counted_chunks(times, tokens, wanted)
        assert sum(found_tokens) == wanted
        assert 0 not in found_tokens
        assert len(found_times) == len(found_tokens)
        assert set(found_times) <= set(times)


@pytest.mark.slow
def test_an_event_that_is_not_openais_fails_its_request(subtests):
    async def answer(scope, receive, send):
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            body = f'data: {{"choices": [{{"text": "a", "finish_reason": null}}]}}\n\ndata: {event}\n\n'
            await send({"type": "http.response.body", "body": body.encode()})

    async def ask():
        target = OpenAITarget(target_of(""), f"{address}v1", lambda: 0.0)
        record = RequestRecord(index=0)
        await target.ask("Hi", {}, record, keep_ids=False)
        await target.close()
        return record

    odd = ['{"choices": null}', "[1]", "5", '{"choices": [{"delta": 5}]}', '{"usage": 5}', "no JSON"]
    with serving_app(answer) as address:
        for event in (*odd, '{"error": null, "choices": []}'):
            with subtests.test(event):
                record = asyncio.run(ask())
                assert (record.outcome, record.num_output_tokens) == ("failed", 1)
                assert record.error
