"""The manifest of a checkpoint's folder: what is written can be read, and anything else is refused in one line."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_triton_build.check import is_inside
from deepseek_triton_tools.repository.checkpoint_manifest import (
    MANIFEST_NAME,
    SCHEMA,
    CheckpointManifest,
    FileRecord,
    read_manifest,
    write_manifest,
)
from deepseek_triton_tools.tool_errors import CheckpointError, ToolError

DIGEST = "0123456789abcdef" * 4

names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1).filter(is_inside)
records = st.builds(FileRecord, st.integers(0, 2**63), st.from_regex("[0-9a-f]{64}", fullmatch=True))
texts = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("folder")


@pytest.mark.slow
@settings(max_examples=40)
@given(st.builds(CheckpointManifest, texts, texts, st.dictionaries(names, records)))
def test_what_is_written_is_read(folder, manifest):
    write_manifest(folder, manifest)
    assert read_manifest(folder) == manifest
    assert [path.name for path in folder.iterdir()] == [MANIFEST_NAME]


def test_a_folder_without_one_and_places_that_cannot_be_read_or_written(tmp_path):
    assert read_manifest(tmp_path) is None
    assert read_manifest(tmp_path / "nowhere") is None
    with pytest.raises(ToolError, match=f"nowhere/{MANIFEST_NAME} can't be written"):
        write_manifest(tmp_path / "nowhere", CheckpointManifest("", "", {}))
    (tmp_path / MANIFEST_NAME).mkdir()
    with pytest.raises(CheckpointError, match="can't be read: not a regular file"):
        read_manifest(tmp_path)


def document(**changes):
    return json.dumps({"schema": SCHEMA, "source": "", "revision": "", "files": {}} | changes)


def file(name="a", **changes):
    return document(files={name: {"size": 1, "sha256": DIGEST} | changes})


REFUSED = [
    ("", "Expecting value"),
    ("[]", "found []"),
    ("[" * 200_000, "maximum recursion depth"),
    (document(schema="other/1"), "found 'other/1'"),
    (document(source=None), "source and revision have to be text"),
    (document(files=[]), "and files an object"),
    *((text, "'a' has no size or no sha256") for text in (file(size=-1), file(size=True), document(files={"a": None}))),
    *((file(sha256=digest), "'a' has no size or no sha256") for digest in (DIGEST[:-1], DIGEST.upper())),
    *((file(name), f"'{name}' is no name in this folder") for name in ("../a", "/a")),
]


def test_anything_else_is_refused(tmp_path, subtests):
    for text, expected in REFUSED:
        with subtests.test(text[:100]):
            (tmp_path / MANIFEST_NAME).write_text(text)
            with pytest.raises(CheckpointError) as raised:
                read_manifest(tmp_path)
            assert str(raised.value).startswith(f"{tmp_path / MANIFEST_NAME}: expected a manifest ({SCHEMA}): ")
            assert expected in str(raised.value)
            assert "\n" not in str(raised.value)


@pytest.mark.slow
@given(st.binary(max_size=200))
def test_no_bytes_are_a_crash(folder, content):
    (folder / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(CheckpointError):
        read_manifest(folder)
