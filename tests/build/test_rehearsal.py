"""The rehearsal: the tiny model planned for TensorRT-LLM, and its checkpoint, which travels in the repository."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from deepseek_triton_build import (
    BuildError,
    PlanRequest,
    RefusedPlanError,
    UnusableCheckpointError,
    make_plan,
    model_repository,
    repository_files,
    write_repository,
)
from deepseek_triton_build.arithmetic.weights import weights
from deepseek_triton_build.catalog import find_variant, gpus
from deepseek_triton_build.check import CheckOptions, check_repository
from deepseek_triton_build.data import own_files
from deepseek_triton_build.render.model_configuration import model_yaml
from deepseek_triton_build.render.repository_files import CHECKSUMS, carried_files
from deepseek_triton_build.render.stamp import plan_hash
from support.deepseek_loader import BLOCK, problems, published_tensors, tensors_in

GOLDEN = Path(__file__).with_name("golden_rehearsal")
SOURCE = model_repository() / "tensorrt_llm/1/tiny"
TINY, R1 = find_variant("tiny"), find_variant("deepseek-r1")
with_checkpoint = pytest.mark.skipif(not SOURCE.is_dir(), reason=f"{SOURCE} is not in this checkout")


def rehearsal(**changes):
    return PlanRequest(**{"variant": "tiny", "gpu": "h200", "engine": "tensorrt_llm", **changes})


# The plan


LAYOUTS = [(None, 1, False), (1, 1, False), (2, 2, False), (4, 4, False), (8, 8, True), (16, 8, True)]
"""GPUs, expert parallelism, and whether attention DP is on."""


@pytest.mark.parametrize("variant", ["tiny", "tiny-r1", "tiny-v4"])
def test_how_it_is_divided(variant):
    for num_gpus, expert_parallel, attention_dp in LAYOUTS:
        plan = make_plan(rehearsal(variant=variant, num_gpus=num_gpus))
        assert plan.world_size == (num_gpus or 1)
        assert (plan.layout.expert_parallel_size, plan.layout.attention_dp) == (expert_parallel, attention_dp)
        assert plan.canonical["speculative_config.num_nextn_predict_layers"] == 1
        assert [warning.rule.code for warning in plan.warnings] == []


def test_every_gpu_with_fp8_has_a_plan():
    for name, gpu in gpus().items():
        if gpu.architecture in ("hopper", "blackwell"):
            assert {make_plan(rehearsal(gpu=name, num_gpus=number)).precision for number in (1, 8)} == {"fp8"}


HEADS, NO_DP = "GPUs can't share 8 attention heads", (("enable_attention_dp", False),)
REFUSED = [  # what is asked for, what is said, and what works
    ({"num_gpus": 3}, f"3 {HEADS} and 8 experts", {"num_gpus": 4}),
    ({"num_gpus": 5}, f"5 {HEADS}", {"num_gpus": 8}),
    ({"num_gpus": 6}, f"6 {HEADS}", {"num_gpus": 8}),
    ({"num_gpus": 7}, f"7 {HEADS}", {"num_gpus": 8}),
    ({"num_gpus": 32}, f"32 {HEADS}", {"num_gpus": 16}),
    ({"gpu": "a100"}, "A100 80 GB SXM is Ampere", {"gpu": "h200"}),
    ({"precision": "fp4"}, "stored as fp8 only", {"precision": "fp8"}),
    ({"profile": "throughput"}, "one profile, rehearsal", {"profile": "rehearsal"}),
    ({"num_gpus": 4, "pipeline_parallel_size": 4}, "3 layers can't fill 4", {"pipeline_parallel_size": 1}),
    ({"num_gpus": 8, "overrides": NO_DP}, "a rank 1 x 192 of q_b_proj, which are no whole FP8", {"overrides": ()}),
]


def test_what_cant_work_names_what_does(subtests):
    for changes, words, suggestion in REFUSED:
        with subtests.test(f"{changes}"):
            with pytest.raises(RefusedPlanError) as refused:
                make_plan(rehearsal(**changes))
            assert words in str(refused.value)
            assert refused.value.suggestion == suggestion


def test_its_profile_is_for_nothing_else_and_bf16_for_no_gpu():
    with pytest.raises(RefusedPlanError, match="profile rehearsal is for tiny, tiny-r1, tiny-v4 only"):
        make_plan(PlanRequest(variant="deepseek-r1", gpu="h200", profile="rehearsal"))
    with pytest.raises(BuildError, match="rule H001"):
        make_plan(rehearsal(precision="bf16"))


@pytest.mark.parametrize("num_gpus", [1, 8])
def test_the_settings_are_those_of_the_golden_file(num_gpus):
    """`deepseek-triton build tiny --engine tensorrt_llm --gpu h200 --gpus N` writes it, below its first line."""
    text = model_yaml(make_plan(rehearsal(num_gpus=num_gpus)), stamp="golden")

    assert text == (GOLDEN / f"h200x{num_gpus}.yaml").read_text("utf-8")


# The shares that the loader makes


@pytest.mark.slow
def test_every_rank_gets_whole_blocks():
    for variant, sizes in (
        (TINY, [(1, False), (2, False), (4, False), (2, True), (4, True), (8, True)]),
        (R1, [(8, False), (16, False), (32, False), (8, True)]),
    ):
        a = variant.architecture
        published = published_tensors(a)
        for size, attention_dp in sizes:
            assert problems(published, a, tensor_parallel_size=size, attention_dp=attention_dp) == []


def test_eight_ranks_would_cut_the_blocks_of_tiny():
    a = TINY.architecture

    assert problems(published_tensors(a), a, tensor_parallel_size=8, attention_dp=False) == [
        f"model.layers.{layer}.self_attn.q_b_proj: 1536 values and 12 scales on 8 ranks" for layer in range(4)
    ]


_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1}


@pytest.mark.slow
@pytest.mark.parametrize("variant", [TINY, R1], ids=["tiny", "r1"])
def test_the_arithmetic_counts_the_published_tensors(variant):
    a, checkpoint = variant.architecture, variant.checkpoints["fp8"]
    sizes = []
    for dtype, shape in published_tensors(a).values():
        count = _BYTES[dtype]
        for length in shape:
            count *= length
        sizes.append(count)

    assert sum(sizes) == weights(a, checkpoint).total == checkpoint.weight_bytes


@with_checkpoint
def test_the_checkpoint_is_what_the_loader_reads():
    tensors = tensors_in(SOURCE / "model.safetensors")
    config = json.loads((SOURCE / "config.json").read_text("utf-8"))

    assert tensors == published_tensors(TINY.architecture)
    assert config["quantization_config"]["weight_block_size"] == [BLOCK, BLOCK]
    assert config["num_key_value_heads"] == config["num_attention_heads"]


# The checkpoint travels


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A checkpoint of a few bytes in the place of the project's own."""
    folder = tmp_path / "1" / "tiny"
    for edition in ("r1", "v4"):
        (folder / edition).mkdir(parents=True)
    files = {"config.json": "{}", "model.safetensors": "weights", "tokenizer_config.json": "v3.1"}
    for name, text in {**files, "r1/tokenizer_config.json": "r1", "v4/tokenizer_config.json": "v4"}.items():
        (folder / name).write_text(text)
    write_checksums(folder)
    (folder / "README.md").write_text("the model card")
    own_files.contract()  # which is loaded once, from the place below
    monkeypatch.setattr(own_files, "version_dir", lambda: tmp_path / "1")
    return folder


def write_checksums(folder):
    names = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CHECKSUMS)
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}\n" for path in names]
    (folder / CHECKSUMS).write_text("".join(lines))


def checksums(text):
    return {name: checksum for checksum, name in (line.split("  ") for line in text.decode().splitlines())}


@pytest.mark.parametrize(("variant", "template"), [("tiny", b"v3.1"), ("tiny-r1", b"r1"), ("tiny-v4", b"v4")])
def test_each_variant_carries_its_own_chat_template_and_true_checksums(source, variant, template):
    carried = carried_files(make_plan(rehearsal(variant=variant)))
    names = {"config.json", "model.safetensors", "tokenizer_config.json"}

    assert set(carried) == {f"tiny/{name}" for name in (*names, "README.md", CHECKSUMS)}
    assert carried["tiny/tokenizer_config.json"] == template
    assert checksums(carried[f"tiny/{CHECKSUMS}"]) == {
        name: hashlib.sha256(carried[f"tiny/{name}"]).hexdigest() for name in names
    }


def test_the_plans_of_v4_say_its_encoding_and_no_other():
    for engine in TINY.engines:
        on = {"engine": engine, "gpu": "h200" if engine in ("tensorrt_llm", "vllm") else None}
        plans = {variant: make_plan(rehearsal(variant=variant, **on)) for variant in ("tiny", "tiny-v4")}
        written = {
            name: setting.value for name, plan in plans.items() for setting in plan.settings if "enc" in setting.key
        }
        assert written == {"tiny-v4": "v4-0731"}


def test_nothing_travels_where_nothing_is_read(source):
    others = ({"model": "/models/tiny"}, {"engine": "simulated", "gpu": None}, {"variant": "deepseek-r1"})
    assert [carried_files(make_plan(rehearsal(**changes))) for changes in others] == [{}] * 3


def gone(name):
    return lambda folder: (folder / name).unlink()


DAMAGES = [  # the later ones of a folder that has no r1/
    (lambda folder: (folder / "config.json").write_text("{"), "another or a cut one"),
    (gone("config.json"), "config.json: can't be read"),
    (lambda folder: (shutil.rmtree(folder / "r1"), write_checksums(folder)), "files in r1/"),
    (shutil.rmtree, "checksums.sha256: can't be read"),
]


def test_a_damaged_source_is_one_line_with_the_fix(source):
    for damage, words in DAMAGES:
        damage(source)
        with pytest.raises(UnusableCheckpointError) as raised:
            carried_files(make_plan(rehearsal(variant="tiny-r1")))
        assert words in str(raised.value)
        assert "restore the folder" in str(raised.value)
        assert "\n" not in str(raised.value)


def changed_config(folder):
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": 16}))


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def swapped(folder):
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


CHANGED = "model.safetensors was changed since it was generated"


@pytest.mark.slow
@with_checkpoint
def test_check_looks_at_the_checkpoint_inside(tmp_path, subtests):
    files = repository_files(make_plan(rehearsal(num_gpus=8)), version="0")
    for damage, words in (
        (lambda folder: None, None),
        (cut, CHANGED),
        (swapped, CHANGED),
        (changed_config, "num_attention_heads 16, not 8"),
        (gone("tokenizer.json"), "tokenizer.json"),
        (shutil.rmtree, "are gone since the folder was generated"),
    ):
        write_repository(files, tmp_path / "r", force=True)
        damage(tmp_path / "r/tensorrt_llm/1/tiny")
        findings = check_repository(tmp_path / "r", CheckOptions()).findings
        messages = [finding.message for finding in findings]
        with subtests.test(str(words)):
            assert messages == [] if words is None else any(words in message for message in messages), messages
            assert any(finding.severity == "error" for finding in findings) == (words is not None)


@with_checkpoint
def test_a_checkpoint_of_another_shape_is_not_taken_for_the_planned_one(tmp_path):
    """Both have the class DeepseekV3ForCausalLM."""
    request = PlanRequest(variant="deepseek-r1", gpu="h200", num_gpus=8, model=str(SOURCE))
    write_repository(repository_files(make_plan(request), version="0"), tmp_path / "r")

    found = [finding.message for finding in check_repository(tmp_path / "r", CheckOptions()).findings]

    assert any(message.startswith("expected the figures of deepseek-r1, found") for message in found), found


def test_the_two_variants_are_two_plans():
    """They differ in the chat template only, which is no setting."""
    assert plan_hash(make_plan(rehearsal())) != plan_hash(make_plan(rehearsal(variant="tiny-r1")))
