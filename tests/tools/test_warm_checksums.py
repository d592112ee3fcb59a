"""The expected checksums of a checkpoint, from the Hugging Face hub and from files of checksums beside the weights."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from deepseek_triton_tools.repository.checkpoint_files import find_checkpoints
from deepseek_triton_tools.repository.checkpoint_manifest import CheckpointManifest, FileRecord, write_manifest
from deepseek_triton_tools.tool_errors import CheckpointError
from deepseek_triton_tools.warming.checkpoint.checksums import expected_checksums

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def shard(tensor: str) -> bytes:
    header = json.dumps({tensor: {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(8)


CONTENTS = {FIRST: shard("a"), SECOND: shard("b")}
DIGESTS = {name: hashlib.sha256(content).hexdigest() for name, content in CONTENTS.items()}
METADATA = ".cache/huggingface/download"


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "weights"
    path.mkdir()
    for name, content in CONTENTS.items():
        (path / name).write_bytes(content)
    return path


def checksums(folder: Path):
    (checkpoint,) = find_checkpoints(str(folder))
    return expected_checksums(checkpoint)


def hashed(path: Path, checksum) -> str:
    """Hash the file as the verification does."""
    digest = checksum.begin()
    digest.update(path.read_bytes())
    return digest.hexdigest()


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        checksums(folder)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def write_metadata(folder: Path, name: str, etag: str) -> Path:
    path = folder / METADATA / f"{name}.metadata"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{'a' * 40}\n{etag}\n1700000000.5\n")
    return path


def test_a_checkpoint_without_checksums_has_none(folder):
    assert checksums(folder) == {}


# The hub


def test_a_blob_of_the_cache_is_called_by_its_hash(tmp_path):
    snapshot, blobs = tmp_path / "snapshots" / "rev", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    git = subprocess.run(["git", "hash-object", "--stdin"], input=CONTENTS[SECOND], capture_output=True, check=True)
    hashes = {FIRST: DIGESTS[FIRST], SECOND: git.stdout.decode().strip()}
    for name, content in CONTENTS.items():
        (blobs / hashes[name]).write_bytes(content)
        (snapshot / name).symlink_to(f"../../blobs/{hashes[name]}")

    found = checksums(snapshot)

    assert {path.name: checksum.algorithm for path, checksum in found.items()} == {FIRST: "sha256", SECOND: "sha1"}
    for path, checksum in found.items():
        assert hashed(path, checksum) == checksum.digest == hashes[path.name]
    (blobs / hashes[SECOND]).write_bytes(CONTENTS[SECOND][:-1] + b"x")
    assert hashed(snapshot / SECOND, found[snapshot / SECOND]) != hashes[SECOND]


def test_a_file_with_a_name_like_a_hash_has_no_checksum_outside_of_a_cache(folder):
    (folder / FIRST).rename(folder / DIGESTS[FIRST])
    (folder / FIRST).symlink_to(DIGESTS[FIRST])

    assert checksums(folder) == {}


def test_the_metadata_of_a_download_into_a_folder_has_checksums(folder):
    git = (
        subprocess.run(["git", "hash-object", folder / SECOND], capture_output=True, check=True).stdout.decode().strip()
    )
    first = write_metadata(folder, FIRST, DIGESTS[FIRST])
    write_metadata(folder, SECOND, git)

    found = checksums(folder)

    assert found[folder / FIRST].digest == DIGESTS[FIRST]
    assert found[folder / FIRST].source == str(first)
    assert hashed(folder / SECOND, found[folder / SECOND]) == git


@pytest.mark.parametrize("etag", ["", 'W/"abc"', "a" * 63, "g" * 64, "A" * 64])
def test_an_etag_that_is_no_hash_is_no_checksum(folder, etag):
    write_metadata(folder, FIRST, etag)

    assert checksums(folder) == {}


def test_metadata_cut_short_has_no_checksum(folder):
    write_metadata(folder, FIRST, "").write_text("a" * 40)

    assert checksums(folder) == {}


# Files of checksums


@pytest.mark.parametrize("name", ["SHA256SUMS", "sha256sum.txt", "SHA256SUMS.txt", "weights.sha256"])
@pytest.mark.parametrize("options", [[], ["--binary"], ["--tag"]], ids=["text", "binary", "tag"])
def test_the_output_of_sha256sum_is_read(folder, name, options):
    if shutil.which("sha256sum") is None:
        pytest.skip("there is no sha256sum here")
    with (folder / name).open("wb") as file:
        subprocess.run(["sha256sum", *options, FIRST, f"./{SECOND}"], cwd=folder, stdout=file, check=True)

    found = checksums(folder)

    assert {path.name: checksum.digest for path, checksum in found.items()} == DIGESTS
    assert found[folder / SECOND].source == f"{folder / name}:2"


def test_a_name_that_had_to_be_escaped(tmp_path):
    if shutil.which("sha256sum") is None:
        pytest.skip("there is no sha256sum here")
    name = "a\\b\nc.safetensors"
    (tmp_path / name).write_bytes(CONTENTS[FIRST])
    with (tmp_path / "SHA256SUMS").open("wb") as file:
        subprocess.run(["sha256sum", name], cwd=tmp_path, stdout=file, check=True)

    assert checksums(tmp_path)[tmp_path / name].digest == DIGESTS[FIRST]


def test_a_file_for_one_file_may_hold_the_digest_alone(folder):
    (folder / f"{SECOND}.sha256").write_text(f"{DIGESTS[SECOND].upper()}\n")

    assert {path.name: checksum.digest for path, checksum in checksums(folder).items()} == {SECOND: DIGESTS[SECOND]}


def test_other_files_comments_and_signatures_are_passed_over(folder):
    lines = [
        "-----BEGIN PGP SIGNED MESSAGE-----",
        "# weights",
        "",
        f"{'0' * 64}  config.json",
        f"{'0' * 64}  ../{FIRST}",
    ]
    (folder / "SHA256SUMS").write_text("\r\n".join([*lines, f"{DIGESTS[FIRST]} *{FIRST}"]) + "\r\n")

    assert {path.name: checksum.digest for path, checksum in checksums(folder).items()} == {FIRST: DIGESTS[FIRST]}


@pytest.mark.parametrize("content", [b"", b"no checksums\n", b"\xff\xfe\x00", b"0" * 63 + b"  x\n"])
def test_a_file_of_checksums_without_any_is_reported(folder, content):
    (folder / "SHA256SUMS").write_bytes(content)

    assert f"{folder / 'SHA256SUMS'}: expected lines as sha256sum writes them" in refused(folder)


def test_a_file_of_checksums_that_is_none_is_reported(folder):
    (folder / "SHA256SUMS").mkdir()
    assert "can't be read: not a regular file" in refused(folder)

    (folder / "SHA256SUMS").rmdir()
    (folder / "SHA256SUMS").write_bytes(bytes(2**20 + 1))
    assert "found more than 1,048,576 bytes" in refused(folder)


def test_a_file_of_checksums_that_went_away_is_reported(folder):
    (folder / "SHA256SUMS").symlink_to("gone")

    assert "can't be read: No such file" in refused(folder)


def test_sources_that_agree_are_one(folder):
    write_metadata(folder, FIRST, DIGESTS[FIRST])
    (folder / "SHA256SUMS").write_text(f"{DIGESTS[FIRST]}  {FIRST}\n")

    assert checksums(folder)[folder / FIRST].source == str(folder / METADATA / f"{FIRST}.metadata")


def test_sources_that_disagree_are_reported_all_of_them(folder):
    for name in CONTENTS:
        write_metadata(folder, name, DIGESTS[name])
    (folder / "SHA256SUMS").write_text(f"{'1' * 64}  {FIRST}\n{'2' * 64}  {SECOND}\n")

    message = refused(folder)

    for name, number, line in ((FIRST, "1", 1), (SECOND, "2", 2)):
        assert f"{folder / name}: its sha256 is {DIGESTS[name]} by {folder / METADATA / name}.metadata" in message
        assert f"{number * 64} by {folder / 'SHA256SUMS'}:{line}" in message


def test_a_file_out_of_reach_is_reported(folder):
    if os.geteuid() != 0:
        pytest.skip("only root can be somebody else")
    (checkpoint,) = find_checkpoints(str(folder))
    (folder / "SHA256SUMS").write_text(f"{DIGESTS[FIRST]}  {FIRST}\n")
    os.seteuid(65534)
    try:
        with pytest.raises(CheckpointError, match="Permission denied"):
            expected_checksums(checkpoint)
    finally:
        os.seteuid(0)


def test_our_manifest_has_them(folder: Path) -> None:
    records = {name: FileRecord(len(content), DIGESTS[name]) for name, content in CONTENTS.items()}
    write_manifest(folder, CheckpointManifest("org/name", "", records))

    found = checksums(folder)

    assert {path.name: hashed(path, checksum) for path, checksum in found.items()} == DIGESTS
    assert {path.name: checksum.digest for path, checksum in found.items()} == DIGESTS
