"""Weight files that are cut at every byte, that differ from their index, or that can't be read."""

import json
import os
import struct
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from deepseek_triton_build.check import INDEX, check_weights, files_read
from support.checked import safetensors

NOBODY = 65534
SIZES = {"b": 40, "a": 24, "empty": 0, "c": 8}
SHARD = "model-00001-of-00001.safetensors"


def write_index(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def look(folder, **options):
    return list(check_weights(folder, str(folder), **options))


def only(findings):
    assert len(findings) == 1, findings
    return findings[0]


@contextmanager
def as_nobody():
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder():
    """A folder that other users can reach, unlike those of pytest."""
    if os.geteuid() != 0:
        pytest.skip("only root can be somebody else")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


# Cut off


CONTENT = safetensors(SIZES)
HEADER_END = 8 + int.from_bytes(CONTENT[:8], "little")
SPANS = {"b": (0, 40), "a": (40, 64), "c": (64, 72)}


def expected(size):
    """Return the code and the message for a file that is cut to `size` bytes."""
    if size < 8:
        return "W009", f"truncated: it ends at byte {size}, within the 8 bytes of the header's length"
    if size < HEADER_END:
        end = f"within its header, which by byte 0 ends at {HEADER_END}"
        return "W009", f"truncated: it ends at byte {size}, {end}"
    if size > len(CONTENT):
        return "W010", f"too long: it has {size} bytes, but by its header it ends at byte {len(CONTENT)}"
    begin, end = next(span for span in SPANS.values() if size < HEADER_END + span[1])
    name = next(name for name, span in SPANS.items() if span == (begin, end))
    num_cut = len([span for span in SPANS.values() if size < HEADER_END + span[1]])
    num_cut += size < HEADER_END + 64  # the empty one, which lies before c
    at = f"bytes {HEADER_END + begin} to {HEADER_END + end}"
    message = f"truncated: it ends at byte {size}, but by its header at byte {len(CONTENT)}; tensors cut: "
    return "W010", f"{message}{num_cut}, the first {name}, {at}"


@pytest.mark.slow
def test_a_file_cut_at_any_byte_is_one_finding_with_the_byte(tmp_path):
    for has_index in (False, True):
        if has_index:
            write_index(tmp_path, dict.fromkeys(SIZES, SHARD))
        for size in [*range(len(CONTENT)), len(CONTENT) + 1]:
            (tmp_path / SHARD).write_bytes((CONTENT + b"x")[:size])
            finding = only(look(tmp_path))
            code, message = expected(size)
            assert (finding.code, finding.message, finding.file) == (code, message, str(tmp_path / SHARD))

    (tmp_path / SHARD).write_bytes(CONTENT)
    assert look(tmp_path) == []


BROKEN = {
    b"<!DOCTYPE html>": "byte 0 says that the header has 5,789,751,444,030,890,300 bytes",
    struct.pack("<Q", 100_000_001): "byte 0 says that the header has 100,000,001 bytes",
    struct.pack("<Q", 5) + b"{'a':": "the header is not JSON at byte 9",
    bytes(100): "byte 0 says that the header has 0 bytes: nothing was written there",
    b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n": "Git LFS pointer",
}


def test_a_broken_header_is_reported_with_its_byte(tmp_path):
    for content, words in BROKEN.items():
        (tmp_path / SHARD).write_bytes(content)
        finding = only(look(tmp_path))
        assert finding.code == "W009"
        assert words in finding.message
        assert ("git lfs pull" in finding.fix) == content.startswith(b"version")


# The index and the headers


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def pair(tmp_path):
    """Two shards, and an index that is right."""
    (tmp_path / FIRST).write_bytes(safetensors({"a": 8, "b": 8}))
    (tmp_path / SECOND).write_bytes(safetensors({"c": 8, "d": 8}))
    write_index(tmp_path, WHOLE)
    return tmp_path


WHOLE = {"a": FIRST, "b": FIRST, "c": SECOND, "d": SECOND}
MAPS = [  # what the index says, and the code, severity, file and message of what is found
    (WHOLE | {"x": FIRST}, ("W011", "error", FIRST, "1 of the 3 tensors that the index lists for it are missing: x")),
    ({"a": FIRST, "c": SECOND, "d": SECOND}, ("W013", "warning", FIRST, "1 of its 2 tensors are not in the index: b")),
]


def test_an_index_that_is_not_what_the_shards_hold(pair):
    for weight_map, found in MAPS:
        write_index(pair, weight_map)
        one = only(look(pair))
        assert (one.code, one.severity, one.file.removeprefix(f"{pair}/"), one.message) == found

    write_index(pair, WHOLE | {"b": SECOND})
    by_code = {finding.code: finding for finding in look(pair)}
    assert (by_code["W013"].file, by_code["W011"].file) == (str(pair / FIRST), str(pair / SECOND))
    assert by_code["W013"].message == "1 of its 2 tensors are in another shard by the index: b"


def test_a_file_that_the_index_names_and_that_is_missing(pair):
    (pair / SECOND).unlink()

    finding = only(look(pair))

    assert finding.code == "W008"
    assert SECOND in finding.message


def test_a_file_that_the_index_does_not_name_is_reported_with_its_size_and_checked_because_it_is_read(pair):
    content = safetensors({"e": 8})
    (pair / "extra.safetensors").write_bytes(content)
    finding = only(look(pair))
    assert finding.code == "W012"
    assert f"TensorRT-LLM reads its {len(content)} bytes all the same" in finding.message
    assert files_read(pair) == ["extra.safetensors", FIRST, SECOND]

    (pair / "extra.safetensors").write_bytes(content[:-1])
    assert {finding.code for finding in look(pair)} == {"W012", "W010"}


def test_an_engine_that_goes_by_the_index_does_not_read_the_others_but_a_single_file_first(pair):
    (pair / "extra.safetensors").write_bytes(b"")
    assert look(pair, only_indexed=True) == []
    assert files_read(pair, only_indexed=True) == [FIRST, SECOND]

    (pair / "model.safetensors").write_bytes(safetensors({"e": 8}))
    (pair / FIRST).write_bytes(b"")
    assert look(pair, only_indexed=True) == []
    assert files_read(pair, only_indexed=True) == ["model.safetensors"]


def test_consolidated_files_are_not_read(pair):
    (pair / "consolidated.safetensors").write_bytes(safetensors({"e": 8}))
    (pair / "consolidated-00001-of-2.safetensors").write_bytes(b"")

    assert look(pair) == []
    assert files_read(pair) == [FIRST, SECOND]


def test_a_file_in_a_folder_below_is_checked_but_tensorrt_llm_does_not_read_it(pair):
    (pair / "sub").mkdir()
    (pair / "sub" / "x.safetensors").write_bytes(b"")
    write_index(pair, WHOLE | {"x": "sub/x.safetensors"})

    assert only(look(pair)).file == str(pair / "sub/x.safetensors")
    assert files_read(pair) == [FIRST, SECOND]
    assert files_read(pair, only_indexed=True) == [FIRST, SECOND, "sub/x.safetensors"]


def test_the_files_are_checked_even_if_the_index_is_broken(pair):
    (pair / INDEX).write_text("{")
    (pair / FIRST).write_bytes(b"")

    assert [finding.code for finding in look(pair)] == ["S002", "W009"]
    assert files_read(pair, only_indexed=True) == [FIRST, SECOND]


def test_a_name_that_no_file_can_have_is_a_finding(pair):
    for name in ("x\0.safetensors", "\ud800", "x" * 300):
        write_index(pair, WHOLE | {"x": name})
        assert only(look(pair)).severity == "error"


# Out of reach


def test_an_unreadable_file_is_reported_and_the_others_are_checked(open_folder):
    for name in (FIRST, SECOND):
        (open_folder / name).write_bytes(safetensors({name: 8}))
    (open_folder / FIRST).chmod(0o600)
    with as_nobody():
        findings = look(open_folder)

    finding = only(findings)
    assert (finding.code, finding.file) == ("S001", str(open_folder / FIRST))
    assert "Permission denied" in finding.message


@pytest.mark.parametrize("mode", [0o700, 0o744, 0o711], ids=["nothing", "listed alone", "opened alone"])
def test_an_unreadable_folder_is_one_finding_and_no_file_counts_as_missing(open_folder, mode):
    for name in (FIRST, SECOND):
        (open_folder / name).write_bytes(safetensors({name: 8}))
    write_index(open_folder, {name: name for name in (FIRST, SECOND)})
    open_folder.chmod(mode)
    with as_nobody():
        findings = look(open_folder)
    open_folder.chmod(0o755)

    assert only(findings).code == "S001"
    assert "can't be looked into: Permission denied" in only(findings).message


def test_a_link_to_an_unreadable_file_does_not_count_as_missing(open_folder):
    """This happens in a cache whose blobs belong to another user."""
    (open_folder / "blobs").mkdir()
    (open_folder / "blobs" / "x").write_bytes(safetensors({"a": 8}))
    (open_folder / "snapshot").mkdir()
    (open_folder / "snapshot" / SHARD).symlink_to("../blobs/x")
    write_index(open_folder / "snapshot", {"a": SHARD})
    (open_folder / "blobs").chmod(0o700)
    with as_nobody():
        findings = look(open_folder / "snapshot")

    assert only(findings).code == "S001"
    assert "Permission denied" in only(findings).message


def test_a_file_removed_during_the_check_is_missing(tmp_path):
    """A link to nothing stands for it, because it is listed too."""
    (tmp_path / SHARD).symlink_to("gone")

    finding = only(look(tmp_path))

    assert (finding.code, finding.file) == ("W008", str(tmp_path / SHARD))


def test_a_read_error_of_the_storage_is_reported(tmp_path):
    """/proc/self/mem can be opened, but its first byte can't be read."""
    (tmp_path / SHARD).symlink_to("/proc/self/mem")

    finding = only(look(tmp_path))

    assert (finding.code, finding.file) == ("S001", str(tmp_path / SHARD))
    assert "can't be read: Input/output error" in finding.message


@pytest.mark.parametrize("mode", [0o744, 0o711])
def test_listing_the_files_of_an_unreadable_folder_raises(open_folder, mode):
    (open_folder / FIRST).write_bytes(b"")
    open_folder.chmod(mode)
    with as_nobody(), pytest.raises(PermissionError):
        files_read(open_folder)
