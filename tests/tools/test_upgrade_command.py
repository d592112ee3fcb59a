"""`deepseek-triton upgrade`: what it shows, writes and refuses, on folders of this version and of earlier ones."""

import json
import shutil
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_triton_build import FORMATS
from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.cli.main import main
from support.checked import edit, tree
from support.documents import snippets

RECORDED = Path(__file__).parents[1] / "build/recorded"
R1 = ["build", "deepseek-r1", "--gpu", "h200", "--gpus", "8"]
CONFIG = "tensorrt_llm/1/model.yaml"
OWN_SETTING = ("speculative_config:\n", "speculative_config:\n  allow_advanced_sampling: false\n")
"""An edit of model.yaml: a setting that is generated for the next release."""
MANIFEST = "tensorrt_llm/deepseek-triton.json"


def upgraded(capsys, *argv, code=0):
    """Return the document of an upgrade."""
    assert main(["upgrade", *map(str, argv), "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "deepseek-triton/upgrade/1"
    return document


def refused(capsys, *argv, code=1):
    """Return the one line of an upgrade that does nothing."""
    assert main(["upgrade", *map(str, argv)]) == code
    captured = capsys.readouterr()
    [line] = captured.err.splitlines()
    assert captured.out == ""
    return line


@pytest.fixture(scope="module")
def older(tmp_path_factory):
    """A repository for an earlier release."""
    out = tmp_path_factory.mktemp("older") / "r1"
    assert main([*R1, "--profile", "latency", "--trtllm", "1.1.0", "--output", str(out)]) == 0
    return out


@pytest.fixture
def folder(older, tmp_path, monkeypatch):
    """A copy of it, in the current folder."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(older, Path("r1-older"))


@pytest.mark.slow
def test_the_session_of_the_page_is_what_is_shown(folder, capsys):
    session, conflict = snippets("text", page="docs/generator.md")
    edit(folder / CONFIG, "max_num_tokens: 8192", "max_num_tokens: 4096  # incident 42")
    edit(folder / "start.sh", "set -euo pipefail\n", "set -euo pipefail\nexport NCCL_DEBUG=INFO\n")
    (folder / "notes.txt").write_text("see the wiki\n")
    before = tree(folder)

    assert main(["upgrade", "r1-older", "--trtllm", "1.2.1"]) == 0
    assert capsys.readouterr().out.rstrip() == session.text.rstrip()
    assert tree(folder) == before
    assert [path.name for path in Path().iterdir()] == ["r1-older"]

    edit(folder / CONFIG, *OWN_SETTING)
    (folder / "\x1b[2J").write_text("a name that a terminal would obey")
    assert main(["upgrade", "r1-older", "--trtllm", "1.2.1"]) == 1
    captured = capsys.readouterr()
    assert conflict.text.rstrip() in captured.out
    assert "\x1b" not in captured.out
    assert "r1-older: nothing was written, because of conflicts: 1; " in captured.err


@pytest.mark.slow
def test_what_is_applied_is_what_build_writes_with_the_edits(folder, capsys):
    edit(folder / CONFIG, "max_num_tokens: 8192", "max_num_tokens: 4096")
    before = tree(folder)
    document = upgraded(capsys, folder, "--trtllm", "1.2.1", "--apply")

    assert (document["status"], document["from"]["release"], document["to"]["release"]) == ("applied", "1.1.0", "1.2.1")
    assert ["26.02" in document["from"]["image"], "26.07" in document["to"]["image"]] == [True, True]
    assert tree(Path(document["backup"])) == before
    assert main([*R1, "--profile", "latency", "--output", "fresh"]) == 0
    edit(Path("fresh") / CONFIG, "max_num_tokens: 8192", "max_num_tokens: 4096")
    # The options name the release that was asked for, where a build without the option leaves it out.
    assert tree(folder).keys() == tree(Path("fresh")).keys()
    assert yaml.safe_load((folder / CONFIG).read_text()) == yaml.safe_load((Path("fresh") / CONFIG).read_text())
    capsys.readouterr()
    assert upgraded(capsys, folder)["status"] == "nothing"
    assert main(["check", "r1-older"]) == 0
    unedited = tree(folder)
    for name in ("start.sh", CONFIG, "tensorrt_llm/config.pbtxt"):  # ends of lines are no edits
        (folder / name).write_bytes(unedited[name].replace(b"\n", b"\r\n"))
    capsys.readouterr()
    assert upgraded(capsys, folder, "--apply")["status"] == "applied"
    assert tree(folder) == unedited


@pytest.mark.slow
def test_a_conflict_is_in_the_document_and_applied_only_with_a_side(folder, capsys):
    edit(folder / CONFIG, *OWN_SETTING)
    before = tree(folder)
    document = upgraded(capsys, folder, "--trtllm", "1.2.1", "--apply", code=1)

    [row] = [row for row in document["files"] if row["conflicts"]]
    assert (document["status"], document["backup"], row["path"]) == ("conflicts", None, CONFIG)
    sides = {"yours": "allow_advanced_sampling: false", "before": None, "now": "allow_advanced_sampling: true"}
    assert row["conflicts"] == [{"where": "speculative_config.allow_advanced_sampling", **sides, "why": ""}]
    assert tree(folder) == before

    # Generated keys are refused beforehand, as the page says.
    document = upgraded(capsys, folder, "--trtllm", "1.2.1", "--keep", "yours", code=1)
    assert {row["key"] for row in document["findings"] if row["is_new"]} >= {"triton_config.default_sampling.top_p"}
    shutil.copytree(folder, "other")
    assert upgraded(capsys, folder, "--trtllm", "1.2.1", "--keep", "generated", "--apply")["status"] == "applied"
    assert "  allow_advanced_sampling: true\n" in (folder / CONFIG).read_text()
    edit(Path("other") / CONFIG, "triton_config:\n", "triton_config:\n  default_sampling: {}\n")
    assert upgraded(capsys, "other", "--trtllm", "1.2.1", "--keep", "yours", "--apply")["status"] == "applied"


@pytest.mark.slow
def test_a_new_error_of_check_stops_the_upgrade(folder, capsys):
    """An error that was there before does not. The release that the folder is for has the key `build_config`, and the
    other one has not."""
    whole = (folder / CONFIG).read_text()
    (folder / CONFIG).write_text(f"{whole}build_config: null\n")
    before = tree(folder)
    document = upgraded(capsys, folder, "--trtllm", "1.2.1", "--apply", code=1)
    assert (document["status"], document["backup"]) == ("errors", None)
    assert [row["key"] for row in document["findings"] if row["is_new"]] == ["build_config"]
    assert tree(folder) == before

    (folder / CONFIG).write_text(whole)
    edit(folder / CONFIG, "trust_remote_code: false", "trust_remote_code: 7")
    document = upgraded(capsys, folder, "--trtllm", "1.2.1", "--apply")
    assert document["status"] == "applied"
    assert [row["is_new"] for row in document["findings"] if row["key"] == "trust_remote_code"] == [False]


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_upgraded_to_what_it_is(name, tmp_path, capsys):
    engine = ["--engine", "vllm"] if name in ("triton", "vllm-serve") else []
    assert main([*R1, *engine, "--format", name, "--output", str(tmp_path / "out")]) == 0
    before = tree(tmp_path / "out")
    capsys.readouterr()
    assert upgraded(capsys, tmp_path / "out", "--apply")["status"] == "nothing"

    assert tree(tmp_path / "out") == before
    other = ["--vllm", "0.33.0"] if engine else ["--trtllm", "1.2.0"]
    assert main(["upgrade", str(tmp_path / "out"), *other]) == 0
    assert ("pip install vllm==0.33.0" in capsys.readouterr().out) == (name == "triton")  # the others have an image
    document = upgraded(capsys, tmp_path / "out", *other, "--apply")
    assert document["status"] == "applied"
    assert document["to"]["vllm" if engine else "release"] == other[1]


PAIR = ["build", "deepseek-v3", "--gpu", "h200", "--profile", "disagg", "--format", "trtllm-serve"]
EDITED = [
    (["build", "tiny", "--engine", "vllm", "--gpu", "h200"], ["start.sh", "tensorrt_llm/1/tiny/model.safetensors"]),
    ([*R1, "--engine", "vllm", "--image", "26.07"], ["start.sh"]),
    (PAIR, ["context/serve.sh", "generation/serve.sh", "orchestrator.sh"]),
    ([*R1, "--set", "stream_interval=4", "--no-decoupled"], ["start.sh"]),
]


@pytest.mark.slow
def test_edits_stay_where_nothing_else_changes(tmp_path, capsys, subtests):
    for argv, texts in EDITED:
        with subtests.test(" ".join(argv)), tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            out = Path(folder, "out")
            assert main([*argv, "--output", str(out)]) == 0
            for name in texts:
                with (out / name).open("a") as file:
                    file.write("# mine\n")
            before = tree(out)
            capsys.readouterr()
            document = upgraded(capsys, out, "--apply")

            assert document["status"] == "nothing"
            assert sorted(row["path"] for row in document["files"] if row["fate"] == "kept") == texts
            errors = [(row["code"], row["file"]) for row in document["findings"] if row["severity"] == "error"]
            assert errors == [("W020", name) for name in texts if name.endswith(".safetensors")]
            assert tree(out) == before


@pytest.mark.slow
def test_a_folder_stays_at_its_release_though_the_default_is_another(folder, capsys):
    """An earlier version, whose default 1.1.0 was, did not write it into the options."""
    record = json.loads((folder / MANIFEST).read_text())
    options = record["options"].replace(" --trtllm 1.1.0", "")
    (folder / MANIFEST).write_text(json.dumps(record | {"options": options}))

    assert upgraded(capsys, folder)["to"]["release"] == "1.1.0"
    record["release"] = "0.9"
    (folder / MANIFEST).write_text(json.dumps(record | {"options": options}))
    assert "unknown TensorRT-LLM release '0.9'" in refused(capsys, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["triton", "trtllm-serve"])
def test_a_folder_of_an_earlier_version_becomes_what_build_writes(name, tmp_path, capsys):
    """tests/build/recorded lacks the program, which is written again."""
    folder = tmp_path / "old"
    shutil.copytree(RECORDED / name, folder)
    document = upgraded(capsys, folder, "--apply")

    assert document["status"] == "applied"
    options = ["--profile", "latency", "--trtllm", "1.1.0", "--format", name]
    assert main([*R1, *options, "--output", str(tmp_path / "new")]) == 0
    assert tree(folder) == tree(tmp_path / "new")


def test_an_edited_file_of_an_earlier_version_is_shown_and_decided_by_keep(tmp_path, capsys):
    folder = tmp_path / "old"
    shutil.copytree(RECORDED / "trtllm-serve", folder)
    edit(folder / "extra-llm-api-config.yml", "stream_interval: 1", "stream_interval: 7")
    mine = (folder / "extra-llm-api-config.yml").read_text()

    assert main(["upgrade", str(folder), "--trtllm", "1.2.1", "--apply"]) == 1
    shown = capsys.readouterr().out
    assert "conflict about the whole file: you changed it, and nobody knows the text that was generated" in shown
    for line in ("- stream_interval: 7", "+ stream_interval: 1", "+ speculative_config.allow_advanced_sampling: true"):
        assert f"    {line}\n" in shown

    assert main(["upgrade", str(folder), "--trtllm", "1.2.1", "--keep", "yours", "--apply"]) == 0
    assert (folder / "extra-llm-api-config.yml").read_text() == mine
    assert "TensorRT-LLM 1.2.1" in (folder / "serve.sh").read_text()
    # From now on the text is known: the edits are seen against it.
    assert "yours, kept: + stream_interval: 7" in (main(["upgrade", str(folder)]), capsys.readouterr().out)[1]


@pytest.mark.slow
def test_a_damaged_manifest_or_options_that_are_no_longer_taken(folder, capsys):
    record = json.loads((folder / MANIFEST).read_text())
    for options, expected in {
        "deepseek-r1 --gpu h200 --gpus 4": "what works: --gpus 8",
        "deepseek-r1 --gpu h200 --gone 1": "`deepseek-triton plan` has no --gone 1",
        "--gpus": "argument --gpus: expected one argument",
        "tiny '": "No closing quotation",
        "--help": "is refused now",
    }.items():
        (folder / MANIFEST).write_text(json.dumps(record | {"options": options}))
        line = refused(capsys, folder)
        assert line.startswith(f"deepseek-triton upgrade: r1-older: `build {options}` is refused now: ")
        assert expected in line
        assert f'; change it in "options" of r1-older/{MANIFEST}' in line
    for text in ("{", json.dumps({name: record[name] for name in record if name != "options"})):
        (folder / MANIFEST).write_text(text)
        assert 'write {"options": "..."}' in refused(capsys, folder)
    options = record["options"].replace("1.1.0", "1.2.1 --format trtllm-serve")
    (folder / MANIFEST).write_text(json.dumps({"options": options}))
    upgraded(capsys, folder, "--apply")
    assert [path.name for path in folder.rglob("*.json")] == [Path(MANIFEST).name]


@pytest.mark.slow
def test_what_is_no_folder_to_upgrade_is_refused(folder, capsys, monkeypatch):
    place = folder.resolve()
    other = "1.2.1", "--apply"
    cases = [
        (["r1-older", "--trtllm", "1.2"], "'1.2.1' or '1.2.0'?"),
        (["r1-older", "--vllm", "0.33.0"], "--vllm: only for --engine vllm"),
        (["r1-older", "--image", "26.7"], "did you mean '26.07'?"),
        (["r1-older/tensorrt_llm"], "is a model of a repository; name the repository, r1-older"),
        (["nowhere"], "nowhere: expected a folder that build wrote"),
        (["r1-older/start.sh"], "r1-older/start.sh: expected a folder that build wrote"),
        (["."], "expected a folder that build wrote"),
    ]
    for argv, expected in cases:
        assert expected in refused(capsys, *argv, code=2)
    Path("pair/context").mkdir(parents=True)
    for side in ("context", "."):  # the pair's own manifest is not there, and damaged
        Path("pair", side, Path(MANIFEST).name).write_text("{")
        assert "build the pair again" in refused(capsys, "pair")
    # The shell would stay in the folder that is the backup now, and the next upgrade would be the backup's.
    before = tree(place)
    for here in (place, place / "tensorrt_llm"):
        monkeypatch.chdir(here)
        assert f"cd out of {place} first" in refused(capsys, place, "--trtllm", *other, code=2)
    assert main(["upgrade", str(place), "--trtllm", "1.2.1"]) == 0
    assert tree(place) == before
    capsys.readouterr()
    # A kill took it away: it is found in its backup, which is not upgraded itself.
    monkeypatch.chdir(place.parent)
    Path("links").mkdir()
    Path("links/current").symlink_to(place)
    folder.rename("r1-older.before-upgrade-1")
    assert "in r1-older.before-upgrade-1: move that back" in refused(capsys, folder, code=2)
    assert f"in {place}.before-upgrade-1: move that back" in refused(capsys, "links/current", code=2)
    assert "rename it first" in refused(capsys, "r1-older.before-upgrade-1", code=2)
    monkeypatch.chdir("r1-older.before-upgrade-1")
    assert "rename it first" in refused(capsys, ".", code=2)


@pytest.mark.slow
@given(
    st.dictionaries(
        st.sampled_from(["version", "options", "format", "profile", "release", "vllm", "files", "generated"]),
        st.recursive(
            st.none() | st.integers() | st.text(max_size=9) | st.sampled_from(["tiny", CONFIG, "../x", "start.sh/x"]),
            lambda below: st.lists(below, max_size=2) | st.dictionaries(st.text(max_size=9), below, max_size=2),
            max_leaves=4,
        ),
    ),
    st.sampled_from([[], ["--json"]]),
)
@settings(max_examples=20)
def test_whatever_a_manifest_holds_the_answer_is_no_traceback(damage, options):
    with tempfile.TemporaryDirectory() as folder:
        stamp = Path(folder, MANIFEST)
        stamp.parent.mkdir()
        stamp.write_text(json.dumps({"options": "tiny --engine simulated", "files": {}} | damage))
        assert main(["upgrade", folder, *options]) in (0, 1, 2)


@pytest.mark.slow
def test_a_folder_of_a_newer_version_is_not_taken_back(folder, capsys):
    path = folder / MANIFEST
    whole = path.read_text()
    codes = {f"{__version__}.1": 2, "99.0": 2, "99.0.0rc1": 2, __version__: 0, "0.0.9": 0, "?": 0}
    for version, code in codes.items():
        path.write_text(json.dumps(json.loads(whole) | {"version": version}))
        before = tree(folder)
        assert main(["upgrade", str(folder), "--apply"]) == code, version
        if code:
            assert f"found one of {version}; " in capsys.readouterr().err
            assert tree(folder) == before


@pytest.mark.slow
def test_a_pair_is_upgraded_whole(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pair = Path("pair")
    assert main(["build", "tiny", "--engine", "simulated", "--profile", "disagg", "--output", "pair"]) == 0
    capsys.readouterr()
    assert f"upgrade both, in {pair.resolve()}" in refused(capsys, "pair/context", "--apply", code=2)
    assert main(["upgrade", "pair"]) == 0
    (pair / "deepseek-triton.json").unlink()
    before = tree(pair)
    capsys.readouterr()
    assert "own deepseek-triton.json beside context/, found none" in refused(capsys, pair, "--apply")
    assert tree(pair) == before
