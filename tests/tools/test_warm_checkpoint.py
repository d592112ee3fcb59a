"""The files that `warm` takes from a folder, the Hugging Face cache or what is served, and their expected checksums."""

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_triton_build import PlanRequest, make_plan, repository_files, write_repository
from deepseek_triton_tools.repository.checkpoint_files import WeightFile, find_checkpoints, find_damage
from deepseek_triton_tools.repository.checkpoint_manifest import CheckpointManifest, FileRecord, write_manifest
from deepseek_triton_tools.tool_errors import CheckpointError
from deepseek_triton_tools.warming.checksums import expected_checksums
from deepseek_triton_tools.warming.survey import Share, files_of_share
from support.cached_checkpoint import write_checkpoint
from support.hub_server import one_tensor

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
COMMIT, OTHER = "a" * 40, "b" * 40
NAME = "deepseek-ai/DeepSeek-R1"
CACHES = {"HF_HUB_CACHE": "", "HUGGINGFACE_HUB_CACHE": "", "HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}
"""Variables in the hub's order, and what is below them."""


def shard(tensor):
    return one_tensor(8, tensor)


def write_weights(folder):
    """Two shards and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FIRST).write_bytes(shard("a"))
    (folder / SECOND).write_bytes(shard("b"))
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": FIRST, "b": SECOND}}))
    return folder


def only(source):
    [checkpoint] = find_checkpoints(str(source))
    return checkpoint


def damage_of(source):
    return list(find_damage(only(source)))


def names(checkpoint):
    return [file.path.name for file in checkpoint.files]


def refused(source, ask=find_checkpoints):
    with pytest.raises(CheckpointError) as raised:
        ask(str(source) if ask is find_checkpoints else source)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_folder_is_a_checkpoint(tmp_path):
    folder = write_weights(tmp_path / "r1")
    (folder / "snapshots").mkdir()
    checkpoint = only(folder)
    assert (checkpoint.source, checkpoint.folder, checkpoint.found_by) == (str(folder), folder, "a folder")
    sizes = {name: (folder / name).stat().st_size for name in (FIRST, SECOND)}
    assert checkpoint.files == tuple(WeightFile(path=folder / name, size=size) for name, size in sizes.items())
    assert damage_of(folder) == []
    assert checkpoint.size == sum(sizes.values())
    write_checkpoint(tmp_path / "x")  # the bench's
    assert (damage_of(tmp_path / "x"), len(only(tmp_path / "x").files)) == ([], 4)
    (tmp_path / "y").mkdir()
    (tmp_path / "y/model-00001-of-99999999999.safetensors").write_bytes(shard("a"))  # is no number of shards
    assert damage_of(tmp_path / "y") == []
    # A file that is cut off or missing is a finding, and the others are taken.
    os.truncate(folder / SECOND, (folder / SECOND).stat().st_size - 1)
    [finding] = damage_of(folder)
    assert (Path(finding.file), "truncated: it ends at byte" in finding.message) == (folder / SECOND, True)
    assert names(only(folder)) == [FIRST, SECOND]
    (folder / SECOND).unlink()
    assert SECOND in damage_of(folder)[0].message
    assert names(only(folder)) == [FIRST]
    (folder / ".cache/huggingface/download").mkdir(parents=True)
    (folder / ".cache/huggingface/download/x.incomplete").touch()
    assert "its download is not finished" in damage_of(folder)[0].message


def test_a_source_that_is_no_folder_of_weights_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for source in ("gone", "a/b/c", "./org/name", "nul\0byte"):
        assert "no such file or folder" in refused(source), source
    message = refused(tmp_path)
    assert all(part in message for part in (str(tmp_path), "*.safetensors", INDEX, "model.yaml"))
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


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache in its default place, and an empty working folder."""
    for variable in CACHES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / ".cache" / "huggingface" / "hub"


def download(cache, commit=COMMIT, ref="main"):
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


def test_a_name_is_its_main_snapshot_and_others_have_a_revision(cache):
    snapshot = download(cache)
    download(cache, OTHER, ref=None)
    checkpoint = only(NAME)
    assert checkpoint.folder == snapshot == only(snapshot.parent.parent).folder
    assert checkpoint.found_by == f"in the Hugging Face cache, revision {COMMIT}"
    assert [file.path for file in checkpoint.files] == [snapshot / FIRST, snapshot / SECOND]
    (snapshot.parent.parent / "blobs" / "0.incomplete").touch()  # a leftover is no fault of a whole checkpoint
    assert damage_of(NAME) == []
    for number, revision in enumerate(["v2", "refs/pr/1", "c" * 40]):
        commit = revision if len(revision) == 40 else str(number) * 40
        snapshot = download(cache, commit, ref=None if revision == commit else revision)
        assert only(f"{NAME}@{revision}").folder == snapshot
    write_weights(Path(NAME))  # a folder of that name goes before the cache
    assert only(NAME).folder == Path(NAME)


def test_the_first_variable_in_the_hubs_order_decides(cache, tmp_path, monkeypatch):
    for number, (variable, below) in enumerate(CACHES.items(), start=1):
        monkeypatch.setenv(variable, str(tmp_path / variable))
        download(tmp_path / variable / below, str(number) * 40)
    for number, variable in enumerate(CACHES, start=1):
        assert only(NAME).folder.name == str(number) * 40
        monkeypatch.delenv(variable)


def test_what_is_not_in_the_cache_is_refused_with_what_is_there(cache):
    message = refused(NAME)
    assert str(cache / "models--deepseek-ai--DeepSeek-R1") in message
    assert f"checkpoint download {NAME}" in message
    snapshot = download(cache, ref=None)
    assert f"{NAME}@{COMMIT}" in refused(NAME)
    message = refused(f"{NAME}@v9")
    assert "refs/v9" in message
    assert f"there are {COMMIT}" in message
    assert f"checkpoint download {NAME} --revision v9" in message
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "bad").write_text("../../..")
    for revision in ("../../..", "..", "/etc", "bad"):  # none leads out of the cache
        assert "has no" in refused(f"{NAME}@{revision}"), revision


def test_a_download_that_is_not_finished_says_so_with_what_is_missing(cache):
    snapshot = download(cache)
    blob = (snapshot / SECOND).resolve()
    blob.rename(f"{blob}.incomplete")
    assert [finding.code for finding in damage_of(NAME)] == ["W008"]  # a link to nothing is a missing file
    assert names(only(NAME)) == [FIRST]
    (snapshot / SECOND).unlink()
    finding = damage_of(NAME)[0]
    assert SECOND in finding.message
    assert f"its download is not finished: 1 *.incomplete in {blob.parent}" in finding.message
    assert f"checkpoint download {NAME}" in finding.fix
    for name in (FIRST, INDEX):
        (snapshot / name).unlink()
    assert "its download is not finished: 1 *.incomplete" in refused(NAME)


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """R1 for 8 x H200 as generated; its model is the hub's name."""
    folder = tmp_path_factory.mktemp("generated") / "repository"
    plan = make_plan(PlanRequest(variant="deepseek-r1", gpu="h200", num_gpus=8))
    write_repository(repository_files(plan, version="1.0"), folder)
    return folder


@pytest.fixture
def repository(generated, tmp_path, cache):
    return shutil.copytree(generated, tmp_path / "repository")


def edit(repository, old, new):
    path = repository / "tensorrt_llm/1/model.yaml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))


def model_line(repository):
    lines = (repository / "tensorrt_llm/1/model.yaml").read_text().splitlines()
    return next(line for line in lines if line.startswith("model:"))


def set_model(repository, model):
    edit(repository, model_line(repository), f"model: {model}")


def test_a_repository_a_model_a_version_or_a_model_yaml(repository, tmp_path):
    folder = write_weights(tmp_path / "r1")
    set_model(repository, str(folder))
    for below in ("", "tensorrt_llm", "tensorrt_llm/1", "tensorrt_llm/1/model.yaml"):
        checkpoint = only(repository / below)
        assert checkpoint.folder == folder
        assert checkpoint.found_by == f"the model of {repository}/tensorrt_llm/1/model.yaml"
    folder = write_weights(repository / "tensorrt_llm" / "1" / "weights")
    set_model(repository, "weights")  # counts from model.yaml
    assert only(repository).folder == folder


def test_a_served_name_and_revision_are_looked_up_in_the_cache(repository, cache):
    assert model_line(repository).split()[1] == NAME
    message = refused(repository)
    assert str(repository / "tensorrt_llm/1" / NAME) in message
    assert str(cache / "models--deepseek-ai--DeepSeek-R1") in message
    snapshot, other = download(cache), download(cache, OTHER, ref=None)
    checkpoint = only(repository)
    assert checkpoint.folder == snapshot
    assert checkpoint.found_by.endswith(f"model.yaml, in the Hugging Face cache, revision {COMMIT}")
    edit(repository, model_line(repository), f"{model_line(repository)}\nrevision: {OTHER}")
    assert only(repository).folder == other
    set_model(repository, "/models/gone")
    assert "/models/gone is not there" in refused(repository)


def test_a_draft_model_of_its_own_is_taken_too(tmp_path):
    target, draft = write_weights(tmp_path / "r1"), write_weights(tmp_path / "draft")
    for key in ("speculative_model", "speculative_model_dir"):
        served(tmp_path / key, "m", 1, f"model: {target}\nspeculative_config:\n  {key}: {draft}\n")
        checkpoints = find_checkpoints(str(tmp_path / key))
        assert [checkpoint.folder for checkpoint in checkpoints] == [target, draft]
        assert checkpoints[1].found_by.startswith("the draft model of ")


def served(root, model, version, text):
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


def test_several_models_give_each_checkpoint_once_and_all_problems(tmp_path):
    root = tmp_path / "repository"
    for model, folder in (("a", "x"), ("b", "y"), ("c", "x")):
        served(root, model, 1, f"model: {write_weights(tmp_path / folder)}\n")
    served(root, "d", 1, "model: tiny\ntriton_config:\n  engine: simulated\n")  # without weights
    served(root, "e", 1, "model: tiny\ntriton_config:\n  engine: reference\n")
    inside = write_weights(root / "e/1/tiny")
    assert [each.folder for each in find_checkpoints(str(root))] == [tmp_path / "x", tmp_path / "y", inside]
    for model in ("f", "g"):
        served(root, model, 1, f"model: /gone/{model}\n")
    assert all(part in refused(root) for part in ("/gone/f is not there", "/gone/g is not there"))


def test_what_the_engine_does_not_read_is_left_out(tmp_path):
    weights = write_weights(tmp_path / "x")
    (weights / "extra.safetensors").write_bytes(shard("c"))
    by_engine = f"model: {weights}\ntriton_config:\n  engine: reference\n"
    served(tmp_path / "one", "m", 1, by_engine)
    served(tmp_path / "other", "m", 1, f"model: {weights}\n")
    assert (names(only(tmp_path / "one")), damage_of(tmp_path / "one")) == ([FIRST, SECOND], [])
    assert names(only(tmp_path / "other")) == ["extra.safetensors", FIRST, SECOND]
    assert f"reads its {len(shard('c'))} bytes all the same" in damage_of(tmp_path / "other")[0].message
    for model in ("a", "z"):  # of several engines, all files that one of them reads
        served(tmp_path / "other", model, 1, by_engine)
    assert names(only(tmp_path / "other")) == ["extra.safetensors", FIRST, SECOND]


def test_a_model_yaml_without_a_checkpoint_is_refused(tmp_path):
    cases = {
        "model: [": "model.yaml:1: not YAML",
        "tensor_parallel_size: 8\n": "expected model: and a checkpoint's folder or name, found null",
        "model: 3\n": "found 3",
        "- a\n": "expected a mapping",
    }
    for number, (text, words) in enumerate(cases.items()):
        served(tmp_path / str(number), "a", 1, text)
        assert words in refused(tmp_path / str(number)), text


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(0, 2**42), max_size=40), count=st.integers(1, 12), order=st.randoms())
def test_shares_are_a_partition_in_order_and_equal_in_every_process(sizes, count, order):
    files = [WeightFile(path=Path(f"{number:05}"), size=size) for number, size in enumerate(sizes)]
    shares = [files_of_share(files, Share(index, count)) for index in range(1, count + 1)]
    shuffled = files.copy()
    order.shuffle(shuffled)
    assert sorted(file.path for share in shares for file in share) == [file.path for file in files]
    assert all(list(share) == sorted(share, key=lambda file: file.path) for share in shares)
    for index, share in enumerate(shares, start=1):
        assert set(files_of_share(shuffled, Share(index, count))) == set(share)
    # None has more than another by more than its last file.
    loads = [[file.size for file in share] for share in shares]
    assert all(sum(load) - min(load, default=0) <= min(map(sum, loads)) for load in loads)


CONTENTS = {FIRST: shard("a"), SECOND: shard("b")}
DIGESTS = {name: hashlib.sha256(content).hexdigest() for name, content in CONTENTS.items()}
METADATA = ".cache/huggingface/download"


@pytest.fixture
def folder(tmp_path):
    for name, content in CONTENTS.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def git_hash(content):
    return subprocess.run(["git", "hash-object", "--stdin"], input=content, capture_output=True, check=True).stdout


def checksums(folder):
    return expected_checksums(only(folder))


def hashed(path, checksum):
    """Hash the file as the verification does."""
    digest = checksum.begin()
    digest.update(path.read_bytes())
    return digest.hexdigest()


def digests(folder):
    return {path.name: checksum.digest for path, checksum in checksums(folder).items()}


def write_metadata(folder, name, etag):
    path = folder / METADATA / f"{name}.metadata"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{'a' * 40}\n{etag}\n1700000000.5\n")
    return path


def test_a_blob_of_the_cache_is_called_by_its_hash(tmp_path):
    snapshot, blobs = tmp_path / "snapshots" / "rev", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    hashes = {FIRST: DIGESTS[FIRST], SECOND: git_hash(CONTENTS[SECOND]).decode().strip()}
    for name, content in CONTENTS.items():
        (blobs / hashes[name]).write_bytes(content)
        (snapshot / name).symlink_to(f"../../blobs/{hashes[name]}")
    found = checksums(snapshot)
    assert {path.name: checksum.algorithm for path, checksum in found.items()} == {FIRST: "sha256", SECOND: "sha1"}
    for path, checksum in found.items():
        assert hashed(path, checksum) == checksum.digest == hashes[path.name]
    (blobs / hashes[SECOND]).write_bytes(CONTENTS[SECOND][:-1] + b"x")
    assert hashed(snapshot / SECOND, found[snapshot / SECOND]) != hashes[SECOND]
    (tmp_path / "plain").mkdir()  # outside of a cache such a name tells nothing
    (tmp_path / "plain" / DIGESTS[FIRST]).write_bytes(CONTENTS[FIRST])
    (tmp_path / "plain" / FIRST).symlink_to(DIGESTS[FIRST])
    assert checksums(tmp_path / "plain") == {}


def test_the_metadata_of_a_download_into_a_folder_has_checksums(folder):
    git = git_hash(CONTENTS[SECOND]).decode().strip()
    first = write_metadata(folder, FIRST, DIGESTS[FIRST])
    write_metadata(folder, SECOND, git)
    (folder / "SHA256SUMS").write_text(f"{DIGESTS[FIRST]}  {FIRST}\n")  # agrees: the first source is named
    found = checksums(folder)
    assert (found[folder / FIRST].digest, found[folder / FIRST].source) == (DIGESTS[FIRST], str(first))
    assert hashed(folder / SECOND, found[folder / SECOND]) == git
    for name in ("SHA256SUMS", f"{METADATA}/{SECOND}.metadata"):
        (folder / name).unlink()
    for etag in ("", 'W/"abc"', "a" * 63, "g" * 64, "A" * 64):  # is no hash
        write_metadata(folder, FIRST, etag)
        assert checksums(folder) == {}, etag
    first.write_text("a" * 40)  # cut short
    assert checksums(folder) == {}


def test_the_output_of_sha256sum_is_read(folder):
    if shutil.which("sha256sum") is None:
        pytest.skip("there is no sha256sum here")
    forms = {"SHA256SUMS": [], "sha256sum.txt": ["--binary"], "SHA256SUMS.txt": ["--tag"], "weights.sha256": []}
    for name, options in forms.items():
        with (folder / name).open("wb") as file:
            subprocess.run(["sha256sum", *options, FIRST, f"./{SECOND}"], cwd=folder, stdout=file, check=True)
        assert digests(folder) == DIGESTS, name
        assert checksums(folder)[folder / SECOND].source == f"{folder / name}:2"
        (folder / name).unlink()
    name = "a\\b\nc.safetensors"  # is escaped
    (folder / name).write_bytes(CONTENTS[FIRST])
    with (folder / "SHA256SUMS").open("wb") as file:
        subprocess.run(["sha256sum", name], cwd=folder, stdout=file, check=True)
    assert digests(folder) == {name: DIGESTS[FIRST]}


def test_other_forms_of_checksums(folder):
    sums = folder / f"{SECOND}.sha256"
    sums.write_text(f"{DIGESTS[SECOND].upper()}\n")  # for one file the digest alone
    assert digests(folder) == {SECOND: DIGESTS[SECOND]}
    sums.unlink()
    zeros = "0" * 64
    other = ["-----BEGIN PGP SIGNED MESSAGE-----", "# weights", "", f"{zeros}  a/config.json", f"{zeros}  ../{FIRST}"]
    (folder / "SHA256SUMS").write_text("\r\n".join([*other, f"{DIGESTS[FIRST]} *{FIRST}"]) + "\r\n")
    assert digests(folder) == {FIRST: DIGESTS[FIRST]}
    (folder / "SHA256SUMS").unlink()
    records = {name: FileRecord(len(content), DIGESTS[name]) for name, content in CONTENTS.items()}
    write_manifest(folder, CheckpointManifest("org/name", "", records))  # our own
    assert digests(folder) == {path.name: hashed(path, each) for path, each in checksums(folder).items()} == DIGESTS


def test_a_file_of_checksums_that_is_none_is_reported(folder):
    sums = folder / "SHA256SUMS"
    for content in (b"", b"no checksums\n", b"\xff\xfe\x00", b"0" * 63 + b"  x\n"):
        sums.write_bytes(content)
        assert f"{sums}: expected lines as sha256sum writes them" in refused(folder, checksums), content
    sums.write_bytes(bytes(2**20 + 1))
    assert "found more than 1,048,576 bytes" in refused(folder, checksums)
    sums.unlink()
    sums.mkdir()
    assert "can't be read: not a regular file" in refused(folder, checksums)
    sums.rmdir()
    sums.symlink_to("gone")
    assert "can't be read: No such file" in refused(folder, checksums)


def test_sources_that_disagree_are_reported_all_of_them(folder):
    for name in CONTENTS:
        write_metadata(folder, name, DIGESTS[name])
    (folder / "SHA256SUMS").write_text(f"{'1' * 64}  {FIRST}\n{'2' * 64}  {SECOND}\n")
    message = refused(folder, checksums)
    for name, number, line in ((FIRST, "1", 1), (SECOND, "2", 2)):
        assert f"{folder / name}: its sha256 is {DIGESTS[name]} by {folder / METADATA / name}.metadata" in message
        assert f"{number * 64} by {folder / 'SHA256SUMS'}:{line}" in message
