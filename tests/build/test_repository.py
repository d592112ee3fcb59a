import fcntl
import hashlib
import json
import os
import shutil
import stat
from dataclasses import replace
from functools import cache
from pathlib import Path, PurePosixPath

import pytest

from deepseek_triton_build import (
    File,
    OutputError,
    PlanRequest,
    ReplacementError,
    format_files,
    make_plan,
    repository_files,
    write_repository,
)
from deepseek_triton_build.catalog import DEFAULT_RELEASE
from deepseek_triton_build.render.owner_edits import MAX_LINES
from support.checked import tree
from support.interrupted import error_of

MODEL_YAML = "tensorrt_llm/1/model.yaml"


@cache
def tiny_files(version="1.0", whole=False):
    """Return the files of a repository; without the many of the program, unless it shall be whole."""
    files = repository_files(make_plan(PlanRequest(variant="tiny", engine="simulated")), version=version)
    if whole:
        return files
    kept = [file for file in files if "/deepseek_" not in str(file.path) or file.path.name == "main.py"]
    stamp = json.loads(kept[-1].content)
    stamp["files"] = {str(file.path): stamp["files"][str(file.path)] for file in kept[:-1]}
    return [*kept[:-1], replace(kept[-1], content=json.dumps(stamp).encode())]


@pytest.fixture
def written(tmp_path):
    output = tmp_path / "repo"
    write_repository(tiny_files(), output)
    return output


def refusal(output, files=None):
    """Return the message of the refusal, which is one line, and its diff."""
    with pytest.raises(ReplacementError) as caught:
        write_repository(files or tiny_files(), output)
    assert "\n" not in str(caught.value)
    return str(caught.value), caught.value.diff


def test_a_repository_holds_the_backend_and_no_python_caches(tmp_path):
    write_repository(tiny_files(whole=True), tmp_path)
    names = set(tree(tmp_path))

    assert {"start.sh", "tensorrt_llm/config.pbtxt", "tensorrt_llm/1/model.py", MODEL_YAML} <= names
    assert "tensorrt_llm/1/deepseek_backend/contract.py" in names
    assert {"tensorrt_llm/1/supervise.py", "tensorrt_llm/1/deepseek_launcher/__init__.py"} <= names
    assert not [name for name in names if "__pycache__" in name]
    assert os.stat(tmp_path / "start.sh").st_mode & stat.S_IXUSR
    again = repository_files(make_plan(PlanRequest(variant="tiny", engine="simulated")), version="1.0")
    assert again == tiny_files(whole=True)


def test_an_untouched_folder_is_replaced(written):
    write_repository(tiny_files(version="2.0"), written)

    assert b"deepseek-triton 2.0" in tree(written)[MODEL_YAML]


def test_an_edited_folder_is_refused_with_the_difference_and_replaced_by_force(written):
    (written / MODEL_YAML).write_text(
        (written / MODEL_YAML).read_text().replace("default_max_tokens: 64", "default_max_tokens: 7")
    )
    (written / "notes.txt").write_text("mine\n")

    message, diff = refusal(written)
    assert "notes.txt, tensorrt_llm/1/model.yaml; --force" in message
    assert f"--- {written}/{MODEL_YAML}" in diff
    assert "-  default_max_tokens: 7\n+  default_max_tokens: 64" in diff
    assert "--- " + str(written / "notes.txt") in diff
    assert "-mine" in diff
    assert (written / "notes.txt").read_text() == "mine\n"

    write_repository(tiny_files(), written, force=True)
    assert "notes.txt" not in tree(written)
    assert b"default_max_tokens: 64" in tree(written)[MODEL_YAML]


R1 = PlanRequest(variant="deepseek-r1", gpu="h200", num_gpus=8, model="/models/DeepSeek-R1")
R1_OPTIONS = "deepseek-r1 --gpu h200 --gpus 8 --model /models/DeepSeek-R1"


OTHERS = [  # the request and format that are wanted, and lines of the difference
    (replace(R1, gpu="h100", num_gpus=16), "triton", [f"-options: {R1_OPTIONS}", "-gpus: 8", "+gpus: 16"]),
    (replace(R1, model="/models/other"), "triton", [f"-options: {R1_OPTIONS}"]),
    (R1, "trtllm-serve", ["-format: triton", "+format: trtllm-serve"]),  # whose manifest lies elsewhere
]


@pytest.mark.slow
def test_another_deployment_is_shown_and_replaced_only_by_force(tmp_path):
    output = tmp_path / "r1"
    for request, format, shown in OTHERS:
        write_repository(format_files("triton", make_plan(replace(R1, release=DEFAULT_RELEASE)), version="1.0"), output)
        write_repository(format_files("triton", make_plan(R1), version="1.0"), output)  # as 1.0.0 stamped the same
        before = tree(output)
        files = format_files(format, make_plan(request), version="1.0")

        message, diff = refusal(output, files)
        assert message == f"{output}: holds another deployment; --force replaces all of it"
        assert set(shown) <= set(diff.splitlines())
        assert tree(output) == before
        write_repository(files, output, force=True)
        assert tree(output) == {file.path.as_posix(): file.content for file in files}
        shutil.rmtree(output)


def test_another_deployment_that_was_edited_is_told_as_both_at_once(written):
    """--force would take both."""
    (written / "notes.txt").write_text("mine")

    message, diff = refusal(written, repository_files(make_plan(R1), version="1.0"))
    assert "holds another deployment; changed since it was generated: notes.txt; --force" in message
    assert {"-options: tiny --engine simulated", "-mine"} <= set(diff.splitlines())


def test_a_stamp_without_options_is_another_deployment(written):
    """The versions before wrote such stamps: nobody can tell which --model they were given."""
    path = written / "tensorrt_llm/deepseek-triton.json"
    record = json.loads(path.read_text())
    del record["options"]
    path.write_text(json.dumps(record))

    assert refusal(written)[1].splitlines()[2:] == ["+options: tiny --engine simulated"]


def test_a_stamp_prints_no_character_that_a_terminal_obeys(written):
    path = written / "tensorrt_llm/deepseek-triton.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"variant": "\x1b[2J\n+x"}))

    assert "-variant: \\x1b[2J +x" in refusal(written)[1].splitlines()


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_that_a_server_runs_from_is_never_replaced(written, force):
    before = tree(written)
    with (written / "tensorrt_llm/deepseek-triton.json").open("rb") as stamp:
        fcntl.flock(stamp, fcntl.LOCK_SH)
        with pytest.raises(OutputError, match=f"a server runs from this folder.*launch stop {written}"):
            write_repository(tiny_files(version="2.0"), written, force=force)
    assert tree(written) == before

    write_repository(tiny_files(version="2.0"), written, force=force)


def test_a_file_that_equals_what_would_be_written_is_no_edit(written):
    later = tiny_files(version="2.0")
    for file in later:
        if file.path.as_posix() == MODEL_YAML:
            (written / MODEL_YAML).write_bytes(file.content)

    write_repository(later, written)


NOT_COMPARED = [
    ("data.bin", b"\0\1", "data.bin: would be removed; it is binary or large"),
    ("big.txt", b"x\n" * 200_000, "big.txt: would be removed; it is binary or large"),
    ("start.sh", b"\xff", "start.sh: would be replaced; it is binary or large"),
    ("start.sh", None, "start.sh: was removed, and would be written again"),
]


def test_a_file_that_can_not_be_compared_line_by_line_is_named(written):
    for name, content, expected in NOT_COMPARED:
        write_repository(tiny_files(), written, force=True)
        if content is None:
            (written / name).unlink()
        else:
            (written / name).write_bytes(content)
        assert refusal(written)[1] == expected


def test_a_long_difference_is_cut(written):
    (written / "list.txt").write_text("line\n" * 5000)

    lines = refusal(written)[1].splitlines()
    assert len(lines) == MAX_LINES
    assert lines[-1] == f"... and {5003 - MAX_LINES + 1} more lines"


def test_changes_are_found_even_if_the_stamp_is_damaged(written):
    for text in ("", "{", "[]", '{"files": 3}', "[" * 100_000):
        (written / "tensorrt_llm/deepseek-triton.json").write_text(text)
        write_repository(tiny_files(), written)  # every file is what would be written: nothing is lost

        (written / "tensorrt_llm/deepseek-triton.json").write_text(text)
        (written / "start.sh").write_text("mine")
        assert "start.sh" in refusal(written)[0]
        write_repository(tiny_files(), written, force=True)


def test_pythons_caches_are_no_edit(written):
    for folder, module in (("1", "model"), ("1/deepseek_launcher", "main")):
        cache = written / "tensorrt_llm" / folder / "__pycache__"
        cache.mkdir()
        (cache / f"{module}.cpython-312.pyc").write_bytes(b"\0")

    write_repository(tiny_files(), written)


def test_the_stamp_may_lie_at_the_top(tmp_path):
    script = b"#!/bin/sh\n"
    record = json.dumps({"files": {"serve.sh": hashlib.sha256(script).hexdigest()}})
    files = [
        File(PurePosixPath("serve.sh"), script, executable=True),
        File(PurePosixPath("deepseek-triton.json"), record.encode()),
    ]
    write_repository(files, tmp_path / "serve")
    write_repository(files, tmp_path / "serve")
    (tmp_path / "serve/serve.sh").write_text("mine\n")

    assert "serve.sh; --force" in refusal(tmp_path / "serve", files)[0]


def test_a_folder_of_other_origin_is_never_replaced_and_an_empty_one_filled(tmp_path):
    (tmp_path / "photo.jpg").write_text("precious")
    for force in (False, True):
        with pytest.raises(OutputError, match="not written by this generator"):
            write_repository(tiny_files(), tmp_path, force=force)
    assert tree(tmp_path) == {"photo.jpg": b"precious"}

    (tmp_path / "empty").mkdir()
    write_repository(tiny_files(), tmp_path / "empty")
    assert "start.sh" in tree(tmp_path / "empty")


def test_what_is_in_the_way_is_named_and_stays(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    for place, said in (
        ("file", r"found a file at .*/file; choose another --output"),
        ("file/a/b", r"found a file at .*/file; choose another --output"),
        ("loop", r"loop: can't be written: .*; choose another --output$"),
    ):
        with pytest.raises(OutputError, match=said) as caught:
            write_repository(tiny_files(), tmp_path / place)
        assert "\n" not in str(caught.value)
    assert tree(tmp_path) == {"file": b"x"}


WRITE = 'write_repository([File(PurePosixPath(f"{n}.txt"), b"x" * 4096) for n in range(2)], folder, force=True)'


@pytest.mark.slow
def test_a_full_disk_leaves_the_folder_as_it_was_and_no_new_one(written, tmp_path):
    before = tree(written)

    assert "can't be written: File too large" in error_of(WRITE, written, max_file_size=1000)
    assert tree(written) == before
    assert "can't be written" in error_of(WRITE, tmp_path / "a/b/repo", max_file_size=1000)
    assert list(tmp_path.iterdir()) == [written]


def test_a_read_only_parent_is_named():
    """Nobody can make a folder in /proc, not even root."""
    if not Path("/proc/self").exists():
        pytest.skip("needs /proc")

    with pytest.raises(OutputError, match=r"^/proc/repo: can't be written: .*; choose another --output$"):
        write_repository(tiny_files(), Path("/proc/repo"))


@pytest.mark.slow
@pytest.mark.parametrize("point", ["before-1", "at-1", "before-2", "at-2"])
def test_an_interrupt_leaves_what_was_there(written, point):
    before = tree(written)

    assert error_of(WRITE, written, points=point) == "interrupted"
    assert tree(written) == before
    assert [path.name for path in written.parent.iterdir()] == ["repo"]


@pytest.mark.slow
@pytest.mark.parametrize("point", ["before-1", "at-1"])
def test_an_interrupt_leaves_no_new_folder(tmp_path, point):
    assert error_of(WRITE, tmp_path / "a/repo", points=point) == "interrupted"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("points", ["at-1,before-2", "at-2,before-3"])
def test_after_a_second_interrupt_the_error_says_where_the_old_folder_is(written, points):
    before = tree(written)

    message = error_of(WRITE, written, points=points)
    [scratch] = [path for path in written.parent.iterdir() if path != written]
    assert f"it is whole in {scratch}/replaced" in message
    assert tree(scratch / "replaced") == before


# What a user may have put there


def in_folder(path):
    path.parent.mkdir(parents=True)
    path.write_bytes(b"mine")


CACHE = "tensorrt_llm/1/__pycache__/notes.txt"
ADDED = [  # a name, how it is made, and part of the difference
    ("pipe", os.mkfifo, "pipe: would be removed; it is no regular file"),
    ("link", lambda path: path.symlink_to("/etc"), "it is a link"),
    ("link", lambda path: path.symlink_to("gone"), "it is a link"),
    ("empty", os.mkdir, "empty: would be removed; it is a folder"),
    ("mine/x", in_folder, "-mine"),
    ("mine/__pycache__/x.pyc", in_folder, "-mine"),
    (CACHE, in_folder, "-mine"),  # no cache in a cache
]


def test_added_files_are_kept_unless_forced(written):
    for name, make, shown in ADDED:
        make(written / name)
        message, diff = refusal(written)
        assert f"changed since it was generated: {name}; --force" in message
        assert shown in diff
        assert os.path.lexists(written / name)

        write_repository(tiny_files(), written, force=True)
        assert not os.path.lexists(written / name)


def test_a_file_of_ours_that_became_something_else_is_an_edit(written, tmp_path):
    script, elsewhere = written / "start.sh", tmp_path / "start.sh"
    for make in (lambda: script.symlink_to(elsewhere), lambda: os.mkfifo(script), script.mkdir):
        script.rename(elsewhere)
        make()
        message, diff = refusal(written)
        assert "generated: start.sh; --force" in message
        assert diff.startswith("start.sh: would be replaced; it is ")
        write_repository(tiny_files(), written, force=True)


def test_the_folder_keeps_its_permissions(written):
    written.chmod(0o700)
    write_repository(tiny_files(version="2.0"), written)

    assert stat.S_IMODE(written.stat().st_mode) == 0o700


def test_names_in_a_stamp_that_lead_out_of_the_folder_are_ignored(written):
    stamp = written / "tensorrt_llm/deepseek-triton.json"
    for name in ("/dev/zero", "../../../../dev/zero", "a\0b"):
        record = json.loads(stamp.read_text())
        record["files"][name] = "0" * 64
        stamp.write_text(json.dumps(record))
        write_repository(tiny_files(), written)


def test_names_and_differences_hold_no_characters_that_a_terminal_obeys(written):
    (written / "a\nb\x1b[2J").write_text("\x1b[31mred\n")

    message, diff = refusal(written)
    assert "\x1b" not in message + diff
    assert "-?[31mred" in diff


def test_when_the_callback_before_the_replacement_fails_nothing_is_replaced(written):
    before = tree(written)

    def look():
        assert tree(written) == before
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        write_repository(tiny_files(version="2.0"), written, before=look)
    assert tree(written) == before
    assert [path.name for path in written.parent.iterdir()] == ["repo"]
