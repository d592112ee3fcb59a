"""`check` over whole repositories: models, releases, stamps, upstream's form and moved keys."""

import hashlib
import json
import os
import shutil
import subprocess
import sys

import pytest
import yaml

from deepseek_triton_build import (
    BuildError,
    NothingToCheckError,
    PlanRequest,
    UnknownNameError,
    make_plan,
    repository_files,
    write_repository,
)
from deepseek_triton_build.catalog import DEFAULT_RELEASE
from deepseek_triton_build.check import CheckOptions, check_repository
from deepseek_triton_build.text import short_yaml
from support.checked import CHECKOUT, CONFIG, MODEL_YAML, OPTIONS, check, check_alone, edited, only, serious, write


def test_the_repository_that_these_tests_edit_and_the_one_in_the_checkout_have_no_findings():
    assert serious(check()) == []
    report = check_repository(CHECKOUT)

    assert report.findings == ()
    assert [(model.model, model.engine, model.backend) for model in report.models] == [
        ("tiny", "reference", "deepseek-triton")
    ]


def test_a_folder_in_the_place_of_a_file_is_one_finding(tmp_path):
    for name in ("1/model.yaml", "config.pbtxt", "deepseek-triton.json"):
        root = write(tmp_path / name)
        path = root / "tensorrt_llm" / name
        path.unlink(missing_ok=True)
        path.mkdir()
        found = serious(check_repository(root, OPTIONS))
        assert [(finding.code, finding.file) for finding in found] == [("S001", f"tensorrt_llm/{name}")]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_one_finding(tmp_path):
    (write(tmp_path) / "tensorrt_llm/1/model.yaml").chmod(0)

    assert [finding.code for finding in serious(check_repository(tmp_path, OPTIONS))] == ["S001"]


def test_a_folder_without_a_model_is_an_error_of_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other" / "resnet" / "1").mkdir(parents=True)
    (tmp_path / "other" / "resnet" / "1" / "model.onnx").touch()
    (tmp_path / "start.sh").touch()

    (tmp_path / "engines" / "preprocessing" / "1").mkdir(parents=True)
    (tmp_path / "engines" / "preprocessing" / "config.pbtxt").write_text('name: "preprocessing"\nbackend: "python"\n')
    said_of = dict.fromkeys(["nothing", "empty", "other"], "expected a model")
    said_of |= dict.fromkeys(["start.sh", "engines/preprocessing/config.pbtxt"], "name its folder")
    said_of["engines"] = "TensorRT-engine backend"
    for place, said in said_of.items():
        with pytest.raises(NothingToCheckError, match=f"{place}: .*{said}") as raised:
            check_repository(tmp_path / place)
        assert isinstance(raised.value, BuildError)
        assert "\n" not in str(raised.value)


def test_an_unknown_release_or_gpu_in_the_options_is_an_error():
    for wrong in ({"release": "1.2.9"}, {"gpu": "h2000"}):
        with pytest.raises(UnknownNameError):
            check(options=CheckOptions(**wrong))


def test_a_python_based_backend_may_have_another_name_and_lies_where_triton_takes_it_for_no_model(tmp_path):
    write(tmp_path, config=edited(CONFIG, 'backend: "python"', 'backend: "vllm"'))
    (tmp_path / "backends/vllm").mkdir(parents=True)
    (tmp_path / "backends/vllm/model.py").touch()
    assert "tensorrt_llm/backends/vllm" in only(check_repository(tmp_path, OPTIONS), "C005").fix
    folder = tmp_path / "tensorrt_llm/backends/vllm"
    folder.mkdir(parents=True)
    (tmp_path / "tensorrt_llm/1/model.py").rename(folder / "model.py")

    assert serious(check_repository(tmp_path, OPTIONS)) == []
    assert serious(check_repository(tmp_path / "tensorrt_llm", OPTIONS)) == []


def test_a_backend_whose_folder_is_not_there_is_refused():
    for name in ("../x", "a/../../b", "", "x"):
        report = check(config=edited(CONFIG, 'backend: "python"', f'backend: "{name}"'))
        assert only(report, "C005").severity == "error"


def test_a_model_needs_its_model_py_under_the_name_that_counts(tmp_path):
    (write(tmp_path, ours=False) / "tensorrt_llm/1/model.py").unlink()
    assert only(check_repository(tmp_path, OPTIONS), "S008").file == "tensorrt_llm/1/model.py"

    other = check(config=CONFIG + 'default_model_filename: "other.py"\n')
    assert only(other, "S008").file == "tensorrt_llm/1/other.py"


def test_what_could_not_be_checked_is_said_with_the_option_that_helps(tmp_path):
    write(tmp_path, model_yaml=edited(MODEL_YAML, "deepseek-ai/DeepSeek-R1", "/models/mine"))

    assert [clause[clause.rindex("(") :] for clause in check_repository(tmp_path).unchecked] == [
        "(--variant, --precision)",
        "(--gpu, --gpus)",
        "(--model)",
    ]
    known = CheckOptions(release="1.2.1", variant="deepseek-v3.1", precision="nvfp4", gpu="b200")
    report = check_repository(tmp_path, known)
    assert [clause[clause.rindex("(") :] for clause in report.unchecked] == ["(--model)"]
    assert (report.models[0].variant, report.models[0].precision) == ("deepseek-v3.1", "fp4")


# Upstream's form


UPSTREAM_INPUTS = """
text_input STRING -1, streaming BOOL 1, sampling_param_temperature FP32 1, sampling_param_max_tokens INT32 1,
sampling_param_stop STRING -1, sampling_param_seed UINT64 1, return_finish_reason BOOL 1, stop BOOL 1
"""
UPSTREAM_OUTPUTS = "text_output STRING -1, finish_reason STRING -1, kv_cache_hit_rate FP32 -1, arrival_time_ns INT64 1"


def upstream_config():
    """Return a config.pbtxt with names, types and nesting as in NVIDIA/TensorRT-LLM's llmapi; it declares no policy."""

    def tensors(kind, table, optional=""):
        rows = (row.split() for row in table.split(","))
        entries = (f'{{ name: "{name}" data_type: TYPE_{t} dims: [ {d} ] {optional}}}' for name, t, d in rows)
        return f"{kind} [\n" + ",\n".join(entries) + "\n]\n"

    head = 'name: "tensorrt_llm"\nbackend: "python"\ninstance_group [\n  {\n    count: 1\n    kind : KIND_CPU\n  }\n]\n'
    return head + tensors("input", UPSTREAM_INPUTS, "optional: true ") + tensors("output", UPSTREAM_OUTPUTS)


UPSTREAM_YAML = """\
model: TinyLlama/TinyLlama-1.1B-Chat-v1.0
backend: "pytorch"
tensor_parallel_size: 1
pipeline_parallel_size: 1
logits_post_processors:
  plain: a_module.here:Processor
triton_config:
  max_batch_size: 0
  decoupled: False
  multimodal: {}
"""


def test_upstreams_own_form_is_accepted_with_a_warning_of_a_policy_that_only_its_model_py_sets(tmp_path):
    write(tmp_path, model_yaml=UPSTREAM_YAML, config=upstream_config(), ours=False)
    report = check_repository(tmp_path)
    assert serious(report) == []
    assert report.models[0].backend == "upstream"

    decoupled = edited(UPSTREAM_YAML, "decoupled: False", "decoupled: True")
    write(tmp_path / "decoupled", model_yaml=decoupled, config=upstream_config(), ours=False)
    finding = only(check_repository(tmp_path / "decoupled"), "C007")
    assert (finding.severity, finding.line) == ("warning", None)
    assert "decoupled: true" in finding.fix


def test_a_key_that_only_upstream_takes_is_wrong_for_our_backend():
    assert only(check(edited(MODEL_YAML, "max_num_tokens: 8192", "logits_post_processors: {}")), "S011").line == 5


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["reference", "simulated"])
def test_an_embedded_engine_ignores_llm_arguments_and_nothing_stops_its_load(tmp_path, engine):
    write_repository(
        repository_files(make_plan(PlanRequest(variant="tiny", engine=engine)), version="0"), tmp_path / "r"
    )
    with (tmp_path / "r/tensorrt_llm/1/model.yaml").open("a") as model_yaml:
        model_yaml.write("tensor_parallel_sizes: 8\nmax_num_tokens: many\ndrain_s: 5\n")

    found = serious(check_repository(tmp_path / "r"))

    assert [(finding.code, finding.severity, finding.key) for finding in found] == [
        ("S021", "warning", key) for key in ("tensor_parallel_sizes", "max_num_tokens", "drain_s")
    ]
    assert all(f"the {engine} engine takes only model" in finding.message for finding in found)
    assert [finding.fix for finding in found] == [
        *["remove it"] * 2,
        "indent it, so that it stands under triton_config",
    ]
    for broken in ("triton_config: {engine: simulate}", "{", "triton_config: {decoupled: true}"):
        (tmp_path / "r/tensorrt_llm/1/model.yaml").write_text(broken)
        assert [model.engine for model in check_repository(tmp_path / "r").models] == [engine]


# Which model, which release


def test_every_model_with_a_model_yaml_is_checked_and_no_other(tmp_path):
    write(tmp_path)
    shutil.copytree(tmp_path / "tensorrt_llm", tmp_path / "second")
    (tmp_path / "resnet" / "1").mkdir(parents=True)
    (tmp_path / "resnet" / "config.pbtxt").write_text("not for us")

    report = check_repository(tmp_path, OPTIONS)

    assert [model.file for model in report.models] == ["second/1/model.yaml", "tensorrt_llm/1/model.yaml"]
    assert only(report, "C004").file == "second/config.pbtxt"


def test_a_models_folder_can_be_checked_by_itself(tmp_path):
    write(tmp_path, model_yaml=edited(MODEL_YAML, "backend:", "backends:"))

    report = check_repository(tmp_path / "tensorrt_llm", OPTIONS)

    assert [(finding.file, finding.line) for finding in serious(report)] == [("1/model.yaml", 2)]


def test_a_yaml_file_can_be_checked_by_itself_and_for_a_number_of_gpus():
    report = check_alone(
        "max_batch_size: 8\nkv_cache_free_gpu_memory_fraction: 0.8\ntriton_config: {}\n", release="1.2.1"
    )
    assert [(finding.code, finding.line) for finding in serious(report)] == [("S013", 2), ("S011", 3)]
    assert only(report, "S013").fix == "under kv_cache_config: write free_gpu_memory_fraction: 0.8"

    alone, on_eight = (
        check_alone("moe_expert_parallel_size: 8\n", release="1.2.1", num_gpus=number) for number in (None, 8)
    )
    assert serious(alone) == serious(on_eight) == []
    assert any("flags" in clause for clause in alone.unchecked)


def test_the_release_comes_from_the_options_else_the_record_else_the_stamp_else_the_default(tmp_path):
    model = write(tmp_path) / "tensorrt_llm"
    known = lambda *options: check_repository(tmp_path, *options).models[0]  # noqa: E731

    assert (known().release, known().release_from) == (DEFAULT_RELEASE, "default")
    assert only(check_repository(tmp_path), "S007").severity == "note"
    (model / "deepseek-triton.json").write_text(json.dumps({"release": "1.1.0"}))
    assert (known().release, known().release_from) == ("1.1.0", "tensorrt_llm/deepseek-triton.json")
    (model / "1" / "release.yaml").write_text('release: "1.0.0"\n')
    assert (known().release, known().release_from) == ("1.0.0", "tensorrt_llm/1/release.yaml")
    assert known(CheckOptions(release="1.2.0")).release == "1.2.0"


def test_the_same_key_is_right_in_one_release_and_moved_in_another():
    model_yaml = edited(MODEL_YAML, "cuda_graph_config:\n  enable_padding: true\n  max_batch_size: 128\n", "")
    codes = {
        release: {finding.code for finding in check(model_yaml, options=CheckOptions(release=release)).findings}
        for release in ("1.2.1", "0.21.0")
    }

    assert ["S013" in found for found in codes.values()] == [False, True]


GRAPHS = "cuda_graph_config: {enable_padding: true, max_batch_size: 64}"
FLAT = "write use_cuda_graph: true; cuda_graph_padding_enabled: true; cuda_graph_max_batch_size: 64"
SIZES = "cuda_graph_config:\n  batch_sizes: [1, 2, 4, 8, 16, 32]"
MOVED = [  # a section, the release that has it elsewhere, and what to write
    (GRAPHS, "0.21.0", FLAT),
    (GRAPHS, "0.19.0", f"under pytorch_backend_config: {FLAT}"),
    (SIZES, "0.21.0", "write use_cuda_graph: true; cuda_graph_batch_sizes: [1, 2, 4, 8, 16, 32]"),
    ("cuda_graph_config: {}", "0.21.0", "write use_cuda_graph: true"),
    ("cuda_graph_config: 5", "0.21.0", "write use_cuda_graph: true"),
    ("cuda_graph_config: false", "0.21.0", "write use_cuda_graph: false"),
    ("cuda_graph_config: null", "0.21.0", "write use_cuda_graph: false"),
    ("moe_config: {load_balancer: {num_slots: 288}}", "0.21.0", "write moe_load_balancer: {num_slots: 288}"),
    ("moe_config: {load_balancer: 'a: b'}", "0.21.0", "write moe_load_balancer: 'a: b'"),
]
PARTLY_KNOWN = [  # a section that moved, of which a key is not known in any release
    (GRAPHS.replace("}", ", heat: 1}"), "0.21.0", FLAT),
    ("cuda_graph_config: {heat: 1}", "0.21.0", "write use_cuda_graph: true"),
    ("cuda_graph_config: {2: 1}", "0.21.0", "write use_cuda_graph: true"),
    ("moe_config: {backend: CUTLASS, heat: 1}", "0.21.0", "write moe_backend: CUTLASS"),
]


def test_the_fix_for_a_section_that_moved_is_the_lines_to_write(subtests):
    for section, release, fix in MOVED + PARTLY_KNOWN:
        with subtests.test(f"{section} in {release}"):
            report = check_alone(f"backend: pytorch\n{section}\n", release=release)
            assert only(report, "S013").fix == fix
            unknown = [(finding.line, finding.fix) for finding in report.findings if finding.code == "S011"]
            assert unknown == [(2, "remove it")] * ((section, release, fix) in PARTLY_KNOWN)


def test_a_value_in_a_fix_reads_back_as_the_same_value():
    for value in ("a  b", "a\nb", "x: y", "true", "1", "", "\x1b", 1e-5, [1, {"b": None}], {}, True):
        text = short_yaml(value)
        assert text.isprintable()
        assert yaml.safe_load(f"key: {text}") == {"key": value}


HAS_IT = "has it; remove it here, or use that release"
BLOCKS = "kv_cache_config: {tokens_per_block: 32}"
OF_OTHERS = {
    ("attention_dp_config: {}", "0.21.0", "S011"): f"TensorRT-LLM 1.0.0 {HAS_IT}",
    (BLOCKS, "0.21.0", "S021"): f"TensorRT-LLM 1.1.0 {HAS_IT}",
    (BLOCKS, "1.0.0", "S011"): f"TensorRT-LLM 1.1.0 {HAS_IT}",
    ("stream_interval: 4", "0.19.0", "S012"): (
        "TensorRT-LLM 1.0.0 has it; look it up in this release's documentation, or use that release"
    ),
    (BLOCKS.replace("block:", "blocks:"), "1.2.1", "S011"): "did you mean tokens_per_block, under kv_cache_config?",
    ("stream_interval_of_none: 4", "0.21.0", "S011"): "remove it",
}


def test_a_key_of_another_release_is_not_taken_for_a_misspelling():
    found = {
        (line, release, code): only(check_alone(f"backend: pytorch\n{line}\n", release=release), code).fix
        for line, release, code in OF_OTHERS
    }
    assert found == OF_OTHERS


def test_a_rule_points_to_the_key_as_the_release_spells_it():
    model = "model: deepseek-ai/DeepSeek-R1\nbackend: pytorch\n"
    for text, line, key in (
        ("moe_config:\n  backend: DEEPGEMM\n", 4, None),
        ("moe_backend: DEEPGEMM\n", 3, "moe_backend"),
    ):
        found = check_alone(model + text, release="0.21.0", gpu="h200").findings
        found = [finding for finding in found if finding.code.startswith("M")]
        assert {finding.line for finding in found} == {line}
        assert key is None or {finding.key for finding in found} == {key}


def test_an_unknown_key_is_only_a_warning_where_the_record_is_incomplete():
    finding = only(check(MODEL_YAML + "something_new: 1\n", options=CheckOptions(release="0.19.0")), "S012")

    assert (finding.severity, finding.line) == ("warning", 16)


# The stamp


def stamped(root, **values):
    write(root)
    files = {path: root / path for path in ("tensorrt_llm/config.pbtxt", "tensorrt_llm/1/model.yaml")}
    sums = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    stamp = {"variant": "deepseek-r1", "gpu": "h200", "gpus": 8, "precision": "fp8", "release": "1.2.1", "files": sums}
    (root / "tensorrt_llm" / "deepseek-triton.json").write_text(json.dumps(stamp | values))
    return root


def test_the_stamp_says_what_it_was_generated_for(tmp_path):
    report = check_repository(stamped(tmp_path))

    model = report.models[0]
    assert (model.variant, model.gpu, model.num_gpus, model.precision) == ("deepseek-r1", "h200", 8, "fp8")
    assert serious(report) == []


@pytest.mark.parametrize(("folder", "file"), [("", "tensorrt_llm/1/model.yaml"), ("tensorrt_llm", "1/model.yaml")])
def test_files_changed_since_they_were_generated_are_noted(tmp_path, folder, file):
    stamped(tmp_path)
    (tmp_path / "tensorrt_llm/1/model.yaml").write_text(MODEL_YAML + "# mine\n")

    finding = only(check_repository(tmp_path / folder), "S005")

    assert (finding.severity, finding.file) == ("note", file)


def test_unknown_names_in_a_stamp_are_a_warning(tmp_path):
    wrong = [{"variant": "deepseek-r9"}, {"gpu": "z100"}, {"release": "9.9"}, {"variant": 5, "gpu": ["h200"]}]
    for number, values in enumerate(wrong):
        report = check_repository(stamped(tmp_path / str(number), **values))
        assert {finding.code for finding in serious(report)} == {"S006"}, values


def test_a_stamp_with_a_damaged_file_list_is_no_error(tmp_path):
    for number, files in enumerate([None, 5, [], {"a": 5}, {"../../x": "y"}]):
        assert not check_repository(stamped(tmp_path / str(number), files=files)).has_errors, files


def test_a_pipe_in_the_place_of_a_file_does_not_block(tmp_path):
    for number, name in enumerate(["1/model.py", "config.pbtxt", "1/model.yaml", "1/release.yaml", "../start.sh"]):
        root = stamped(tmp_path / str(number), files={"tensorrt_llm/1/model.py": "x", "start.sh": "x"})
        path = root / "tensorrt_llm" / name
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        assert check_repository(root).findings


def test_names_in_a_stamp_that_lead_out_of_the_repository_are_ignored(tmp_path):
    (tmp_path / "x").write_text("outside")
    names = ["/dev/zero", "tensorrt_llm//dev/zero", "../x", "tensorrt_llm/../../x", "", "a\0b"]
    for number, name in enumerate(names):
        report = check_repository(stamped(tmp_path / f"repository{number}", files={name: "sum"}))
        assert not report.has_errors
        assert all("/dev" not in finding.file and ".." not in finding.file for finding in report.findings)


# The rules


DEFAULT = "  default_sampling:\n    top_p: 0.9\n"


def test_a_default_that_the_sampler_ignores_is_found_on_its_line():
    mtp = "speculative_config:\n  decoding_type: MTP\n  num_nextn_predict_layers: 1\n"
    finding = only(check(mtp + MODEL_YAML + DEFAULT), "D009")

    assert (finding.key, finding.line) == ("triton_config.default_sampling.top_p", 20)


def test_a_sampler_chosen_by_a_key_of_another_release_counts_as_chosen():
    """The fix of S013 chooses the sampler, so there is no second finding about the defaults the other one ignores."""
    chosen = MODEL_YAML + "  default_sampling:\n    top_k: 20\n    min_tokens: 5\n"
    for release in ("0.21.0", "1.0.0"):
        moved, alone = (
            {finding.code for finding in check(text, options=CheckOptions(release=release)).findings}
            for text in ("sampler_type: TRTLLMSampler\n" + chosen, chosen)
        )
        assert "S013" in moved
        assert ("D009" in moved, "D009" in alone) == (False, True)


def test_the_rules_judge_a_key_in_a_wrong_place_as_if_it_were_in_the_right_one():
    report = check(edited(MODEL_YAML, "max_num_tokens: 8192", "moe_backend: DEEPGEMM"))
    found = [(finding.code, finding.line) for finding in serious(report)]

    assert ("S013", 5) in found
    assert [line for code, line in found if code.startswith("M")] == [5]


# The libraries


@pytest.mark.slow
def test_config_pbtxt_is_read_with_tritonclient_alone_and_without_it_there_is_only_a_note(tmp_path):
    write(tmp_path, config=edited(CONFIG, "KIND_CPU", "KIND_GPU"))
    program = (
        "from pathlib import Path\n"
        "from deepseek_triton_build.check import CheckOptions, check_repository\n"
        f"report = check_repository(Path({str(tmp_path)!r}), CheckOptions(release='1.2.1', gpu='h200'))\n"
        "print([f.code for f in report.findings if f.code in ('C001', 'T015')])\n"
        "print('grpc' in sys.modules, 'numpy' in sys.modules)\n"
    )
    for before, code in ("import sys\n", "T015"), ("import sys; sys.modules['tritonclient'] = None\n", "C001"):
        done = subprocess.run([sys.executable, "-c", before + program], check=True, capture_output=True, text=True)
        assert done.stdout.splitlines() == [f"['{code}']", "False False"]


def test_findings_are_plain_data():
    found = json.loads(json.dumps(check(edited(MODEL_YAML, "backend:", "backends:")).findings_json()))

    assert {"code", "severity", "message", "fix", "file", "line", "key", "issue"} == set(found[0])
