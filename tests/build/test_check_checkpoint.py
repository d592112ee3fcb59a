"""`check` reads a checkpoint's folder: which model it is, and whether every shard is there and complete."""

import json
import os
import shutil
import struct
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_triton_build import PlanRequest, UnusableCheckpointError, make_plan, repository_files, write_repository
from deepseek_triton_build.check import INDEX, CheckOptions, check_repository, check_weights
from deepseek_triton_build.check.safetensors import HeaderError, read_header
from support.checked import MODEL_YAML, OPTIONS, check_alone, edited, only, safetensors, serious, write

SHARDS = {
    "model-00001-of-000003.safetensors": {"embed": 64, "layers.0.q": 128},
    "model-00002-of-000003.safetensors": {"layers.0.k": 32, "layers.1.q": 128},
    "model-00003-of-000003.safetensors": {"layers.1.k": 32, "lm_head": 64},
}
FIRST, SECOND, THIRD = SHARDS
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
CONFIG_JSON = {"architectures": ["DeepseekV3ForCausalLM"], "quantization_config": FP8}
TOKENIZER = {
    "tokenizer.json": {"added_tokens": [{"id": 0, "content": "<bos>"}], "model": {"vocab": {"a": 1}}},
    "tokenizer_config.json": {"bos_token": {"content": "<bos>"}, "eos_token": None},
}
STAMP = {"variant": "deepseek-r1", "gpu": "h200", "gpus": 8, "precision": "fp8", "release": "1.2.1"}


def write_checkpoint(folder):
    folder.mkdir(parents=True)
    for name, tensors in SHARDS.items():
        (folder / name).write_bytes(safetensors(tensors, {"format": "pt"}))
    weight_map = {tensor: shard for shard, tensors in SHARDS.items() for tensor in tensors}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(CONFIG_JSON))
    for name, content in TOKENIZER.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.fixture
def weights(tmp_path):
    """The checkpoint's folder."""
    return write_checkpoint(tmp_path / "weights")


def checked(weights, stamp=None, **options):
    """The report about a repository, stamped for DeepSeek-R1 in FP8, that serves the checkpoint."""
    root = weights.parent / "repository"
    shutil.rmtree(root, ignore_errors=True)
    write(root, model_yaml=edited(MODEL_YAML, "deepseek-ai/DeepSeek-R1", str(weights)))
    (root / "tensorrt_llm" / "deepseek-triton.json").write_text(json.dumps(STAMP if stamp is None else stamp))
    return check_repository(root, CheckOptions(**options))


def test_a_complete_checkpoint_has_no_findings(weights):
    report = checked(weights)

    assert report.findings == ()
    assert (report.models[0].variant, report.models[0].precision) == ("deepseek-r1", "fp8")


def cut(path, size):
    """Cut a file to `size` bytes; a negative number cuts off as many."""
    content = path.read_bytes()
    path.write_bytes(content[:size])


def header_of(content, **entry):
    return header_of_all(content, t=entry)


def header_of_all(content, **entries):
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + content


def f8(begin, end, *, length=None):
    """Return the header's entry of an 8-bit tensor."""
    return {"dtype": "F8_E4M3", "shape": [end - begin if length is None else length], "data_offsets": [begin, end]}


def rewrite(weights, name, change):
    document = json.loads((weights / name).read_text())
    (weights / name).write_text(json.dumps(change(document) or document))


def second(content):
    return lambda weights: (weights / SECOND).write_bytes(content)


def replaced(make):
    """Put something else in the place of the second shard."""
    return lambda weights: ((weights / SECOND).unlink(), make(weights / SECOND))


def index(**changes):
    return lambda weights: rewrite(weights, INDEX, lambda document: document.update(changes))


def listed(file):
    return lambda weights: rewrite(weights, INDEX, lambda document: document["weight_map"].update(x=file))


def config(**changes):
    return lambda weights: rewrite(weights, "config.json", lambda document: document.update(changes))


NVFP4, STRAY = '{"quantization": {"quant_algo": "NVFP4"}}', "model-00004-of-000004.safetensors"
DAMAGE = [  # the code, the file and part of the message of what is found, and what was done
    ("W010", SECOND, "truncated: it ends at byte 346", lambda w: cut(w / SECOND, -1)),
    ("W009", SECOND, "byte 14", second(struct.pack("<Q", 8) + b'{"t": x}')),
    ("W009", SECOND, "byte 10", second(struct.pack("<Q", 4) + b'{"\xff"')),
    ("W009", SECOND, "JSON object", second(struct.pack("<Q", 2) + b"[]")),
    ("W009", SECOND, "[8, 0]", second(header_of(b"", data_offsets=[8, 0]))),
    ("W009", SECOND, "no data_offsets", second(header_of(b"", dtype="U8"))),
    ("W009", SECOND, "no dtype or no shape", second(header_of(b"", data_offsets=[0, 0]))),
    ("W009", SECOND, "no shape", second(header_of(b"", dtype="U8", shape=[10**4000] * 9, data_offsets=[0, 0]))),
    ("W009", SECOND, "a shape of 400", second(header_of(bytes(4), **f8(0, 4, length=400)))),
    ("W009", SECOND, "overlaps", second(header_of_all(bytes(8), a=f8(0, 8), b=f8(4, 8)))),
    ("W009", SECOND, "2 bytes before it unused", second(header_of_all(bytes(8), a=f8(0, 2), b=f8(4, 8)))),
    ("W009", SECOND, "2^63 or more", second(header_of(b"", data_offsets=[0, 10**4299]))),
    ("W009", SECOND, "expected a file", replaced(os.mkfifo)),
    ("W009", SECOND, "expected a file", replaced(lambda path: path.symlink_to("/dev/zero"))),
    ("W009", SECOND, "", replaced(os.mkdir)),
    ("S002", INDEX, "/dev/zero", listed("/dev/zero")),
    ("S002", INDEX, "../x", listed("../x")),
    ("W007", INDEX, "names no tensor", index(weight_map={})),
    ("S002", INDEX, "weight_map", index(weight_map=[])),
    ("W008", INDEX, SECOND, lambda w: (w / SECOND).unlink()),
    ("W008", INDEX, SECOND, replaced(lambda path: path.symlink_to("gone"))),
    ("W011", SECOND, "layers.1.q", second(safetensors({"layers.0.k": 32}))),
    ("W012", STRAY, "index", lambda w: (w / STRAY).write_bytes(safetensors({"x": 8}))),
    ("W006", "config.json", "found awq", config(quantization_config={"quant_method": "awq"})),
    ("W006", "config.json", "found no quantization", config(quantization_config=None)),
    ("S002", "config.json", "not JSON", lambda w: (w / "config.json").write_text("{")),
    ("S001", "config.json", "No such file", lambda w: (w / "config.json").unlink()),
    ("W004", "config.json", "deepseek-r1", config(architectures=["DeepseekV32ForCausalLM"])),
    ("W006", "hf_quant_config.json", "NVFP4", lambda w: (w / "hf_quant_config.json").write_text(NVFP4)),
]


@pytest.mark.slow
def test_damage_is_found_with_its_file(tmp_path, subtests):
    for number, (code, file, words, damage) in enumerate(DAMAGE):
        weights = write_checkpoint(tmp_path / str(number) / "weights")
        damage(weights)
        with subtests.test(f"{code} {words}"):
            finding = only(checked(weights), code)
            assert finding.file == str(weights / file)
            assert words in finding.message
            assert "\n" not in finding.message + finding.fix


def test_a_quant_method_that_names_only_a_tool_is_no_finding(weights):
    rewrite(weights, "config.json", lambda c: c.update(quantization_config={"quant_method": "modelopt"}))

    assert serious(checked(weights)) == []


def test_several_shards_are_reported_one_by_one(weights):
    cut(weights / FIRST, -1)
    cut(weights / THIRD, 20)

    assert [finding.code for finding in serious(checked(weights))] == ["W010", "W009"]


def test_without_an_index_missing_shards_are_found_by_the_numbers_in_the_names(weights):
    (weights / INDEX).unlink()
    (weights / THIRD).unlink()

    assert THIRD in only(checked(weights), "W008").message


def test_a_checkpoint_in_one_file_needs_no_index_but_weights(weights):
    for path in weights.glob("model*"):
        path.unlink()
    assert only(checked(weights), "W007").severity == "error"

    for tensors, found in (({"x": 8}, []), ({}, [("W007", str(weights / "model.safetensors"))])):
        (weights / "model.safetensors").write_bytes(safetensors(tensors, {"format": "pt"}))
        assert [(finding.code, finding.file) for finding in checked(weights).findings] == found


# What it is


def test_the_files_alone_say_what_it_is(weights):
    """An NVFP4 checkpoint on Hopper is recognised by them; an unknown architecture is a warning."""
    quant = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}
    (weights / "hf_quant_config.json").write_text(json.dumps(quant))
    on_hopper = checked(weights, stamp={}, release="1.2.1", gpu="h200")
    assert [finding.code[0] for finding in on_hopper.findings if finding.severity == "error"] == ["H"]
    assert on_hopper.models[0].precision == "fp4"

    rewrite(weights, "config.json", lambda config: config.update(architectures=["LlamaForCausalLM"]))
    finding = only(checked(weights, stamp={}), "W005")
    assert finding.severity == "warning"
    assert "LlamaForCausalLM" in finding.message


def test_a_folder_named_like_a_checkpoint_is_taken_for_it(tmp_path):
    weights = write_checkpoint(tmp_path / "DeepSeek-R1-0528")

    assert checked(weights, stamp={}, release="1.2.1").models[0].variant == "deepseek-r1-0528"


# Where it is


def moved(root, model, **options):
    write(root, model_yaml=edited(MODEL_YAML, "deepseek-ai/DeepSeek-R1", model))
    return check_repository(root, CheckOptions(release="1.2.1", **options))


def test_a_missing_folder_is_an_error_only_in_a_strict_check(tmp_path):
    for number, model in enumerate(["/models/gone", "./gone", "~/gone", "a/b/c"]):
        for strict, code in ((False, "W001"), (True, "W002")):
            report = moved(tmp_path / f"{number} {strict}", model, strict=strict)
            assert only(report, code).line == 1
            assert report.has_errors == strict
    for name, fix in (("/models/gone", "--model FOLDER"), ("../gone", "an absolute path")):
        assert only(moved(tmp_path / f"fix {fix}", name), "W001").fix.endswith(fix)
    assert only(moved(tmp_path / "hub", "deepseek-ai/DeepSeek-R1"), "W003").severity == "note"


def test_a_relative_path_counts_from_model_yaml(tmp_path):
    weights = write_checkpoint(tmp_path / "tensorrt_llm" / "1" / "weights")
    cut(weights / SECOND, -1)
    (tmp_path / "tensorrt_llm" / "1" / "deepseek_backend").mkdir()
    model_yaml = edited(MODEL_YAML, "deepseek-ai/DeepSeek-R1", "weights")
    (tmp_path / "tensorrt_llm" / "1" / "model.yaml").write_text(model_yaml)

    report = check_repository(tmp_path, OPTIONS)

    assert only(report, "W010").file == f"tensorrt_llm/1/weights/{SECOND}"


def test_a_file_of_a_generated_checkpoint_is_told_once(tmp_path):
    plan = make_plan(PlanRequest(variant="tiny", engine="vllm", gpu="h200"))
    write_repository(repository_files(plan, version="0"), tmp_path / "r")
    (tmp_path / "r/tensorrt_llm/1/tiny/model.safetensors").unlink()
    assert [finding.code for finding in serious(check_repository(tmp_path / "r"))] == ["S008"]


def test_model_root_may_be_any_folder_above_the_checkpoint(tmp_path):
    """The whole path, its last name, the folder itself, and the folder where model.yaml names none."""
    places = {"models/r1": "/models/r1", "r1": "/models/r1", "": "/models/r1", ".": "deepseek-ai/DeepSeek-R1"}
    for number, (below, model) in enumerate(places.items()):
        weights = write_checkpoint(tmp_path / f"disk{number}" / below)
        cut(weights / SECOND, -1)
        report = moved(tmp_path / f"repository{number}", model, model_root=tmp_path / f"disk{number}")
        assert only(report, "W010").file == str(weights / SECOND)


def test_model_root_counts_more_than_the_folder_in_model_yaml_and_for_a_yaml_file_too(weights):
    other = write_checkpoint(weights.parent / "other")
    cut(other / SECOND, -1)
    assert only(checked(weights, model_root=other), "W010").file == str(other / SECOND)
    assert only(check_alone("max_batch_size: 8\n", release="1.2.1", model_root=other), "W010").line is None

    (weights.parent / "empty").mkdir()
    report = checked(weights, model_root=weights.parent / "empty")
    assert [finding.code for finding in serious(report)] == ["W007"]


def test_model_root_has_to_be_there(tmp_path):
    (tmp_path / "a file").touch()
    write(tmp_path / "repository")
    for place in ("gone", "a file"):
        with pytest.raises(UnusableCheckpointError, match="expected the checkpoint's folder") as raised:
            check_repository(tmp_path / "repository", CheckOptions(model_root=tmp_path / place))
        assert "\n" not in str(raised.value)


# The header


def test_the_header_says_what_is_in_a_file(tmp_path):
    (tmp_path / "x").write_bytes(content := safetensors({"a": 3, "b": 5}, {"format": "pt"}))

    with (tmp_path / "x").open("rb") as file:
        header = read_header(file)

    start = len(content) - 8
    assert header.tensors == {"a": (start, start + 3, "U8", (3,)), "b": (start + 3, start + 8, "U8", (5,))}
    assert (header.length, header.found) == (len(content), len(content))


def test_only_the_headers_are_read(tmp_path):
    """The files are sparse, four terabytes in all."""
    size = 2**40
    for name in SHARDS:
        with (tmp_path / name).open("wb") as file:
            file.write(header_of(b"", **f8(0, size)))
            file.truncate(file.tell() + size)

    assert list(check_weights(tmp_path, "weights")) == []


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=80), prefix=st.sampled_from([b"", struct.pack("<Q", 2), struct.pack("<Q", 30)]))
def test_no_bytes_end_in_another_exception(tmp_path_factory, content, prefix):
    path = tmp_path_factory.mktemp("header") / "x"
    path.write_bytes(prefix + content)
    with path.open("rb") as file, suppress(HeaderError):
        assert read_header(file).found == len(prefix + content)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=8), below, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(config=JSON, quant=JSON, index=JSON, header=JSON)
def test_no_json_ends_in_an_exception(tmp_path_factory, config, quant, index, header):
    """Any JSON may stand in the places that are read."""
    weights = write_checkpoint(tmp_path_factory.mktemp("json") / "weights")
    text = json.dumps({"a": header, "b": {"data_offsets": header}}).encode()
    (weights / FIRST).write_bytes(struct.pack("<Q", len(text)) + text)
    (weights / "config.json").write_text(json.dumps({"architectures": config, "quantization_config": quant}))
    (weights / "hf_quant_config.json").write_text(json.dumps({"quantization": config}))
    (weights / INDEX).write_text(json.dumps({"weight_map": index}))

    assert checked(weights, stamp={"variant": config, "files": quant}, release="1.2.1").findings


def test_a_tokenizer_of_another_place_is_the_one_that_counts(weights):
    for name in TOKENIZER:
        (weights / name).unlink()
    elsewhere = weights.parent / "tokenizer"
    elsewhere.mkdir()
    codes = {}
    for named in ("", "tokenizer: deepseek-ai/DeepSeek-R1\n", f"tokenizer: {elsewhere}\n"):
        root = weights.parent / f"repository{len(codes)}"
        write(root, model_yaml=named + edited(MODEL_YAML, "deepseek-ai/DeepSeek-R1", str(weights)))
        codes[named] = [finding.file for finding in serious(check_repository(root, OPTIONS)) if finding.code == "W014"]

    assert list(codes.values()) == [
        [f"{weights}/tokenizer.json", f"{weights}/tokenizer_config.json"],
        [],
        [f"{elsewhere}/tokenizer.json", f"{elsewhere}/tokenizer_config.json"],
    ]
