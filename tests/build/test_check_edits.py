"""Each wrong edit of a working repository is found on its line, with what to do."""

import pytest

from deepseek_triton_build.check import CheckOptions, check_repository
from support.checked import CONFIG, MODEL_YAML, OPTIONS, check, check_alone, edited, only, serious, write

GROUP = CONFIG[: CONFIG.index("KIND_CPU")].count("\n") + 1
"""Line of the instance group in config.pbtxt. It moves when the contract grows."""
TOKENS, TENSOR, ENGINE = "max_num_tokens: 8192", "tensor_parallel_size: 8", "  engine: tensorrt_llm"
DTYPE, FRACTION = "  dtype: fp8", "  free_gpu_memory_fraction: 0.8"
OLD_COMPILE = "pytorch_backend_config:\n  torch_compile_config: {enable_fullgraph: true, capture_num_tokens: [1, 2]}"
NEW_COMPILE = "under torch_compile_config: write enable_fullgraph: true; capture_num_tokens: [1, 2]"
DRAFTS = "speculative_config:\n  decoding_type: "

MODEL_YAML_EDITS = [  # what is replaced, by what, the code of the finding, its line and part of its fix
    (TENSOR, "tensor_parallel_sizes: 8", "S011", 3, "tensor_parallel_size"),
    (DTYPE, "  dtypee: fp8", "S011", 8, "did you mean dtype, under kv_cache_config?"),
    (TOKENS, "pytorch_backend_config:\n  kv_cache_dtype: fp8", "S013", 6, "under kv_cache_config: write dtype: fp8"),
    (TOKENS, OLD_COMPILE, "S013", 6, NEW_COMPILE),
    (TOKENS, "max_num_tokens: true", "S014", 5, "whole number"),
    ("  max_batch_size: 128", "  batch_sizes: [1, x]", "S014", 11, "list of whole numbers"),
    (TENSOR, "tensor_parallel_size: null", "S017", 3, "leave the key out"),
    (f"kv_cache_config:\n{FRACTION}\n{DTYPE}", "kv_cache_config: fp8", "S018", 6, "write its keys below it"),
    (TOKENS, f"{DRAFTS}MTP\n  layers: 1", "S011", 7, "remove"),
    (TOKENS, f"{DRAFTS}Medusa\n  medusa_choices: 1", "S019", 6, "nothing, if it is meant"),
    ("model: deepseek-ai/DeepSeek-R1", "model:", "S020", 1, "model:"),
    (DTYPE, "  free_gpu_memory_fraction: 0.9", "S004", 8, "remove one"),
    (DTYPE, "  dtype: [fp8", "S002", 8, "bracket"),
    (DTYPE, "  dtype: !!python/name:os.system x", "S002", 8, "correct it"),
    (DTYPE, "  dtype: 2026-99-99", "S002", 8, "correct it"),
    (DTYPE, "  &a dtype: &b [*b]", "S002", 8, "correct it"),
    (ENGINE, "  engines: tensorrt_llm", "T001", 13, "engine?"),
    (ENGINE, "  default_sampling: {heat: 1}", "T001", 13, "remove it"),
    (TOKENS, "kv_cache_config.tokens_per_block: 64", "S011", 5, "under kv_cache_config: write tokens_per_block: 64"),
    (TOKENS, "max_num_tokens: !!bool maybe", "S002", 5, "correct it"),
    (ENGINE, "  default_sampling: {top_p: 7}", "T002", 13, "leave the key out"),
    (ENGINE, "  default_sampling:\n    top_k: 2.5", "T002", 14, "leave the key out"),
    (ENGINE, "  default_sampling: {seed: abc}", "T002", 13, "leave"),
    ("  decoupled: true", "  decoupled: 1", "T002", 14, "true or false"),
    ("  max_batch_size: 0", "  max_batch_size: 8", "T002", 15, "from 0 to 0"),
]
NAME, IDS, KIND = 'name: "tensorrt_llm"', '"input_ids", data_type: TYPE_INT32', "KIND_CPU"
TWICE = f"input [ {{ name: {IDS}, dims: [ -1 ], optional: true }} ]\n# Responses are"
NAMED_TWICE = 'instance_group { name: "x" kind: KIND_CPU }\nname: "other"\nbackend'
AFTER_TEXT = " ]\n# The prompt in token ids"
CONFIG_EDITS = [
    ("{ decoupled: true }", "{ decoupled: false }", "C006", 7, "decoupled: true"),
    ("dims: [ -1 ] }" + AFTER_TEXT, "dims: [ -1 ], optional: true }" + AFTER_TEXT, "C008", 9, "dims: [ -1 ] }"),
    ('name: "messages"', 'name: "message"', "C009", 14, "messages?"),
    (IDS, '"input_ids", data_type: TYPE_INT64', "C008", 11, "INT32"),
    (f"{IDS}, dims: [ -1 ]", f"{IDS}, dims: [ 1, -1 ]", "C008", 11, "dims: [ -1 ]"),
    (f"{IDS}, dims: [ -1 ], optional: true", f"{IDS}, dims: [ -1 ]", "C008", 11, "optional: true"),
    ("# Responses are", TWICE, "C008", 6, "leave only one"),
    (IDS, '"input_ids", data_type: 99', "C003", 11, "its name"),
    (KIND, "99", "C003", GROUP, "its name"),
    (f"{NAME}\nbackend", NAMED_TWICE, "C004", 3, "tensorrt_llm"),
    ("# Generated", "\ufeff# Generated", "C003", 1, "remove the byte order mark"),
    ("{ count: 1, kind: KIND_CPU }", "\n  {\n    count: 1\n    kind: KIND_CPU", "C003", GROUP + 3, "write }"),
    ("count: 1", "count: 2", "T011", GROUP, "or count: 1 for one instance"),
]


@pytest.mark.slow
def test_an_edit_is_found_on_its_line(subtests):
    reports = [(row, check(model_yaml=edited(MODEL_YAML, *row[:2])), None) for row in MODEL_YAML_EDITS]
    reports += [(row, check(config=edited(CONFIG, *row[:2])), "tensorrt_llm/config.pbtxt") for row in CONFIG_EDITS]
    for (_, new, code, line, fix), report, file in reports:
        with subtests.test(f"{new}: {code}"):
            finding = only(report, code)
            assert finding.line == line
            assert file is None or finding.file == file
            assert fix in finding.fix
            assert "\n" not in finding.message + finding.fix


ALONE = [  # what is replaced, by what, and the only code that is told
    (TENSOR, "tensor_parallel_sz: 8", "S011"),
    (TENSOR, "tensor_parallel_size: eight", "S014"),
    (TENSOR, "tensor_parallel_size: 4", "T016"),
    (TENSOR, "tensor_parallel_size: 3", "P001"),
    ("moe_expert_parallel_size: 8", "moe_expert_parallel_size: 3", "P002"),
    (FRACTION, "  free_gpu_memory_fraction: 0.99", "K006"),
    (TOKENS, f"{TOKENS}\n{DRAFTS}MTPP\n  num_nextn_predict_layers: 1", "S015"),
    (TOKENS, f"{TOKENS}\nspeculative_config:\n  decoding_typ: MTP\n  num_nextn_predict_layers: 1", "S011"),
    ("  max_batch_size: 128", f"  kv_cache_config:\n{DTYPE}\n{FRACTION}", "S011"),
    ("  decoupled: true", "  decoupled: yess", "T002"),
    ("{ decoupled: true }", "{ decoupled: false }", "C006"),
]


@pytest.mark.parametrize(("old", "new", "code"), ALONE)
def test_one_fault_is_one_finding(old, new, code):
    """What follows from a fault, and goes with it, is not told beside it."""
    report = check(MODEL_YAML.replace(old, new, 1), CONFIG.replace(old, new, 1))
    assert [finding.code for finding in serious(report)] == [code]


PLACEMENTS = [  # gpu_device_ids of instances of two ranks, and what is found
    ("0,1;2,3", 2, []),
    ("0,1", 1, []),
    ("0,1;2", 2, ["T013"]),
    ("0,1;2,3,4", 2, ["T014"]),
    ("0,1;1,2", 2, ["T012"]),
    ("0,1;01, 2", 2, ["T012"]),  # shared, written otherwise
    ("0,1", 2, ["T011"]),
    ("0,1;", 2, ["T011"]),
    ("0,1;2,3", 1, ["T011"]),
]


@pytest.mark.slow
def test_gpu_device_ids_are_counted_against_the_ranks():
    two_ranks = MODEL_YAML.replace("parallel_size: 8", "parallel_size: 2")
    found = []
    for gpus, count, _ in PLACEMENTS:
        parameter = f'parameters [ {{ key: "gpu_device_ids", value: {{ string_value: "{gpus}" }} }} ]'
        config = edited(CONFIG, "count: 1", f"count: {count}") + parameter + "\n"
        report = check(two_ranks, config, CheckOptions(release="1.2.1"))
        found.append((gpus, count, [finding.code for finding in serious(report)]))

    assert found == PLACEMENTS


def test_all_problems_are_reported_at_once_by_file_and_line():
    model_yaml = edited(edited(MODEL_YAML, "backend:", "backends:"), DTYPE, "  tokens_per_block: x")
    report = check(model_yaml, edited(CONFIG, "KIND_CPU", "KIND_GPU"))

    found = [(finding.file.rpartition("/")[2], finding.line, finding.code) for finding in serious(report)]
    assert found == [("model.yaml", 2, "S011"), ("model.yaml", 8, "S014"), ("config.pbtxt", GROUP, "T015")]
    assert report.has_errors


ANCHORS = ["l0: &l0 [x, x]", *(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, 30))]
UNREADABLE = [
    (b"model: m\ntokenizer: \xff\n", "S001", 2),
    (b"", "S003", 1),
    (b"# nothing\n", "S003", 1),
    (b"- model: m\n", "S003", 1),
    (b"model\n", "S003", 1),
    (b"a: 1\n---\nb: 2\n", "S002", 2),
    (b"a: " + b"[" * 200_000, "S002", 1),
    (b"a: \x00\n", "S002", None),
    (b"? [a]\n: b\n", "S002", 1),
    (b'? !!seq ""\n: b\n', "S002", 1),
    (b"!!set x: 1\n", "S002", 1),
    (b"a: !!seq x\n", "S002", 1),
    (b'a: !!int ""\n', "S002", 1),
    (b"a: !!float x\n", "S002", 1),
    (b"a: !!timestamp foo\n", "S002", 1),
    (b"a: !!binary x\n", "S002", 1),
    (b"a: 18446744073709551616\n", "S002", 1),
    (b"a: " + b"9" * 9000 + b"\n", "S002", 1),
    (b"a: 0x" + b"f" * 9000 + b"\n", "S002", 1),
    ("\n".join(ANCHORS).encode(), "S002", None),  # they unfold without end
]


@pytest.mark.slow
def test_a_model_yaml_that_cant_be_read_is_one_finding(subtests):
    for content, code, line in UNREADABLE:
        with subtests.test(repr(content[:40])):
            report = check(content)
            assert [finding.code for finding in serious(report)] == [code]
            assert line is None or report.findings[-1].line == line


def test_an_unknown_key_in_a_section_is_only_a_warning_in_old_releases():
    report = check_alone("backend: pytorch\nkv_cache_config:\n  dtypee: fp8\nnope: 1\n", release="0.21.0")

    found = [(finding.code, finding.severity, finding.line) for finding in serious(report)]
    assert found == [("S021", "warning", 3), ("S011", "error", 4)]


def test_the_fix_for_a_huge_number_of_gpus_fits_a_line():
    huge = edited(MODEL_YAML, TENSOR, "tensor_parallel_size: 1000000000000")
    report = check(huge, edited(CONFIG, "count: 1", "count: 2000000000"))

    assert len(only(report, "T011").fix) < 500


def test_findings_hold_no_characters_that_a_terminal_obeys(tmp_path):
    write(
        tmp_path,
        model_yaml=edited(MODEL_YAML, "max_num_tokens", '"a\\e[31m\\nb"'),
        config=edited(CONFIG, 'name: "input_ids"', 'name: "a\\033[31m\\nb"'),
    )
    (tmp_path / "tensorrt_llm" / "deepseek-triton.json").write_text('{"files": {"tensorrt_llm/\\u001b[31m\\n": "x"}}')

    findings = check_repository(tmp_path, OPTIONS).findings

    assert {"S008", "S011", "C009"} <= {finding.code for finding in findings}
    assert all((finding.message + finding.fix).isprintable() for finding in findings)


def test_merged_keys_may_be_overridden():
    section = f"kv_cache_config:\n  <<: &base {{dtype: auto}}\n{FRACTION}\n"

    assert serious(check(edited(MODEL_YAML, f"kv_cache_config:\n{FRACTION}\n", section))) == []
