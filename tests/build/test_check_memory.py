"""`check` does the planner's arithmetic: weights that don't fit are an error, no room for a KV cache a warning."""

from deepseek_triton_build.check import CheckOptions
from support.checked import MODEL_YAML, check, check_alone, edited


def found(old, new, gpu, num_gpus):
    report = check(edited(MODEL_YAML, old, new), options=CheckOptions(release="1.2.1", gpu=gpu, num_gpus=num_gpus))
    return [finding for finding in report.findings if finding.code in ("T016", "T017")]


SAME, FULL = "max_num_tokens: 8192", "max_num_tokens: 262144"
RANKS = "tensor_parallel_size: 8\nmoe_expert_parallel_size: 8"
CASES = [
    (SAME, SAME, "h200", 8, []),
    (SAME, SAME, "h100", 8, [("T016", "error")]),
    (RANKS, RANKS.replace("8", "2"), "h200", 2, [("T016", "error")]),
    (RANKS, "", "h200", 1, [("T016", "error")]),  # one GPU, unsaid
    (SAME, FULL, "h200", 8, [("T017", "warning")]),
    (SAME, "max_num_tokens: null", "h200", 8, []),  # the engine's default
    ("tensor_parallel_size: 8", "tensor_parallel_size: x", "h200", 8, []),
    ("deepseek-ai/DeepSeek-R1", "another/Model", "h100", 8, []),  # weights not known
]


def test_weights_and_kv_cache_are_fitted_to_the_gpus():
    for *case, expected in CASES:
        assert [(finding.code, finding.severity) for finding in found(*case)] == expected, case


def test_the_fix_says_how_many_gpus_hold_the_weights_and_raises_the_share_only_when_memory_is_left():
    [weights] = found(SAME, SAME, "h100", 8)
    assert (weights.key, weights.line) == ("tensor_parallel_size", 3)
    assert "take 16 h100 or more" in weights.fix
    for old, new, is_raised in ((SAME, FULL, False), ("fraction: 0.8", "fraction: 0.001", True)):
        [cache] = found(old, new, "h200", 8)
        assert ("free_gpu_memory_fraction" in cache.fix) == is_raised


def test_an_option_file_is_judged_only_when_the_number_of_gpus_is_given():
    """No file says which flags its program gets."""
    text = "model: deepseek-ai/DeepSeek-R1\nmax_num_tokens: 262144\n"
    for num_gpus, codes in ((None, []), (8, []), (2, ["T016"])):
        report = check_alone(text, release="1.2.1", gpu="h200", num_gpus=num_gpus)
        assert [finding.code for finding in report.findings if finding.code in ("T016", "T017")] == codes
