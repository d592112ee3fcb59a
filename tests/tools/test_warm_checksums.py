"""The expected checksums of a checkpoint, from the Hugging Face hub and from files of checksums beside the weights."""

import hashlib
import json
import shutil
import struct
import subprocess

import pytest

from deepseek_triton_tools.repository.checkpoint_files import find_checkpoints
from deepseek_triton_tools.repository.checkpoint_manifest import CheckpointManifest, FileRecord, write_manifest
from deepseek_triton_tools.tool_errors import CheckpointError
from deepseek_triton_tools.warming.checkpoint.checksums import expected_checksums

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def shard(tensor):
    header = json.dumps({tensor: {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(8)


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
    (checkpoint,) = find_checkpoints(str(folder))
    return expected_checksums(checkpoint)


def hashed(path, checksum):
    """Hash the file as the verification does."""
    digest = checksum.begin()
    digest.update(path.read_bytes())
    return digest.hexdigest()


def digests(folder):
    return {path.name: checksum.digest for path, checksum in checksums(folder).items()}


def refused(folder):
    with pytest.raises(CheckpointError) as raised:
        checksums(folder)
    assert "\n" not in str(raised.value)
    return str(raised.value)


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


def test_a_file_with_a_name_like_a_hash_has_no_checksum_outside_of_a_cache(folder):
    (folder / FIRST).rename(folder / DIGESTS[FIRST])
    (folder / FIRST).symlink_to(DIGESTS[FIRST])
    assert checksums(folder) == {}


def test_the_metadata_of_a_download_into_a_folder_has_checksums(folder):
    git = git_hash(CONTENTS[SECOND]).decode().strip()
    first = write_metadata(folder, FIRST, DIGESTS[FIRST])
    write_metadata(folder, SECOND, git)
    (folder / "SHA256SUMS").write_text(f"{DIGESTS[FIRST]}  {FIRST}\n")  # agrees: the first source is named
    found = checksums(folder)
    assert (found[folder / FIRST].digest, found[folder / FIRST].source) == (DIGESTS[FIRST], str(first))
    assert hashed(folder / SECOND, found[folder / SECOND]) == git


def test_an_etag_that_is_no_hash_is_no_checksum(folder):
    assert checksums(folder) == {}
    for etag in ("", 'W/"abc"', "a" * 63, "g" * 64, "A" * 64):
        path = write_metadata(folder, FIRST, etag)
        assert checksums(folder) == {}, etag
    path.write_text("a" * 40)  # cut short
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
    assert digests(folder) == {SECOND: DIGESTS[SECOND]}


def test_other_files_comments_and_signatures_are_passed_over(folder):
    other = [
        "-----BEGIN PGP SIGNED MESSAGE-----",
        "# weights",
        "",
        f"{'0' * 64}  config.json",
        f"{'0' * 64}  ../{FIRST}",
    ]
    (folder / "SHA256SUMS").write_text("\r\n".join([*other, f"{DIGESTS[FIRST]} *{FIRST}"]) + "\r\n")
    assert digests(folder) == {FIRST: DIGESTS[FIRST]}


def test_a_file_of_checksums_that_is_none_is_reported(folder):
    sums = folder / "SHA256SUMS"
    for content in (b"", b"no checksums\n", b"\xff\xfe\x00", b"0" * 63 + b"  x\n"):
        sums.write_bytes(content)
        assert f"{sums}: expected lines as sha256sum writes them" in refused(folder), content
    sums.write_bytes(bytes(2**20 + 1))
    assert "found more than 1,048,576 bytes" in refused(folder)
    sums.unlink()
    sums.mkdir()
    assert "can't be read: not a regular file" in refused(folder)
    sums.rmdir()
    sums.symlink_to("gone")
    assert "can't be read: No such file" in refused(folder)


def test_sources_that_disagree_are_reported_all_of_them(folder):
    for name in CONTENTS:
        write_metadata(folder, name, DIGESTS[name])
    (folder / "SHA256SUMS").write_text(f"{'1' * 64}  {FIRST}\n{'2' * 64}  {SECOND}\n")
    message = refused(folder)
    for name, number, line in ((FIRST, "1", 1), (SECOND, "2", 2)):
        assert f"{folder / name}: its sha256 is {DIGESTS[name]} by {folder / METADATA / name}.metadata" in message
        assert f"{number * 64} by {folder / 'SHA256SUMS'}:{line}" in message


def test_our_manifest_has_them(folder):
    records = {name: FileRecord(len(content), DIGESTS[name]) for name, content in CONTENTS.items()}
    write_manifest(folder, CheckpointManifest("org/name", "", records))
    assert digests(folder) == {path.name: hashed(path, each) for path, each in checksums(folder).items()} == DIGESTS
