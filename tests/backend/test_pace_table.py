import copy

import pytest

from deepseek_backend.engines.simulated.presets import find_preset
from deepseek_backend.engines.simulated.scheduler import RankLoad
from deepseek_backend.engines.simulated.simulated_options import parse_options
from deepseek_backend.errors import ConfigError

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


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        pytest.param([RankLoad(1, 1000)] * 2, 10, id="point"),
        pytest.param([RankLoad(1, 3000)] * 2, 15, id="between contexts"),
        pytest.param([RankLoad(1, 10)] * 2, 10, id="below the first context"),
        pytest.param([RankLoad(127, 127 * 1000)] * 2, 70, id="beyond the last batch"),
        pytest.param([RankLoad(0, 0, 1000, 500_000)] * 2, 50, id="prompt alone"),
        pytest.param([RankLoad(64, 64 * 5000, 2000, 2_000_000)] * 2, 140, id="prompt beside long contexts"),
        pytest.param([RankLoad(0, 0, 1000, 1_500_000)] * 2, 52, id="second chunk"),
        pytest.param([RankLoad(2, 2000), RankLoad(0, 0)], 10, id="the mean of the ranks"),
    ],
)
def test_a_step_takes_what_the_table_says(loads, expected):
    assert step_ms(*loads) == pytest.approx(expected)


def test_the_engine_takes_a_document_as_its_preset():
    options = parse_options({"preset": DOCUMENT})

    assert options.preset == "a deployment"
    assert options.deployment.num_ranks == 2
    assert options.limits.max_batch_size == 64
    assert options.max_seq_len == 16384
    assert options.paced


def _without_title(document):
    del document["title"]


def _falling(document):
    document["pace"]["batches"] = [64, 1]


def _short(document):
    document["pace"]["prompt"][1] = [70]


def _negative(document):
    document["pace"]["decode"][0][0] = -1


def _no_rank(document):
    document["num_ranks"] = 0


def _drafts(document):
    document["tokens_per_step"] = 2.8


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_without_title, "expected a mapping with title"),
        (_falling, "batches: expected two or more rising numbers"),
        (_short, r"prompt\[1\]: expected 2 numbers, got 1"),
        (_negative, r"decode\[0\]: expected a list of numbers from 0"),
        (_no_rank, "num_ranks: expected a whole number from 1, got 0"),
        (_drafts, "tokens_per_step: expected a number from 1 to 1"),
    ],
)
def test_a_damaged_document_is_refused_by_what_is_wrong(damage, said):
    document = copy.deepcopy(DOCUMENT)
    damage(document)

    with pytest.raises(ConfigError, match=said):
        parse_options({"preset": document})
