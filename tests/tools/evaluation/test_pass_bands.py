"""The bands are those of TensorRT-LLM's own accuracy tests."""

import pytest

from deepseek_triton_tools.cli.eval import TASKS
from deepseek_triton_tools.evaluation.pass_bands import bands_of, pass_bands, verdicts


@pytest.mark.parametrize(
    ("task", "model", "chat", "limit"),
    [
        ("gsm8k", "deepseek-r1", False, 92.21),
        ("mmlu", "deepseek-r1", False, 85.76),
        ("gpqa_diamond", "deepseek-r1-fp4", True, 62.18),
        ("tiny", "tiny", False, 98.54),
    ],
)
def test_a_whole_run_passes_from_the_published_limit(task, model, chat, limit):
    [band] = bands_of(task, model, chat=chat)
    assert band.passes_from(band.num_questions) == pytest.approx(limit, abs=0.005)
    assert [
        verdict.passed
        for score in (limit + 0.1, limit - 0.1)
        for verdict in verdicts([band], score, band.num_questions, pass_at=None)
    ] == [True, False]


@pytest.mark.parametrize("band", pass_bands(), ids=lambda band: f"{band.task}, {band.title}")
def test_fewer_questions_make_the_band_wider(band):
    limits = [band.passes_from(num_questions) for num_questions in (10, 100, band.num_questions)]
    assert limits == sorted(limits)
    assert limits[-1] < band.reference
    assert band.source
    assert band.task in TASKS


def test_another_form_or_model_has_no_band():
    assert bands_of("gsm8k", "deepseek-r1", chat=True) == ()
    assert bands_of("gsm8k", "deepseek-v3", chat=False) == ()


def test_the_users_limit_takes_the_place_of_the_published_ones():
    bands = bands_of("gsm8k", "deepseek-r1", chat=False)
    [verdict] = verdicts(bands, 95.0, 1319, pass_at=96.0)
    assert (verdict.passes_from, verdict.passed) == (96.0, False)


def test_each_model_has_one_band_of_a_task_and_form():
    seen = [(band.task, band.chat, model) for band in pass_bands() for model in band.models]
    assert len(seen) == len(set(seen))
