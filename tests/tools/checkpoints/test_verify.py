"""Verifying a checkpoint offline: by a manifest, by the hub's cache, by a file of checksums, or by headers only."""

import hashlib
import json
import os
import subprocess

import numpy as np
import pytest

from deepseek_triton_tools.checkpoints.verify import verify
from deepseek_triton_tools.repository.checkpoint_manifest import (
    MANIFEST_NAME,
    CheckpointManifest,
    FileRecord,
    write_manifest,
)
from deepseek_triton_tools.tool_errors import CheckpointError
from support.tensor_writing import as_float32, write_sharded

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
VALUES = np.arange(1000, dtype=np.float32)


@pytest.fixture
def folder(tmp_path):
    """Return a checkpoint of two files, without hashes: a and c lie in the first one, b and d in the second."""
    path = tmp_path / "weights"
    path.mkdir()
    write_sharded(path, {name: as_float32(VALUES) for name in "abcd"}, 2)
    (path / "config.json").write_text("{}")
    (path / "inference").mkdir()
    (path / "inference" / "model.py").write_text("pass\n")
    return path


@pytest.fixture
def listed(folder):
    """Return the same with a manifest."""
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    records = {name: FileRecord(len(each), hashlib.sha256(each).hexdigest()) for name, each in files.items()}
    write_manifest(folder, CheckpointManifest("maker/model", "abc", records))
    return folder


def verified(folder):
    return verify(folder, jobs=2, observe=lambda *_: None)


def lines(folder):
    return [str(damage) for damage in verified(folder).damages]


def flip(path, byte):
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)


def hash_of(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


# By a manifest


def test_nothing_is_wrong_with_what_was_written(listed):
    seen = []
    report = verify(listed, jobs=1, observe=lambda *read: seen.append(read))
    assert (report.damages, report.unverified) == ((), ())
    assert (report.compared_with, report.source, report.revision) == (MANIFEST_NAME, "maker/model", "abc")
    assert report.num_files == 5
    files = (path for path in listed.rglob("*") if path.is_file() and path.name != MANIFEST_NAME)
    assert report.num_bytes == sum(path.stat().st_size for path in files)
    assert seen[-1] == (report.num_bytes, report.num_bytes)


def test_one_bit_or_a_cut_is_found_and_the_tensors_are_named(listed):
    expected, size = hash_of(listed / SECOND), (listed / FIRST).stat().st_size
    flip(listed / SECOND, -1)
    os.truncate(listed / FIRST, size - 8)
    assert lines(listed) == [
        f"{FIRST}: truncated: it ends at byte {size - 8:,}, expected {size:,}; 1 tensors: c; download it again",
        f"{SECOND}: its sha256 is {hash_of(listed / SECOND)}, expected {expected}; 2 tensors: b, d; download it again",
    ]


def test_all_damage_is_named_at_once(listed):
    (listed / FIRST).unlink()
    flip(listed / SECOND, -1)
    (listed / "config.json").write_text("{ }")
    flip(listed / "inference" / "model.py", 0)
    found = {line.partition(":")[0]: line for line in lines(listed)}
    assert found.keys() == {FIRST, SECOND, "config.json", "inference/model.py", "model.safetensors.index.json"}
    assert found[FIRST] == f"{FIRST}: it is missing; download it again"
    assert found["config.json"] == "config.json: expected 2 bytes, found 3; download it again"
    assert f"1 of 2 shards are missing: {FIRST}" in found["model.safetensors.index.json"]


def test_pointers_and_folders_are_told_from_damage(listed):
    size = (listed / FIRST).stat().st_size
    (listed / FIRST).write_text("version https://git-lfs.github.com/spec/v1\n")
    (listed / "config.json").unlink()
    (listed / "config.json").mkdir()
    config, first = lines(listed)
    assert config.startswith("config.json: ")
    assert first.startswith(f"{FIRST}: it is a Git LFS pointer, not the file of {size:,} bytes; ")


def test_weights_that_the_manifest_lacks_are_named_and_looked_at(folder, tmp_path):
    records = {"config.json": FileRecord(2, hash_of(folder / "config.json"))}
    write_manifest(folder, CheckpointManifest("maker/model", "abc", records))
    assert (lines(folder), verified(folder).unverified) == ([], (FIRST, SECOND))
    os.truncate(folder / FIRST, (folder / FIRST).stat().st_size - 8)
    (damage,) = verified(folder).damages
    assert (damage.file, damage.tensors) == (FIRST, ("c",))
    # A folder and a manifest without weights.
    none = tmp_path / "none"
    none.mkdir()
    (none / "config.json").write_text("{}")
    write_manifest(none, CheckpointManifest("maker/model", "abc", records))
    assert lines(none) == []


def test_an_interrupt_ends_it(listed):
    os.truncate(listed / "config.json", 2**33)  # a hole, which takes seconds to hash
    manifest = json.loads((listed / MANIFEST_NAME).read_text())
    manifest["files"]["config.json"]["size"] = 2**33
    (listed / MANIFEST_NAME).write_text(json.dumps(manifest))

    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(listed, jobs=1, observe=interrupt)


# By other hashes


def test_a_file_of_checksums_is_taken_where_there_is_no_manifest(folder):
    sums = subprocess.run(["sha256sum", FIRST, SECOND], cwd=folder, capture_output=True, check=True).stdout
    more = "checksums.sha256", "not/copied.json", "../aside.json"  # itself, before its end, and others' files
    rows = "".join(f"{hashlib.sha256().hexdigest()}  {name}\n" for name in more)
    (folder / "checksums.sha256").write_bytes(sums + rows.encode())
    report = verified(folder)
    assert (report.compared_with, report.num_files, report.damages) == ("checksums.sha256", 2, ())
    (folder / FIRST).write_text("version https://git-lfs.github.com/spec/v1\n")
    (folder / "checksums.sha256").write_bytes(sums + rows.replace("not/copied", "tokenizer").encode())
    found = [(damage.file, "Git LFS" in damage.problem) for damage in verified(folder).damages]
    assert found == [(FIRST, True), ("tokenizer.json", False)]


def test_the_hubs_cache_names_files_after_their_hashes(folder, tmp_path):
    model = tmp_path / "models--maker--model"
    snapshot = model / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (model / "blobs").mkdir()
    for path in folder.glob("*.*"):
        content = path.read_bytes()
        is_large = path.suffix == ".safetensors"
        blob = hash_of(path) if is_large else hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        (model / "blobs" / blob).write_bytes(content)
        (snapshot / path.name).symlink_to(f"../../blobs/{blob}")
    report = verified(snapshot)
    assert (report.compared_with, report.num_files, report.damages) == ("the hashes of its download", 4, ())
    flip((snapshot / "config.json").resolve(), 0)
    flip((snapshot / FIRST).resolve(), -1)
    assert [damage.file for damage in verified(snapshot).damages] == ["config.json", FIRST]


def test_without_hashes_the_headers_are_looked_at(folder, checkpoint):
    report = verified(folder)
    assert (report.compared_with, report.num_files, report.damages) == ("", 2, ())
    assert report.unverified == (FIRST, SECOND)
    assert "there are no hashes: only the index and the headers of 2 files" in checkpoint("verify", folder).out
    os.truncate(folder / FIRST, (folder / FIRST).stat().st_size - 4001)
    (damage,) = verified(folder).damages
    assert (damage.file, damage.tensors) == (FIRST, ("a", "c"))
    assert damage.problem.startswith("truncated")


def test_what_is_no_checkpoints_folder(tmp_path, monkeypatch, checkpoint):
    (tmp_path / "folder").mkdir()
    (tmp_path / "r1/tensorrt_llm").mkdir(parents=True)
    (tmp_path / "r1/tensorrt_llm/config.pbtxt").touch()
    (tmp_path / "file").write_text("")
    whats = {"file": "a file", "nothing": "nothing", "folder": "an empty one", "r1": "a model repository"}
    for name, found in {**whats, ".": "neither config.json nor"}.items():
        with pytest.raises(CheckpointError, match=f"expected a checkpoint's folder, found {found}"):
            verified(tmp_path / name)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert "expected a checkpoint's folder or OWNER/NAME" in checkpoint("verify", "/nowhere", code=1).err
    assert "checkpoint download maker/model" in checkpoint("verify", "maker/model", code=1).err


# The command line


def test_the_exit_code_the_last_line_and_the_document_say_how_it_went(listed, checkpoint):
    out = checkpoint("verify", listed).out
    assert out.startswith(f"{listed}: 5 files, ")
    assert out.endswith(f" of maker/model, compared with {MANIFEST_NAME}; nothing is damaged\n")
    flip(listed / FIRST, -1)
    assert checkpoint("verify", listed, "--jobs", "1", code=1).out.endswith("; 1 damaged\n")
    document = json.loads(checkpoint("verify", listed, "--json", code=1).out)
    assert (document["ok"], document["exit_code"], document["folder"]) == (False, 1, str(listed))
    assert [(each["file"], each["tensors"]) for each in document["damages"]] == [(FIRST, ["a", "c"])]


def test_what_the_manifest_says_cannot_command_the_terminal(listed, checkpoint):
    evil = "\x1b]0;evil\x07\nmodel"
    write_manifest(listed, CheckpointManifest(evil, "abc", {f"{evil}.json": FileRecord(1, "0" * 64)}))
    out = checkpoint("verify", listed, code=1).out
    assert out.count("evil") == 2
    assert out.replace("\n", "").isprintable()
    assert len(out.splitlines()) == 2
