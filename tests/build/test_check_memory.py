"""`check` does the planner's arithmetic: weights that don't fit are an error, no room for a KV cache a warning."""

import pytest

from deepseek_triton_build.check import CheckOptions, check_repository
from support.checked import MODEL_YAML, edited, only, serious, write


def check(root, old, new, gpu, num_gpus):
    write(root, model_yaml=edited(MODEL_YAML, old, new))
    report = check_repository(root, CheckOptions(release="1.2.1", gpu=gpu, num_gpus=num_gpus))
    return [(finding.code, finding.severity) for finding in serious(report) if finding.code in ("T016", "T017")]


SAME = "max_num_tokens: 8192"
CASES = [
    pytest.param(SAME, SAME, "h200", 8, [], id="as planned"),
    pytest.param(SAME, SAME, "h100", 8, [("T016", "error")], id="weights fill the GPU"),
    pytest.param(
        "tensor_parallel_size: 8\nmoe_expert_parallel_size: 8",
        "tensor_parallel_size: 2\nmoe_expert_parallel_size: 2",
        "h200",
        2,
        [("T016", "error")],
        id="a quarter of the GPUs",
    ),
    pytest.param(
        "tensor_parallel_size: 8\nmoe_expert_parallel_size: 8", "", "h200", 1, [("T016", "error")], id="one GPU, unsaid"
    ),
    pytest.param(SAME, "max_num_tokens: 262144", "h200", 8, [("T017", "warning")], id="an iteration fills the GPU"),
    pytest.param(SAME, "max_num_tokens: null", "h200", 8, [], id="the engine's default"),
    pytest.param("tensor_parallel_size: 8", "tensor_parallel_size: x", "h200", 8, [], id="parallelism not known"),
    pytest.param("deepseek-ai/DeepSeek-R1", "another/Model", "h100", 8, [], id="weights not known"),
]


@pytest.mark.parametrize(("old", "new", "gpu", "num_gpus", "expected"), CASES)
def test_weights_and_kv_cache_are_fitted_to_the_gpus(tmp_path, old, new, gpu, num_gpus, expected):
    assert check(tmp_path, old, new, gpu, num_gpus) == expected


def test_the_error_says_how_many_gpus_hold_the_weights(tmp_path):
    write(tmp_path)

    finding = only(check_repository(tmp_path, CheckOptions(release="1.2.1", gpu="h100", num_gpus=8)), "T016")

    assert (finding.key, finding.line) == ("tensor_parallel_size", 3)
    assert "take 16 h100 or more" in finding.fix


@pytest.mark.parametrize(
    ("old", "new", "is_raised"),
    [(SAME, "max_num_tokens: 262144", False), ("fraction: 0.8", "fraction: 0.001", True)],
    ids=["nothing is left", "little of it is used"],
)
def test_the_fix_raises_the_kv_caches_share_only_when_memory_is_left(tmp_path, old, new, is_raised):
    write(tmp_path, model_yaml=edited(MODEL_YAML, old, new))

    fix = only(check_repository(tmp_path, CheckOptions(release="1.2.1", gpu="h200", num_gpus=8)), "T017").fix

    assert ("free_gpu_memory_fraction" in fix) == is_raised


@pytest.mark.parametrize(("num_gpus", "codes"), [(None, []), (8, []), (2, ["T016"])])
def test_an_option_file_is_judged_only_when_the_number_of_gpus_is_given(tmp_path, num_gpus, codes):
    """No file says which flags its program gets."""
    path = tmp_path / "extra.yaml"
    path.write_text("model: deepseek-ai/DeepSeek-R1\nmax_num_tokens: 262144\n")

    report = check_repository(path, CheckOptions(release="1.2.1", gpu="h200", num_gpus=num_gpus))

    assert [finding.code for finding in report.findings if finding.code in ("T016", "T017")] == codes
