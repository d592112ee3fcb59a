"""The upgrade of a generated folder: what becomes of each file, and how the folder is replaced."""

import base64
import bz2
import fcntl
import hashlib
import json
import os
import shutil
import signal
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from deepseek_triton_build import (
    DISAGGREGATED,
    DisaggregatedRequest,
    File,
    OutputError,
    PlanRequest,
    backups_of,
    format_files,
    make_disaggregated_plan,
    make_plan,
    pair_files,
    plan_upgrade,
    replace_repository,
    write_repository,
)
from deepseek_triton_build.render.merge import merge_texts
from deepseek_triton_build.render.stamp import unpacked_text
from support.checked import edit, tree
from support.interrupted import call, error_of
from support.rights import without_rights

R1 = PlanRequest(variant="deepseek-r1", gpu="h200", num_gpus=8, release="1.0.0")
FEWER = ("max_num_tokens: 8192", "max_num_tokens: 4096")
CONFIG, MODEL_PY = "tensorrt_llm/1/model.yaml", "tensorrt_llm/1/model.py"


@cache
def generated(request=R1, format="triton", version="1.0"):
    """Return the files without most of the program."""
    files = format_files(format, make_plan(request), version=version)
    if format != "triton":
        return files
    kept = [file for file in files if "/deepseek_" not in str(file.path) or file.path.name == "main.py"]
    stamp = json.loads(kept[-1].content)
    stamp["files"] = {str(file.path): stamp["files"][str(file.path)] for file in kept[:-1]}
    return [*kept[:-1], replace(kept[-1], content=json.dumps(stamp).encode())]


def new():
    return generated(replace(R1, release="1.2.1"), version="2.0")


def contents(files):
    return {file.path.as_posix(): file.content for file in files}


@pytest.fixture
def folder(tmp_path):
    write_repository(generated(), tmp_path / "r1")
    return tmp_path / "r1"


def plan(folder, now=None, keep="yours"):
    return plan_upgrade(folder, now or new(), keep=keep)


def fates(upgrade):
    return {file.path: file.fate for file in upgrade.files}


def apply(folder, now=None, keep="yours"):
    upgrade = plan(folder, now, keep)
    return replace_repository(upgrade.written, folder, kept=upgrade.kept, before=lambda: upgrade.refuse_change(folder))


def test_the_manifest_has_each_settings_file_as_it_was_generated(folder):
    """A damaged text counts as absent."""
    record = json.loads((folder / "tensorrt_llm/deepseek-triton.json").read_text())
    assert set(record["generated"]) == {"start.sh", "tensorrt_llm/config.pbtxt", CONFIG}
    assert unpacked_text(record, CONFIG) == (folder / CONFIG).read_bytes()

    for packed in ("", "!", "QlpoOTFBWSZTWQ==", 3, None, "QlpoOTFBWSZTWQAAAAA="):
        assert unpacked_text(record | {"generated": {CONFIG: packed}}, CONFIG) is None
        assert unpacked_text(record | {"generated": packed, "files": packed}, CONFIG) is None
    assert unpacked_text(record | {"generated": {CONFIG: record["generated"]["start.sh"]}}, CONFIG) is None


def test_a_text_that_unpacks_to_more_than_a_text_is_not_unpacked():
    """A few bytes can ask for any amount of memory."""
    content = b"0" * 2**21
    record = {
        "generated": {"a.sh": base64.b64encode(bz2.compress(content)).decode()},
        "files": {"a.sh": hashlib.sha256(content).hexdigest()},
    }
    assert unpacked_text(record, "a.sh") is None


def test_an_unedited_folder_becomes_what_is_generated_now(folder):
    assert plan(folder, generated()).changes == []
    apply(folder)

    assert tree(folder) == contents(new())


def test_edits_are_kept_and_what_the_generator_changes_comes(folder):
    edit(folder / CONFIG, "max_num_tokens: 8192", "max_num_tokens: 4096  # incident 42")
    edit(folder / "start.sh", "set -euo pipefail\n", "set -euo pipefail\nexport NCCL_DEBUG=INFO\n")
    backup = apply(folder)

    text = (folder / CONFIG).read_text()
    assert "max_num_tokens: 4096  # incident 42\n" in text
    assert "deepseek-triton 2.0" in text
    assert "TensorRT-LLM 1.2.1" in text.splitlines()[0]
    assert "export NCCL_DEBUG=INFO" in (folder / "start.sh").read_text()
    assert "max_num_tokens: 4096" in (backup / CONFIG).read_text()
    assert "deepseek-triton 1.0" in (backup / CONFIG).read_text()
    assert plan(folder).changes == []


def test_edits_are_still_known_as_such_in_the_next_upgrade(folder):
    edit(folder / CONFIG, *FEWER)
    apply(folder)
    backup = apply(folder, generated())

    assert FEWER[1] in (folder / CONFIG).read_text()
    assert backup.name == "r1.before-upgrade-2"
    edit(folder / CONFIG, *reversed(FEWER))
    apply(folder)
    assert tree(folder) == contents(new())


@pytest.mark.parametrize("keep", ["yours", "generated"])
def test_a_conflict_is_settled_by_the_side_that_is_named(folder, keep):
    edit(folder / CONFIG, "enable_chunked_prefill: false", "enable_chunked_prefill: null")
    [(path, conflict)] = plan(folder).conflicts
    assert (path, conflict.where) == (CONFIG, "enable_chunked_prefill")
    assert (conflict.before, conflict.now) == ("enable_chunked_prefill: false", "enable_chunked_prefill: true")

    apply(folder, keep=keep)
    expected = "null" if keep == "yours" else "true"
    assert f"enable_chunked_prefill: {expected}\n" in (folder / CONFIG).read_text()
    assert plan(folder).conflicts == []


@pytest.mark.parametrize("keep", ["yours", "generated"])
def test_an_edited_file_of_the_program_is_a_conflict_if_the_program_changed(folder, keep):
    (folder / MODEL_PY).write_text("mine")
    assert (fates(plan(folder))[MODEL_PY], plan(folder).conflicts) == ("kept", [])

    now = [replace(file, content=b"new") if file.path.as_posix() == MODEL_PY else file for file in new()]
    [(path, conflict)] = plan(folder, now).conflicts
    assert path == MODEL_PY
    assert "the program has changed too" in conflict.why
    apply(folder, now, keep)
    assert (folder / MODEL_PY).read_text() == ("mine" if keep == "yours" else "new")


def test_a_file_that_is_no_longer_generated_goes_unless_it_was_edited(folder):
    gone = ("start.sh", CONFIG)
    edit(folder / CONFIG, "max_num_tokens: 8192", "max_num_tokens: 1")
    now = [file for file in new() if file.path.as_posix() not in gone]

    found = fates(plan(folder, now))
    assert (found["start.sh"], found[CONFIG]) == ("removed", "kept")
    apply(folder, now)
    assert not (folder / "start.sh").exists()
    assert "max_num_tokens: 1\n" in (folder / CONFIG).read_text()


def test_a_file_that_was_removed_by_hand_stays_removed_until_it_is_generated_differently(folder):
    (folder / "start.sh").unlink()
    (folder / MODEL_PY).unlink()
    same = generated(version="2.0")

    found = fates(plan(folder, same))
    assert found[MODEL_PY] == "restored"
    assert (found["start.sh"], plan(folder, same).conflicts) == ("kept", [])
    apply(folder, same)
    assert not (folder / "start.sh").exists()
    assert (folder / MODEL_PY).exists()
    assert fates(plan(folder, same, keep="generated"))["start.sh"] == "restored"

    [(path, conflict)] = plan(folder).conflicts
    assert (path, conflict.why) == ("start.sh", "you removed it, and it is generated differently now")
    apply(folder, keep="generated")
    assert tree(folder) == contents(new())


def test_what_the_owner_added_stays(folder):
    (folder / "notes.txt").write_text("mine")
    (folder / "notes.txt").chmod(0o640)
    (folder / "empty").mkdir(mode=0o700)
    (folder / "weights").symlink_to("/models")
    (folder / "tensorrt_llm/1/__pycache__").mkdir()
    (folder / "tensorrt_llm/1/__pycache__/model.cpython-312.pyc").write_bytes(b"\0")
    os.mkfifo(folder / "pipe")
    upgrade = plan(folder)
    assert upgrade.added == ("empty", "notes.txt", "pipe", "weights")

    with (folder / "notes.txt").open("a") as log:
        backup = apply(folder)
        log.write(", and more")
    assert (folder / "notes.txt").read_text() == "mine, and more"
    assert (folder / "notes.txt").stat().st_mode & 0o777 == 0o640
    assert (folder / "empty").stat().st_mode & 0o777 == 0o700
    assert (folder / "weights").readlink() == Path("/models")
    assert (folder / "pipe").is_fifo()
    assert not (folder / "tensorrt_llm/1/__pycache__").exists()
    assert (backup / "tensorrt_llm/1/__pycache__").is_dir()


def test_a_later_edit_of_a_file_that_was_kept_leaves_the_backup_as_it_was(folder):
    edit(folder / CONFIG, *FEWER)
    before = tree(folder)
    backup = apply(folder, generated())
    for name in before:
        with (folder / name).open("a") as file:
            file.write("# later\n")

    assert tree(backup) == before


def test_modes_stay_and_new_scripts_can_be_run(folder):
    folder.chmod(0o750)
    (folder / "tensorrt_llm").chmod(0o700)
    (folder / CONFIG).chmod(0o600)
    (folder / "start.sh").chmod(0o700)
    before = os.umask(0o022)
    try:
        apply(folder, [*new(), File(Path("more.sh"), b"x", executable=True)])
    finally:
        os.umask(before)

    modes = {name: (folder / name).stat().st_mode & 0o777 for name in ("", "tensorrt_llm", CONFIG, "start.sh")}
    assert modes == {"": 0o750, "tensorrt_llm": 0o700, CONFIG: 0o600, "start.sh": 0o700}
    assert (folder / "more.sh").stat().st_mode & 0o777 == 0o755


def test_folders_that_may_not_be_written_within_are_replaced_and_stay_so(folder):
    (folder / "tensorrt_llm/1").chmod(0o555)
    with without_rights():
        backup = apply(folder)
        assert tree(folder) == contents(new())
        assert {(place / "tensorrt_llm/1").stat().st_mode & 0o777 for place in (folder, backup)} == {0o555}
        write_repository(generated(), folder, force=True)

    assert tree(folder) == contents(generated())
    assert {path.name for path in folder.parent.iterdir()} == {"r1", backup.name}


@pytest.mark.parametrize("write", [apply, lambda folder: write_repository(new(), folder, force=True)])
def test_a_folder_that_may_not_be_written_is_refused_and_nothing_stays_beside_it(folder, write):
    folder.chmod(0o555)
    (folder / "tensorrt_llm").chmod(0o555)
    with without_rights(), pytest.raises(OutputError, match=r"can't be \w+: Permission denied"):
        write(folder)

    assert tree(folder) == contents(generated())
    assert [path.name for path in folder.parent.iterdir()] == ["r1"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_owners_stay_where_root_upgrades(folder):
    for path in (folder, folder / "tensorrt_llm", folder / CONFIG):
        os.chown(path, 12345, 23456)
    apply(folder)

    for path in (folder, folder / "tensorrt_llm", folder / CONFIG):
        assert (path.stat().st_uid, path.stat().st_gid) == (12345, 23456)


@pytest.mark.parametrize("keep", ["yours", "generated"])
def test_a_file_that_became_a_link_is_a_conflict(folder, tmp_path, keep):
    shared = tmp_path / "shared.yaml"
    (folder / CONFIG).rename(shared)
    (folder / CONFIG).symlink_to(shared)

    [(path, conflict)] = plan(folder).conflicts
    assert (path, conflict.why) == (CONFIG, "it was a file, and is a link now")
    before = shared.read_bytes()
    apply(folder, keep=keep)
    assert (folder / CONFIG).is_symlink() == (keep == "yours")
    assert shared.read_bytes() == before


def test_a_file_in_the_place_of_a_folder_is_named(folder):
    shutil.rmtree(folder / "tensorrt_llm/1/deepseek_launcher")
    (folder / "tensorrt_llm/1/deepseek_launcher").symlink_to("/elsewhere")

    with pytest.raises(OutputError, match=r"deepseek_launcher is in the way of a file that is generated; move it away"):
        plan(folder)


def test_a_file_of_a_name_that_is_new_now_is_a_conflict_and_a_script_that_is_no_text(folder):
    (folder / "bench.sh").write_text("mine")
    now = [*new(), File(Path("bench.sh"), b"new", executable=True)]
    [(_, conflict)] = plan(folder, now).conflicts
    assert conflict.why.startswith("you added it")
    assert fates(plan(folder, [*new(), File(Path("bench.sh"), b"mine")]))["bench.sh"] == "same"

    (folder / "start.sh").write_bytes(b"\xff")
    [(path, conflict)] = plan(folder).conflicts
    assert path == "start.sh"
    assert "expected UTF-8" in conflict.why


BOMB = "".join(f"b{n}: &b{n} [{', '.join([f'*b{n - 1}' if n else '1'] * 9)}]\n" for n in range(30))
"""A text of a few lines whose last value has 9 ** 30 values."""
UNMERGED = [
    *("mine: &a [*a]", "mine: &a [*a, *a]", "mine: &a\n  b: *a", BOMB, "mine: !env FOO", "mine: 2024-13-45", "mine: ="),
    "max_num_tokens: 1",  # both sides' keys would stand there twice
]


@pytest.mark.slow
def test_yaml_that_no_merge_would_mean_is_a_conflict_about_the_file(folder):
    before = (folder / CONFIG).read_text()
    for text in UNMERGED:
        (folder / CONFIG).write_text(f"{before}{text}\n")
        [(_, conflict)] = plan(folder).conflicts
        assert "it can't be merged" in conflict.why
    assert plan(folder, keep="generated").written == new()


def test_a_key_twice_in_a_file_within_a_file_is_a_conflict_about_the_file(folder):
    """Both sides add it, in different places of the text."""
    files = generated(format="dynamo")
    [name] = [file.path.as_posix() for file in files if b"engine.yaml: |" in file.content]
    base = next(file.content.decode() for file in files if file.path.as_posix() == name)
    lines = base.splitlines(keepends=True)
    start = next(number for number, line in enumerate(lines) if "engine.yaml: |" in line) + 1
    indent = lines[start][: len(lines[start]) - len(lines[start].lstrip())]
    tops = [at for at in range(start, len(lines)) if lines[at].startswith(indent) and lines[at][len(indent)].isalpha()]
    mine, new = list(lines), list(lines)
    mine.insert(tops[0], f"{indent}twice: 1\n")
    new.insert(tops[3], f"{indent}twice: 2\n")
    assert merge_texts(name, base, "".join(mine), base.replace("1.0", "2.0"), keep="yours") is not None
    assert merge_texts(name, base, "".join(mine), "".join(new), keep="yours") is None


# Folders of versions that kept no texts


def without_texts(folder):
    path = folder / "tensorrt_llm/deepseek-triton.json"
    record = json.loads(path.read_text())
    del record["generated"]
    path.write_text(json.dumps(record))
    return folder


@pytest.fixture
def earlier(folder):
    return without_texts(folder)


def test_without_texts_an_unedited_file_is_replaced(earlier):
    apply(earlier, generated(version="1.5"))
    assert tree(earlier) == contents(generated(version="1.5"))


@pytest.mark.parametrize("keep", ["yours", "generated"])
def test_without_any_old_text_an_edited_file_is_a_conflict(earlier, keep):
    edit(earlier / CONFIG, *FEWER)
    mine = (earlier / CONFIG).read_bytes()

    [(path, conflict)] = plan(earlier).conflicts
    assert path == CONFIG
    assert "nobody knows the text that was generated" in conflict.why
    apply(earlier, keep=keep)
    assert (earlier / CONFIG).read_bytes() == (mine if keep == "yours" else contents(new())[CONFIG])


def test_a_damaged_manifest_makes_every_difference_a_conflict(folder):
    (folder / "tensorrt_llm/deepseek-triton.json").write_text("{")
    upgrade = plan(folder)

    told = {path for path, _ in upgrade.conflicts}
    assert told == {name for name, content in tree(folder).items() if content != contents(new())[name]} - {
        "tensorrt_llm/deepseek-triton.json"
    }


# Pairs


@pytest.mark.slow
@pytest.mark.parametrize("format", ["triton", "trtllm-serve", "dynamo"])
def test_a_pair_is_upgraded_with_the_edits_of_both_sides(tmp_path, format):
    def files(release, version):
        both = PlanRequest(variant="deepseek-v3", gpu="h200", profile=DISAGGREGATED, release=release)
        return pair_files(make_disaggregated_plan(DisaggregatedRequest(both=both)), version=version, format=format)

    folder = tmp_path / "pair"
    write_repository(files("1.1.0", "1.0"), folder)
    texts = [path for path in folder.rglob("*") if path.suffix in (".sh", ".yaml", ".yml") and path.name[0] != "r"]
    assert texts
    for path in texts:
        path.write_text(f"{path.read_text()}\n# mine\n")
    now = files("1.2.1", "2.0")
    assert plan(folder, now).conflicts == []
    apply(folder, now)

    for file in now:
        text = (folder / file.path).read_text()
        assert "# mine" in text or folder / file.path not in texts
        assert text.replace("\n\n# mine\n", "\n").replace("\n# mine\n", "\n") == file.content.decode()


@pytest.mark.slow
def test_a_side_that_was_upgraded_by_itself_is_known_by_its_own_manifest(tmp_path):
    both = PlanRequest(variant="tiny", engine="simulated", profile=DISAGGREGATED)
    pair = make_disaggregated_plan(DisaggregatedRequest(both=both))
    folder = tmp_path / "pair"
    write_repository(pair_files(pair, version="1.0"), folder)
    apply(folder / "context", format_files("triton", pair.context, version="1.5"))

    assert (tmp_path / "pair/context.before-upgrade-1").is_dir()
    assert plan(folder, pair_files(pair, version="2.0")).conflicts == []


# The folder is replaced as a whole


def test_an_edit_while_the_upgrade_is_made_is_not_lost(folder):
    (folder / "notes.txt").write_text("mine")
    for name in (CONFIG, MODEL_PY, "new.txt", "notes.txt"):
        upgrade = plan(folder)
        if name == "notes.txt":
            (folder / name).unlink()
        else:
            (folder / name).write_text("late")
        before = tree(folder)
        with pytest.raises(OutputError, match=f"{name} changed while the upgrade was made; nothing was done"):
            replace_repository(upgrade.written, folder, before=lambda one=upgrade: one.refuse_change(folder))
        assert tree(folder) == before
        assert [path.name for path in folder.parent.iterdir()] == ["r1"]


def test_a_folder_that_a_server_runs_from_or_starts_from_is_not_replaced(folder):
    before = tree(folder)
    with (folder / "tensorrt_llm/deepseek-triton.json").open("rb") as stamp:
        with pytest.raises(OutputError, match="a server runs from this folder"):
            replace_repository(new(), folder, before=lambda: fcntl.flock(stamp, fcntl.LOCK_SH))
        with pytest.raises(OutputError, match="a server runs from this folder"):
            apply(folder)
    assert tree(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == ["r1"]


REPLACE = 'replace_repository([File(PurePosixPath("new.txt"), b"x" * 4096)], folder, kept=["notes.txt"])'


@pytest.mark.slow
@pytest.mark.parametrize("point", ["before-1", "at-1", "before-2", "at-2", ""])
def test_a_full_disk_and_an_interrupt_leave_what_was_there_and_a_kill_the_old_folder_whole(folder, point):
    (folder / "notes.txt").write_text("mine")
    old = tree(folder)
    error_of(REPLACE, folder, points=point, max_file_size=10**6 if point else 1000)
    assert tree(folder) == old
    assert [path.name for path in folder.parent.iterdir()] == ["r1"]

    if point:
        assert call(REPLACE, folder, points=point, signal="SIGKILL").returncode == -signal.SIGKILL
        backup = folder.with_name("r1.before-upgrade-1")
        assert tree(folder if point == "before-1" else backup) == old
        assert folder.exists() == (point in ("before-1", "at-2"))


def test_a_backup_has_a_higher_number_than_all_that_are_there(folder):
    for name in ("2", "10", "x", "03"):
        folder.with_name(f"r1.before-upgrade-{name}").mkdir()

    assert apply(folder) == folder.with_name("r1.before-upgrade-11")
    assert [path.name[-2:] for path in backups_of(folder)] == ["-2", "10", "11"]


def test_a_link_to_the_folder_stays_a_link(folder):
    link = folder.with_name("current")
    link.symlink_to("r1")
    backup = apply(link)

    assert link.is_symlink()
    assert tree(folder) == contents(new())
    assert backup == folder.with_name("r1.before-upgrade-1")
