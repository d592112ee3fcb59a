import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_triton_build import PlanRequest, make_plan
from deepseek_triton_build.catalog import last_image, profiles, variants
from deepseek_triton_tools.terminal import tables
from support.commands import run_command
from support.v4_checkpoint import v4_config, write_v4

R1 = ["deepseek-r1", "--gpu", "h200", "--gpus", "8"]


def planned(*argv):
    """What is printed."""
    done = run_command("plan", *argv)
    assert done.returncode == 0, done.stderr
    return done.stdout


def document(*argv):
    return json.loads(planned(*argv, "--json"))


def refused(*argv):
    """The exit code, and the one line on stderr."""
    done = run_command("plan", *argv)
    [line] = done.stderr.splitlines()
    assert (done.stdout, line[:22]) == ("", "deepseek-triton plan: ")
    return done.returncode, line


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
    (["deepseek-r1", "--gpu", "h200", "--gpus", "4"], 1, "--gpus 8"),
    (["deepseek-r1"], 2, "needs --gpu"),
    (["deepseek-r1", "--gpu", "NVIDIA H200"], 2, "did you mean 'h200'?"),
    (["deepseek-r1-0529", "--gpu", "h200"], 2, "did you mean 'deepseek-r1-0528'?"),
    (["x" * 5000, "--gpu", "h200"], 2, "unknown variant 'xxx"),
    (["/" + "x" * 5000, "--gpu", "h200"], 2, "is a path"),
    (["/nowhere/R1"], 2, "--model: VARIANT --model /nowhere/R1, where VARIANT is what it is: deepseek-v3 or "),
    (["deepseek-ai/DeepSek-R1"], 2, "did you mean deepseek-ai/DeepSeek-R1?"),
    (["deepseek-ai/DeepSeek-R2"], 2, "'deepseek-ai/DeepSeek-R2': known so far"),
    (["deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", "--gpu", "h200"], 2, "architecture of the Qwen"),
    (["me/DeepSeek-V3.1-Terminus-AWQ"], 2, "deepseek-v3.1 --precision w4a16 --engine vllm --model me/"),
    (["me/DeepSeek-R1-0528-NVFP4-x"], 2, "deepseek-r1-0528 --precision fp4 --model me/"),
    (["me/DeepSeek-R1-Q4_K_M"], 2, "llama.cpp"),
    (["deepseek-r1-int4-awq"], 2, "deepseek-r1 --precision w4a16 --engine vllm --model NAME"),
    (["me/MAI-DS-R1"], 2, "deepseek-r1 --model me/MAI-DS-R1"),
    (["r1-1776"], 2, "deepseek-r1 --model NAME"),
    (["me/Fathom-R1-14B"], 2, "'me/Fathom-R1-14B': known so far"),
    (["V3.1"], 2, "deepseek-v3.1 needs --gpu"),
    (["R1-0528-NVFP4", "--gpu", "h200"], 1, "what works: --gpu b200"),
    (["speciale"], 2, "did you mean 'deepseek-v3.2-speciale'?"),
    (["deepseek-r1", "--gpu", "h800"], 2, "--gpu h100 plans like it"),
    (["deepseek-r1", "--gpu", "NVIDIA-B300-SXM6-AC"], 2, "did you mean 'b300'?"),
    (["deepseek-r1", "--gpu", "NVIDIA RTX PRO 6000 Blackwell Server Edition"], 2, "--gpu rtx-pro-6000 plans like it"),
    (["deepseek-r1", "--gpu", "b300", "--trtllm", "1.1.0"], 1, "H006"),
    (["deepseek-r1", "--gpu", "NVIDIA-H100-80GB-HBM3"], 2, "did you mean 'h100'?"),
    ([FP4, "--gpu", "h200"], 1, "what works: --gpu b200"),
    ([FP4, "--gpu", "b200", "--precision", "fp8"], 2, "holds fp4 weights"),
    (["tiny", "--mtp", "0", "--gpu", "h200"], 2, "leave out --gpu, --mtp"),
    (["tiny", "--vllm", "0.25.1"], 2, "leave out --vllm, or build with --engine vllm"),
    (["tiny", "--pp", "2", "--allow-unpublished"], 2, "leave out --pp, --allow-unpublished, or build with"),
    (["deepseek-r1", "--gpu", "h200", "--preset", "h200x8-r1-fp8-min-latency"], 1, "not tensorrt_llm; leave it out"),
    (["deepseek-v4-pro-0813", "--gpu", "b300", "--trtllm", "1.2.1"], 2, "not for vllm; leave it out"),
    (["deepseek-r1", "--engine", "vlm", "--gpu", "h200"], 2, "did you mean 'vllm'?"),
    (["deepseek-r1", "--profile", "disag", "--gpu", "h200"], 2, "did you mean 'disagg'?"),
]
OPTIONS_REFUSED = [
    ("--image", "26.7", 2, "did you mean '26.07'?"),
    ("--image", "", 2, "unknown Triton container ''"),
    ("--image", "26.99", 2, "no Triton container after 26.07 is known to have TensorRT-LLM; known so far: 26.07"),
    ("--image", "26.05-vllm-python-py3", 1, "use 26.05-trtllm-python-py3"),
    ("--trtllm", "1.2", 2, "'1.2.1' or '1.2.0'?"),
    ("--vllm", "0.25.1", 2, "--vllm: only for --engine vllm, not for tensorrt_llm"),
    ("--parallel", "dp", 2, "--parallel: only for --engine vllm"),
    ("--model", "/" + "x" * 5000, 2, "is too long for a path"),
    ("--model", "/m/\udcff", 2, "expected a name in UTF-8"),
    ("--model", "", 2, "expected a folder or a Hugging Face name"),
    ("--model", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B", 2, "not served here"),
    ("--model", __file__, 2, "found a file; name its folder: "),
    ("--model", "deepseek-ai/DeepSeek-V3", 2, "is deepseek-v3, not"),
    ("--model", "v3", 2, "is deepseek-v3, not"),
    ("--model", "me/DeepSeek-R1-GGUF", 2, "llama.cpp"),
    *(("--set", f"max_batch_size={value}", 2, "quote it") for value in ("2020-13-45", "!!bool maybe", '!!int ""')),
    *(("--set", f"max_batch_size={value}", 2, "quote it") for value in ("!!timestamp foo", "{[a]: 1}", "&a [*a]")),
    *(("--set", f"max_batch_size={character * 5000}", 2, "quote it") for character in "9["),
    ("--set", f"max_batch_size={2**63}", 2, "64 bits"),
    ("--set", "stream_interval=.nan", 2, "finite number, found nan"),
    ("--set", "stream_interval=[-.inf]", 2, "finite number, found -inf"),
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
    (["--image", "26.11"], "no public page says which vLLM it has"),
]
REFUSED += [([*R1, option, value], code, expected) for option, value, code, expected in OPTIONS_REFUSED]
REFUSED += [([*R1, "--engine", "vllm", *options], 2, expected) for options, expected in FOR_VLLM_REFUSED]


@pytest.mark.slow
def test_what_cant_be_planned_is_one_line(subtests):
    for argv, code, expected in REFUSED:
        with subtests.test(ascii(argv[-2:])):
            found, line = refused(*argv)
            assert (found, expected in line) == (code, True), line


def test_what_the_parser_refuses():
    wrong = [
        "--trtllm 1.2.1 --image 26.07",
        "--isl 0",
        "--mtp -1",
        "--concurrency many",
        "--rate 0",
        "--kv-cache-dtype fp4",
    ]
    for options in [*wrong, "--brief --json", "--diff . --json"]:
        done = run_command("plan", *R1, *options.split())
        assert (done.returncode, "argument" in done.stderr) == (2, True), options


def test_a_plan_for_people_says_what_and_why():
    printed = planned(*R1)
    plan = make_plan(PlanRequest(variant="deepseek-r1", gpu="h200", num_gpus=8))
    words = ["8 x NVIDIA H200", plan.image, last_image(), "35,136 bytes a token", "one node, 8 MPI ranks", "713 Gi"]
    words += [text for setting in plan.settings for text in (setting.key, setting.reason)]
    assert [each for each in words if each not in printed] == []
    assert "\x1b" not in printed

    budget = plan.budget
    [bar] = [line.strip()[1:-1] for line in printed.splitlines() if line.startswith("  [#")]
    assert printed.index(bar) < printed.index("Requests at once") < printed.index("Model and parallelism")
    workspace = budget.workspace - budget.cuda_graphs
    sizes = {"#": budget.weights, "=": budget.kv_cache, "+": budget.cuda_graphs, "-": workspace, ".": budget.free}
    assert list(dict.fromkeys(bar)) == list(sizes)
    expected = {mark: len(bar) * size / budget.memory for mark, size in sizes.items()}
    assert {mark: bar.count(mark) for mark in sizes} == pytest.approx(expected, abs=1)


@pytest.mark.slow
@given(sizes=st.lists(st.integers(-1, 10**12), max_size=6), length=st.integers(1, 200))
def test_a_bar_shows_every_part_and_has_its_length(sizes, length):
    parts = [(chr(ord("a") + number), size) for number, size in enumerate(sizes)]
    shown = {mark: size for mark, size in parts if size > 0}
    bar = tables.bar(parts, length)

    assert list(dict.fromkeys(bar)) == list(shown)
    assert not shown or length <= len(bar) < length + len(shown)
    if len(bar) == length and all(size * length >= sum(shown.values()) for size in shown.values()):
        assert all(abs(bar.count(mark) - length * size / sum(shown.values())) <= 1 for mark, size in shown.items())


def test_a_brief_plan_is_without_settings():
    argv = ["deepseek-r1", "--gpu", "b200", "--profile", "throughput"]
    brief, whole = planned(*argv, "--brief"), planned(*argv)
    assert set(brief.splitlines()) < set(whole.splitlines())
    titles = ("Memory of one GPU", "Requests at once", "start.sh", "Warnings and notes", "enable_attention_dp")
    assert [title for title in titles if title not in brief] == ["enable_attention_dp"]


@pytest.mark.slow
def test_a_source_is_named_once_and_shapes_by_their_range(subtests):
    for profile in profiles():
        options = ["deepseek-r1", "--gpu", "gb200-nvl72", "--gpus", "32", "--profile", profile]
        request = PlanRequest(variant="deepseek-r1", gpu="gb200-nvl72", num_gpus=32, profile=profile)
        if profile == "rehearsal":
            options = ["tiny", "--engine", "tensorrt_llm", "--gpu", "gb200-nvl72"]
            request = PlanRequest(variant="tiny", gpu="gb200-nvl72", engine="tensorrt_llm")
        with subtests.test(profile):
            body, _, sources = planned(*options).partition("Model and parallelism")[2].partition("\nSources\n")
            plan = make_plan(request)
            for source in {line.source for line in (*plan.settings, *plan.environment) if line.source}:
                assert body.count(f"({source})") + sources.count(f"] {source}\n") == 1, source
            assert "[[1, " not in body
            assert ("shapes: 1 to " in body) == any(line.reason.startswith("pairs of") for line in plan.settings)


@pytest.fixture
def built(tmp_path):
    """Build R1 with these options, and return the lines of `plan --diff` with others."""

    def diff(*options, there=(), change=lambda folder: None):
        folder = tmp_path / "r1"
        assert run_command("build", *R1, "--output", str(folder), *there).returncode == 0
        change(folder)
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        lines = planned(*R1, *options, "--diff", str(folder)).splitlines()
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
        return lines

    return diff


@pytest.mark.slow
def test_other_options_would_change_these_settings(built, tmp_path):
    lines = built("--mtp", "1", "--trtllm", "1.1.0", "--set", "kv_cache_config.free_gpu_memory_fraction=0.7")
    at = lines.index("tensorrt_llm/1/model.yaml")
    assert "  - options: deepseek-r1 --gpu h200 --gpus 8" in lines[:at]
    assert lines.index("  - kv_cache_config.free_gpu_memory_fraction: 0.8") > at
    assert lines.index("  + kv_cache_config.free_gpu_memory_fraction: 0.7") > at
    assert any(line.startswith("  + speculative_config.") for line in lines[at:])
    assert lines[-1] == "changed: tensorrt_llm/1/release.yaml"
    assert not [line for line in lines if "#" in line or "sha" in line or "plan:" in line]
    assert built() == [f"{tmp_path}/r1: nothing would change"]


def test_the_folders_own_format_is_compared(built):
    lines = built("--concurrency", "16", there=["--format", "trtllm-serve"])
    assert "serve.sh" in lines
    assert not [line for line in lines if "format" in line.split(":")[0] or "removed" in line]
    for name in ("vllm-serve", "dynamo", "trtllm-eval"):
        options = ["--profile", "throughput"]
        (line,) = built(*options, there=[*options, "--format", name, "--force"])
        assert line.endswith("nothing would change")


@pytest.mark.slow
def test_the_owners_changes_would_be_lost(built):
    """YAML that is none is compared as it stands."""

    def change(folder):
        yaml = folder / "tensorrt_llm/1/model.yaml"
        yaml.write_text(yaml.read_text().replace("max_batch_size: 128", "max_batch_size: 96", 1) + "# mine\n")
        (folder / "start.sh").write_text("exec \x1b[2J")
        (folder / "tensorrt_llm/1/model.py").unlink()
        (folder / "tensorrt_llm/1/supervise.py").write_bytes(b"\xff")

    lines = built(change=change)
    assert {"  - max_batch_size: 96", "  + max_batch_size: 128", "  - exec \\x1b[2J"} <= set(lines)
    assert {"added: tensorrt_llm/1/model.py", "changed: tensorrt_llm/1/supervise.py"} <= set(lines)
    assert "mine" not in "".join(lines)
    lines = built(there=["--force"], change=lambda folder: (folder / "tensorrt_llm/1/model.yaml").write_text("a: [1\n"))
    assert {"  - a: [1", "  + max_batch_size: 128"} <= set(lines)


def test_a_folder_that_build_did_not_write_has_no_difference(tmp_path):
    for stamp in (None, "{", "[" * 100_000):
        if stamp is not None:
            (tmp_path / "deepseek-triton.json").write_text(stamp)
        code, line = refused(*R1, "--diff", str(tmp_path))
        assert (code, "deepseek-triton.json" in line) == (2, True)


def test_on_a_terminal_a_plan_fits_the_width(monkeypatch):
    monkeypatch.setattr(tables, "is_terminal", lambda: True)
    for columns in (60, 160):
        monkeypatch.setenv("COLUMNS", str(columns))
        printed = planned("deepseek-r1", "--gpu", "b200", "--gpus", "8", "--profile", "throughput")
        assert "kv_cache_config.free_gpu_memory_fraction" in printed
        assert "…" not in printed
        without_styles = re.sub(r"\x1b\[[0-9;]*m", "", printed)
        assert [line for line in without_styles.splitlines() if len(line) > columns and len(line.split()) > 2] == []


def test_json_holds_the_whole_plan():
    got = document(*R1)
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


def test_concurrency_is_shown_for_the_lengths_asked_for():
    """Without lengths, for several that the plan serves."""
    got = document("deepseek-r1", "--gpu", "h200", "--isl", "8192", "--osl", "1024")
    (row,) = got["concurrency"]
    assert (row["isl"], row["osl"]) == (8192, 1024)
    assert row["kv_cache_holds"] == got["memory"]["kv_tokens"] // 9216
    assert row["runs"] == min(row["kv_cache_holds"], got["max_concurrency"])
    assert row["limit"] == ("kv_cache" if row["runs"] < got["max_concurrency"] else "max_batch_size")

    got = document("deepseek-r1", "--gpu", "h200")
    assert len(got["concurrency"]) > 2
    longest = next(line["value"] for line in got["settings"] if line["key"] == "max_seq_len")
    assert all(row["isl"] + row["osl"] <= longest for row in got["concurrency"])


SISTERS = [
    ("nvidia/DeepSeek-R1-NVFP4-v2", "deepseek-r1", "fp4", "nvidia/DeepSeek-R1-NVFP4-v2"),
    ("deepseek-v3.1-terminus", "deepseek-v3.1", "fp8", "deepseek-ai/DeepSeek-V3.1-Terminus"),
    ("nvidia/DeepSeek-V3-FP4", "deepseek-v3", "fp4", "nvidia/DeepSeek-V3-FP4"),
    ("deepseek-v3.2-exp-base", "deepseek-v3.2-exp", "fp8", "deepseek-ai/DeepSeek-V3.2-Exp-Base"),
    ("DeepSeek-V3.2", "deepseek-v3.2", "fp4", "nvidia/DeepSeek-V3.2-NVFP4"),
    ("deepseek-r1-zero", "deepseek-r1", "fp8", "deepseek-ai/DeepSeek-R1-Zero"),
    ("deepseek-v3.1-base", "deepseek-v3.1", "fp8", "deepseek-ai/DeepSeek-V3.1-Base"),
]


@pytest.mark.slow
def test_every_published_checkpoint_can_be_named():
    """Its name is variant, precision and model."""
    for variant in variants().values():
        for published in () if variant.model else variant.checkpoints.values():
            gpu = "b200" if published.precision == "fp4" else "h200"
            engine = "vllm" if published.precision == "w4a16" else "tensorrt_llm"
            of_engine = ["--gpu", gpu, "--engine", engine]
            if variant.architecture.attention == "csa":
                of_engine = ["--gpu", "b300", "--gpus", "8", "--vllm", "0.31.0"]
            got = document(published.model, *of_engine)
            found = (got["variant"], got["precision"], got["model"])
            assert found == (variant.name, published.precision, published.model)
    for name, variant, precision, model in SISTERS:
        got = document(name, "--gpu", "b200", "--precision", precision)
        assert (got["variant"], got["precision"], got["model"]) == (variant, precision, model)


def test_a_model_that_is_not_here_is_noted_and_planned():
    for model, note in (("/models/DeepSeek-R1", "not on this machine"), ("me/my-r1", "a Hugging Face name")):
        done = run_command("plan", *R1, "--model", model, "--json")
        assert (done.returncode, note in done.stderr, json.loads(done.stdout)["model"]) == (0, True, model)
    awq = run_command("plan", *R1, "--engine", "vllm", "--model", "/models/DeepSeek-R1-AWQ", "--json")
    assert json.loads(awq.stdout)["precision"] == "w4a16"


def test_a_folder_here_says_what_it_is(tmp_path):
    for precision, quant in {"fp8": None, "fp4": "NVFP4"}.items():
        folder = checkpoint(tmp_path / precision, quant=quant)
        assert document("deepseek-r1", "--gpu", "b200", "--model", folder)["precision"] == precision
    other = checkpoint(tmp_path / "v32", class_name="DeepseekV32ForCausalLM")
    dspark = write_v4(tmp_path / "v4", v4_config("deepseek-v4-flash-dspark", num_hidden_layers=4, n_routed_experts=8))
    wide = checkpoint(tmp_path / "bf16")
    (tmp_path / "bf16/config.json").write_text(json.dumps({"architectures": ["DeepseekV3ForCausalLM"]}))
    for argv, expected in (
        ([*R1, "--model", other], "expected a DeepseekV3ForCausalLM for deepseek-r1"),
        (
            ["deepseek-v4-flash", "--gpu", "h200", "--engine", "vllm", "--model", str(dspark)],
            "dspark_markov_rank 256, not 0",
        ),
        ([other, "--gpu", "h200"], f"--model {other}, where VARIANT is what it is: deepseek-v3.2-exp or deepseek-v3.2"),
        ([*R1, "--model", wide], "deepseek-triton checkpoint quantize"),
        ([*R1, "--model", checkpoint(tmp_path / "small", layers=3)], "num_hidden_layers 3, not 61"),
        ([*R1, "--model", str(tmp_path)], f"plan: --model {tmp_path}/config.json: can't be read"),
    ):
        code, line = refused(*argv)
        assert (code, expected in line) == (2, True), line


def test_a_cut_checkpoint_is_planned_with_a_note(tmp_path):
    folder = checkpoint(tmp_path / "cut", layers=5)
    index = {"weight_map": {"model.layers.4.mlp.experts.0.up_proj.weight": "model-00001-of-000001.safetensors"}}
    (tmp_path / "cut/model.safetensors.index.json").write_text(json.dumps(index))
    done = run_command("plan", "deepseek-r1", "--gpu", "h200", "--model", folder, "--brief")
    assert (done.returncode, "5 of 61 layers" in done.stderr, "1 x NVIDIA H200" in done.stdout) == (0, True, True)


def test_options_reach_the_plan():
    options = ["--mtp", "2", "--relaxed-acceptance", "--kv-cache-dtype", "auto", "--concurrency", "16"]
    options += ["--set", "kv_cache_config={free_gpu_memory_fraction: 0.7}", "--set", "stream_interval=4"]
    image = "nvcr.io/nvidia/tritonserver:26.01-trtllm-python-py3"
    got = document(*R1, *options, "--image", image)

    assert got["release"] == "1.1.0"
    assert {line["key"]: line["value"] for line in got["settings"]}.items() >= {
        "speculative_config.num_nextn_predict_layers": 2,
        "speculative_config.use_relaxed_acceptance_for_thinking": True,
        "kv_cache_config.dtype": "auto",
        "max_batch_size": 16,
        "kv_cache_config.free_gpu_memory_fraction": 0.7,
        "stream_interval": 4,
    }.items()


def test_several_nodes_say_what_starts_them():
    printed = planned("deepseek-v3", "--gpu", "h100", "--gpus", "16")
    assert "2 nodes of 8 GPUs, 16 MPI ranks: HOSTS=node1,node2 start.sh" in printed
    assert "srun --mpi=pmix --nodes 2 --ntasks-per-node 8" in printed

    launch = document("deepseek-r1", "--engine", "vllm", "--gpu", "h100")["launch"]
    assert (launch["nodes"], launch["gpus_per_node"]) == (2, 8)
    assert launch["command"] == "NODE_RANK=0 MASTER_ADDR=node1 start.sh"
    assert "--ntasks-per-node 1" in launch["where"]


def test_a_plan_without_tensorrt_llm():
    got = document("tiny", "--engine", "simulated", "--preset", "h200x8-r1-fp8-max-throughput")
    assert (got["engine"], got["memory"], got["gpus"], got["concurrency"]) == ("simulated", None, None, [])
    assert "deepseek-triton serve DIR" in planned("tiny")
    assert "--format trtllm-serve --output DIR" in planned(*R1, "--trtllm", "1.3.0rc29")  # the default is refused


def test_warnings_and_what_is_left_out_are_shown():
    larger_than_its_graphs = [*R1, "--set", "max_batch_size=1024"]
    rows, printed = document(*larger_than_its_graphs)["warnings"], planned(*larger_than_its_graphs)
    assert rows
    for row in rows:
        assert all((row["code"], row["fix"], row["source"]))
        assert f"{row['severity']} {row['code']}: {row['message']}" in printed
        assert f"fix: {row['fix']}" in printed

    with_mtp = ["deepseek-r1", "--gpu", "h200", "--trtllm", "1.0.0", "--mtp", "1"]
    omitted = [row["key"] for row in document(*with_mtp)["omissions"]]
    assert "triton_config.default_sampling.temperature" in omitted
    assert "Left out\n" in planned(*with_mtp)


def test_settings_that_lie_in_a_file_of_their_own_are_shown():
    wide = ["deepseek-r1", "--gpu", "gb200-nvl72", "--profile", "wide-ep", "--trtllm", "1.0.0"]
    [file] = document(*wide)["files"]
    assert (file["name"], [row["value"] for row in file["settings"]]) == ("moe-load-balancer.yaml", [288, 1])
    shown = planned(*wide)
    assert ("moe_config.load_balancer.num_slots" in shown, "moe-load-balancer.yaml" in shown) == (True, True)


VLLM = ["deepseek-r1", "--engine", "vllm", "--gpu", "h200", "--gpus", "8"]


def test_the_image_chooses_the_vllm_version():
    for image in ("26.07", "nvcr.io/nvidia/tritonserver:26.07-vllm-python-py3"):
        got = document(*VLLM, "--image", image)
        assert (got["vllm"], got["release"], got["launch"]["mpi_ranks"]) == ("0.24.0", None, 0)
        assert got["image"] == "nvcr.io/nvidia/tritonserver:26.07-vllm-python-py3"
        assert (got["containers"], got["formats"]) == (["26.07"], ["triton", "vllm-serve"])
    printed = planned(*VLLM, "--vllm", "0.25.1", "--parallel", "dp")
    shown = ("pip install vllm==0.25.1", "data_parallel_size", "VLLM_ALL2ALL_BACKEND", "max_num_seqs allows 1,024")
    assert [text for text in shown if text not in printed] == []


@pytest.mark.slow
def test_the_difference_to_a_folder_for_vllm(tmp_path):
    built = run_command("build", *VLLM, "--output", str(tmp_path / "r"))
    assert "vLLM 0.27.1: nvcr.io/nvidia/tritonserver:26.08-vllm-python-py3" in built.stdout
    assert "nothing would change" in planned(*VLLM, "--diff", str(tmp_path / "r"))
    lines = planned(*VLLM, "--set", "enable_prefix_caching=false", "--diff", str(tmp_path / "r")).splitlines()
    assert {"  - enable_prefix_caching: true", "  + enable_prefix_caching: false"} <= set(lines)
