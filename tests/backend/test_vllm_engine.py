"""The vLLM engine on a vLLM whose engine core does what a test says: its life, its two ways to the core, every end."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepseek_backend.config import parse_config
from deepseek_backend.contract import ErrorCode
from deepseek_backend.engines import create_engine
from deepseek_backend.engines.base import EngineStats
from deepseek_backend.engines.generate_request import GenerateRequest, SamplingParams
from deepseek_backend.engines.vllm import VllmEngine
from deepseek_backend.engines.vllm.core_connection import CoreConnection
from deepseek_backend.engines.vllm.generate_calls import GenerateCalls
from deepseek_backend.errors import ASK_ANOTHER, ConfigError, EngineError, UnavailableError
from deepseek_triton_build.data.vllm import VLLM_VERSIONS, load_vllm
from standin.harness import Sink
from support.fake_vllm import (
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    TOKENIZER,
    TOKENS_PER_BLOCK,
    FakeAsyncLLM,
    FakedEngine,
    GenerationError,
    RetryableRequestError,
    VLLMValidationError,
    faked_engine,
)
from support.waiting import wait_for

MakeFaked = Callable[..., FakedEngine]
WAYS = pytest.mark.parametrize("public", [False, True], ids=["core", "generate"])
HELLO = TOKENIZER.encode("Hello world", add_special_tokens=False).ids


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeFaked]:
    with ExitStack() as stack:
        yield lambda **given: stack.enter_context(faked_engine(tmp_path, monkeypatch, **given))


def text_of(faked: FakedEngine, request: GenerateRequest) -> str:
    return "".join(step.text for step in faked.sink.result(request))


# The way to the core


@pytest.mark.parametrize("version", VLLM_VERSIONS)
def test_a_vllm_like_its_record_is_read_by_the_iteration(make: MakeFaked, version: str) -> None:
    assert isinstance(make(version=version).engine._connection, CoreConnection)


def test_another_one_is_called_in_public_and_the_log_says_what_differs(
    make: MakeFaked, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = make(public=True).engine
    assert isinstance(engine._connection, GenerateCalls)
    (line,) = caplog.messages
    assert "vllm.v1.engine:EngineCoreOutput has request_id, new_token_ids" in line


@pytest.mark.parametrize("lost", ["engine_core", "input_processor"])
def test_a_vllm_whose_front_end_keeps_its_core_elsewhere_is_called_in_public(
    make: MakeFaked, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lost: str
) -> None:
    def moved(self: Any, args: Any, stat_loggers: Any) -> None:
        made(self, args, stat_loggers)
        setattr(self, f"moved_{lost}", self.__dict__.pop(lost))

    made = FakeAsyncLLM.__init__
    monkeypatch.setattr(FakeAsyncLLM, "__init__", moved)
    with caplog.at_level(logging.WARNING):
        assert isinstance(make().engine._connection, GenerateCalls)
    assert f"AsyncLLM.{lost} is not there" in caplog.text


# Answers


@WAYS
def test_an_answer_comes_in_steps_with_every_count(make: MakeFaked, public: bool) -> None:
    faked = make(public=public)
    request = faked.accepted()
    for token_id in HELLO[:-1]:
        faked.core.emit({"request_id": request.request_id, "new_token_ids": [token_id]})
    faked.core.emit({"request_id": request.request_id, "new_token_ids": HELLO[-1:], "finish_reason": "length"})
    steps = faked.sink.result(request)
    assert "".join(step.text for step in steps) == "Hello world"
    assert [token_id for step in steps for token_id in step.token_ids] == HELLO
    assert {step.num_input_tokens for step in steps} == {len(faked.core.prompts[request.request_id])}
    assert (steps[-1].finish_reason, steps[-1].stop_reason) == ("length", None)


def test_the_steps_of_an_iteration_come_in_one_call(make: MakeFaked) -> None:
    faked = make()
    requests = [faked.accepted() for _ in range(5)]
    for _ in range(3):
        faked.core.emit(*({"request_id": request.request_id, "new_token_ids": [HELLO[0]]} for request in requests))
    wait_for(lambda: sum(map(len, faked.sink.calls)) == 15)
    assert [len(call) for call in faked.sink.calls] == [5, 5, 5]


def test_the_steps_of_generate_come_in_one_call_too(make: MakeFaked) -> None:
    faked = make(public=True)
    requests = [faked.accepted() for _ in range(5)]
    faked.core.emit(*({"request_id": request.request_id, "new_token_ids": [HELLO[0]]} for request in requests))
    wait_for(lambda: sum(map(len, faked.sink.calls)) == 5)
    assert len(faked.sink.calls) == 1


@WAYS
def test_a_whole_answer_comes_in_its_last_step(make: MakeFaked, public: bool) -> None:
    faked = make(public=public)
    request = faked.accepted(wants_steps=False)
    assert faked.engine.health().worked_at_s == 0
    for token_id in HELLO:
        faked.core.emit({"request_id": request.request_id, "new_token_ids": [token_id]})
    wait_for(lambda: faked.engine.health().worked_at_s > 0)
    assert faked.sink.calls == []
    faked.core.emit({"request_id": request.request_id, "new_token_ids": [1], "finish_reason": "stop"})
    (step,) = faked.sink.result(request)
    assert (step.text, list(step.token_ids), step.finish_reason) == ("Hello world", [*HELLO, 1], "stop")
    assert step.generation_s is not None
    assert step.generation_s >= 0


@WAYS
def test_an_output_that_can_not_be_read_ends_its_own_request_only(make: MakeFaked, public: bool) -> None:
    faked = make(public=public)
    broken, other = faked.accepted(), faked.accepted()
    faked.core.emit(
        {"request_id": broken.request_id, "new_token_ids": ["?"]},
        {"request_id": other.request_id, "new_token_ids": HELLO, "finish_reason": "length"},
    )
    error = faked.sink.result(broken)[-1].error
    assert isinstance(error, EngineError)
    assert str(error).startswith("an output of vLLM can't be read: ")
    assert text_of(faked, other) == "Hello world"
    wait_for(lambda: faked.core.aborted == [broken.request_id])
    assert faked.engine.health().alive


@WAYS
def test_a_failing_sink_stops_no_other_request(make: MakeFaked, public: bool) -> None:
    faked = make(public=public)
    request = faked.accepted()
    faked.sink.fail = True
    faked.core.emit({"request_id": request.request_id, "new_token_ids": HELLO[:1]})
    faked.core.emit({"request_id": request.request_id, "new_token_ids": HELLO[1:], "finish_reason": "length"})
    assert text_of(faked, request) == "Hello world"


# Ranks of data parallelism


@WAYS
def test_each_request_goes_to_the_rank_with_the_fewest_open_ones(make: MakeFaked, public: bool) -> None:
    faked = make(public=public, data_parallel_size=3)
    requests = [faked.accepted() for _ in range(6)]
    ranks = [faked.core.ranks[request.request_id] for request in requests]
    assert ranks == [0, 1, 2, 0, 1, 2]

    faked.core.emit({"request_id": requests[1].request_id, "new_token_ids": HELLO, "finish_reason": "length"})
    faked.engine.abort(requests[4].request_id)
    for request in (requests[1], requests[4]):
        faked.sink.result(request)
    later = [faked.accepted() for _ in range(4)]
    assert [faked.core.ranks[request.request_id] for request in later] == [1, 1, 2, 0]


def test_a_request_that_vllm_refuses_takes_no_rank(make: MakeFaked) -> None:
    faked = make(data_parallel_size=2)
    faked.core.refuse = ValueError("no")
    faked.refused()
    faked.core.refuse = None
    requests = [faked.accepted() for _ in range(4)]
    assert sorted(str(faked.core.ranks[request.request_id]) for request in requests) == ["0", "0", "1", "1"]


def test_only_the_ranks_of_its_own_node_are_chosen_in_a_hybrid(make: MakeFaked) -> None:
    faked = make(data_parallel_size=8, data_parallel_size_local=2, data_parallel_hybrid_lb=True)
    requests = [faked.accepted() for _ in range(4)]
    assert [faked.core.ranks[request.request_id] for request in requests] == [0, 1, 0, 1]


@pytest.mark.parametrize(("version", "data_parallel_size"), [("0.33.0", 4), ("0.24.0", 1), ("0.24.0", None)])
def test_vllm_chooses_the_rank_where_it_counts_what_it_sent(
    make: MakeFaked, version: str, data_parallel_size: int | None
) -> None:
    faked = make(version=version, data_parallel_size=data_parallel_size)
    assert faked.core.ranks[faked.accepted().request_id] is None


# Ends


@WAYS
def test_an_abort_ends_the_request_at_once_and_vllm_drops_it(make: MakeFaked, public: bool) -> None:
    faked = make(public=public)
    request = faked.accepted()
    faked.core.emit({"request_id": request.request_id, "new_token_ids": HELLO[:1]})
    wait_for(lambda: faked.sink.steps_of(request))
    faked.engine.abort(request.request_id)
    assert faked.sink.result(request)[-1].finish_reason == "cancelled"
    wait_for(lambda: faked.core.aborted == [request.request_id])
    faked.core.emit({"request_id": request.request_id, "new_token_ids": HELLO[1:], "finish_reason": "length"})
    other = faked.accepted()
    faked.core.emit({"request_id": other.request_id, "new_token_ids": HELLO, "finish_reason": "length"})
    faked.sink.result(other)
    assert text_of(faked, request) == "Hello"


@WAYS
def test_an_abort_brings_the_text_that_waits_for_the_rest_of_a_character(make: MakeFaked, public: bool) -> None:
    faked = make(public=public)
    request = faked.accepted()
    (first, *_) = TOKENIZER.encode("💻", add_special_tokens=False).ids
    faked.core.emit({"request_id": request.request_id, "new_token_ids": [first]})
    wait_for(lambda: faked.sink.steps_of(request))
    faked.engine.abort(request.request_id)
    assert text_of(faked, request) == "\ufffd"


@WAYS
def test_an_abort_in_the_turn_of_an_output_loses_none_of_it(make: MakeFaked, public: bool) -> None:
    faked = make(public=public)
    request = faked.accepted()

    def at_once() -> None:
        faked.core.emit_now({"request_id": request.request_id, "new_token_ids": HELLO})
        faked.core.loop.call_soon(faked.engine._abort, request.request_id)

    faked.core.loop.call_soon_threadsafe(at_once)
    assert text_of(faked, request) == "Hello world"
    assert [step.finish_reason for step in faked.sink.steps_of(request)] == [None, "cancelled"]


@WAYS
def test_an_abort_of_an_unknown_or_ended_request_is_nothing(make: MakeFaked, public: bool) -> None:
    faked = make(public=public)
    request = faked.accepted()
    faked.core.emit({"request_id": request.request_id, "new_token_ids": HELLO, "finish_reason": "length"})
    faked.sink.result(request)
    faked.engine.abort(request.request_id)
    faked.engine.abort("never seen")
    faked.engine.stop()
    assert len(faked.sink.steps_of(request)) == 1
    assert faked.core.aborted == []


@WAYS
@pytest.mark.parametrize(
    ("reason", "kind", "expected"),
    [
        ("error", EngineError, "vLLM ended the request with an error; the server's log has the cause"),
        (
            "abort",
            UnavailableError,
            f"vLLM's engine core was told to end, and has ended the request{ASK_ANOTHER}",
        ),
        ("novel", EngineError, "vLLM ended the request with the unknown finish reason 'novel'"),
    ],
)
def test_an_end_that_is_none_of_an_answer_is_an_error(
    make: MakeFaked, public: bool, reason: str, kind: type[Exception], expected: str
) -> None:
    faked = make(public=public)
    request = faked.accepted()
    faked.core.emit({"request_id": request.request_id, "new_token_ids": HELLO, "finish_reason": reason})
    step = faked.sink.result(request)[-1]
    assert isinstance(step.error, kind)
    assert str(step.error) == expected
    assert step.finish_reason is None
    assert faked.engine.health().alive


@WAYS
@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (
            VLLMValidationError("Invalid structured outputs: no rule 'root'"),
            ErrorCode.INVALID_ARGUMENT,
            "guided_grammar: vLLM refused it: Invalid structured outputs: no rule 'root'",
        ),
        (
            RetryableRequestError("Generation is paused."),
            ErrorCode.UNAVAILABLE,
            f"vLLM can't take the request now: RetryableRequestError: Generation is paused{ASK_ANOTHER}",
        ),
        (
            GenerationError("The cache has no such block."),
            ErrorCode.INTERNAL,
            "vLLM failed: GenerationError: The cache has no such block.",
        ),
    ],
)
def test_the_client_reads_why_the_core_refused_its_request(
    make: MakeFaked, public: bool, error: Exception, code: ErrorCode, expected: str
) -> None:
    faked = make(version="0.33.0", public=public)
    refused, other = faked.accepted(guided_grammar="x ::= y"), faked.accepted()
    why = SimpleNamespace(to_exception=lambda: error)
    faked.core.emit(
        {"request_id": refused.request_id, "finish_reason": "error", "error": why},
        {"request_id": other.request_id, "new_token_ids": HELLO, "finish_reason": "length"},
    )
    (step,) = faked.sink.result(refused)
    assert step.error is not None
    assert (step.error.code, str(step.error)) == (code, expected)
    assert text_of(faked, other) == "Hello world"
    assert faked.core.aborted == []


@WAYS
def test_the_death_of_the_core_is_seen_and_answers_every_request(make: MakeFaked, public: bool) -> None:
    faked = make(public=public)
    requests = [faked.accepted() for _ in range(3)]
    assert faked.engine.health().alive
    faked.core.die()
    for request in requests:
        assert isinstance(faked.sink.result(request)[-1].error, UnavailableError)
    wait_for(lambda: not faked.engine.health().alive)
    assert faked.engine.health().reason == "vLLM's engine core has died; the server's log has the cause"
    error = faked.refused()
    assert error.code is ErrorCode.UNAVAILABLE
    assert "has died" in str(error)


@WAYS
def test_stop_ends_every_request_and_may_come_twice(make: MakeFaked, public: bool) -> None:
    faked = make(public=public)
    requests = [faked.accepted() for _ in range(3)]
    llm = faked.engine._llm
    faked.engine.stop()
    assert [faked.sink.steps_of(request)[-1].finish_reason for request in requests] == ["cancelled"] * 3
    assert sorted(faked.core.aborted) == sorted(request.request_id for request in requests)
    faked.engine.stop()
    assert llm.num_shutdowns == 1
    assert isinstance(faked.refused(), UnavailableError)
    assert not faked.engine.health().alive
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(("vllm", "tokenizer"))]


@pytest.mark.slow
@WAYS
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.lists(st.tuples(st.sampled_from(["token", "end", "abort"]), st.integers(0, 3)), max_size=25),
    whole=st.booleans(),
)
def test_every_request_gets_exactly_one_last_step(
    make: MakeFaked, public: bool, data: list[tuple[str, int]], whole: bool
) -> None:
    faked = make(public=public)
    requests = [faked.accepted(wants_steps=not whole) for _ in range(4)]
    for event, number in data:
        request_id = requests[number].request_id
        if event == "abort":
            faked.engine.abort(request_id)
        else:
            ended = "length" if event == "end" else None
            faked.core.emit({"request_id": request_id, "new_token_ids": HELLO[:1], "finish_reason": ended})
    faked.engine.stop()
    for request in requests:
        steps = faked.sink.steps_of(request)
        assert [bool(step.finish_reason or step.error) for step in steps] == [False] * (len(steps) - 1) + [True]


# Start


def engine_of(folder: Path, document: dict[str, Any]) -> VllmEngine:
    engine = create_engine(parse_config(document, version_dir=folder))
    assert isinstance(engine, VllmEngine)
    return engine


def document(**given: Any) -> dict[str, Any]:
    return {"model": "m", **given, "triton_config": {"engine": "vllm"}}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (None, "release.yaml: can't be read: No such file or directory; generate the repository with"),
        ("release: 1.2.1\n", "release.yaml: not the record of a vLLM version; generate the repository again"),
        ("[", "release.yaml: not YAML"),
        ("- 1\n", "release.yaml: not the record of a vLLM version"),
    ],
)
def test_without_a_record_of_vllm_nothing_starts(tmp_path: Path, record: str | None, expected: str) -> None:
    if record is not None:
        (tmp_path / "release.yaml").write_text(record)
    with pytest.raises(ConfigError) as caught:
        engine_of(tmp_path, document()).start()
    assert expected in str(caught.value)


def test_another_version_is_refused_unless_it_is_allowed(make: MakeFaked, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(EngineError, match=r"generated for vLLM 0\.24\.0, but 0\.25\.1 is installed"):
        make(installed="0.25.1")
    assert make(installed="0.24.0+cu130").engine.health().alive
    assert make(installed="0.25.1", options={"allow_version_mismatch": True}).engine.health().alive
    assert "vLLM 0.25.1 runs a repository generated for 0.24.0" in caplog.text


def test_an_unknown_engine_option_is_refused(tmp_path: Path) -> None:
    given = {"model": "m", "triton_config": {"engine": "vllm", "engine_options": {"allow_mismatch": True}}}
    with pytest.raises(ConfigError, match="allow_mismatch: unknown key; known for vllm: allow_version_mismatch"):
        engine_of(tmp_path, given)


def test_an_unknown_engine_argument_is_refused_with_the_nearest(make: MakeFaked) -> None:
    with pytest.raises(ConfigError) as caught:
        make(max_model_length=5, enable_expert_paralel=True)
    assert caught.value.problems == (
        "max_model_length: vLLM has no such engine argument, did you mean max_model_len?",
        "enable_expert_paralel: vLLM has no such engine argument, did you mean enable_expert_parallel?",
    )


def test_without_vllm_the_error_says_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "release.yaml").write_text(load_vllm("0.24.0").text)
    found = importlib.import_module

    def without(name: str) -> Any:
        if name == "vllm":
            raise ModuleNotFoundError("No module named 'vllm'", name="vllm")
        return found(name)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(EngineError) as caught:
        VllmEngine(parse_config(document(), version_dir=tmp_path)).start()
    assert "install vllm==0.24.0; it is part of nvcr.io/nvidia/tritonserver:26.07-vllm-python-py3" in str(caught.value)


@pytest.mark.parametrize("error", [ValueError("no such quantization"), SystemExit(3)])
def test_a_load_that_fails_says_why(make: MakeFaked, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    monkeypatch.setattr(FakeAsyncLLM, "load_error", error)
    with pytest.raises(EngineError, match="vLLM can't load m: "):
        make()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(("vllm", "tokenizer"))]


def test_what_model_yaml_leaves_open_is_chosen(
    make: MakeFaked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    args = make(model="tiny").engine._llm.args
    assert (args.model, args.disable_log_stats, args.shutdown_timeout) == (str(tmp_path / "tiny"), True, 600)
    assert args.structured_outputs_config == {"backend": "xgrammar"}
    assert make(model="deepseek-ai/DeepSeek-R1", shutdown_timeout=7).engine._llm.args.shutdown_timeout == 7


def test_the_engine_says_what_it_can_do(make: MakeFaked) -> None:
    known = make().engine.capabilities
    assert known.max_seq_len == MAX_MODEL_LEN
    assert known.max_prompt_bytes == MAX_MODEL_LEN * max(len(token.encode()) for token in TOKENIZER.get_vocab())
    assert known.bos_token == "<｜begin▁of▁sentence｜>"
    assert known.whole_answers
    assert not known.priority
    assert known.unsupported == {"priority": "needs the engine argument scheduling_policy: priority"}


def test_nothing_happens_before_the_start(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, document())
    engine.stop()
    engine.abort("r1")
    assert not engine.health().alive
    assert engine.stats() == EngineStats(num_running=0, num_waiting=0, extra=engine.stats().extra)
    with pytest.raises(RuntimeError):
        engine.submit(GenerateRequest(request_id="r", prompt="p", sampling=SamplingParams(), max_tokens=1), Sink())


def test_a_conversation_is_rendered_by_the_checkpoints_own_template(make: MakeFaked) -> None:
    assert make().engine.render_chat([{"role": "user", "content": "Why?"}], {}) == "user: Why?\n"


def test_the_tokenizer_serves_the_tasks(make: MakeFaked) -> None:
    engine = make().engine
    ids = engine.tokenizer.encode("the", True)

    assert engine.tokenizer.decode(ids, skip_special_tokens=False) == "<｜begin▁of▁sentence｜>the"
    assert engine.tokenizer.decode(ids, skip_special_tokens=True) == "the"
    assert engine.tokenizer.vocab_size == TOKENIZER.get_vocab_size()
    assert engine.tokenizer.chat_template is None
    assert engine.capabilities.version == sys.modules["vllm"].__version__


# Numbers


def scheduler_stats(**given: Any) -> SimpleNamespace:
    empty = {"num_running_reqs": 0, "num_waiting_reqs": 0, "kv_cache_usage": 0.0, "spec_decoding_stats": None}
    return SimpleNamespace(**{**empty, "prefix_cache_stats": SimpleNamespace(queries=0, hits=0), **given})


def test_the_numbers_are_the_schedulers(make: MakeFaked) -> None:
    faked = make()
    requests = [faked.accepted() for _ in range(3)]
    drafts, prefix = SimpleNamespace(num_draft_tokens=4, num_accepted_tokens=3), SimpleNamespace(queries=50, hits=32)
    for _ in range(2):
        stats = scheduler_stats(
            num_running_reqs=2, kv_cache_usage=0.5, spec_decoding_stats=drafts, prefix_cache_stats=prefix
        )
        faked.core.emit({"request_id": requests[0].request_id, "new_token_ids": HELLO[:1]}, scheduler_stats=stats)
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
        faked.sink.result(request)
    stats = faked.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)


def test_the_numbers_of_data_parallel_ranks_are_added(make: MakeFaked) -> None:
    faked = make(public=True)
    for _ in range(5):
        faked.accepted()
    (numbers,) = faked.engine._llm.stat_loggers
    numbers.record(scheduler_stats(num_running_reqs=2, kv_cache_usage=0.2), None, engine_idx=0)
    numbers.record(scheduler_stats(num_running_reqs=1, kv_cache_usage=0.4), None, mm_cache_stats=None, engine_idx=1)
    numbers.record(None, None)
    stats = faked.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (3, 2, round(0.3 * NUM_BLOCKS))


@WAYS
def test_statistics_that_can_not_be_read_end_nothing(
    make: MakeFaked, public: bool, caplog: pytest.LogCaptureFixture
) -> None:
    faked = make(public=public)
    request = faked.accepted()
    (numbers,) = faked.engine._llm.stat_loggers
    for _ in range(2):
        faked.core.emit(
            {"request_id": request.request_id, "new_token_ids": HELLO[:1]}, scheduler_stats=SimpleNamespace()
        )
        # On the loop thread, as vLLM calls it: two threads at once could both log.
        faked.core.loop.call_soon_threadsafe(numbers.record, SimpleNamespace(), None)
    faked.core.emit({"request_id": request.request_id, "finish_reason": "length"})
    assert text_of(faked, request) == "HelloHello"
    assert faked.engine.stats().kv_blocks_total == NUM_BLOCKS
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [
        "vLLM's scheduler statistics can't be read; their metrics stay as they are"
    ]


def test_the_record_is_what_the_metrics_name(tmp_path: Path) -> None:
    from deepseek_backend.metrics.backend_metrics import info

    (tmp_path / "release.yaml").write_text(load_vllm("0.24.0").text)
    assert info(parse_config(document(), version_dir=tmp_path))["release"] == "0.24.0"
