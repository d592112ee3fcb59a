"""`deepseek-triton warm server`: against a scripted server, which says what it is cold or full for."""

import asyncio
import contextlib
import functools
import itertools
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml

from deepseek_triton_build.arithmetic import shapes_for_llm_args
from deepseek_triton_client import AsyncClient, InvalidRequest, Overloaded, ProtocolError, Readiness, ServerError
from deepseek_triton_client.testing import LoopbackServer
from deepseek_triton_tools.host.processes import allow_open_files
from deepseek_triton_tools.server.waiting import LogFollower, Waiting
from deepseek_triton_tools.terminal.status_line import StatusLine
from deepseek_triton_tools.tool_errors import RepositoryError, ServerFailedError, ToolError
from deepseek_triton_tools.warming import server
from deepseek_triton_tools.warming.server import Round, ServerWarmOptions, is_steady, planned_shapes, warm_server
from support.model_server import END, WAIT
from support.waiting import PATIENCE_S

FAILED = """\
E1121 12:42:09.142789 49 model_lifecycle.cc:642] "failed to load 'tensorrt_llm' version 1: Internal: no GPU"
"""


def options(url, **others):
    facts = {"batch_sizes": (1,), "input_lengths": (8,), "limit_s": 60} | others
    return ServerWarmOptions(**{"client": functools.partial(AsyncClient, url)} | facts)


@pytest.fixture
def run(model_server, capsys, monkeypatch):
    """Warm the scripted server; gives the exit code, the JSON document and stderr. Rounds that differ by less than a
    busy machine makes them differ count as equal."""
    monkeypatch.setattr(server, "_UNNOTICED_S", 0.4)

    def warm(*, url=model_server.url, **others):
        code = warm_server(options(url, as_json=True, **others))
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, err=err, document=json.loads(out))

    return warm


def length(body):
    return len(body["input_ids"])


def tokens(pause_s=0.0):
    for _ in range(3):
        yield {"text_output": "a"}
        time.sleep(pause_s)
    yield {"text_output": "a", **END, "num_output_tokens": 4}


def warm(body):
    yield from tokens(0.002)


def refusing(error, is_refused=lambda body: True):
    """Answer the other requests."""

    def answer(body):
        if is_refused(body):
            raise error
        yield from warm(body)

    return answer


def outcome(done):
    return done.code, [shape["status"] for shape in done.document["shapes"]]


@pytest.mark.slow
def test_rounds_go_on_until_a_cold_server_is_steady(model_server, run, tmp_path):
    seen = Counter()

    def cold(body):
        seen[length(body)] += 1
        if seen[length(body)] <= 2:  # of two at once: the first round
            time.sleep(1)
        yield from tokens(0.002)

    model_server.answer = cold
    done = run(batch_sizes=(2,), input_lengths=(8, 16), ready_file=tmp_path / "ready")
    assert outcome(done) == (0, ["steady", "steady"])
    for shape in done.document["shapes"]:
        assert len(shape["rounds"]) >= 3
        assert {each["num_requests"] for each in shape["rounds"]} == {2}
        assert shape["rounds"][0]["ttft_s"] > shape["rounds"][-1]["ttft_s"]
    assert json.loads((tmp_path / "ready").read_text()) == done.document
    assert (tmp_path / "ready").stat().st_mode & 0o777 == 0o644
    assert os.listdir(tmp_path) == ["ready"]


def test_never_more_are_open_than_a_shape_has_and_no_prompt_comes_twice(model_server, run, monkeypatch):
    allowed = []
    monkeypatch.setattr(server, "MOST_OVER_HTTP", 4)
    monkeypatch.setattr(server, "allow_open_files", allowed.append)
    model_server.answer = warm
    done = run(batch_sizes=(1, 4, 5), input_lengths=(8, 33), max_tokens=5)
    assert outcome(done) == (0, ["steady", "steady", "left out"] * 2)
    assert "over HTTP" in done.document["shapes"][2]["reason"]
    assert allowed == [5 + 64]
    assert {length(body) for body in model_server.bodies} == {8, 33}
    prompts = [tuple(body["input_ids"]) for body in model_server.bodies]
    assert len(set(prompts)) == len(prompts) >= 20
    assert max(map(max, prompts)) < 256  # which every vocabulary has

    together = threading.Barrier(4)

    def four_together(body):
        together.wait(PATIENCE_S)
        yield from tokens()

    model_server.answer = four_together
    run(batch_sizes=(4,), max_tokens=5)
    assert model_server.most_at_once == 4
    sent = {"sampling_param_max_tokens": 5, "sampling_param_ignore_eos": True}
    assert all(sent.items() <= body.items() for body in model_server.bodies)


def test_the_limit_on_open_files_is_raised_as_far_as_the_hard_one(monkeypatch):
    cases = {(16, 256): 80, (16, 64): 64, (16, -1): 80, (80, 256): None, (-1, -1): None}
    found = {}
    for limits in cases:
        found[limits] = None
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        monkeypatch.setattr(resource, "setrlimit", lambda _, new, limits=limits: found.update({limits: new[0]}))
        allow_open_files(80)
    assert found == cases


def test_a_server_that_never_gets_steady_has_max_rounds(model_server, run, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "is_steady", lambda done: False)
    model_server.answer = warm
    done = run(max_rounds=4, ready_file=tmp_path / "ready")
    assert outcome(done) == (3, ["not steady"])
    assert len(done.document["shapes"][0]["rounds"]) == 4
    assert done.document["ok"] is json.loads((tmp_path / "ready").read_text())["ok"] is False


@pytest.mark.slow
def test_at_the_limit_what_is_open_is_cancelled_and_the_rest_is_not_begun(model_server, run):
    def stuck(body):
        if length(body) == 16:
            yield {"text_output": "a"}
            yield WAIT
        yield from tokens()

    model_server.answer = stuck
    done = run(input_lengths=(8, 16, 32), limit_s=1.5)
    assert outcome(done) == (3, ["steady", "not reached", "not reached"])
    assert model_server.gone.wait(PATIENCE_S)
    assert not any(length(body) == 32 for body in model_server.bodies)


ROUND = Round(num_requests=4, num_refused=0, ttft_s=1.0, answer_s=2.5)


def test_two_rounds_are_steady_when_no_time_differs_by_a_tenth():
    alike = [{}, {"ttft_s": 1.09, "answer_s": 2.7}]
    unlike = [{"ttft_s": 1.12}, {"ttft_s": 0.89}, {"num_refused": 1}]
    unlike += [{"answer_s": 5.5}, {"num_requests": 3}]  # a stall in the middle of an answer; fewer answers
    assert not is_steady([ROUND])
    for changes in alike + unlike:
        other = replace(ROUND, **changes)
        assert is_steady([ROUND, other]) is is_steady([other, ROUND]) is (changes in alike), changes
        assert is_steady([other, ROUND, ROUND])
    quick = Round(num_requests=1, num_refused=0, ttft_s=0.002, answer_s=0.004)
    assert is_steady([quick, replace(quick, ttft_s=0.009, answer_s=0.015)])  # nobody notices the difference


def test_a_shape_that_is_too_long_is_left_out_with_a_line(model_server, run, capsys):
    too_long = InvalidRequest("too long", code="E_PROMPT_TOO_LONG")
    model_server.answer = refusing(too_long, lambda body: length(body) > 10)
    done = run(batch_sizes=(2,), input_lengths=(1600, 8))
    assert outcome(done) == (0, ["left out", "steady"])
    assert "E_PROMPT_TOO_LONG" in done.document["shapes"][0]["reason"]
    assert "E_PROMPT_TOO_LONG" in done.err
    assert sum(length(body) == 1600 for body in model_server.bodies) == 2  # not asked again
    assert warm_server(options(model_server.url, batch_sizes=(2,), input_lengths=(8, 1600))) == 0
    out = capsys.readouterr().out
    assert f"tensorrt_llm on {model_server.url} was ready" in " ".join(out.split())
    rows = [line.split() for line in out.splitlines()]
    assert [row[-1] for row in rows if row[:2] == ["2", "8"]] == ["steady"]
    assert [row[2:] for row in rows if row[:2] == ["2", "1,600"]] == [["0", "-", "-", "left", "out"]]


@pytest.fixture
def short_pauses(monkeypatch):
    monkeypatch.setattr(server, "_PAUSE_S", 0.01)


def test_a_full_server_gets_fewer_requests(model_server, run, short_pauses):
    room = threading.Semaphore(2)
    refused = threading.Event()
    asked_at_first = threading.Barrier(4)
    first_round = iter([True] * 4)

    def two_at_once(body):
        is_first = next(first_round, False)
        if is_first:
            asked_at_first.wait(PATIENCE_S)
        if not room.acquire(blocking=False):
            refused.set()
            raise Overloaded("max_inflight is 2")
        try:
            if is_first:  # so that two are refused, however slow the machine is
                refused.wait(PATIENCE_S)
                time.sleep(0.2)
            yield from tokens()
        finally:
            room.release()

    model_server.answer = two_at_once
    done = run(batch_sizes=(4,), input_lengths=(8,))
    assert outcome(done) == (0, ["steady"])
    [first] = done.document["shapes"]
    assert (first["rounds"][0]["num_requests"], first["rounds"][0]["num_refused"]) == (2, 2)
    assert {each["num_requests"] for each in first["rounds"]} == {2}
    assert first["rounds"][-1]["num_refused"] == 0
    assert model_server.most_at_once == 4


@pytest.mark.slow
def test_a_shape_that_the_server_stays_full_for_is_left_out(model_server, run, short_pauses):
    model_server.answer = refusing(Overloaded("max_inflight_tokens is 20"), lambda body: length(body) >= 16)
    done = run(batch_sizes=(3,), input_lengths=(16, 8), max_rounds=5)
    assert outcome(done) == (0, ["left out", "steady"])
    assert "max_inflight_tokens is 20" in done.document["shapes"][0]["reason"]
    # Three in the first round, and then one at a time.
    assert sum(length(body) == 16 for body in model_server.bodies) == 3 + 4
    done = run(batch_sizes=(1, 2), input_lengths=(32,))  # full all the time, but it has not failed
    assert outcome(done) == (3, ["left out", "left out"])


def test_a_server_that_fails_is_a_failure_and_nobody_is_told_ready(model_server, run, tmp_path):
    def ended(finish_reason, body):
        yield {"text_output": "a"}
        yield {"text_output": "", **END, "finish_reason": finish_reason, "num_output_tokens": 1}

    class Gone(AsyncClient):
        async def ready(self):
            return False

    ready, log = tmp_path / "ready", tmp_path / "log"

    def fails(match, error=ServerFailedError, **others):
        ready.write_text("of an earlier run")
        with pytest.raises(error, match=match):
            run(ready_file=ready, **others)
        assert not ready.exists()

    for code in ("E_UNAVAILABLE", "E_INTERNAL"):  # it dies in the middle
        model_server.requests.clear()
        gone = ServerError("the engine is gone", code=code)
        model_server.answer = refusing(gone, lambda body: len(model_server.bodies) > 3)
        match = r"the server failed at 1 x 16 prompt tokens: .*the engine is gone"
        fails(match, input_lengths=(8, 16, 32), max_rounds=3)
    for reason in ("cancelled", "timeout"):
        model_server.answer = functools.partial(ended, reason)
        fails(f"the server ended the answer: {reason}")
    model_server.answer = lambda body: iter([{"text_output": "a"}])  # torn, and the server is not ready any more
    fails(r"the server failed at 1 x 8 .*finish_reason", client=functools.partial(Gone, model_server.url))
    model_server.answer = refusing(InvalidRequest("no"))
    fails(r"none of the shapes; 1 x 8 prompt tokens: .E_INVALID_ARGUMENT. no", ToolError)
    log.write_text('I1121 12:42:07.749106 49 model_lifecycle.cc:472] "loading: tensorrt_llm:1"\n')
    match = r"is not ready after 0.3 s: .*; its log says last: loading: tensorrt_llm:1"
    with socket.socket() as taken:  # a port that is taken and does not listen
        taken.bind(("127.0.0.1", 0))
        fails(match, url=f"http://127.0.0.1:{taken.getsockname()[1]}", wait_s=0.3, log=log)


def test_an_unexpected_error_is_raised_and_ends_the_others(model_server):
    model_server.answer = warm
    token = iter(["a"] * 4)  # for the questions before the first request

    def broken():
        found = next(token, None)
        if found is None:
            raise ToolError("the token can't be read")
        return found

    client = functools.partial(AsyncClient, model_server.url, token=broken)
    with pytest.raises(ToolError, match="the token can't be read"):
        warm_server(options(None, client=client, batch_sizes=(4,)))


def test_a_torn_stream_leaves_its_shape_out_and_the_rest_goes_on(model_server, run):
    numbers = itertools.count(1)

    def torn(body):
        number = next(numbers) if length(body) == 16 else 0
        yield {"text_output": "a"}
        if number in (0, 3):
            yield {"text_output": "", **END, "num_output_tokens": 2}

    model_server.answer = torn
    done = run(batch_sizes=(3,), input_lengths=(16, 8))
    assert outcome(done) == (0, ["left out", "steady"])
    assert "without a finish_reason" in done.document["shapes"][0]["reason"]
    assert sum(length(body) == 16 for body in model_server.bodies) == 3  # another way of asking is no cure


class Front(LoopbackServer):
    """Triton's HTTP front end without the model: its answers about its health, the model and the repository. With
    `words` of None it is the port of the metrics, an empty 200 to everything."""

    def __init__(self, words, index, ready=200):
        self.asked = []
        self.words, self.index, self.ready = words, index, ready
        super().__init__()

    def respond(self, handler, body):
        self.asked.append(handler.path)
        if self.words is None:
            handler.send_whole(200, b"")
        elif handler.command == "POST":
            handler.send_json(401 if self.index is None else 200, self.index)
        elif handler.path == "/v2/health/ready":
            handler.send_whole(self.ready, b"")
        elif handler.path.endswith("/ready"):
            handler.send_json(400, {"error": "Model version not ready"})
        else:
            handler.send_json(404, {"error": self.words})


INDEX = "/v2/repository/index"
NOT_FOUND = "Request for unknown model: 'tensorrt_llm' is not found"
NO_VERSION = "Request for unknown model: 'tensorrt_llm' version 9 is not found"
OURS = {"name": "tensorrt_llm", "version": "1", "state": "READY"}
OTHER = {"name": "other", "version": "2", "state": "READY"}
MISSING = [  # what Triton says of the model and its index of all, and what is said; nothing: it may still come
    (NOT_FOUND, [OTHER, {"name": "a"}], f"{NOT_FOUND}; the server has a, other version 2"),
    (NO_VERSION, [OURS], f"{NO_VERSION}; the server has tensorrt_llm version 1"),
    (NOT_FOUND, None, NOT_FOUND),
    (NOT_FOUND, {}, NOT_FOUND),
    (NOT_FOUND, [OTHER, {**OTHER, "name": "next", "state": "LOADING"}], ""),
    (NOT_FOUND, [{"name": "tensorrt_llm"}], ""),  # unloaded
    ("Request for unknown model: 'tensorrt_llm' has no available versions", [], ""),
    ("no page here", [], ""),  # of a proxy
]


@pytest.mark.parametrize(("words", "index", "said"), MISSING)
def test_whether_a_model_may_still_come(words, index, said):
    async def ask(url):
        async with AsyncClient(url) as client:
            [readiness] = await client.readiness()
            assert readiness.state == ("missing" if said else "loading")
            return readiness.detail if said else ""

    with contextlib.closing(Front(words, index)) as server:
        why = asyncio.run(ask(server.url))
        assert why == said
        assert (INDEX in server.asked) == words.endswith("is not found")


def test_a_model_that_the_server_does_not_have_is_not_waited_for(run):
    for words, kind, said in ((NOT_FOUND, ServerFailedError, "has other"), (None, ProtocolError, "metrics port")):
        with contextlib.closing(Front(words, [OTHER])) as server, pytest.raises(kind, match=said):
            run(url=server.url)  # two hours
    with contextlib.closing(Front(NOT_FOUND, [], ready=400)) as server:  # it may come
        with pytest.raises(ServerFailedError, match=r"is not ready after 0.2 s"):
            run(url=server.url, wait_s=0.2)
        assert INDEX not in server.asked


@pytest.mark.slow
def test_a_signal_cancels_what_is_open_and_what_was_finished_is_reported(model_server, tmp_path):
    def stuck(body):
        yield {"text_output": "a"}
        if length(body) == 16:
            yield WAIT
        yield {"text_output": "", **END, "num_output_tokens": 2}

    ready = tmp_path / "ready"
    ready.touch()
    model_server.answer = stuck
    argv = [model_server.url, "--batch-sizes", "1", "--input-lengths", "8,16", "--ready-file", str(ready), "--json"]
    command = [sys.executable, "-m", "deepseek_triton_tools.cli.main", "warm", "server", *argv]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert model_server.waiting.wait(PATIENCE_S)
        assert not ready.exists()
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    document = json.loads(out)
    assert (process.returncode, document["ok"], document["was_stopped"]) == (143, False, True)
    assert (document["url"], "Traceback" in err) == (model_server.url, False)
    [shape] = document["shapes"]
    assert (shape["num_input_tokens"], len(shape["rounds"]) >= 2) == (8, True)
    assert model_server.gone.wait(PATIENCE_S)
    assert not ready.exists()


def write_yaml(folder, document, version="1", model="tensorrt_llm"):
    path = folder / model / version / "model.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return folder


def pairs(planned):
    shapes, _ = planned
    return [(shape.num_requests, shape.num_input_tokens) for shape in shapes]


def test_the_shapes_of_a_repository_and_without_one(tmp_path):
    write_yaml(tmp_path, {"triton_config": {"warmup": {"shapes": [[1, 1]]}}}, version="9")
    write_yaml(tmp_path, {"triton_config": {"warmup": {"shapes": [[1, 64], [8, 512], [2, 64]]}}}, version="10")

    def planned(repository, **numbers):
        return planned_shapes(ServerWarmOptions(client=AsyncClient, repository=repository, **numbers), "tensorrt_llm")

    given = functools.partial(planned, tmp_path)
    assert pairs(given()) == [(1, 64), (8, 512), (2, 64)]
    assert "10/model.yaml" in given()[1]
    assert pairs(given(batch_sizes=(3,))) == [(3, 64), (3, 512)]  # given sizes replace those of the repository
    assert pairs(given(input_lengths=(7,))) == [(1, 7), (2, 7), (8, 7)]
    assert pairs(given(batch_sizes=(3, 4), input_lengths=(7, 9))) == [(3, 7), (4, 7), (3, 9), (4, 9)]
    assert given(batch_sizes=(3,), input_lengths=(7,))[1] == "--batch-sizes and --input-lengths"
    llm_args = {"model": "m", "max_batch_size": 8, "max_num_tokens": 1024, "max_input_len": 512, "max_seq_len": 1024}
    for number, ours in enumerate([None, {}, {"engine": "tensorrt_llm", "warmup": None}]):
        folder = write_yaml(tmp_path / str(number), {**llm_args, "triton_config": ours})
        assert pairs(planned(folder)) == list(shapes_for_llm_args(llm_args))
    other = write_yaml(tmp_path / "other", {"model": "tiny", "triton_config": {"engine": "simulated"}})
    for folder in (other, None):  # modest ones
        assert pairs(planned(folder)) == list(server.MODEST_SHAPES)


def test_an_invalid_model_yaml_is_refused(tmp_path):
    shapes = {"triton_config": {"warmup": {"shapes": [[1, 64], [0, 64]]}}}
    cases = [
        ("[1, 2]", "tensorrt_llm", "can't be read"),
        ("a: [", "tensorrt_llm", "can't be read"),
        ({"triton_config": {"warmup": {"shapes": [[1], "x"]}}}, "tensorrt_llm", "can't be read"),
        (shapes, "tensorrt_llm", "expected pairs of whole numbers from 1"),
        ({}, "other", r"tensorrt_llm/VERSION/model.yaml, found none"),
    ]
    for number, (document, model, expected) in enumerate(cases):
        folder = write_yaml(tmp_path / str(number), document, model=model)
        with pytest.raises(RepositoryError, match=expected):
            planned_shapes(ServerWarmOptions(client=AsyncClient, repository=folder), "tensorrt_llm")


# --- waiting ---

LOG = """\
I1121 12:42:07.747691 4989 pinned_memory_manager.cc:277] "Pinned memory pool is created at '0x7f' with size 268435456"
I1121 12:42:07.749106 4989 model_lifecycle.cc:472] "loading: tensorrt_llm:1"
deepseek_backend INFO: loading /models/r1 on the tensorrt_llm engine
[12/20/2025-04:20:19] [TRT-LLM] [I] Prefetching 641.30GB checkpoint files.
[12/20/2025-04:20:21] [TRT-LLM] [I] Use 63.32 GB for model weights.
Loading safetensors weights in parallel: 100%|###| 15/15 [00:00<00:00, 81.92it/s]
Loading weights:  50%|###  | 400/801 [00:23<00:23, 17.29it/s]\rLoading weights: 100%|#####| 801/801 [00:46<00:00]
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 0.56 GiB for max tokens in paged KV cache (8224).
[12/20/2025-04:21:10] [TRT-LLM] [I] [Autotuner] Autotuning process starts ...
[12/20/2025-04:21:37] [TRT-LLM] [I] Creating CUDA graph instances for 11 batch sizes.
I1121 12:42:09.142789 4989 model_lifecycle.cc:839] "successfully loaded 'tensorrt_llm'"
"""


PHASES = ["starting", "loading", "prefetching the checkpoint", "loading weights", "allocating the KV cache"]
PHASES += ["autotuning", "capturing CUDA graphs", "opening its ports"]


def test_the_phases_of_a_load_are_read_from_its_log(tmp_path):
    path = tmp_path / "log"
    path.touch()
    log = LogFollower(path)
    phases = []
    with path.open("a") as file:
        for line in LOG.splitlines(keepends=True):
            file.write(line)
            file.flush()
            log.read()
            phases.append(log.phase)
    assert list(dict.fromkeys(phases)) == PHASES
    assert log.last_message == "successfully loaded 'tensorrt_llm'"
    path.write_text('I1121 12:42:07.747691 4989 pinned_memory_manager.cc:277] "again"\n')  # it begins anew
    log.read()
    assert (log.phase, log.last_message) == ("starting", "again")
    path.rename(tmp_path / "log.1")
    path.write_text("deepseek_backend INFO: loading it\n" + "x" * 200)
    log.read()
    assert log.phase == "loading"
    path.write_text(FAILED + LOG)
    log = LogFollower(path)  # of a log that is there already, the phase, but not an old failure
    log.read()
    assert (log.phase, log.failure("tensorrt_llm")) == ("opening its ports", "")


def test_the_phase_does_not_depend_on_where_the_pieces_of_a_log_end(tmp_path):
    path = tmp_path / "log"
    data = LOG.encode() * 3
    log = LogFollower(path)
    assert not log.is_there
    pieces = random.Random(0)
    with path.open("ab", buffering=0) as file:
        while data:
            size = pieces.randint(1, 90)
            file.write(data[:size])
            data = data[size:]
            log.read()
    assert list(log.lines) == [line for line in (LOG * 3).replace("\r", "\n").splitlines() if line]


def test_a_wait_is_shown_in_phases(tmp_path, capsys):
    path = tmp_path / "log"
    waiting = Waiting("tensorrt_llm", StatusLine(1000.0), LogFollower(path))
    waiting.see(Readiness("http://a:1", "unreachable", 0.0))
    waiting.see(Readiness("http://a:1", "unreachable", 1.0))
    path.write_text(LOG.partition("[TensorRT-LLM]")[0])
    waiting.see(Readiness("http://a:1", "unreachable", 75.0))
    waiting.see(Readiness("http://a:1", "ready", 80.0))
    assert list(waiting.seconds) == ["unreachable", "loading weights"]
    first, second = capsys.readouterr().err.splitlines()
    assert f"0:00:00: unreachable (there is no log {path})" in first
    assert "0:01:15: loading weights  Loading weights: 100%" in second
    path.write_text(path.read_text() + FAILED)
    with pytest.raises(ServerFailedError, match="can't become ready: model 'tensorrt_llm' failed to load: no GPU"):
        waiting.see(Readiness("http://a:1", "unreachable", 90.0))
    waiting = Waiting("tensorrt_llm", StatusLine(1000.0))
    waiting.see(Readiness("http://a:1", "ready", 0.0))  # at once: it was waited for in no phase
    assert waiting.seconds == {}
