"""The bands are those of TensorRT-LLM's own accuracy tests."""

import pytest

from deepseek_triton_tools.cli.eval import TASKS
from deepseek_triton_tools.evaluation.run_evaluation import bands_of, pass_bands, verdicts


@pytest.mark.slow
def test_a_whole_run_passes_from_the_published_limit():
    limits = {
        ("gsm8k", "deepseek-r1", False): 92.21,
        ("mmlu", "deepseek-r1", False): 85.76,
        ("gpqa_diamond", "deepseek-r1-fp4", True): 62.18,
        ("tiny", "tiny", False): 98.37,
    }
    for (task, model, chat), limit in limits.items():
        [band] = bands_of(task, model, chat=chat)
        assert band.passes_from(band.num_questions) == pytest.approx(limit, abs=0.005)
        for score, passed in ((limit + 0.1, True), (limit - 0.1, False)):
            [verdict] = verdicts([band], score, band.num_questions, pass_at=None)
            assert verdict.passed == passed
    # The user's limit takes the place of the published ones.
    [verdict] = verdicts(bands_of("gsm8k", "deepseek-r1", chat=False), 95.0, 1319, pass_at=96.0)
    assert (verdict.passes_from, verdict.passed) == (96.0, False)
    # Another form or model has no band.
    assert bands_of("gsm8k", "deepseek-r1", chat=True) == bands_of("gsm8k", "deepseek-v3", chat=False) == ()


def test_fewer_questions_make_the_band_wider():
    for band in pass_bands():
        limits = [band.passes_from(num_questions) for num_questions in (10, 100, band.num_questions)]
        assert limits == sorted(limits), band.title
        assert limits[-1] < band.reference
        assert band.source
        assert band.task in TASKS
    # Each model has one band of a task and form.
    seen = [(band.task, band.chat, model) for band in pass_bands() for model in band.models]
    assert len(seen) == len(set(seen))
