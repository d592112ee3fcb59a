import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_triton_build import PlanRequest, make_plan
from deepseek_triton_build.catalog import profiles, variants
from deepseek_triton_tools.cli.main import main
from deepseek_triton_tools.terminal import tables

R1 = ["plan", "deepseek-r1", "--gpu", "h200", "--gpus", "8"]


def document(capsys, *argv):
    assert main(["plan", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def checkpoint(folder, *, class_name="DeepseekV3ForCausalLM", quant=None, layers=61):
    folder.mkdir()
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = {"architectures": [class_name], "quantization_config": quantization, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    if quant:
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": quant}}))
    return str(folder)


FP4 = "nvidia/DeepSeek-R1-FP4"
REFUSED = [
    (["deepsek-r1"], 2, "did you mean 'deepseek-r1'"),
    (["deepseek-r1", "--gpu", "h2000"], 2, "unknown GPU 'h2000'"),
    (["deepseek-r1", "--gpu", "h200", "--gpus", "4"], 1, "--gpus 8"),
    (["deepseek-r1", "--gpu", "a100"], 1, "Ampere"),
    (["deepseek-r1"], 2, "needs --gpu"),
    (["deepseek-r1", "--gpu", "NVIDIA H200"], 2, "did you mean 'h200'?"),
    (["deepseek-r1-0529", "--gpu", "h200"], 2, "did you mean 'deepseek-r1-0528'?"),
    (["x" * 5000, "--gpu", "h200"], 2, "unknown variant 'xxx"),
    (["/" + "x" * 5000, "--gpu", "h200"], 2, "is a path"),
    (["/nowhere/R1"], 2, "--model: VARIANT --model /nowhere/R1, where VARIANT is what it is: deepseek-v3 or "),
    (["deepseek-ai/DeepSeek-R2"], 2, "did you mean deepseek-ai/DeepSeek-R1?"),
    (["deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", "--gpu", "h200"], 2, "architecture of the Qwen"),
    ([FP4, "--gpu", "h200"], 1, "what works: --gpu b200"),
    ([FP4, "--gpu", "b200", "--precision", "fp8"], 2, "holds fp4 weights"),
    (["tiny", "--mtp", "0", "--gpu", "h200"], 2, "leave out --gpu, --mtp"),
    (["tiny", "--preset", "x"], 1, "--preset paces the simulated engine"),
    (["tiny", "--vllm", "0.25.1"], 2, "leave out --vllm"),
    (["deepseek-r1", "--engine", "vlm", "--gpu", "h200"], 2, "did you mean 'vllm'?"),
]
OPTIONS_REFUSED = [
    ("--image", "26.7", 2, "did you mean '26.07'?"),
    ("--image", "", 2, "unknown Triton container ''"),
    ("--image", "99.01", 2, "unknown Triton container"),
    ("--image", "26.05-vllm-python-py3", 1, "use 26.05-trtllm-python-py3"),
    ("--image", "25.11", 1, "no repository is made for it"),
    ("--image", "25.07", 1, "carries TensorRT-LLM 0.20.0"),
    ("--trtllm", "1.2", 2, "did you mean '1.2.1' or '1.2.0'?"),
    ("--trtllm", "", 2, "unknown TensorRT-LLM release ''"),
    ("--trtllm", "0.20.0", 1, "use 0.21.0"),
    ("--precision", "fp5", 2, "unknown precision 'fp5'"),
    ("--profile", "fast", 2, "unknown profile 'fast'"),
    ("--vllm", "0.25.1", 2, "--vllm: only for --engine vllm, not for tensorrt_llm"),
    ("--parallel", "dp", 2, "--parallel: only for --engine vllm"),
    ("--model", "/" + "x" * 5000, 2, "is too long for a path"),
    ("--model", "/m/\udcff", 2, "expected a name in UTF-8"),
    ("--model", "", 2, "expected a folder or a Hugging Face name"),
    ("--model", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B", 2, "not served here"),
    ("--model", "deepseek-ai/DeepSeek-V3", 2, "is deepseek-v3, not"),
    *(("--set", f"max_batch_size={value}", 2, "quote it") for value in ("2020-13-45", "!!bool maybe", '!!int ""')),
    *(("--set", f"max_batch_size={value}", 2, "quote it") for value in ("!!timestamp foo", "{[a]: 1}", "&a [*a]")),
    *(("--set", f"max_batch_size={character * 5000}", 2, "quote it") for character in "9["),
    ("--set", f"max_batch_size={2**63}", 2, "64 bits"),
    ("--set", "stream_interval=.nan", 2, "finite number, found nan"),
    ("--set", "stream_interval=[-.inf]", 2, "finite number, found -inf"),
    ("--set", "max_batch_sise=3", 1, "did you mean max_batch_size?"),
    ("--set", "max_batch_size", 2, "expected KEY=VALUE"),
    ("--set", "=3", 2, "expected KEY=VALUE"),
    ("--set", "max_batch_size=[1", 2, "the value is not YAML"),
    ("--set", "moe_config=[{a: 1}]", 2, "found a mapping"),
]
FOR_VLLM_REFUSED = [
    (["--trtllm", "1.2.1"], "--trtllm: only for --engine tensorrt_llm, not for vllm"),
    (["--relaxed-acceptance"], "--relaxed-acceptance: only for"),
    (["--allow-unpublished"], "--allow-unpublished: only for"),
    (["--vllm", "0.25"], "unknown vLLM version '0.25'"),
    (["--image", "26.05"], "Triton's container 26.05 has it"),
    (["--image", "24.01"], "unknown Triton container '24.01'"),
]
REFUSED += [([*R1[1:], option, value], code, expected) for option, value, code, expected in OPTIONS_REFUSED]
REFUSED += [([*R1[1:], "--engine", "vllm", *options], 2, expected) for options, expected in FOR_VLLM_REFUSED]


@pytest.mark.slow
def test_what_cant_be_planned_is_one_line(capsys, subtests):
    for argv, code, expected in REFUSED:
        with subtests.test(ascii(argv[-2:])):
            assert main(["plan", *argv]) == code
            captured = capsys.readouterr()
            assert captured.out == ""
            (line,) = captured.err.splitlines()
            assert line.startswith("deepseek-triton plan: ")
            assert expected in line


def test_what_the_parser_refuses(capsys):
    wrong = [["--trtllm", "1.2.1", "--image", "26.07"], ["--isl", "0"], ["--mtp", "-1"], ["--concurrency", "many"]]
    for options in [*wrong, ["--kv-cache-dtype", "fp4"], ["--brief", "--json"], ["--diff", ".", "--json"]]:
        with pytest.raises(SystemExit) as caught:
            main([*R1, *options])
        assert (caught.value.code, "argument" in capsys.readouterr().err) == (2, True), options


def test_a_plan_for_people_says_what_and_why(capsys):
    assert main(R1) == 0

    printed = capsys.readouterr().out
    plan = make_plan(PlanRequest(variant="deepseek-r1", gpu="h200", num_gpus=8))
    for setting in plan.settings:
        assert setting.key in printed
        assert setting.reason in printed
    for words in ("8 x NVIDIA H200", "26.07-trtllm", "35,136 bytes a token", "one node, 8 MPI ranks", "765 GB"):
        assert words in printed
    assert "\x1b" not in printed

    budget = plan.budget
    [bar] = [line.strip()[1:-1] for line in printed.splitlines() if line.startswith("  [#")]
    assert printed.index(bar) < printed.index("Requests at once") < printed.index("Model and parallelism")
    workspace = budget.workspace - budget.cuda_graphs
    sizes = {"#": budget.weights, "=": budget.kv_cache, "+": budget.cuda_graphs, "-": workspace, ".": budget.free}
    assert list(dict.fromkeys(bar)) == list(sizes)
    for mark, size in sizes.items():
        assert bar.count(mark) == pytest.approx(len(bar) * size / budget.memory, abs=1)


@given(sizes=st.lists(st.integers(-1, 10**12), max_size=6), length=st.integers(1, 200))
def test_a_bar_shows_every_part_and_has_its_length(sizes, length):
    parts = [(chr(ord("a") + number), size) for number, size in enumerate(sizes)]
    shown = {mark: size for mark, size in parts if size > 0}
    bar = tables.bar(parts, length)

    assert list(dict.fromkeys(bar)) == list(shown)
    assert not shown or length <= len(bar) < length + len(shown)
    if len(bar) == length and all(size * length >= sum(shown.values()) for size in shown.values()):
        assert all(abs(bar.count(mark) - length * size / sum(shown.values())) <= 1 for mark, size in shown.items())


def test_a_brief_plan_is_without_settings(capsys):
    argv = ["plan", "deepseek-r1", "--gpu", "b200", "--profile", "throughput"]
    assert main([*argv, "--brief"]) == 0
    brief = capsys.readouterr().out
    assert main(argv) == 0
    whole = capsys.readouterr().out

    assert set(brief.splitlines()) < set(whole.splitlines())
    for words in ("Memory of one GPU", "Requests at once", "start.sh", "Warnings and notes"):
        assert words in brief
    assert "enable_attention_dp" not in brief
    assert len(brief.splitlines()) < 35


@pytest.mark.parametrize("profile", profiles())
def test_a_source_is_named_once_and_shapes_by_their_range(profile, capsys):
    options = ["deepseek-r1", "--gpu", "gb200-nvl72", "--gpus", "32", "--profile", profile]
    request = PlanRequest(variant="deepseek-r1", gpu="gb200-nvl72", num_gpus=32, profile=profile)
    if profile == "rehearsal":
        options = ["tiny", "--engine", "tensorrt_llm", "--gpu", "gb200-nvl72"]
        request = PlanRequest(variant="tiny", gpu="gb200-nvl72", engine="tensorrt_llm")
    assert main(["plan", *options]) == 0
    body = capsys.readouterr().out.partition("Model and parallelism")[2].partition("\nSources\n")

    plan = make_plan(request)
    for source in {line.source for line in (*plan.settings, *plan.environment) if line.source}:
        assert body[0].count(f"({source})") + body[2].count(f"] {source}\n") == 1, source
    assert "[[1, " not in body[0]
    assert ("shapes: 1 to " in body[0]) == any(line.reason.startswith("pairs of") for line in plan.settings)


@pytest.fixture
def built(tmp_path, capsys):
    """Build R1 with these options, and return what `plan --diff` then says with others."""

    def diff(*options, there=(), change=lambda folder: None):
        folder = tmp_path / "r1"
        assert main(["build", *R1[1:], "--output", str(folder), *there]) == 0
        change(folder)
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        capsys.readouterr()
        code = main([*R1, *options, "--diff", str(folder)])
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
        captured = capsys.readouterr()
        return code, captured.out.splitlines() or captured.err.splitlines()

    return diff


def test_other_options_would_change_these_settings(built):
    code, lines = built("--mtp", "1", "--set", "kv_cache_config.free_gpu_memory_fraction=0.7")

    assert code == 0
    at = lines.index("tensorrt_llm/1/model.yaml")
    assert "  - options: deepseek-r1 --gpu h200 --gpus 8" in lines[:at]
    assert lines.index("  - kv_cache_config.free_gpu_memory_fraction: 0.8") > at
    assert lines.index("  + kv_cache_config.free_gpu_memory_fraction: 0.7") > at
    assert any(line.startswith("  + speculative_config.") for line in lines[at:])
    assert not [line for line in lines if "#" in line or "sha" in line or "plan:" in line]


def test_the_folders_own_format_is_compared(built):
    code, lines = built("--concurrency", "16", there=["--format", "trtllm-serve"])

    assert code == 0
    assert "serve.sh" in lines
    assert not [line for line in lines if "format" in line.split(":")[0] or "removed" in line]


def test_the_owners_changes_would_be_lost(built):
    def change(folder):
        yaml = folder / "tensorrt_llm/1/model.yaml"
        yaml.write_text(yaml.read_text().replace("max_batch_size: 128", "max_batch_size: 96", 1) + "# mine\n")
        (folder / "start.sh").write_text("exec \x1b[2J")
        (folder / "tensorrt_llm/1/model.py").unlink()
        (folder / "tensorrt_llm/1/supervise.py").write_bytes(b"\xff")

    code, lines = built(change=change)
    assert code == 0
    assert {"  - max_batch_size: 96", "  + max_batch_size: 128", "  - exec \\x1b[2J"} <= set(lines)
    assert {"added: tensorrt_llm/1/model.py", "changed: tensorrt_llm/1/supervise.py"} <= set(lines)
    assert "mine" not in "".join(lines)


def test_yaml_that_is_none_is_compared_as_it_stands(built, tmp_path):
    code, lines = built(change=lambda folder: (folder / "tensorrt_llm/1/model.yaml").write_text("a: [1\n"))

    assert code == 0
    assert {"  - a: [1", "  + max_batch_size: 128"} <= set(lines)


def test_the_same_options_would_change_nothing(built, tmp_path):
    assert built() == (0, [f"{tmp_path}/r1: nothing would change"])


def test_a_folder_that_build_did_not_write_has_no_difference(tmp_path, capsys):
    for stamp in (None, "{", "[" * 100_000):
        if stamp is not None:
            (tmp_path / "deepseek-triton.json").write_text(stamp)
        assert main([*R1, "--diff", str(tmp_path)]) == 2
        captured = capsys.readouterr()
        assert (captured.out, captured.err.count("\n")) == ("", 1)
        assert "deepseek-triton.json" in captured.err


@pytest.mark.parametrize("columns", [60, 100, 160])
def test_on_a_terminal_a_plan_fits_the_width(columns, capsys, monkeypatch):
    monkeypatch.setattr(tables, "is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["plan", "deepseek-r1", "--gpu", "b200", "--gpus", "8", "--profile", "throughput"]) == 0

    printed = capsys.readouterr().out
    assert "kv_cache_config.free_gpu_memory_fraction" in printed
    assert "…" not in printed
    without_styles = re.sub(r"\x1b\[[0-9;]*m", "", printed)
    assert [line for line in without_styles.splitlines() if len(line) > columns and len(line.split()) > 2] == []


def test_json_holds_the_whole_plan(capsys):
    got = document(capsys, "deepseek-r1", "--gpu", "h200", "--gpus", "8")

    assert got["schema"] == "deepseek-triton/plan/1"
    assert (got["variant"], got["precision"], got["gpu"], got["gpus"]) == ("deepseek-r1", "fp8", "h200", 8)
    assert got["model"] == "deepseek-ai/DeepSeek-R1"
    memory = got["memory"]
    parts = ("weights", "kv_cache", "cuda_graphs", "cuda_context", "activations", "sampler", "free")
    assert sum(memory[part] for part in parts) == memory["total"]
    assert memory["kv_tokens"] == memory["kv_cache"] // memory["kv_bytes_per_token"]
    assert got["host_memory_bytes"] > 688_574_839_360
    assert got["launch"]["mpi_ranks"] == 8
    assert got["recipe"]["source"]
    assert all(line["reason"] for line in got["settings"])


def test_concurrency_is_shown_for_the_lengths_asked_for(capsys):
    """Without lengths, for several that the plan serves."""
    got = document(capsys, "deepseek-r1", "--gpu", "h200", "--isl", "8192", "--osl", "1024")
    (row,) = got["concurrency"]
    assert (row["isl"], row["osl"]) == (8192, 1024)
    assert row["kv_cache_holds"] == got["memory"]["kv_tokens"] // 9216
    assert row["runs"] == min(row["kv_cache_holds"], got["max_concurrency"])

    got = document(capsys, "deepseek-r1", "--gpu", "h200")
    assert len(got["concurrency"]) > 2
    longest = next(line["value"] for line in got["settings"] if line["key"] == "max_seq_len")
    assert all(row["isl"] + row["osl"] <= longest for row in got["concurrency"])


def test_a_hugging_face_name_is_variant_precision_and_model(capsys):
    for name, variant, precision in (
        ("deepseek-ai/DeepSeek-R1", "deepseek-r1", "fp8"),
        (FP4, "deepseek-r1", "fp4"),
        ("nvidia/DeepSeek-R1-NVFP4-v2", "deepseek-r1", "fp4"),
        ("deepseek-ai/DeepSeek-V3.2-Exp", "deepseek-v3.2-exp", "fp8"),
    ):
        got = document(capsys, name, "--gpu", "b200")
        assert (got["variant"], got["precision"], got["model"]) == (variant, precision, name)


def test_every_published_checkpoint_can_be_named():
    for variant in variants().values():
        for checkpoint_ in () if variant.model else variant.checkpoints.values():
            gpu = "b200" if checkpoint_.precision == "fp4" else "h200"
            engine = "vllm" if checkpoint_.precision == "w4a16" else "tensorrt_llm"
            assert main(["plan", checkpoint_.model, "--gpu", gpu, "--engine", engine, "--json"]) == 0


def test_a_model_that_is_not_here_is_noted_and_planned(capsys):
    for model, note in (("/models/DeepSeek-R1", "not on this machine"), ("me/my-r1", "a Hugging Face name")):
        assert main([*R1, "--model", model, "--json"]) == 0
        captured = capsys.readouterr()
        assert note in captured.err
        assert json.loads(captured.out)["model"] == model


def test_a_folder_here_says_its_precision(capsys, tmp_path):
    got = document(capsys, "deepseek-r1", "--gpu", "b200", "--model", checkpoint(tmp_path / "fp8"))
    assert got["precision"] == "fp8"

    got = document(capsys, "deepseek-r1", "--gpu", "b200", "--model", checkpoint(tmp_path / "fp4", quant="NVFP4"))
    assert got["precision"] == "fp4"


def test_a_folder_of_another_architecture_is_refused(capsys, tmp_path):
    """As the variant, it is told what it can be."""
    folder = checkpoint(tmp_path / "v32", class_name="DeepseekV32ForCausalLM")

    assert main([*R1, "--model", folder]) == 2
    assert "expected a DeepseekV3ForCausalLM for deepseek-r1" in capsys.readouterr().err
    assert main(["plan", folder, "--gpu", "h200"]) == 2
    assert capsys.readouterr().err.endswith(f"give it as --model: deepseek-v3.2-exp --model {folder}\n")


def test_a_folder_of_16_bit_weights_is_refused_with_what_makes_them_fp8(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["DeepseekV3ForCausalLM"]}))

    assert main([*R1, "--model", str(tmp_path)]) == 2
    assert "deepseek-triton checkpoint quantize" in capsys.readouterr().err


def test_a_cut_checkpoint_is_planned_with_a_note(capsys, tmp_path):
    folder = checkpoint(tmp_path / "cut", layers=5)
    index = {"weight_map": {"model.layers.4.mlp.experts.0.up_proj.weight": "model-00001-of-000001.safetensors"}}
    (tmp_path / "cut/model.safetensors.index.json").write_text(json.dumps(index))

    assert main(["plan", "deepseek-r1", "--gpu", "h200", "--model", folder, "--brief"]) == 0
    out, err = capsys.readouterr()
    assert "5 of 61 layers" in err
    assert "1 x NVIDIA H200" in out


def test_options_reach_the_plan(capsys):
    options = ["--mtp", "2", "--relaxed-acceptance", "--kv-cache-dtype", "auto", "--concurrency", "16"]
    options += ["--set", "kv_cache_config={free_gpu_memory_fraction: 0.7}", "--set", "stream_interval=4"]
    image = "nvcr.io/nvidia/tritonserver:26.01-trtllm-python-py3"
    got = document(capsys, *R1[1:], *options, "--image", image)

    assert got["release"] == "1.1.0"
    assert {line["key"]: line["value"] for line in got["settings"]}.items() >= {
        "speculative_config.num_nextn_predict_layers": 2,
        "speculative_config.use_relaxed_acceptance_for_thinking": True,
        "kv_cache_config.dtype": "auto",
        "max_batch_size": 16,
        "kv_cache_config.free_gpu_memory_fraction": 0.7,
        "stream_interval": 4,
    }.items()


def test_several_nodes_say_what_starts_them(capsys):
    assert main(["plan", "deepseek-v3", "--gpu", "h100", "--gpus", "16"]) == 0
    printed = capsys.readouterr().out
    assert "2 nodes of 8 GPUs, 16 MPI ranks: HOSTS=node1,node2 start.sh" in printed
    assert "srun --mpi=pmix --nodes 2 --ntasks-per-node 8" in printed

    launch = document(capsys, "deepseek-r1", "--engine", "vllm", "--gpu", "h100")["launch"]
    assert (launch["nodes"], launch["gpus_per_node"]) == (2, 8)
    assert launch["command"] == "NODE_RANK=0 MASTER_ADDR=node1 start.sh"
    assert "--ntasks-per-node 1" in launch["where"]


def test_a_plan_without_tensorrt_llm(capsys):
    got = document(capsys, "tiny", "--engine", "simulated", "--preset", "h200x8-r1-fp8-max-throughput")

    assert (got["engine"], got["memory"], got["gpus"], got["concurrency"]) == ("simulated", None, None, [])
    assert main(["plan", "tiny"]) == 0
    assert "deepseek-triton serve DIR" in capsys.readouterr().out


def test_warnings_have_code_and_fix(capsys):
    larger_than_its_graphs = [*R1[1:], "--set", "max_batch_size=1024"]
    got = document(capsys, *larger_than_its_graphs)

    assert got["warnings"]
    assert all(row["code"] and row["fix"] and row["source"] for row in got["warnings"])
    assert main(["plan", *larger_than_its_graphs]) == 0
    printed = capsys.readouterr().out
    for row in got["warnings"]:
        assert f"{row['severity']} {row['code']}: {row['message']}" in printed
        assert f"fix: {row['fix']}" in printed


def test_what_is_left_out_is_said(capsys):
    with_mtp = ["deepseek-r1", "--gpu", "h200", "--trtllm", "1.0.0", "--mtp", "1"]
    got = document(capsys, *with_mtp)

    assert any(row["key"] == "triton_config.default_sampling.temperature" for row in got["omissions"])
    assert main(["plan", *with_mtp]) == 0
    assert "Left out\n" in capsys.readouterr().out


def test_settings_that_lie_in_a_file_of_their_own_are_shown(capsys):
    wide = ["deepseek-r1", "--gpu", "gb200-nvl72", "--profile", "wide-ep", "--trtllm", "1.0.0"]
    [file] = document(capsys, *wide)["files"]
    assert main(["plan", *wide]) == 0
    shown = capsys.readouterr().out

    assert (file["name"], [row["value"] for row in file["settings"]]) == ("moe-load-balancer.yaml", [288, 1])
    assert "moe_config.load_balancer.num_slots" in shown
    assert "moe-load-balancer.yaml" in shown


# vLLM

VLLM = ["plan", "deepseek-r1", "--engine", "vllm", "--gpu", "h200", "--gpus", "8"]


def test_the_image_chooses_the_vllm_version(capsys):
    for image in ("26.07", "nvcr.io/nvidia/tritonserver:26.07-vllm-python-py3"):
        got = document(capsys, *VLLM[1:], "--image", image)
        assert (got["vllm"], got["release"], got["launch"]["mpi_ranks"]) == ("0.24.0", None, 0)
        assert got["image"] == "nvcr.io/nvidia/tritonserver:26.07-vllm-python-py3"
        assert (got["containers"], got["formats"]) == (["26.07"], ["triton", "vllm-serve"])


def test_a_plan_for_vllm_is_shown_whole(capsys):
    assert main([*VLLM, "--vllm", "0.25.1", "--parallel", "dp"]) == 0
    printed = capsys.readouterr().out
    settings = ("data_parallel_size", "VLLM_ALL2ALL_BACKEND", "max_num_seqs allows 1,024")
    for text in ("vLLM 0.25.1: no Triton container has it; pip install vllm==0.25.1", *settings):
        assert text in printed


def test_the_difference_to_a_folder_for_vllm(tmp_path, capsys):
    assert main(["build", *VLLM[1:], "--output", str(tmp_path / "r")]) == 0
    assert "vLLM 0.24.0: nvcr.io/nvidia/tritonserver:26.07-vllm-python-py3" in capsys.readouterr().out
    assert main([*VLLM, "--diff", str(tmp_path / "r")]) == 0
    assert "nothing would change" in capsys.readouterr().out
    assert main([*VLLM, "--set", "enable_prefix_caching=false", "--diff", str(tmp_path / "r")]) == 0

    printed = capsys.readouterr().out
    assert "- enable_prefix_caching: true" in printed
    assert "+ enable_prefix_caching: false" in printed
