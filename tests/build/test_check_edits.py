"""Each wrong edit of a working repository is found on its line, with what to do."""

import pytest

from deepseek_triton_build.check import CheckOptions, check_repository
from support.checked import CONFIG, MODEL_YAML, OPTIONS, edited, only, serious, write

GROUP = CONFIG[: CONFIG.index("KIND_CPU")].count("\n") + 1
"""Line of the instance group in config.pbtxt. It moves when the contract grows."""

MODEL_YAML_EDITS = [
    pytest.param(
        "tensor_parallel_size: 8", "tensor_parallel_sizes: 8", "S011", 3, "tensor_parallel_size", id="unknown"
    ),
    pytest.param(
        "  dtype: fp8",
        "  dtypee: fp8",
        "S011",
        8,
        "did you mean dtype, under kv_cache_config?",
        id="unknown in a section",
    ),
    pytest.param(
        "max_num_tokens: 8192", "moe_backend: TRTLLM", "S013", 5, "under moe_config: write backend: TRTLLM", id="moved"
    ),
    pytest.param(
        "max_num_tokens: 8192",
        "pytorch_backend_config:\n  kv_cache_dtype: fp8",
        "S013",
        6,
        "under kv_cache_config: write dtype: fp8",
        id="moved out of a section that is gone",
    ),
    pytest.param(
        "max_num_tokens: 8192",
        "pytorch_backend_config:\n  torch_compile_config: {enable_fullgraph: true, capture_num_tokens: [1, 2]}",
        "S013",
        6,
        "under torch_compile_config: write enable_fullgraph: true; capture_num_tokens: [1, 2]",
        id="a section moved out of a section that is gone",
    ),
    pytest.param("max_num_tokens: 8192", "max_num_tokens: many", "S014", 5, "whole number", id="wrong type"),
    pytest.param("max_num_tokens: 8192", "max_num_tokens: '8192'", "S014", 5, "without quotes", id="quoted"),
    pytest.param("max_num_tokens: 8192", "max_num_tokens: true", "S014", 5, "whole number", id="bool for an int"),
    pytest.param(
        "  max_batch_size: 128", "  batch_sizes: [1, x]", "S014", 11, "list of whole numbers", id="wrong type in a list"
    ),
    pytest.param(
        "max_num_tokens: 8192", "moe_config:\n  backend: CUTLAS", "S015", 6, "CUTLASS", id="not one of the choices"
    ),
    pytest.param("  free_gpu_memory_fraction: 0.8", "  free_gpu_memory_fraction: 80", "S016", 7, "0 to 1", id="range"),
    pytest.param("tensor_parallel_size: 8", "tensor_parallel_size: 0", "S016", 3, "from 1", id="no GPUs"),
    pytest.param("tensor_parallel_size: 8", "tensor_parallel_size: null", "S017", 3, "leave the key out", id="null"),
    pytest.param(
        "kv_cache_config:\n  free_gpu_memory_fraction: 0.8\n  dtype: fp8",
        "kv_cache_config: fp8",
        "S018",
        6,
        "write its keys below it",
        id="section as a scalar",
    ),
    pytest.param(
        "max_num_tokens: 8192",
        "speculative_config:\n  num_nextn_predict_layers: 1",
        "S015",
        5,
        "under speculative_config: write decoding_type: MTP",
        id="no kind",
    ),
    pytest.param(
        "max_num_tokens: 8192",
        "speculative_config:\n  decoding_type: MTP\n  layers: 1",
        "S011",
        7,
        "remove",
        id="unknown in the kind that is chosen",
    ),
    pytest.param(
        "max_num_tokens: 8192",
        "speculative_config:\n  decoding_type: Medusa\n  medusa_choices: 1",
        "S019",
        6,
        "nothing, if it is meant",
        id="a kind that is not recorded",
    ),
    pytest.param("model: deepseek-ai/DeepSeek-R1", "model:", "S020", 1, "model:", id="no model"),
    pytest.param("max_num_tokens: 8192", "tensor_parallel_size: 4", "S004", 5, "remove one", id="duplicate key"),
    pytest.param(
        "  dtype: fp8", "  free_gpu_memory_fraction: 0.9", "S004", 8, "remove one", id="duplicate in a section"
    ),
    pytest.param("  dtype: fp8", "  dtype: [fp8", "S002", 9, "correct it", id="not YAML"),
    pytest.param("  dtype: fp8", "  dtype: !!python/name:os.system x", "S002", 8, "correct it", id="a tag of Python's"),
    pytest.param("  dtype: fp8", "  dtype: 2026-99-99", "S002", 8, "correct it", id="a date that is none"),
    pytest.param("  dtype: fp8", "  &a dtype: &b [*b]", "S002", 8, "correct it", id="an alias of itself"),
    pytest.param("  engine: tensorrt_llm", "  engines: tensorrt_llm", "T001", 13, "engine?", id="unknown setting"),
    pytest.param("  engine: tensorrt_llm", "  stream_mode: all", "T002", 13, "delta", id="setting of a wrong value"),
    pytest.param(
        "  engine: tensorrt_llm", "  default_sampling: {heat: 1}", "T001", 13, "remove it", id="unknown sampling field"
    ),
    pytest.param(
        "max_num_tokens: 8192",
        "kv_cache_config.tokens_per_block: 64",
        "S011",
        5,
        "under kv_cache_config: write tokens_per_block: 64",
        id="a dotted key",
    ),
    pytest.param("max_num_tokens: 8192", "max_num_tokens: !!bool maybe", "S002", 5, "correct it", id="no bool"),
    pytest.param(
        "  engine: tensorrt_llm", "  default_sampling: {top_p: 7}", "T002", 13, "leave the key out", id="sampling range"
    ),
    pytest.param(
        "  engine: tensorrt_llm",
        "  default_sampling:\n    top_k: 2.5",
        "T002",
        14,
        "leave the key out",
        id="no whole number",
    ),
    pytest.param("  engine: tensorrt_llm", "  default_sampling: {seed: abc}", "T002", 13, "leave", id="no seed"),
    pytest.param("  decoupled: true", "  decoupled: 1", "T002", 14, "true or false", id="decoupled as a number"),
    pytest.param("  decoupled: true", "  decoupled: false", "C006", 7, "decoupled: false", id="decoupled differs"),
    pytest.param("  max_batch_size: 0", "  max_batch_size: 8", "C006", 5, "does not take 8", id="batch size differs"),
    pytest.param("tensor_parallel_size: 8", "tensor_parallel_size: 16", "T013", GROUP, "give it 16", id="too few GPUs"),
    pytest.param(
        "tensor_parallel_size: 8", "tensor_parallel_size: 4", "T014", GROUP, "tensor_parallel_size", id="idle GPUs"
    ),
]


@pytest.mark.parametrize(("old", "new", "code", "line", "fix"), MODEL_YAML_EDITS)
def test_an_edit_of_model_yaml_is_found(tmp_path, old, new, code, line, fix):
    write(tmp_path, model_yaml=edited(MODEL_YAML, old, new))

    finding = only(check_repository(tmp_path, OPTIONS), code)

    assert finding.line == line
    assert fix in finding.fix
    assert "\n" not in finding.message + finding.fix


CONFIG_EDITS = [
    pytest.param('name: "tensorrt_llm"', 'name: "deepseek"', "C004", 2, "tensorrt_llm", id="another name"),
    pytest.param('backend: "python"', 'backend: "tensorrtllm"', "C005", 3, "python", id="another backend"),
    pytest.param("max_batch_size: 0", "max_batch_sizes: 0", "C003", 5, "correct", id="a field Triton hasn't"),
    pytest.param("{ decoupled: true }", "{ decoupled: true", "C003", 9, "correct", id="a brace is missing"),
    pytest.param("{ decoupled: true }", "{ decoupled: false }", "C006", 7, "decoupled: true", id="not decoupled"),
    pytest.param("max_batch_size: 0", "max_batch_size: 4", "C006", 5, "max_batch_size: 0", id="batches"),
    pytest.param(
        "dims: [ -1 ] } ]\n# The prompt in token ids",
        "dims: [ -1 ], optional: true } ]\n# The prompt in token ids",
        "C008",
        9,
        "dims: [ -1 ] }",
        id="text_input is optional",
    ),
    pytest.param('name: "messages"', 'name: "message"', "C008", None, 'name: "messages"', id="input missing"),
    pytest.param('name: "messages"', 'name: "message"', "C009", 14, "messages?", id="input too many"),
    pytest.param(
        '"input_ids", data_type: TYPE_INT32',
        '"input_ids", data_type: TYPE_INT64',
        "C008",
        11,
        "INT32",
        id="another type",
    ),
    pytest.param(
        '"input_ids", data_type: TYPE_INT32, dims: [ -1 ]',
        '"input_ids", data_type: TYPE_INT32, dims: [ 1, -1 ]',
        "C008",
        11,
        "dims: [ -1 ]",
        id="another shape",
    ),
    pytest.param(
        'name: "input_ids", data_type: TYPE_INT32, dims: [ -1 ], optional: true',
        'name: "input_ids", data_type: TYPE_INT32, dims: [ -1 ]',
        "C008",
        11,
        "optional: true",
        id="an input that has to be sent",
    ),
    pytest.param(
        "# Responses are",
        'input [ { name: "input_ids", data_type: TYPE_INT32, dims: [ -1 ], optional: true } ]\n# Responses are',
        "C008",
        6,
        "leave only one",
        id="an input twice",
    ),
    pytest.param(
        '"input_ids", data_type: TYPE_INT32', '"input_ids", data_type: 99', "C003", 11, "its name", id="no data type"
    ),
    pytest.param("KIND_CPU", "99", "C003", GROUP, "its name", id="no kind"),
    pytest.param(
        'name: "tensorrt_llm"\nbackend',
        'instance_group { name: "x" kind: KIND_CPU }\nname: "other"\nbackend',
        "C004",
        3,
        "tensorrt_llm",
        id="another name, after one within",
    ),
    pytest.param("# Generated", "\ufeff# Generated", "C003", 1, "remove the byte order mark", id="a byte order mark"),
    pytest.param("KIND_CPU", "KIND_GPU", "T015", GROUP, "KIND_CPU", id="a GPU kind"),
    pytest.param(
        "instance_group [ { count: 1, kind: KIND_CPU } ]", "", "T015", None, "KIND_CPU", id="no instance group"
    ),
    pytest.param("count: 1", "count: 2", "T011", GROUP, "gpu_device_ids", id="several instances without GPUs"),
    pytest.param("count: 1", "count: 2", "T011", GROUP, "or count: 1 for one instance", id="or one instance"),
]


@pytest.mark.parametrize(("old", "new", "code", "line", "fix"), CONFIG_EDITS)
def test_an_edit_of_config_pbtxt_is_found(tmp_path, old, new, code, line, fix):
    write(tmp_path, config=edited(CONFIG, old, new))

    finding = only(check_repository(tmp_path, OPTIONS), code)

    assert (finding.file, finding.line) == ("tensorrt_llm/config.pbtxt", line)
    assert fix in finding.fix


def placed(gpus, count):
    parameter = f'parameters [ {{ key: "gpu_device_ids", value: {{ string_value: "{gpus}" }} }} ]'
    return edited(CONFIG, "count: 1", f"count: {count}") + parameter + "\n"


PLACEMENTS = [
    pytest.param("0,1;2,3", 2, [], id="right"),
    pytest.param("0,1", 1, [], id="one instance"),
    pytest.param("0,1;2", 2, ["T013"], id="too few"),
    pytest.param("0,1;2,3,4", 2, ["T014"], id="too many"),
    pytest.param("0,1;1,2", 2, ["T012"], id="shared"),
    pytest.param("0,1;01, 2", 2, ["T012"], id="shared, written otherwise"),
    pytest.param("0,1", 2, ["T011"], id="none for the second instance"),
    pytest.param("0,1;", 2, ["T011"], id="an empty list"),
    pytest.param("0,1;2,3", 1, ["T011"], id="more than there are instances"),
]


@pytest.mark.parametrize(("gpus", "count", "codes"), PLACEMENTS)
def test_gpu_device_ids_are_counted_against_the_ranks(tmp_path, gpus, count, codes):
    two_ranks = edited(
        edited(MODEL_YAML, "parallel_size: 8", "parallel_size: 2"), "parallel_size: 8", "parallel_size: 2"
    )
    write(tmp_path, model_yaml=two_ranks, config=placed(gpus, count))

    report = check_repository(tmp_path, CheckOptions(release="1.2.1"))

    assert [finding.code for finding in serious(report)] == codes


def test_all_problems_are_reported_at_once_by_file_and_line(tmp_path):
    model_yaml = edited(edited(MODEL_YAML, "backend:", "backends:"), "  dtype: fp8", "  tokens_per_block: x")
    write(tmp_path, model_yaml=model_yaml, config=edited(CONFIG, "KIND_CPU", "KIND_GPU"))

    report = check_repository(tmp_path, OPTIONS)

    found = [(finding.file.rpartition("/")[2], finding.line, finding.code) for finding in serious(report)]
    assert found == [("model.yaml", 2, "S011"), ("model.yaml", 8, "S014"), ("config.pbtxt", GROUP, "T015")]
    assert report.has_errors


UNREADABLE = [
    pytest.param(b"model: m\ntokenizer: \xff\n", "S001", 2, id="not UTF-8"),
    pytest.param(b"", "S003", 1, id="empty"),
    pytest.param(b"# nothing\n", "S003", 1, id="comments only"),
    pytest.param(b"- model: m\n", "S003", 1, id="a list"),
    pytest.param(b"model\n", "S003", 1, id="a word"),
    pytest.param(b"a: 1\n---\nb: 2\n", "S002", 2, id="two documents"),
    pytest.param(b"a: " + b"[" * 200_000, "S002", 1, id="nested without end"),
    pytest.param(b"a: \x00\n", "S002", None, id="a control character"),
    pytest.param(b"? [a]\n: b\n", "S002", 1, id="a list as a key"),
    pytest.param(b'? !!seq ""\n: b\n', "S002", 1, id="a text tagged as a list as a key"),
    pytest.param(b"!!set x: 1\n", "S002", 1, id="a text tagged as a set as a key"),
    pytest.param(b"a: !!seq x\n", "S002", 1, id="a text tagged as a list"),
    pytest.param(b'a: !!int ""\n', "S002", 1, id="no int"),
    pytest.param(b"a: !!float x\n", "S002", 1, id="no float"),
    pytest.param(b"a: !!timestamp foo\n", "S002", 1, id="no timestamp"),
    pytest.param(b"a: !!binary x\n", "S002", 1, id="no bytes"),
    pytest.param(b"a: 18446744073709551616\n", "S002", 1, id="a number of 65 bits"),
    pytest.param(b"a: " + b"9" * 9000 + b"\n", "S002", 1, id="a number of 9,000 digits"),
    pytest.param(b"a: 0x" + b"f" * 9000 + b"\n", "S002", 1, id="a number of 9,000 hexadecimal digits"),
]


@pytest.mark.parametrize(("content", "code", "line"), UNREADABLE)
def test_a_model_yaml_that_cant_be_read_is_one_finding(tmp_path, content, code, line):
    write(tmp_path, model_yaml=content)

    report = check_repository(tmp_path, OPTIONS)

    assert [finding.code for finding in serious(report)] == [code]
    assert line is None or report.findings[-1].line == line


def test_an_unknown_key_in_a_section_is_only_a_warning_in_old_releases(tmp_path):
    path = tmp_path / "extra.yaml"
    path.write_text("backend: pytorch\nkv_cache_config:\n  dtypee: fp8\nnope: 1\n")

    report = check_repository(path, CheckOptions(release="0.21.0"))

    found = [(finding.code, finding.severity, finding.line) for finding in serious(report)]
    assert found == [("S021", "warning", 3), ("S011", "error", 4)]


def test_the_fix_for_a_huge_number_of_gpus_fits_a_line(tmp_path):
    huge = edited(MODEL_YAML, "tensor_parallel_size: 8", "tensor_parallel_size: 1000000000000")
    write(tmp_path, model_yaml=huge, config=edited(CONFIG, "count: 1", "count: 2000000000"))

    assert len(only(check_repository(tmp_path, OPTIONS), "T011").fix) < 500


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


def test_anchors_that_unfold_without_end_are_one_finding(tmp_path):
    lines = ["l0: &l0 [x, x]", *(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, 30))]
    write(tmp_path, model_yaml="\n".join(lines))

    assert [finding.code for finding in serious(check_repository(tmp_path, OPTIONS))] == ["S002"]


def test_merged_keys_may_be_overridden(tmp_path):
    section = "kv_cache_config:\n  <<: &base {dtype: auto}\n  free_gpu_memory_fraction: 0.8\n"
    model_yaml = edited(MODEL_YAML, "kv_cache_config:\n  free_gpu_memory_fraction: 0.8\n", section)
    write(tmp_path, model_yaml=model_yaml)

    assert serious(check_repository(tmp_path, OPTIONS)) == []
