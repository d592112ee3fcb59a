"""The vLLM engine on a vLLM whose engine core does what a test says: its life, its two ways to the core, every end."""

import contextlib
import importlib
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepseek_backend.backend_metrics import info
from deepseek_backend.config import parse_config
from deepseek_backend.contract import ErrorCode
from deepseek_backend.engines import create_engine
from deepseek_backend.engines.base import EngineStats
from deepseek_backend.engines.vllm.request_paths import CoreConnection, GenerateCalls
from deepseek_backend.errors import ASK_ANOTHER, ConfigError, EngineError, UnavailableError
from deepseek_triton_build.data.vllm import VLLM_VERSIONS, load_vllm
from support.fake_vllm import (
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    TOKENIZER,
    TOKENS_PER_BLOCK,
    FakeAsyncLLM,
    GenerationError,
    RetryableRequestError,
    VLLMValidationError,
    out,
)
from support.waiting import wait_for

WAYS = pytest.mark.parametrize("public", [False, True], ids=["core", "generate"])
HELLO = TOKENIZER.encode("Hello world", add_special_tokens=False).ids


@pytest.mark.slow
def test_a_vllm_like_its_record_is_read_by_the_iteration_and_another_one_called_in_public(make_vllm, caplog):
    for version in VLLM_VERSIONS:
        assert isinstance(make_vllm(version=version).engine._connection, CoreConnection)
    caplog.clear()
    assert isinstance(make_vllm(public=True).engine._connection, GenerateCalls)
    (line,) = caplog.messages
    assert "vllm.v1.engine:EngineCoreOutput has request_id, new_token_ids" in line


@pytest.mark.parametrize("lost", ["engine_core", "input_processor"])
def test_a_vllm_whose_front_end_keeps_its_core_elsewhere_is_called_in_public(make_vllm, monkeypatch, caplog, lost):
    def moved(self, args, stat_loggers):
        made(self, args, stat_loggers)
        setattr(self, f"moved_{lost}", self.__dict__.pop(lost))

    made = FakeAsyncLLM.__init__
    monkeypatch.setattr(FakeAsyncLLM, "__init__", moved)
    with caplog.at_level(logging.WARNING):
        assert isinstance(make_vllm().engine._connection, GenerateCalls)
    assert f"AsyncLLM.{lost} is not there" in caplog.text


@pytest.mark.slow
def test_an_answer_comes_in_steps_with_every_count(faked):
    request = faked.accepted()
    for token_id in HELLO[:-1]:
        faked.emit(request, [token_id])
    faked.emit(request, HELLO[-1:], "length")
    steps = faked.result(request)
    assert (steps.text, steps.token_ids) == ("Hello world", HELLO)
    assert {step.num_input_tokens for step in steps} == {len(faked.core.prompts[request.request_id])}


@pytest.mark.slow
def test_the_steps_of_an_iteration_come_in_one_call(faked):
    requests = [faked.accepted() for _ in range(5)]
    for number in range(1, 4):
        faked.core.emit(*(out(request, HELLO[:1]) for request in requests))
        wait_for(lambda number=number: sum(map(len, faked.sink.calls)) == 5 * number)
    assert [len(call) for call in faked.sink.calls] == [5, 5, 5]


def test_a_whole_answer_comes_in_its_last_step(faked):
    request = faked.accepted(wants_steps=False)
    assert faked.engine.health().worked_at_s == 0
    for token_id in HELLO:
        faked.emit(request, [token_id])
    wait_for(lambda: faked.engine.health().worked_at_s > 0)
    assert faked.sink.calls == []
    faked.emit(request, [1], "stop")
    (step,) = faked.result(request)
    assert (step.text, list(step.token_ids), step.finish_reason) == ("Hello world", [*HELLO, 1], "stop")
    assert step.generation_s >= 0


@pytest.mark.slow
def test_an_output_that_can_not_be_read_ends_its_own_request_only(faked):
    broken, other = faked.accepted(), faked.accepted()
    faked.core.emit(out(broken, ["?"]), out(other, HELLO, "length"))
    error = faked.result(broken)[-1].error
    assert isinstance(error, EngineError)
    assert str(error).startswith("an output of vLLM can't be read: ")
    assert faked.result(other).text == "Hello world"
    wait_for(lambda: faked.core.aborted == [broken.request_id])
    assert faked.engine.health().alive


def ranks(faked, *requests):
    return [faked.core.ranks[request.request_id] for request in requests]


@WAYS
def test_each_request_goes_to_the_rank_with_the_fewest_open_ones(make_vllm, public):
    faked = make_vllm(public=public, data_parallel_size=3)
    requests = [faked.accepted() for _ in range(6)]
    assert ranks(faked, *requests) == [0, 1, 2, 0, 1, 2]
    faked.emit(requests[1], HELLO, "length")
    faked.engine.abort(requests[4].request_id)
    for request in (requests[1], requests[4]):
        faked.result(request)
    assert ranks(faked, *(faked.accepted() for _ in range(4))) == [1, 1, 2, 0]


@pytest.mark.slow
def test_which_ranks_are_chosen(make_vllm):
    faked = make_vllm(data_parallel_size=2)
    faked.core.refuse = ValueError("no")
    faked.refused()
    faked.core.refuse = None
    assert sorted(ranks(faked, *(faked.accepted() for _ in range(4)))) == [0, 0, 1, 1]
    faked = make_vllm(data_parallel_size=8, data_parallel_size_local=2, data_parallel_hybrid_lb=True)
    assert ranks(faked, *(faked.accepted() for _ in range(4))) == [0, 1, 0, 1]
    for version, size in ("0.33.0", 4), ("0.24.0", 1), ("0.24.0", None):
        faked = make_vllm(version=version, data_parallel_size=size)
        assert ranks(faked, faked.accepted()) == [None]


def test_an_abort_reaches_vllm_and_what_comes_later_is_nobodys(faked):
    request, other = faked.accepted(), faked.accepted()
    faked.emit(request, HELLO[:1])
    wait_for(lambda: faked.steps_of(request))
    faked.engine.abort(request.request_id)
    wait_for(lambda: faked.core.aborted == [request.request_id])
    faked.core.emit(out(request, HELLO[1:], "length"), out(other, HELLO, "length"))
    assert faked.result(other).text == "Hello world"
    faked.engine.abort(other.request_id)
    faked.engine.stop()
    assert faked.result(request).text == "Hello"
    assert faked.core.aborted == [request.request_id]


def test_an_abort_brings_the_text_that_waits_for_the_rest_of_a_character(faked):
    request = faked.accepted()
    (first, *_) = TOKENIZER.encode("💻", add_special_tokens=False).ids
    faked.emit(request, [first])
    wait_for(lambda: faked.steps_of(request))
    faked.engine.abort(request.request_id)
    assert faked.result(request).text == "\ufffd"


def test_an_abort_in_the_turn_of_an_output_loses_none_of_it(faked):
    request = faked.accepted()

    def at_once():
        faked.core.emit_now(out(request, HELLO))
        faked.core.loop.call_soon(faked.engine._abort, request.request_id)

    faked.core.loop.call_soon_threadsafe(at_once)
    assert faked.result(request).text == "Hello world"
    assert [step.finish_reason for step in faked.steps_of(request)] == [None, "cancelled"]


def test_an_end_that_is_none_of_an_answer_is_an_error(faked):
    for reason, kind in ("error", EngineError), ("abort", UnavailableError), ("novel", EngineError):
        request = faked.accepted()
        faked.emit(request, HELLO, reason)
        step = faked.result(request)[-1]
        assert type(step.error) is kind
        assert step.finish_reason is None
    assert "'novel'" in str(step.error)
    assert faked.engine.health().alive


REFUSALS = [  # vLLM's error, the code, and the end of what is said
    (VLLMValidationError("no rule"), ErrorCode.INVALID_ARGUMENT, "guided_grammar: vLLM refused it: no rule"),
    (RetryableRequestError("It rests."), ErrorCode.UNAVAILABLE, f"RetryableRequestError: It rests{ASK_ANOTHER}"),
    (GenerationError("No such block."), ErrorCode.INTERNAL, "GenerationError: No such block."),
]


@WAYS
def test_the_client_reads_why_the_core_refused_its_request(make_vllm, public):
    faked = make_vllm(version="0.33.0", public=public)
    for error, code, expected in REFUSALS:
        refused, other = faked.accepted(guided_grammar="x ::= y"), faked.accepted()
        why = SimpleNamespace(to_exception=lambda error=error: error)
        faked.core.emit(out(refused, [], "error", error=why), out(other, HELLO, "length"))
        (step,) = faked.result(refused)
        assert step.error.code == code
        assert str(step.error).endswith(expected)
        assert faked.result(other).text == "Hello world"
    assert faked.core.aborted == []


def test_the_death_of_the_core_is_the_reason(faked):
    faked.core.die()
    wait_for(lambda: not faked.engine.health().alive)
    assert faked.engine.health().reason == "vLLM's engine core has died; the server's log has the cause"
    assert "has died" in str(faked.refused())


def test_a_stop_drops_every_request_and_shuts_down_once(faked):
    requests = [faked.accepted() for _ in range(3)]
    llm, core = faked.engine._llm, faked.core
    faked.engine.stop()
    faked.engine.stop()
    assert sorted(core.aborted) == sorted(request.request_id for request in requests)
    assert llm.num_shutdowns == 1


@pytest.mark.slow
@WAYS
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.lists(st.tuples(st.sampled_from(["token", "end", "abort"]), st.integers(0, 3)), max_size=25),
    whole=st.booleans(),
)
def test_every_request_gets_exactly_one_last_step(make_vllm, public, data, whole):
    faked = make_vllm(public=public)
    requests = [faked.accepted(wants_steps=not whole) for _ in range(4)]
    for event, number in data:
        if event == "abort":
            faked.engine.abort(requests[number].request_id)
        else:
            faked.emit(requests[number], HELLO[:1], "length" if event == "end" else None)
    faked.engine.stop()
    for request in requests:
        assert len(faked.ended(request)) == 1


def engine_of(folder):
    return create_engine(parse_config(DOCUMENT, version_dir=folder))


DOCUMENT = {"model": "m", "triton_config": {"engine": "vllm"}}
NO_RECORDS = {None: "can't be read", "release: 1.2.1\n": "not the record", "[": "not YAML", "- 1\n": "not the record"}


def test_without_a_record_of_vllm_nothing_starts(tmp_path):
    for record, expected in NO_RECORDS.items():
        if record is not None:
            (tmp_path / "release.yaml").write_text(record)
        with pytest.raises(ConfigError, match=rf"release.yaml: {expected}"):
            engine_of(tmp_path).start()
    (tmp_path / "release.yaml").write_text(load_vllm("0.24.0").text)
    assert info(parse_config(DOCUMENT, version_dir=tmp_path))["release"] == "0.24.0"


@pytest.mark.slow
def test_another_version_is_refused_unless_it_is_allowed(make_vllm, caplog):
    with pytest.raises(EngineError, match=r"generated for vLLM 0\.24\.0, but 0\.25\.1 is installed"):
        make_vllm(installed="0.25.1")
    assert make_vllm(installed="0.24.0+cu130").engine.health().alive
    assert make_vllm(installed="0.25.1", options={"allow_version_mismatch": True}).engine.health().alive
    assert "vLLM 0.25.1 runs a repository generated for 0.24.0" in caplog.text


def test_an_unknown_argument_is_refused(make_vllm):
    with pytest.raises(ConfigError) as caught:
        make_vllm(max_model_length=5, enable_expert_paralel=True)
    for problem, name, nearest in zip(caught.value.problems, ("max_model_length", "enable_expert_paralel"),
                                       ("max_model_len", "enable_expert_parallel"), strict=True):  # fmt: skip
        assert problem.startswith(f"{name}: ")
        assert problem.endswith(f"did you mean {nearest}?")


def test_without_vllm_the_error_says_where_it_is(tmp_path, monkeypatch):
    (tmp_path / "release.yaml").write_text(load_vllm("0.24.0").text)
    found = importlib.import_module

    def without(name):
        if name == "vllm":
            raise ModuleNotFoundError("No module named 'vllm'", name="vllm")
        return found(name)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(EngineError) as caught:
        engine_of(tmp_path).start()
    assert "install vllm==0.24.0; it is part of nvcr.io/nvidia/tritonserver:26.07-vllm-python-py3" in str(caught.value)


@pytest.mark.parametrize("error", [ValueError("no such quantization"), SystemExit(3)])
def test_a_load_that_fails_says_why(make_vllm, monkeypatch, error):
    monkeypatch.setattr(FakeAsyncLLM, "load_error", error)
    with pytest.raises(EngineError, match="vLLM can't load m: "):
        make_vllm()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(("vllm", "tokenizer"))]


@pytest.mark.slow
def test_what_model_yaml_leaves_open_is_chosen(make_vllm, tmp_path, monkeypatch):
    (tmp_path / "tiny").mkdir()
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    args = make_vllm(model="tiny").engine._llm.args
    assert (args.model, args.disable_log_stats, args.shutdown_timeout) == (str(tmp_path / "tiny"), True, 600)
    assert args.structured_outputs_config == {"backend": "xgrammar"}
    assert make_vllm(model="deepseek-ai/DeepSeek-R1", shutdown_timeout=7).engine._llm.args.shutdown_timeout == 7


@pytest.mark.slow
def test_the_engine_says_what_it_can_do(make_vllm):
    known = make_vllm().engine.capabilities
    assert known.max_seq_len == MAX_MODEL_LEN
    assert known.max_prompt_bytes == MAX_MODEL_LEN * max(len(token.encode()) for token in TOKENIZER.get_vocab())
    assert known.bos_token == "<｜begin▁of▁sentence｜>"
    assert known.whole_answers
    assert not known.priority
    assert known.unsupported == {"priority": "needs the engine argument scheduling_policy: priority"}
    assert make_vllm().engine.render_chat([{"role": "user", "content": "Why?"}], {}) == "user: Why?\n"
    engine = make_vllm().engine
    ids = engine.tokenizer.encode("the", True)
    assert engine.tokenizer.decode(ids, skip_special_tokens=False) == "<｜begin▁of▁sentence｜>the"
    assert engine.tokenizer.decode(ids, skip_special_tokens=True) == "the"
    assert engine.tokenizer.vocab_size == TOKENIZER.get_vocab_size()
    assert engine.tokenizer.chat_template is None
    assert engine.capabilities.version == sys.modules["vllm"].__version__


def scheduler_stats(**given):
    empty = {"num_running_reqs": 0, "num_waiting_reqs": 0, "kv_cache_usage": 0.0, "spec_decoding_stats": None}
    return SimpleNamespace(**{**empty, "prefix_cache_stats": SimpleNamespace(queries=0, hits=0), **given})


def test_the_numbers_are_the_schedulers(make_vllm):
    faked = make_vllm()
    requests = [faked.accepted() for _ in range(3)]
    drafts, prefix = SimpleNamespace(num_draft_tokens=4, num_accepted_tokens=3), SimpleNamespace(queries=50, hits=32)
    for _ in range(2):
        stats = scheduler_stats(
            num_running_reqs=2, kv_cache_usage=0.5, spec_decoding_stats=drafts, prefix_cache_stats=prefix
        )
        faked.core.emit(out(requests[0], HELLO[:1]), scheduler_stats=stats)
    wait_for(lambda: len(faked.sink.calls) == 2)
    assert faked.engine.stats() == EngineStats(
        num_running=2,
        num_waiting=1,
        kv_blocks_used=NUM_BLOCKS // 2,
        kv_blocks_total=NUM_BLOCKS,
        tokens_per_block=TOKENS_PER_BLOCK,
        num_draft_tokens=8,
        num_accepted_draft_tokens=6,
        extra={"prefix_cache_queried_tokens": 100.0, "prefix_cache_hit_tokens": 64.0},
    )
    for request in requests:
        faked.engine.abort(request.request_id)
        faked.result(request)
    stats = faked.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)


def test_the_numbers_of_data_parallel_ranks_are_added(make_vllm):
    faked = make_vllm(public=True)
    for _ in range(5):
        faked.accepted()
    (numbers,) = faked.engine._llm.stat_loggers
    numbers.record(scheduler_stats(num_running_reqs=2, kv_cache_usage=0.2), None, engine_idx=0)
    numbers.record(scheduler_stats(num_running_reqs=1, kv_cache_usage=0.4), None, mm_cache_stats=None, engine_idx=1)
    numbers.record(None, None)
    stats = faked.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (3, 2, round(0.3 * NUM_BLOCKS))


def test_statistics_that_can_not_be_read_end_nothing(faked, caplog):
    request = faked.accepted()
    (numbers,) = faked.engine._llm.stat_loggers
    for _ in range(2):
        faked.core.emit(out(request, HELLO[:1]), scheduler_stats=SimpleNamespace())
        # On the loop thread, as vLLM calls it: two threads at once could both log.
        faked.core.loop.call_soon_threadsafe(numbers.record, SimpleNamespace(), None)
    faked.emit(request, [], "length")
    assert faked.result(request).text == "HelloHello"
    assert faked.engine.stats().kv_blocks_total == NUM_BLOCKS
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [
        "vLLM's scheduler statistics can't be read; their metrics stay as they are"
    ]


PROGRAM = """
import multiprocessing, pathlib, sys, time
from multiprocessing import shared_memory

from deepseek_backend.engines.vllm.loading import own_process_group


def core(name, registered):
    memory = shared_memory.SharedMemory(name=name, create=True, size=1024)
    pathlib.Path(registered).touch()
    time.sleep(600)


if __name__ == "__main__":
    with own_process_group():
        multiprocessing.get_context("spawn").Process(target=core, args=sys.argv[1:]).start()
    time.sleep(600)
"""


@pytest.mark.slow
def test_no_shared_memory_is_left_after_a_crash_and_the_end_of_the_group(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    segment = Path(f"/dev/shm/deepseek_triton_test_{os.getpid()}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    registered = tmp_path / "registered"
    stub = subprocess.Popen([sys.executable, program, segment.name, registered], env=environment)
    try:
        # Python tells the resource tracker of a segment after it has made it.
        wait_for(registered.exists, lambda: "no segment was made")

        stub.kill()
        os.killpg(stub.pid, signal.SIGKILL)  # what the guard process does then

        wait_for(lambda: not segment.exists(), lambda: f"{segment} is left")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(stub.pid, signal.SIGKILL)
        stub.kill()
        stub.wait()
        segment.unlink(missing_ok=True)
