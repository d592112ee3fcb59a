"""The files that `warm` takes from a folder, from the Hugging Face cache, and from what a model repository serves."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
from bench.synthetic_checkpoint import make_checkpoint
from hypothesis import given
from hypothesis import strategies as st

from deepseek_triton_build import PlanRequest, make_plan, repository_files, write_repository
from deepseek_triton_build.check import Finding
from deepseek_triton_tools.repository.checkpoint_files import (
    CheckpointFiles,
    WeightFile,
    find_checkpoints,
    find_damage,
)
from deepseek_triton_tools.tool_errors import CheckpointError
from deepseek_triton_tools.warming.checkpoint.survey import files_of_share
from deepseek_triton_tools.warming.checkpoint.warm_options import Share

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
COMMIT, OTHER = "a" * 40, "b" * 40
NAME = "deepseek-ai/DeepSeek-R1"
CACHE_VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")


def damage(checkpoint: CheckpointFiles) -> tuple[Finding, ...]:
    return tuple(find_damage(checkpoint))


def shard(tensor: str, size: int = 8) -> bytes:
    header = json.dumps({tensor: {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(size)


def write_weights(folder: Path) -> Path:
    """Two shards and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FIRST).write_bytes(shard("a"))
    (folder / SECOND).write_bytes(shard("b"))
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": FIRST, "b": SECOND}}))
    return folder


def only(source: str | Path):
    checkpoints = find_checkpoints(str(source))
    assert len(checkpoints) == 1
    return checkpoints[0]


def damage_of(source: str | Path):
    return damage(only(source))


def names(checkpoint) -> list[str]:
    return [file.path.name for file in checkpoint.files]


def refused(source: str | Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        find_checkpoints(str(source))
    assert "\n" not in str(raised.value)
    return str(raised.value)


# A folder


def test_a_folder_is_a_checkpoint(tmp_path):
    folder = write_weights(tmp_path / "r1")

    checkpoint = only(folder)

    assert (checkpoint.source, checkpoint.folder, checkpoint.found_by) == (str(folder), folder, "a folder")
    assert checkpoint.files == tuple(
        WeightFile(path=folder / name, size=(folder / name).stat().st_size) for name in (FIRST, SECOND)
    )
    assert damage(checkpoint) == ()
    assert checkpoint.size == sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def test_the_benchs_checkpoint_is_whole(tmp_path):
    make_checkpoint(tmp_path / "x", size=2_000_000)

    checkpoint = only(tmp_path / "x")

    assert damage(checkpoint) == ()
    assert len(checkpoint.files) == 4


def test_a_finding_has_the_whole_path_of_its_file(tmp_path):
    folder = write_weights(tmp_path / "r1")
    os.truncate(folder / SECOND, (folder / SECOND).stat().st_size - 1)

    checkpoint = only(folder)

    assert [Path(finding.file) for finding in damage(checkpoint)] == [checkpoint.files[1].path]
    assert "truncated: it ends at byte" in damage(checkpoint)[0].message
    assert names(checkpoint) == [FIRST, SECOND]


def test_a_missing_file_is_a_finding_and_the_others_are_taken(tmp_path):
    folder = write_weights(tmp_path / "r1")
    (folder / SECOND).unlink()

    checkpoint = only(folder)

    assert SECOND in damage(checkpoint)[0].message
    assert names(checkpoint) == [FIRST]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("gone", "no such file or folder"),
        ("a/b/c", "no such file or folder"),
        ("./org/name", "no such file or folder"),
        ("nul\0byte", "no such file or folder"),
    ],
)
def test_a_source_that_does_not_exist_is_refused(tmp_path, monkeypatch, source, words):
    monkeypatch.chdir(tmp_path)

    assert words in refused(source)


def test_an_empty_folder_is_no_checkpoint_and_says_what_was_looked_for(tmp_path):
    message = refused(tmp_path)

    assert all(part in message for part in (str(tmp_path), "*.safetensors", INDEX, "model.yaml"))


def test_a_shard_in_a_folders_place(tmp_path):
    folder = write_weights(tmp_path / "r1")

    assert f"name its folder: {folder}" in refused(folder / FIRST)


def test_a_folder_out_of_reach_is_not_called_missing(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can be somebody else")
    folder = write_weights(tmp_path / "closed" / "r1")
    (tmp_path / "closed").chmod(0o700)
    os.seteuid(65534)
    try:
        message = refused(folder)
    finally:
        os.seteuid(0)

    assert f"{folder}: can't be accessed: Permission denied" in message


# The Hugging Face cache


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache in its default place, and an empty working folder."""
    for variable in CACHE_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / ".cache" / "huggingface" / "hub"


def download(cache: Path, commit: str = COMMIT, ref: str | None = "main") -> Path:
    """Write what `hf download` leaves of a model; returns the snapshot's folder."""
    model = cache / f"models--{NAME.replace('/', '--')}"
    written = write_weights(model / "new")
    snapshot = model / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (model / "blobs").mkdir(exist_ok=True)
    for path in sorted(written.iterdir()):
        blob = model / "blobs" / f"{path.name}-{commit}"
        path.rename(blob)
        (snapshot / path.name).symlink_to(f"../../blobs/{blob.name}")
    written.rmdir()
    if ref:
        (model / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (model / "refs" / ref).write_text(commit)
    return snapshot


def test_a_name_is_its_main_snapshot(cache):
    snapshot = download(cache)
    download(cache, OTHER, ref=None)

    checkpoint = only(NAME)

    assert checkpoint.folder == snapshot
    assert checkpoint.found_by == f"in the Hugging Face cache, revision {COMMIT}"
    assert [file.path for file in checkpoint.files] == [snapshot / FIRST, snapshot / SECOND]
    assert damage(checkpoint) == ()


@pytest.mark.parametrize("revision", [OTHER, "v2", "refs/pr/1"])
def test_another_revision_by_commit_branch_or_pull_request(cache, revision):
    download(cache)
    snapshot = download(cache, OTHER, ref=None if revision == OTHER else revision)

    assert only(f"{NAME}@{revision}").folder == snapshot


def test_the_folder_of_the_model_in_the_cache(cache):
    snapshot = download(cache)

    assert only(snapshot.parent.parent).folder == snapshot


def test_a_folder_of_that_name_goes_before_the_cache(cache):
    download(cache)
    write_weights(Path(NAME))

    assert only(NAME).folder == Path(NAME)


@pytest.mark.parametrize(
    ("variable", "below"),
    [("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")],
)
def test_the_environment_says_where_the_cache_is(cache, tmp_path, monkeypatch, variable, below):
    monkeypatch.setenv(variable, str(tmp_path / "elsewhere"))
    snapshot = download(tmp_path / "elsewhere" / below)

    assert only(NAME).folder == snapshot


def test_the_first_variable_in_the_hubs_order_decides(cache, tmp_path, monkeypatch):
    for number, (variable, below) in enumerate(
        zip(CACHE_VARIABLES, ("", "", "hub", "huggingface/hub"), strict=True), start=1
    ):
        monkeypatch.setenv(variable, str(tmp_path / variable))
        download(tmp_path / variable / below, str(number) * 40)

    for number, variable in enumerate(CACHE_VARIABLES, start=1):
        assert only(NAME).folder.name == str(number) * 40
        monkeypatch.delenv(variable)


def test_where_the_hub_itself_has_its_cache(cache, monkeypatch):
    """Compared with huggingface_hub, where that is installed."""
    hub = pytest.importorskip("huggingface_hub")
    snapshot = download(cache)

    found = hub.snapshot_download(NAME, cache_dir=cache, local_files_only=True)

    assert only(NAME).folder == Path(found) == snapshot


def test_a_name_that_is_not_in_the_cache(cache):
    message = refused(NAME)

    assert str(cache / "models--deepseek-ai--DeepSeek-R1") in message
    assert f"checkpoint download {NAME}" in message


def test_a_revision_that_is_not_in_the_cache_names_those_that_are(cache):
    download(cache)

    message = refused(f"{NAME}@v9")

    assert "refs/v9" in message
    assert f"there are {COMMIT}" in message
    assert f"checkpoint download {NAME} --revision v9" in message


def test_without_a_main_the_existing_revisions_are_named(cache):
    download(cache, ref=None)

    assert f"{NAME}@{COMMIT}" in refused(NAME)


@pytest.mark.parametrize("revision", ["../../..", "..", "/etc"])
def test_a_revision_does_not_lead_out_of_the_cache(cache, revision):
    snapshot = download(cache)
    (snapshot.parent.parent / "refs" / "bad").write_text("../../..")

    assert "has no" in refused(f"{NAME}@{revision}")
    assert "has no" in refused(f"{NAME}@bad")


def test_a_download_that_is_not_finished_says_so_with_what_is_missing(cache):
    snapshot = download(cache)
    blob = (snapshot / SECOND).resolve()
    blob.rename(f"{blob}.incomplete")
    (snapshot / SECOND).unlink()

    finding = damage_of(NAME)[0]

    assert SECOND in finding.message
    assert f"its download is not finished: 1 *.incomplete in {blob.parent}" in finding.message
    assert f"checkpoint download {NAME}" in finding.fix


def test_a_link_to_a_blob_that_was_removed_is_a_missing_file(cache):
    snapshot = download(cache)
    (snapshot / SECOND).resolve().unlink()

    checkpoint = only(NAME)

    assert [finding.code for finding in damage(checkpoint)] == ["W008"]
    assert names(checkpoint) == [FIRST]


def test_a_download_that_has_no_weights_yet_is_named(cache):
    snapshot = download(cache)
    for name in (FIRST, SECOND, INDEX):
        (snapshot / name).unlink()
    (snapshot.parent.parent / "blobs" / "0.incomplete").touch()

    assert "its download is not finished: 1 *.incomplete" in refused(NAME)


def test_a_leftover_of_a_download_is_no_fault_of_a_whole_checkpoint(cache):
    snapshot = download(cache)
    (snapshot.parent.parent / "blobs" / "0.incomplete").touch()

    assert damage_of(NAME) == ()


def test_a_download_into_a_folder_that_is_not_finished(tmp_path):
    folder = write_weights(tmp_path / "r1")
    (folder / SECOND).unlink()
    (folder / ".cache/huggingface/download").mkdir(parents=True)
    (folder / ".cache/huggingface/download/x.incomplete").touch()

    assert "its download is not finished" in damage_of(folder)[0].message


# What is served


def generated(root: Path, **request) -> Path:
    plan = make_plan(PlanRequest(**request))
    write_repository(repository_files(plan, version="1.0"), root)
    return root


@pytest.fixture
def repository(tmp_path, cache):
    """R1 for 8 x H200 as generated; its model is the hub's name."""
    return generated(tmp_path / "repository", variant="deepseek-r1", gpu="h200", num_gpus=8)


def edit(repository: Path, old: str, new: str, version: str = "1") -> None:
    path = repository / "tensorrt_llm" / version / "model.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def model_line(repository: Path) -> str:
    lines = (repository / "tensorrt_llm/1/model.yaml").read_text().splitlines()
    return next(line for line in lines if line.startswith("model:"))


def set_model(repository: Path, model: str) -> None:
    edit(repository, model_line(repository), f"model: {model}")


@pytest.mark.parametrize("below", ["", "tensorrt_llm", "tensorrt_llm/1", "tensorrt_llm/1/model.yaml"])
def test_a_repository_a_model_a_version_or_a_model_yaml(repository, tmp_path, below):
    folder = write_weights(tmp_path / "r1")
    set_model(repository, str(folder))

    checkpoint = only(repository / below)

    assert checkpoint.folder == folder
    assert checkpoint.found_by == f"the model of {repository}/tensorrt_llm/1/model.yaml"


def test_a_relative_path_counts_from_model_yaml(repository):
    folder = write_weights(repository / "tensorrt_llm" / "1" / "weights")
    set_model(repository, "weights")

    assert only(repository).folder == folder


def test_a_served_name_is_looked_up_in_the_cache(repository, cache):
    name = model_line(repository).split()[1]
    assert name == NAME
    snapshot = download(cache)

    checkpoint = only(repository)

    assert checkpoint.folder == snapshot
    assert checkpoint.found_by.endswith(f"model.yaml, in the Hugging Face cache, revision {COMMIT}")


def test_a_served_revision_is_followed(repository, cache):
    download(cache)
    snapshot = download(cache, OTHER, ref=None)
    edit(repository, model_line(repository), f"{model_line(repository)}\nrevision: {OTHER}")

    assert only(repository).folder == snapshot


def test_a_served_checkpoint_that_is_not_here_names_all_places(repository, cache):
    message = refused(repository)
    assert str(repository / "tensorrt_llm/1" / NAME) in message
    assert str(cache / "models--deepseek-ai--DeepSeek-R1") in message

    set_model(repository, "/models/gone")
    assert "/models/gone is not there" in refused(repository)


@pytest.mark.parametrize("key", ["speculative_model", "speculative_model_dir"])
def test_a_draft_model_of_its_own_is_taken_too(tmp_path, key):
    target, draft = write_weights(tmp_path / "r1"), write_weights(tmp_path / "draft")
    version = tmp_path / "repository" / "m" / "1"
    version.mkdir(parents=True)
    (version / "model.yaml").write_text(f"model: {target}\nspeculative_config:\n  {key}: {draft}\n")

    checkpoints = find_checkpoints(str(tmp_path / "repository"))

    assert [checkpoint.folder for checkpoint in checkpoints] == [target, draft]
    assert checkpoints[1].found_by.startswith("the draft model of ")


def served(root: Path, model: str, version: int, text: str) -> None:
    folder = root / model / str(version)
    folder.mkdir(parents=True)
    (folder / "model.yaml").write_text(text)
    (root / model / "config.pbtxt").touch()


def test_the_highest_version_is_taken(tmp_path):
    for version in (2, 10, 9):
        served(tmp_path / "repository", "m", version, f"model: {write_weights(tmp_path / str(version))}\n")
    (tmp_path / "repository" / "m" / "11").mkdir()  # without a model.yaml

    assert only(tmp_path / "repository").folder == tmp_path / "10"
    assert only(tmp_path / "repository" / "m" / "2").folder == tmp_path / "2"


def test_several_models_give_each_checkpoint_once(tmp_path):
    for model, folder in (("a", "x"), ("b", "y"), ("c", "x")):
        served(tmp_path / "repository", model, 1, f"model: {write_weights(tmp_path / folder)}\n")

    checkpoints = find_checkpoints(str(tmp_path / "repository"))

    assert [checkpoint.folder.name for checkpoint in checkpoints] == ["x", "y"]


def test_what_the_engine_does_not_read_is_left_out(tmp_path):
    weights = write_weights(tmp_path / "x")
    (weights / "extra.safetensors").write_bytes(shard("c"))
    served(tmp_path / "one", "m", 1, f"model: {weights}\ntriton_config:\n  engine: reference\n")
    served(tmp_path / "other", "m", 1, f"model: {weights}\n")

    by_index, by_folder = only(tmp_path / "one"), only(tmp_path / "other")

    assert (names(by_index), damage(by_index)) == ([FIRST, SECOND], ())
    assert names(by_folder) == ["extra.safetensors", FIRST, SECOND]
    assert f"reads its {len(shard('c'))} bytes all the same" in damage(by_folder)[0].message


def test_a_checkpoint_of_two_engines_has_all_files_that_one_of_them_reads(tmp_path):
    weights = write_weights(tmp_path / "x")
    (weights / "extra.safetensors").write_bytes(shard("c"))
    for model, engine in (("a", "reference"), ("b", "tensorrt_llm"), ("c", "reference")):
        served(tmp_path / "r", model, 1, f"model: {weights}\ntriton_config:\n  engine: {engine}\n")

    assert names(only(tmp_path / "r")) == ["extra.safetensors", FIRST, SECOND]


def test_the_checkpoint_inside_a_repository_is_found(tmp_path):
    served(tmp_path / "r", "a", 1, "model: tiny\ntriton_config:\n  engine: reference\n")
    write_weights(tmp_path / "r/a/1/tiny")

    assert only(tmp_path / "r").folder == tmp_path / "r/a/1/tiny"


def test_the_simulated_engine_is_nothing_to_warm(repository):
    edit(repository, "engine: tensorrt_llm", "engine: simulated")

    assert "the simulated engine reads no weights" in refused(repository)


def test_a_model_without_weights_beside_one_with_is_passed_over(tmp_path):
    served(tmp_path / "r", "a", 1, "model: tiny\ntriton_config:\n  engine: simulated\n")
    served(tmp_path / "r", "b", 1, f"model: {write_weights(tmp_path / 'x')}\n")

    assert only(tmp_path / "r").folder == tmp_path / "x"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: [", "model.yaml:2: not YAML"),
        ("tensor_parallel_size: 8\n", "expected model: and a checkpoint's folder or name, found null"),
        ("model: 3\n", "found 3"),
        ("- a\n", "expected a mapping"),
    ],
)
def test_a_model_yaml_without_a_checkpoint_is_refused(tmp_path, text, words):
    served(tmp_path / "r", "a", 1, text)

    assert words in refused(tmp_path / "r")


def test_all_problems_are_named_at_once(tmp_path):
    served(tmp_path / "r", "a", 1, "model: /gone/a\n")
    served(tmp_path / "r", "b", 1, "model: /gone/b\n")
    served(tmp_path / "r", "c", 1, f"model: {write_weights(tmp_path / 'x')}\n")

    assert all(part in refused(tmp_path / "r") for part in ("/gone/a is not there", "/gone/b is not there"))


# Shares


SIZES = st.lists(st.integers(0, 2**42), max_size=40)


def files_of(sizes: list[int]) -> list[WeightFile]:
    return [WeightFile(path=Path(f"{number:05}"), size=size) for number, size in enumerate(sizes)]


@given(sizes=SIZES, count=st.integers(1, 12), order=st.randoms())
def test_shares_are_a_partition_in_order_and_equal_in_every_process(sizes, count, order):
    files = files_of(sizes)
    shares = [files_of_share(files, Share(index, count)) for index in range(1, count + 1)]
    shuffled = files.copy()
    order.shuffle(shuffled)

    assert sorted(file.path for share in shares for file in share) == [file.path for file in files]
    assert all(list(share) == sorted(share, key=lambda file: file.path) for share in shares)
    for index, share in enumerate(shares, start=1):
        assert set(files_of_share(shuffled, Share(index, count))) == set(share)


@given(sizes=SIZES, count=st.integers(1, 12))
def test_no_share_has_more_than_another_by_more_than_its_last_file(sizes, count):
    loads, smallest = [], []
    for index in range(1, count + 1):
        share = files_of_share(files_of(sizes), Share(index, count))
        loads.append(sum(file.size for file in share))
        smallest.append(min((file.size for file in share), default=0))

    assert all(load - least <= min(loads) for load, least in zip(loads, smallest, strict=True))


def test_163_shards_over_8_ranks_differ_by_a_shard_at_most():
    sizes = [5_234_139_343, *[4_302_000_000] * 161, 6_600_000_000]
    shares = [files_of_share(files_of(sizes), Share(index, 8)) for index in range(1, 9)]
    loads = [sum(file.size for file in share) for share in shares]

    assert max(loads) - min(loads) <= 4_302_000_000


def test_a_last_number_that_is_no_number_of_shards_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-99999999999.safetensors").write_bytes(shard("a"))
    assert [finding.code for finding in damage(only(tmp_path))] == []


def test_a_folder_of_weights_may_have_a_folder_of_snapshots(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(shard("a"))
    (tmp_path / "snapshots").mkdir()
    assert only(tmp_path).found_by == "a folder"
