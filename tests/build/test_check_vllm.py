"""`check` of what vLLM runs: repositories, Triton's own vLLM backend, and scripts with `vllm serve`."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from deepseek_triton_build import PlanRequest, RefusedPlanError, format_files, make_plan, write_repository
from deepseek_triton_build.build_errors import NothingToCheckError, UnknownNameError
from deepseek_triton_build.check import CheckOptions, check_repository, read_facts
from deepseek_triton_build.check.flags import as_flag, read_vllm_flags
from deepseek_triton_build.check.scripts import ShellScript
from deepseek_triton_build.data.releases import load_release
from deepseek_triton_build.data.vllm import VLLM_VERSIONS, load_vllm
from deepseek_triton_build.render.vllm_commands import WITHOUT_FLAG
from support.check_faults import FIRST, write_weights
from support.checked import CONFIG, edit, edited, only, serious, write

MODEL_YAML = """\
model: deepseek-ai/DeepSeek-R1
tensor_parallel_size: 8
enable_expert_parallel: true
gpu_memory_utilization: 0.9
max_model_len: 65536
max_num_seqs: 256
scheduling_policy: priority
speculative_config:
  method: mtp
  num_speculative_tokens: 1
triton_config:
  engine: vllm
  decoupled: true
  max_batch_size: 0
"""
OPTIONS = CheckOptions(gpu="h200", num_gpus=8)
RECORD = load_vllm("0.25.1").text


def repository(root, model_yaml=MODEL_YAML, *, record=RECORD):
    write(root, model_yaml=model_yaml, config=CONFIG)
    (root / "tensorrt_llm/1/release.yaml").write_text(record)
    return root


def test_a_right_repository_has_only_the_note_about_its_checkpoint(tmp_path):
    report = check_repository(repository(tmp_path), OPTIONS)

    assert [finding.code for finding in report.findings] == ["W003"]
    (model,) = report.models
    assert (model.engine, model.release, model.release_from) == ("vllm", "0.25.1", "tensorrt_llm/1/release.yaml")
    assert (model.variant, model.precision, model.gpu, model.num_gpus) == ("deepseek-r1", "fp8", "h200", 8)


SEQS, METHOD = "max_num_seqs: 256", "  method: mtp"
EDITS = [  # what is replaced, by what, the code of the finding, its line and words of it
    ("max_num_seqs:", "max_num_seq:", "S011", 6, "did you mean max_num_seqs?"),
    (SEQS, "max_num_seqs: '256'", "S014", 6, "without quotes"),
    (SEQS, "max_num_seqs: true", "S014", 6, "whole number"),
    (SEQS, "max_num_seqs: 0", "S016", 6, "from 1"),
    (SEQS, f"max_num_batched_tokens: -1\n{SEQS}", "S016", 6, "from 1"),
    (SEQS, f"block_size: 0\n{SEQS}", "S016", 6, "from 1"),
    (SEQS, "max_batch_size: 256", "S013", 6, "write max_num_seqs: 256"),
    (SEQS, "compilation_config:\n  level: 3", "S013", 7, "under compilation_config: write mode: 3"),
    (METHOD, "  methods: mtp", "S011", 9, "did you mean method, under speculative_config?"),
    (SEQS, f"attention_backend: FLASH_MLA\n{SEQS}", "S015", 6, "did you mean FLASHMLA?"),
    (SEQS, "kv_cache_config:\n  dtype: fp8", "S013", 7, "write kv_cache_dtype: fp8"),
    (SEQS, "kv_cache_config:\n  sink: 1", "S011", 6, "is not an argument of vLLM"),
    (SEQS, "max_inflight: 256", "S011", 6, "indent it"),
    ("  decoupled: true", "  decoupled: true\n  max_num_seqs: 1", "T001", 14, "move it to the top level"),
    (SEQS, "pipeline_parallel_size: 2", "T013", 0, "8 GPUs for 16 ranks"),
    ("model: deepseek-ai/DeepSeek-R1", "model:", "S020", 1, "no model is named"),
]


@pytest.mark.slow
def test_an_edit_is_found(tmp_path, subtests):
    for number, (old, new, code, line, words) in enumerate(EDITS):
        report = check_repository(repository(tmp_path / str(number), edited(MODEL_YAML, old, new)), OPTIONS)
        with subtests.test(f"{new}: {code}"):
            finding = only(report, code)
            assert words in f"{finding.message}; {finding.fix}"
            assert line in (0, finding.line)
    in_small_letters = edited(MODEL_YAML, SEQS, f"attention_backend: flashmla\n{SEQS}")
    assert serious(check_repository(repository(tmp_path / "right", in_small_letters), OPTIONS)) == []


PLANS = [
    {"variant": variant, "gpu": gpu, "num_gpus": num_gpus, "vllm": version, **more}
    for variant, gpu, num_gpus in (
        ("deepseek-r1-0528", "h200", 8),
        ("deepseek-v3", "h200", 16),
        ("deepseek-r1", "b200", 8),
        ("deepseek-v3.2-exp", "b200", 8),
        ("tiny", "h100", 2),
    )
    for version in VLLM_VERSIONS
    for more in (
        {},
        {"profile": "latency"},
        {"profile": "throughput"},
        {"parallel": "dp"},
        {"parallel": "tp", "mtp": 1, "kv_dtype": "fp8"},
        {"precision": "fp4"},
        {"precision": "w4a16", "model": "/models/some-w4a16"},
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("format", ["triton", "vllm-serve"])
def test_what_build_writes_for_vllm_has_no_findings(tmp_path, format):
    checked = 0
    for number, fields in enumerate(PLANS):
        try:
            plan = make_plan(PlanRequest(engine="vllm", **fields))
            files = format_files(format, plan, version="0")
        except RefusedPlanError:
            continue
        write_repository(files, tmp_path / str(number))
        report = check_repository(tmp_path / str(number), CheckOptions())
        assert [one for one in report.findings if one.code not in ("W001", "W003")] == [], fields
        assert (report.models[0].engine, report.models[0].release) == ("vllm", fields["vllm"])
        checked += 1
    assert checked >= len(PLANS) / 2


def test_a_record_of_the_other_library_is_an_error(tmp_path):
    report = check_repository(repository(tmp_path / "a", record=load_release("1.2.1").text), OPTIONS)
    assert "expected the record of a version of vLLM" in only(report, "S029").message

    trtllm = "model: deepseek-ai/DeepSeek-R1\ntensor_parallel_size: 8\ntriton_config: {engine: tensorrt_llm}\n"
    report = check_repository(repository(tmp_path / "b", trtllm), OPTIONS)
    assert "expected the record of a version of TensorRT-LLM" in only(report, "S029").message

    # The record says whose arguments these are.
    report = check_repository(repository(tmp_path / "c", edited(MODEL_YAML, "engine: vllm", "engine: vlm")), OPTIONS)
    assert [finding.code for finding in serious(report)] == ["T002"]


def test_without_model_yaml_the_record_says_which_library_it_is(tmp_path):
    root = repository(tmp_path)
    (root / "tensorrt_llm/1/model.yaml").unlink()
    (model,) = check_repository(root / "tensorrt_llm", OPTIONS).models
    assert (model.engine, model.release) == ("vllm", "0.25.1")


def test_without_its_engine_a_folder_is_checked_for_the_one_it_was_built_for(tmp_path):
    plan = make_plan(PlanRequest(variant="tiny", engine="vllm", gpu="h200"))
    write_repository(format_files("triton", plan, version="0"), tmp_path / "r")
    edit(tmp_path / "r/tensorrt_llm/1/model.yaml", "  engine: vllm\n", "")
    assert [finding.key for finding in serious(check_repository(tmp_path / "r"))] == ["triton_config.engine"]
    (tmp_path / "r/tensorrt_llm/1/deepseek_backend/engines/tensorrt_llm").mkdir()  # its owner wants another one
    assert [model.engine for model in check_repository(tmp_path / "r").models] == ["tensorrt_llm"]


def test_a_version_that_is_not_known_is_checked_against_the_nearest(tmp_path):
    report = check_repository(repository(tmp_path, record='vllm: "0.22.1"\n'), OPTIONS)

    finding = only(report, "S006")
    assert "'0.22.1', which Triton's container 26.06 has and is not recorded here" in finding.message
    assert "0.24.0 is the nearest" in finding.fix
    assert (report.models[0].release, report.models[0].release_from) == ("0.24.0", "the nearest to 0.22.1")


def test_the_users_version_counts_and_has_to_be_known(tmp_path):
    repository(tmp_path)

    assert check_repository(tmp_path, CheckOptions(vllm="0.33.0")).models[0].release == "0.33.0"
    with pytest.raises(UnknownNameError, match=r"the nearest known is 0\.24\.0"):
        check_repository(tmp_path, CheckOptions(vllm="0.22.1"))


def test_variables_in_start_sh_are_those_of_vllm(tmp_path):
    repository(tmp_path)
    (tmp_path / "start.sh").write_text(
        "#!/bin/bash\nexport VLLM_USE_DEEP_GEMM=1 VLLM_LOGGING_LEVEL=INFO\n"
        "export VLLM_ALL2ALL_BACKEND=${ALL2ALL:-deepep_low_latency}\nexport VLLM_USE_FLASHINFER_MOE_FP8=$MOE\n"
    )

    found = [(one.code, one.line, one.fix) for one in serious(check_repository(tmp_path, OPTIONS))]

    write_it = "in tensorrt_llm/1/model.yaml: write"
    assert found == [
        ("S028", 3, f"{write_it} all2all_backend: deepep_low_latency, and remove the variable"),
        ("S028", 4, f"{write_it} moe_backend, and remove the variable"),
    ]


def test_vllm_ignores_what_only_tensorrt_llm_reads_of_a_checkpoint(tmp_path):
    repository(tmp_path / "repository")
    weights = tmp_path / "weights"
    write_weights(weights)
    shutil.copy(weights / FIRST, weights / "extra.safetensors")
    (weights / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8_BLOCK_SCALE"}}')
    options = CheckOptions(gpu="h200", num_gpus=8, model_root=weights)

    assert serious(check_repository(tmp_path / "repository", options)) == []
    trtllm = "model: deepseek-ai/DeepSeek-R1\nbackend: pytorch\ntensor_parallel_size: 8\n"
    write(tmp_path / "other", model_yaml=trtllm)
    found = {finding.code for finding in check_repository(tmp_path / "other", options).findings}
    assert {"W012", "W018"} <= found


_INT4 = {"weights": {"num_bits": 4, "type": "int"}, "input_activations": None}
_W4A8 = {**_INT4, "input_activations": {"num_bits": 8}}
_INT8 = {"weights": {"num_bits": 8, "type": "int"}}


PRECISIONS = [
    ({"quant_method": "awq", "bits": 4}, "w4a16"),
    ({"quant_method": "gptq", "bits": 4}, "w4a16"),
    ({"quant_method": "gptq", "bits": 8}, None),
    ({"quant_method": "compressed-tensors", "config_groups": {"group_0": _INT4}}, "w4a16"),
    ({"quant_method": "compressed-tensors", "config_groups": {"group_0": _INT4, "group_1": _INT8}}, None),
    ({"quant_method": "compressed-tensors", "config_groups": {"group_0": _W4A8}}, None),
    ({"quant_method": "compressed-tensors", "config_groups": {}}, None),
    ({"quant_method": "compressed-tensors", "config_groups": [4]}, None),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
]


def test_weights_of_4_bits_are_known_by_what_made_them(tmp_path):
    found = []
    for quantization, _ in PRECISIONS:
        text = json.dumps({"architectures": ["DeepseekV3ForCausalLM"], "quantization_config": quantization})
        (tmp_path / "config.json").write_text(text)
        found.append((quantization, read_facts(tmp_path, "weights", for_vllm=True)[0].precision))
    assert found == PRECISIONS


# Triton's own vLLM backend


def vllm_backend(root, model_json, config='backend: "vllm"'):
    (root / "r1" / "1").mkdir(parents=True)
    (root / "r1" / "1" / "model.json").write_text(model_json)
    (root / "r1" / "config.pbtxt").write_text(f"{config}\ninstance_group [ {{ count: 1, kind: KIND_MODEL }} ]\n")
    return root


def test_a_model_json_has_lines_whatever_it_is_indented_with(tmp_path):
    text = '{\n\t"model": "deepseek-ai/DeepSeek-R1",\n\t"tensor_parallel_siz": 8\n}\n'

    finding = only(check_repository(vllm_backend(tmp_path, text), CheckOptions()), "S011")

    assert (finding.file, finding.line, finding.fix) == ("r1/1/model.json", 3, "did you mean tensor_parallel_size?")


def test_instances_of_one_gpu_are_right_for_one_rank(tmp_path):
    vllm_backend(tmp_path, '{"model": "deepseek-ai/DeepSeek-R1"}')
    config = tmp_path / "r1" / "config.pbtxt"
    config.write_text(config.read_text().replace("KIND_MODEL", "KIND_GPU"))

    assert serious(check_repository(tmp_path, CheckOptions())) == []


def test_a_model_json_of_another_backend_is_left_alone_and_a_broken_one_of_vllm_reported(tmp_path):
    with pytest.raises(NothingToCheckError, match="expected a model"):
        check_repository(vllm_backend(tmp_path / "a", '{"learner": {}}', 'backend: "fil"'), CheckOptions())
    assert only(check_repository(vllm_backend(tmp_path / "b", "{'model': 1}"), CheckOptions()), "S002").line == 1


# Scripts


def settings_of(command, version="0.24.0"):
    script = ShellScript(file="serve.sh", text=f"exec {command}\n")
    given = read_vllm_flags(script, script.program, load_vllm(version))
    assert given.findings == []
    return given.settings


MTP = '\'{"method": "mtp", "num_speculative_tokens": 2}\''
FLAGS = {
    "-tp 8 -dp=2": {"tensor_parallel_size": 8, "data_parallel_size": 2},
    "--tensor_parallel_size=8": {"tensor_parallel_size": 8},
    "--max-num-batched-tokens 32k --block-size 64": {"max_num_batched_tokens": 32000, "block_size": 64},
    "--max-num-batched-tokens 32K": {"max_num_batched_tokens": 32768},
    "--max-model-len auto": {},
    "--no-enable-prefix-caching --enable-dbo": {"enable_prefix_caching": False, "enable_dbo": True},
    "--cudagraph-capture-sizes 1 2 4": {"cudagraph_capture_sizes": [1, 2, 4]},
    "--compilation-config.cudagraph_mode FULL -O3": {"compilation_config.cudagraph_mode": "FULL"},
    "-cc.mode 3": {"compilation_config.mode": 3},
    "--max-model-len -1 --max-logprobs -1": {"max_model_len": -1, "max_logprobs": -1},
    f"--speculative-config {MTP}": {"speculative_config.method": "mtp", "speculative_config.num_speculative_tokens": 2},
    "--host 0.0.0.0 --port 8000 --tool-call-parser deepseek_v3 --api-key x": {},
    '--moe-backend "${MOE:-deep_gemm}" --kv-cache-dtype "$KV"': {"moe_backend": "deep_gemm"},
}


def test_flags_count_as_vllm_serve_takes_them():
    assert {flags: settings_of(f"vllm serve deepseek-ai/DeepSeek-R1 {flags}") for flags in FLAGS} == FLAGS


def test_a_flag_without_its_value_is_said_to_have_none():
    script = ShellScript(file="serve.sh", text="exec vllm serve m --max-num-seqs --enable-dbo\n")
    (finding,) = read_vllm_flags(script, script.program, load_vllm("0.24.0")).findings
    assert (finding.code, finding.message) == ("S014", "--max-num-seqs: expected a value after it, found none")


@pytest.mark.parametrize("version", VLLM_VERSIONS)
def test_every_argument_is_known_as_a_flag(version):
    for name, row in load_vllm(version).arguments.items():
        if row.type == "bool" and name not in WITHOUT_FLAG:
            assert settings_of(f"vllm serve m {as_flag(name, True)[6:]}", version) == {name: True}
            assert settings_of(f"vllm serve m {as_flag(name, False)[6:]}", version) == {name: False}
    written = as_flag("compilation_config", {"mode": 3})[6:]
    assert settings_of(f"vllm serve m {written}", version) == {"compilation_config.mode": 3}


def test_the_program_is_found_however_it_is_started(tmp_path):
    served = "serve deepseek-ai/DeepSeek-R1 -tp 8"
    for command in (
        f"vllm {served}",
        "vllm serve --model deepseek-ai/DeepSeek-R1 -tp 8",
        "python3 -m vllm.entrypoints.openai.api_server --model deepseek-ai/DeepSeek-R1 -tp 8",
        f"docker run --gpus all vllm/vllm-openai:v0.25.1 vllm {served}",
        "podman run -e A=1 docker.io/vllm/vllm-openai:v0.25.1 --model deepseek-ai/DeepSeek-R1 -tp 8",
    ):
        (tmp_path / "serve.sh").write_text(f"#!/bin/bash\ncommand -v vllm\n{command}\n")
        report = check_repository(tmp_path, OPTIONS)
        model = report.models[0]
        is_named = "v0.25.1" in command
        assert [finding.code for finding in report.findings] == ([] if is_named else ["S007"])
        assert (model.model, model.engine) == ("deepseek-ai/DeepSeek-R1", "vllm")
        assert (model.release == "0.25.1") is is_named


COMMANDS = yaml.safe_load((Path(__file__).parents[1] / "support" / "check_vllm_commands.yaml").read_text("utf-8"))


def test_published_commands_for_v4_have_no_findings_but_the_listed_ones(tmp_path):
    found, script = {}, tmp_path / "serve.sh"
    for name, row in COMMANDS["commands"].items():
        own = COMMANDS["v4.1" if "V4.1" in row["serve"] else "v4"]
        script.write_text(f"vllm serve {row['serve']} {COMMANDS['always']} {own}\n")
        report = check_repository(tmp_path, CheckOptions(**row["machine"]))
        found[name] = {finding.code for finding in report.findings if finding.severity != "note"}
    assert found == {name: set(row.get("found", ())) for name, row in COMMANDS["commands"].items()}


def test_a_model_json_of_v4_is_judged_as_its_flags_are(tmp_path):
    served = {"model": "deepseek-ai/DeepSeek-V4-Flash-0731", "tensor_parallel_size": 8, "block_size": 256}
    draft = {"method": "dspark", "num_speculative_tokens": 5}
    codes = [
        {
            finding.code
            for finding in serious(check_repository(vllm_backend(tmp_path / dtype, text), CheckOptions(gpu="b200")))
        }
        for dtype in ("fp8", "auto")
        for text in [json.dumps(served | {"kv_cache_dtype": dtype, "speculative_config": draft})]
    ]
    assert codes == [set(), {"X030"}]


def test_a_script_that_only_measures_is_left_alone(tmp_path):
    (tmp_path / "bench.sh").write_text("vllm bench serve --model m --random-input-len 1\n")

    report = check_repository(tmp_path, OPTIONS)

    assert (report.findings, report.models) == ((), ())
