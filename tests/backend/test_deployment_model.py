"""The scheduler and the deployment model together, on a virtual clock: no test sleeps."""

import copy
import functools
import operator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_backend.engines.simulated.presets import LATENT, NUM_LAYERS, PRESETS, find_preset
from deepseek_backend.engines.simulated.scheduler import BatchLimits, RankLoad, ScheduledRow, Scheduler
from deepseek_backend.engines.simulated.simulated_options import parse_options
from deepseek_backend.errors import ConfigError

THROUGHPUT_B200 = PRESETS["b200x8-r1-fp4-max-throughput"]
LATENCY_B200 = PRESETS["b200x8-r1-fp4-min-latency"]


def output_tokens_per_second(preset, concurrency, waves):
    """Simulate requests of 1,024 prompt and 2,048 output tokens, which all wait from the start, on one of the ranks."""
    deployment = preset.deployment
    limits = BatchLimits(
        max_batch_size=min(preset.max_batch_size, concurrency // deployment.num_ranks),
        max_num_tokens=preset.max_num_tokens,
        tokens_per_block=32,
        num_blocks=deployment.kv_cache_tokens // 32,
        num_draft_tokens=deployment.num_draft_tokens,
        tokens_per_step=preset.tokens_per_step,
    )
    scheduler = Scheduler(limits)
    num_requests = concurrency // deployment.num_ranks * waves
    for _ in range(num_requests):
        scheduler.add(ScheduledRow(num_input_tokens=1024, max_tokens=2048, length=2048))
    seconds = 0.0
    while not scheduler.idle:
        seconds += deployment.step_seconds(scheduler.step().loads * deployment.num_ranks)
    return num_requests * 2048 * deployment.num_ranks / seconds


PUBLISHED = {  # preset and concurrency -> output tokens a second
    ("b200x8-r1-fp4-min-latency", 1): 274.4168,
    ("b200x8-r1-0528-fp4-fp8kv-max-throughput", 7168): 43146.2042,
    ("b200x8-r1-fp4-max-throughput", 3072): 36384.0838,
    ("h200x8-r1-fp8-min-latency", 1): 158.0669,
    ("h200x8-r1-fp8-max-throughput", 1024): 11489.2671,
}


@pytest.mark.slow
def test_total_output_throughput_is_the_published_one():
    """The source is "How to get best performance on DeepSeek-R1 in TensorRT LLM"; three waves in place of up to 16."""
    found = {case: output_tokens_per_second(PRESETS[case[0]], case[1], waves=3) for case in PUBLISHED}
    assert found == pytest.approx(PUBLISHED, rel=0.05)


def test_a_figure_that_was_not_used_for_the_fit():
    """It is 111 tokens/s at batch 1 without MTP: TensorRT-LLM tech blog 1, table of autoregressive MTP layers."""
    without_mtp = replace(
        LATENCY_B200, deployment=replace(LATENCY_B200.deployment, num_draft_tokens=0), tokens_per_step=1.0
    )
    assert output_tokens_per_second(without_mtp, 1, waves=1) == pytest.approx(111, rel=0.05)


def test_kv_memory_is_what_weights_and_workspace_leave():
    """Tech blog 3 gives about 100 GB a GPU for FP4 R1 under attention DP."""
    deployment = replace(THROUGHPUT_B200.deployment, kv_memory_fraction=1.0)
    assert deployment.kv_cache_tokens * NUM_LAYERS * LATENT * 2 == pytest.approx(100e9, rel=0.01)
    for name in ("b200x8-r1-fp4-max-throughput", "h200x8-r1-fp8-max-throughput"):
        preset = PRESETS[name]
        assert preset.deployment.kv_cache_tokens >= preset.max_batch_size * (1024 + 2048), "the batch that was run"


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(1, 384), st.integers(0, 4096)), min_size=8, max_size=8),
    st.integers(0, 7),
    st.sampled_from(sorted(PRESETS)),
)
def test_more_work_never_takes_less_time(ranks, busier, name):
    deployment = PRESETS[name].deployment
    loads = [
        RankLoad(num_decodes=rows, context_tokens=rows * context) for rows, context in ranks[: deployment.num_ranks]
    ]
    seconds = deployment.step_seconds(loads)
    load = loads[busier % deployment.num_ranks]
    load.num_decodes += 1
    assert deployment.step_seconds(loads) >= seconds
    load.prefill_tokens += 1024
    assert deployment.step_seconds(loads) > seconds


def test_what_takes_more_time():
    deployment = LATENCY_B200.deployment
    first, last = (RankLoad(prefill_tokens=1024, prefill_pairs=1024 * before) for before in (512, 65_536))
    assert deployment.step_seconds([last]) > 1.1 * deployment.step_seconds([first])
    deployment = THROUGHPUT_B200.deployment
    busy, idle = RankLoad(num_decodes=64, context_tokens=1_000_000), RankLoad(num_decodes=64)
    balanced = [RankLoad(num_decodes=64, context_tokens=125_000)] * 8
    assert deployment.step_seconds([idle] * 7 + [busy]) > deployment.step_seconds(balanced)
    # One token uses 8 of 256 experts: a small batch takes far less time than one that uses all, but more per row.
    deployment = replace(LATENCY_B200.deployment, num_draft_tokens=0)
    overhead = deployment.step_seconds([RankLoad()])
    one, many = (deployment.step_seconds([RankLoad(num_decodes=rows)]) - overhead for rows in (1, 64))
    assert 4 * one < many < 64 * one


def limits(**changes):
    defaults = {"max_batch_size": 4, "max_num_tokens": 32, "tokens_per_block": 4, "num_blocks": 100}
    return BatchLimits(**{**defaults, **changes})


def row(num_input_tokens=4, length=4):
    return ScheduledRow(num_input_tokens=num_input_tokens, max_tokens=length, length=length)


def added(scheduler, *rows):
    for one in rows:
        scheduler.add(one)
    return rows


def test_the_queue_is_kept():
    scheduler = Scheduler(limits(max_num_tokens=10))
    first, second = added(scheduler, row(10), row(10))
    assert scheduler.step().moved == [first]
    iteration = scheduler.step()  # 1 of 10 tokens is taken: the second prompt doesn't fit
    assert (iteration.moved, iteration.loads[0].prefill_tokens) == ([first], 0)
    scheduler.remove(first)
    assert scheduler.step().moved == [second]
    scheduler = Scheduler(limits(num_blocks=5))
    running, head, small = added(scheduler, row(8, 4), row(12, 4), row(1, 1))
    assert scheduler.step().moved == [running]
    assert list(scheduler.waiting) == [head, small]


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(-2, 2), st.booleans()), max_size=30))
def test_the_queue_is_in_order_of_priority_and_of_arrival_among_equals(arrivals):
    """An arrival is a priority, and whether the row at the head leaves the queue after it."""
    scheduler, expected = Scheduler(limits()), []
    for number, (priority, leaves) in enumerate(arrivals):
        one = ScheduledRow(num_input_tokens=number, max_tokens=1, length=1, priority=priority)
        scheduler.add(one)
        expected = sorted([*expected, one], key=lambda other: (-other.priority, other.num_input_tokens))
        if leaves:
            scheduler.remove(expected.pop(0))
        assert list(scheduler.waiting) == expected


def test_a_prompt_longer_than_the_budget_runs_in_chunks():
    scheduler = Scheduler(limits(max_num_tokens=8))
    (long,) = added(scheduler, row(20, 2))
    chunks = [scheduler.step() for _ in range(4)]
    assert [chunk.loads[0].prefill_tokens for chunk in chunks] == [8, 8, 4, 0]
    assert [chunk.moved for chunk in chunks] == [[], [], [long], [long]]
    assert sum(chunk.loads[0].prefill_pairs for chunk in chunks) == 20 * 20 / 2


def test_blocks_are_reserved_for_prompt_and_max_tokens_and_freed_at_the_end():
    scheduler = Scheduler(limits())
    added(scheduler, row(5, 4))
    used = []
    while not scheduler.idle:
        scheduler.step()
        used.append(scheduler.num_blocks_used)
    assert used == [3, 3, 3, 0]


def test_requests_go_to_the_rank_with_the_fewest_rows():
    scheduler = Scheduler(limits(), num_ranks=3)
    rows = added(scheduler, *(row() for _ in range(6)))
    scheduler.step()
    assert [rank.num_running for rank in scheduler.ranks] == [2, 2, 2]
    assert [scheduler.ranks.index(one.rank) for one in rows] == [0, 1, 2, 0, 1, 2]


def test_drafts_make_the_average_burst_the_acceptance_length():
    scheduler = Scheduler(limits(num_draft_tokens=3, tokens_per_step=2.82))
    (only,) = added(scheduler, row(1, 283))
    iterations = 0
    while not scheduler.idle:
        assert scheduler.step().loads[0].num_decodes <= 1
        iterations += 1
    assert (only.generated, iterations) == (283, 101)  # the prompt's token, then 282 in 100 iterations
    assert (scheduler.num_drafted, scheduler.num_accepted) == (300, 182)


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 60), st.integers(1, 20), st.integers(0, 40)), max_size=30),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([(0, 1.0), (1, 1.7), (3, 2.82)]),
)
def test_the_limits_hold_in_every_iteration(requests, max_batch_size, num_ranks, drafts):
    """A request is its iteration of arrival, prompt length, output length, and iteration of the abort."""
    num_draft_tokens, tokens_per_step = drafts
    bounds = limits(
        max_batch_size=max_batch_size,
        max_num_tokens=max(20, max_batch_size * (1 + num_draft_tokens)),
        num_blocks=20,
        num_draft_tokens=num_draft_tokens,
        tokens_per_step=tokens_per_step,
    )
    scheduler = Scheduler(bounds, num_ranks=num_ranks)
    coming = [(arrival, abort, row(prompt, length)) for arrival, prompt, length, abort in requests]
    open_rows, ended = [], []
    for now in range(10_000):
        for _, _, one in [request for request in coming if request[0] == now]:
            scheduler.add(one)
            open_rows.append(one)
        for _, _, one in [request for request in coming if request[1] == now and request[2] in open_rows]:
            scheduler.remove(one)
            open_rows.remove(one)
        if now > 40 and scheduler.idle:
            break
        contexts = [
            sum(one.num_input_tokens + one.generated for one in open_rows if one.rank is rank and one.generated)
            for rank in scheduler.ranks
        ]
        iteration = scheduler.step()
        if not iteration.loads:
            assert scheduler.idle
            continue
        assert [load.context_tokens for load in iteration.loads] == contexts
        for load, rank in zip(iteration.loads, scheduler.ranks, strict=True):
            assert load.num_decodes * bounds.tokens_per_row + load.prefill_tokens <= bounds.max_num_tokens
            assert rank.num_running <= load.num_decodes + load.prefill_tokens
            assert rank.num_running <= bounds.max_batch_size
            assert rank.free_blocks >= 0
        for one in iteration.moved:
            assert one in open_rows
            if one.generated == one.length:
                open_rows.remove(one)
                ended.append(one)
    assert not open_rows
    assert scheduler.idle
    assert scheduler.num_blocks_used == 0


DOCUMENT = {
    "title": "a deployment",
    "source": "made up",
    "num_ranks": 2,
    "num_draft_tokens": 0,
    "tokens_per_step": 1.0,
    "kv_cache_tokens": 100_000,
    "kv_token_bytes": 70_272,
    "max_batch_size": 64,
    "max_num_tokens": 8192,
    "max_seq_len": 16384,
    "pace": {
        "batches": [1, 64],
        "contexts": [1000, 5000],
        "decode": [[10, 20], [40, 60]],
        "prompt_batches": [0, 64],
        "tokens": [1000, 2000],
        "prompt": [[50, 100], [70, 120]],
        "pair_ns": [2.0, 2.0],
    },
}


def step_ms(*loads):
    return find_preset(DOCUMENT).deployment.step_seconds(loads) * 1000


STEPS = [  # loads of the ranks, and milliseconds
    ([RankLoad(1, 1000)] * 2, 10),  # a point of the table
    ([RankLoad(1, 3000)] * 2, 15),  # between contexts
    ([RankLoad(1, 10)] * 2, 10),  # below the first context
    ([RankLoad(127, 127 * 1000)] * 2, 70),  # beyond the last batch
    ([RankLoad(0, 0, 1000, 500_000)] * 2, 50),  # a prompt alone
    ([RankLoad(64, 64 * 5000, 2000, 2_000_000)] * 2, 140),  # a prompt beside long contexts
    ([RankLoad(0, 0, 1000, 1_500_000)] * 2, 52),  # a second chunk
    ([RankLoad(2, 2000), RankLoad(0, 0)], 10),  # the mean of the ranks
]


def test_a_step_takes_what_the_table_says():
    assert [step_ms(*loads) for loads, _ in STEPS] == pytest.approx([expected for _, expected in STEPS])


def test_the_engine_takes_a_document_as_its_preset():
    options = parse_options({"preset": DOCUMENT})
    assert (options.preset, options.deployment.num_ranks, options.paced) == ("a deployment", 2, True)
    assert (options.limits.max_batch_size, options.max_seq_len) == (64, 16384)


DAMAGES = [  # the place, the value put there, and what is said
    (("title",), None, "expected a mapping with title"),
    (("pace", "batches"), [64, 1], "batches: expected two or more rising numbers"),
    (("pace", "prompt", 1), [70], r"prompt\[1\]: expected 2 numbers, got 1"),
    (("pace", "decode", 0, 0), -1, r"decode\[0\]: expected a list of numbers from 0"),
    (("num_ranks",), 0, "num_ranks: expected a whole number from 1, got 0"),
    (("kv_token_bytes",), 0, "kv_token_bytes: expected a number above 0, got 0"),
    (("tokens_per_step",), 2.8, "tokens_per_step: expected a number from 1 to 1"),
]


def test_a_damaged_document_is_refused_by_what_is_wrong(subtests):
    for (*path, last), value, said in DAMAGES:
        document = copy.deepcopy(DOCUMENT)
        place = functools.reduce(operator.getitem, path, document)
        place[last] = value
        if value is None:
            del place[last]
        with subtests.test(said), pytest.raises(ConfigError, match=said):
            parse_options({"preset": document})
