from __future__ import annotations

import itertools
import json
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, DeepseekV32Config, DeepseekV32ForCausalLM

from deepseek_backend.config import BackendConfig
from deepseek_backend.contract import ErrorCode
from deepseek_backend.engines import create_engine
from deepseek_backend.engines.base import Step
from deepseek_backend.engines.transformers import TransformersEngine
from deepseek_backend.engines.transformers.model_runner import ModelRunner
from deepseek_backend.errors import ConfigError, EngineError, RequestError, UnavailableError
from deepseek_backend.request import GenerateRequest, SamplingParams
from deepseek_backend.tiny_checkpoint import DEMO_MAX_TOKENS, DEMO_PROMPTS, ensure_tiny_checkpoint

TIMEOUT_S = 120
PROMPT = DEMO_PROMPTS[0]


@dataclass
class Answer:
    """What came for one request."""

    steps: list[Step] = field(default_factory=list)
    started: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def text(self) -> str:
        return "".join(step.text for step in self.steps)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for step in self.steps for token_id in step.token_ids]

    @property
    def last(self) -> Step:
        assert self.done.wait(TIMEOUT_S), "no last step"
        return self.steps[-1]


class Collector:
    """A sink that holds the engine to the protocol: one call at a time, one last step, nothing after it."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.call_sizes: list[int] = []
        self._busy = threading.Lock()

    def on_steps(self, steps: Sequence[tuple[GenerateRequest, Step]]) -> None:
        assert self._busy.acquire(blocking=False), "two calls at once"
        self.call_sizes.append(len(steps))
        for request, step in steps:
            answer = self.answers[request.request_id]
            assert not answer.done.is_set(), "a step after the last one"
            assert (step.finish_reason is None) or (step.error is None)
            answer.steps.append(step)
            answer.started.set()
            if step.finish_reason is not None or step.error is not None:
                answer.done.set()
        self._busy.release()


_ids = itertools.count()


def submit(
    engine: TransformersEngine, collector: Collector, prompt: str = PROMPT, max_tokens: int = 8, **sampling: Any
) -> tuple[str, Answer]:
    request_id = str(next(_ids))
    request = GenerateRequest(
        request_id=request_id, prompt=prompt, sampling=SamplingParams(**sampling), max_tokens=max_tokens
    )
    answer = collector.answers[request_id] = Answer()
    engine.submit(request, collector)
    return request_id, answer


def generate(engine: TransformersEngine, prompt: str = PROMPT, max_tokens: int = 8, **sampling: Any) -> Answer:
    _, answer = submit(engine, Collector(), prompt, max_tokens, **sampling)
    assert answer.last
    return answer


def config(model: str | Path, version_dir: Path = Path(), **options: Any) -> BackendConfig:
    return BackendConfig(
        engine="transformers",
        llm_args={"model": str(model)},
        engine_options={"device": "cpu", **options},
        version_dir=version_dir,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_tiny_checkpoint(tmp_path_factory.getbasetemp() / "cache")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[TransformersEngine]:
    """Has fewer slots than the largest test has requests, so that rows wait, join and leave."""
    engine = TransformersEngine(config(folder, max_num_seqs=5))
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
def own_engine(folder: Path) -> Iterator[TransformersEngine]:
    """One to stop or break."""
    engine = TransformersEngine(config(folder, max_num_seqs=2))
    engine.start()
    yield engine
    engine.stop()


# --- generation ------------------------------------------------------------------------------------------------------


def test_concurrent_requests_say_what_they_say_alone_and_what_generate_says(
    engine: TransformersEngine, folder: Path, tokenizer: Tokenizer
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    collector = Collector()
    jobs = [(prompt, max_tokens) for max_tokens in (3, 17, 33, DEMO_MAX_TOKENS) for prompt in DEMO_PROMPTS]
    answers = {job: submit(engine, collector, *job)[1] for job in jobs}
    for prompt in DEMO_PROMPTS:
        input_ids = torch.tensor([tokenizer.encode(prompt).ids])
        (output,) = model.generate(input_ids, do_sample=False, max_new_tokens=DEMO_MAX_TOKENS)
        expected = output[input_ids.shape[1] :].tolist()
        for max_tokens in (3, 17, 33, DEMO_MAX_TOKENS):
            answer = answers[prompt, max_tokens]
            assert answer.last.finish_reason == "length"
            assert answer.token_ids == expected[:max_tokens]
            assert answer.text == tokenizer.decode(expected[:max_tokens])
            alone = generate(engine, prompt, max_tokens)
            assert (alone.text, alone.token_ids) == (answer.text, answer.token_ids)
    assert max(collector.call_sizes) >= 5, "never ran as one batch"


def test_counts_the_prompt_with_bos_unless_told_otherwise(engine: TransformersEngine, tokenizer: Tokenizer) -> None:
    num_tokens = len(tokenizer.encode(PROMPT).ids)
    assert {step.num_input_tokens for step in generate(engine).steps} == {num_tokens}
    assert generate(engine, add_special_tokens=False).last.num_input_tokens == num_tokens - 1


def test_a_seed_repeats_whatever_runs_beside_it(engine: TransformersEngine) -> None:
    alone = generate(engine, max_tokens=30, temperature=0.8, seed=11)
    collector = Collector()
    others = [submit(engine, collector, prompt, 20)[1] for prompt in DEMO_PROMPTS[1:]]
    _, again = submit(engine, collector, max_tokens=30, temperature=0.8, seed=11)
    _, different = submit(engine, collector, max_tokens=30, temperature=0.8, seed=12)
    assert all(answer.last for answer in (again, different, *others))
    assert again.text == alone.text != different.text


def test_stop_token_ends_the_text_and_is_counted_but_not_said(engine: TransformersEngine, tokenizer: Tokenizer) -> None:
    free = generate(engine, max_tokens=10)
    stop_id = free.token_ids[6]
    end = free.token_ids.index(stop_id) + 1
    stopped = generate(engine, max_tokens=10, stop_token_ids=(stop_id, 10**6))
    assert (stopped.last.finish_reason, stopped.last.stop_reason) == ("stop", stop_id)
    assert stopped.token_ids == free.token_ids[:end]
    assert stopped.text == tokenizer.decode(free.token_ids[: end - 1])


def test_min_tokens_puts_the_stop_off(engine: TransformersEngine) -> None:
    first = generate(engine, max_tokens=1).token_ids[0]
    answer = generate(engine, max_tokens=6, min_tokens=4, stop_token_ids=(first,))
    assert first not in answer.token_ids[:4]
    assert len(answer.token_ids) >= 5


@pytest.mark.parametrize("as_list", [False, True])
def test_end_token_of_the_generation_config_ends_the_text(
    engine: TransformersEngine, folder: Path, tmp_path: Path, as_list: bool
) -> None:
    free = generate(engine, max_tokens=12)
    eos = free.token_ids[8]
    end = free.token_ids.index(eos) + 1
    copy = shutil.copytree(folder, tmp_path / "checkpoint")
    generation_config = json.loads((copy / "generation_config.json").read_text())
    generation_config["eos_token_id"] = [1, eos] if as_list else eos
    (copy / "generation_config.json").write_text(json.dumps(generation_config))
    other = TransformersEngine(config(copy))
    other.start()
    try:
        answer = generate(other, max_tokens=12)
        assert (answer.last.finish_reason, answer.last.stop_reason) == ("stop", None)
        assert answer.token_ids == free.token_ids[:end]
        assert free.text.startswith(answer.text)
        ignored = generate(other, max_tokens=12, ignore_eos=True)
        assert (ignored.text, ignored.last.finish_reason) == (free.text, "length")
    finally:
        other.stop()


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def short_engine(folder: Path) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(config(folder, max_seq_len=10))
    engine.start()
    yield engine
    engine.stop()


def test_max_tokens_is_cut_to_the_room_left(short_engine: TransformersEngine) -> None:
    answer = generate(short_engine, max_tokens=1000)
    assert answer.last.finish_reason == "length"
    assert len(answer.token_ids) == 10 - answer.last.num_input_tokens
    assert short_engine.capabilities.max_seq_len == 10


def test_longest_prompt_gets_one_token(short_engine: TransformersEngine) -> None:
    answer = generate(short_engine, " the" * 8, max_tokens=5)
    assert (answer.last.num_input_tokens, len(answer.token_ids)) == (9, 1)


def test_too_long_a_prompt_is_refused_with_both_numbers(short_engine: TransformersEngine) -> None:
    error = generate(short_engine, " the" * 9).last.error
    assert isinstance(error, RequestError)
    assert error.code is ErrorCode.PROMPT_TOO_LONG
    assert "10 tokens and at most 9 fit" in str(error)


def test_a_prompt_without_tokens_is_refused(engine: TransformersEngine) -> None:
    error = generate(engine, "", add_special_tokens=False).last.error
    assert isinstance(error, RequestError)
    assert generate(engine).last.finish_reason == "length"


def test_context_may_outgrow_the_first_cache(engine: TransformersEngine) -> None:
    """Past 256 tokens the cache doubles; beside it a short request goes on unharmed."""
    expected = generate(engine, max_tokens=DEMO_MAX_TOKENS).text
    collector = Collector()
    _, long = submit(engine, collector, " time" * 240, max_tokens=40)
    _, short = submit(engine, collector, max_tokens=DEMO_MAX_TOKENS)
    assert long.last.finish_reason == "length"
    assert short.last
    assert short.text == expected


# --- life cycle ------------------------------------------------------------------------------------------------------


def test_abort_ends_running_and_waiting_requests(own_engine: TransformersEngine) -> None:
    collector = Collector()
    running = [submit(own_engine, collector, max_tokens=4000) for _ in range(2)]
    for _, answer in running:
        assert answer.started.wait(TIMEOUT_S)
    waiting_id, waiting = submit(own_engine, collector, max_tokens=4000)
    own_engine.abort(waiting_id)
    assert waiting.last.finish_reason == "cancelled"
    assert waiting.token_ids == []
    running_id, answer = running[0]
    own_engine.abort(running_id)
    assert answer.last.finish_reason == "cancelled"
    assert len(answer.token_ids) < 4000
    assert not running[1][1].done.is_set()
    own_engine.abort(running_id)
    own_engine.abort("nobody")
    assert generate(own_engine).last.finish_reason == "length"


def test_stats_count_running_and_waiting(own_engine: TransformersEngine) -> None:
    collector = Collector()
    answers = [submit(own_engine, collector, max_tokens=4000)[1] for _ in range(3)]
    for answer in answers[:2]:
        assert answer.started.wait(TIMEOUT_S)
    stats = own_engine.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 1)
    assert 0 < stats.kv_blocks_used < stats.kv_blocks_total == 2 * 4096


def test_stop_cancels_what_is_open_and_refuses_what_comes(own_engine: TransformersEngine) -> None:
    collector = Collector()
    answers = [submit(own_engine, collector, max_tokens=4000)[1] for _ in range(4)]
    assert answers[0].started.wait(TIMEOUT_S)
    own_engine.stop()
    own_engine.stop()
    assert {answer.last.finish_reason for answer in answers} == {"cancelled"}
    assert not own_engine.health().alive
    _, late = submit(own_engine, collector)
    assert isinstance(late.last.error, UnavailableError)
    assert own_engine.stats().num_running == 0


def test_stop_cancels_what_the_thread_has_not_seen_yet(own_engine: TransformersEngine) -> None:
    """Submitted while the engine is busy delivering, stopped before it looks again."""
    delivering, go_on = threading.Event(), threading.Event()

    class SlowCollector(Collector):
        def on_steps(self, steps: Sequence[tuple[GenerateRequest, Step]]) -> None:
            delivering.set()
            assert go_on.wait(TIMEOUT_S)
            super().on_steps(steps)

    collector = SlowCollector()
    submit(own_engine, collector, max_tokens=4000)
    assert delivering.wait(TIMEOUT_S)
    _, unseen = submit(own_engine, collector)
    stopper = threading.Thread(target=own_engine.stop)
    stopper.start()
    while own_engine.health().alive:
        time.sleep(0.001)
    go_on.set()
    stopper.join()
    assert unseen.last.finish_reason == "cancelled"


def test_before_start_nothing_is_served(folder: Path) -> None:
    engine = TransformersEngine(config(folder))
    assert not engine.health().alive
    assert isinstance(generate(engine).last.error, UnavailableError)
    engine.stop()
    with pytest.raises(RuntimeError, match="start"):
        _ = engine.capabilities


@pytest.mark.parametrize("forward", ["prefill", "decode"])
def test_a_failing_forward_pass_fails_every_request_and_the_engine(
    own_engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch, forward: str
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of\nmemory")

    collector = Collector()
    answers = [submit(own_engine, collector, max_tokens=4000)[1] for _ in range(2)]
    assert all(answer.started.wait(TIMEOUT_S) for answer in answers)
    answers += [submit(own_engine, collector, max_tokens=4000)[1] for _ in range(2)]
    monkeypatch.setattr(ModelRunner, forward, fail)
    own_engine.abort(next(iter(collector.answers)))  # makes room for a prefill
    errors = [answer.last.error for answer in answers[1:]]
    assert all(isinstance(error, EngineError) for error in errors)
    assert answers[0].last.finish_reason == "cancelled" or isinstance(answers[0].last.error, EngineError)
    health = own_engine.health()
    assert not health.alive
    assert health.reason == "the engine has failed: RuntimeError: out of memory"
    assert isinstance(generate(own_engine).last.error, UnavailableError)


# --- configuration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        pytest.param({"max_num_seq": 4}, r"max_num_seq: unknown option; known: device, dtype", id="unknown"),
        pytest.param({"max_num_seqs": 0}, r"max_num_seqs: expected a whole number from 1, got 0", id="no slots"),
        pytest.param({"max_num_seqs": True}, r"max_num_seqs: expected a whole number", id="bool"),
        pytest.param({"max_seq_len": 1}, r"max_seq_len: expected a whole number from 2, got 1", id="no room"),
        pytest.param({"num_threads": "2"}, r"num_threads: expected a whole number from 1, got '2'", id="string"),
        pytest.param({"dtype": "fp8"}, r"dtype: expected one of float32, bfloat16, float16, got 'fp8'", id="dtype"),
        pytest.param(
            {"device": "gpu"}, r"device: expected a torch device such as cpu or cuda:0, got 'gpu'", id="device"
        ),
        pytest.param({"a": 1, "dtype": 3}, r"a: unknown .*; triton_config.engine_options.dtype: expected", id="both"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        TransformersEngine(config("tiny", **options))


def test_a_checkpoint_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    engine = TransformersEngine(config("empty", tmp_path))
    with pytest.raises(EngineError, match=r"can't load the checkpoint 'empty': \w+: ") as caught:
        engine.start()
    assert "\n" not in str(caught.value)
    assert not engine.health().alive


def test_max_seq_len_beyond_the_checkpoint_is_refused(folder: Path) -> None:
    engine = TransformersEngine(config(folder, max_seq_len=5000))
    with pytest.raises(EngineError, match=r"max_seq_len is 5000, .* 4096"):
        engine.start()


def test_model_may_be_relative_to_the_version_folder(folder: Path) -> None:
    engine = create_engine(config(folder.name, folder.parent))
    engine.start()
    try:
        assert engine.capabilities.max_seq_len == 4096
        assert engine.health().alive
    finally:
        engine.stop()


def test_tiny_is_made_in_the_users_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: TransformersEngine
) -> None:
    shutil.copytree(folder, tmp_path / "deepseek-triton" / folder.name)  # or its check would run again
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tiny = TransformersEngine(config("tiny", dtype="bfloat16"))
    tiny.start()
    try:
        assert len(generate(tiny).token_ids) == 8
    finally:
        tiny.stop()


# --- forward passes --------------------------------------------------------------------------------------------------


def tiny_v3(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def tiny_v32(_folder: Path) -> Any:
    """A random V3.2 whose indexer has to choose, as sequences are longer than index_topk.

    With few heads many tokens would score exactly 0, and among those the choice is arbitrary.
    """
    torch.manual_seed(0)
    config = DeepseekV32Config(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=2,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        index_n_heads=16,
        index_head_dim=16,
        index_topk=12,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    return DeepseekV32ForCausalLM(config).eval()


@pytest.mark.parametrize("make_model", [tiny_v3, tiny_v32])
def test_logits_of_a_changing_batch_are_those_of_the_plain_model(folder: Path, make_model: Any) -> None:
    """Rows of mixed lengths join and leave; every row's logits are compared at every step."""
    model = make_model(folder)
    runner = ModelRunner(model, max_num_seqs=3)
    rows: list[list[int]] = []

    def check(logits: torch.Tensor, rows: list[list[int]]) -> None:
        assert logits.shape[0] == len(rows)
        for got, row in zip(logits, rows, strict=True):
            with torch.no_grad():
                expected = model(torch.tensor([row])).logits[0, -1]
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)

    def join(prompt: list[int]) -> None:
        logits = runner.prefill(prompt)
        check(logits, [prompt])
        rows.append([*prompt, int(logits.argmax())])

    def decode(num_steps: int) -> None:
        for _ in range(num_steps):
            logits = runner.decode([row[-1] for row in rows])
            check(logits, rows)
            for row, token_id in zip(rows, logits.argmax(-1).tolist(), strict=True):
                row.append(token_id)
            assert list(runner.lengths) == [len(row) - 1 for row in rows]

    join(list(range(5, 25)))
    decode(2)
    join([7])
    join(list(range(100, 350)))
    decode(8)  # across the first growth of the cache
    runner.remove(0)
    rows[0] = rows.pop()
    decode(2)
    join(list(range(40, 43)))
    decode(2)
    runner.remove(2)
    rows.pop()
    decode(2)
