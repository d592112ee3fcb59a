"""A release is the same bytes whoever builds it, and works where nothing else is installed."""

import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import tomli
from packaging.requirements import Requirement

from releasing import make_release, smoke
from releasing.make_release import REQUIREMENTS, ReleaseError, pins, sbom

ROOT = Path(__file__).resolve().parents[2]
PINNED = """\
# made by something
h11==0.16.0 \\
    --hash=sha256:aa \\
    --hash=sha256:bb
uvloop==0.23.0 ; sys_platform != 'win32' \\
    --hash=sha256:cc
"""


PROJECT = f"""\
build-system = {{ requires = ["hatchling"], build-backend = "hatchling.build" }}
project = {{ name = "deepseek-triton", dynamic = ["version"], requires-python = ">=3.10" }}
tool.hatch.version.path = "{make_release.VERSION_FILE}"
tool.hatch.build.targets.wheel.only-include = ["{make_release.VERSION_FILE}"]
"""


def git(folder, *words):
    who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def commit(folder, *names):
    """Copy these files of this checkout, and commit them."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    changelog, version = folder / "CHANGELOG.md", make_release.version_of(folder)
    text = changelog.read_text("utf-8")
    if not re.search(rf"^## \[?{re.escape(version)}", text, re.MULTILINE):
        changelog.write_text(text.replace("## Unreleased", f"## {version}", 1), "utf-8")
    git(folder, "init")
    git(folder, "add", "--all")
    git(folder, "commit", "--message", "first")
    return folder


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """What this checkout has now, without the tests."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
    kept = [name for name in listed if (ROOT / name).is_file() and not name.startswith("tests/")]
    return commit(tmp_path_factory.mktemp("release"), *(name for name in kept if not (ROOT / name).is_symlink()))


@pytest.fixture
def small(tmp_path):
    """A project of one module with the files that a release reads."""
    (tmp_path / "small").mkdir()
    (tmp_path / "small/pyproject.toml").write_text(PROJECT)
    return commit(tmp_path / "small", make_release.VERSION_FILE, "CHANGELOG.md", REQUIREMENTS)


def names(folder):
    return {path.name for path in folder.iterdir()}


def check_files(folder, released):
    version = make_release.version_of(folder)
    built = (f"deepseek_triton-{version}-py3-none-any.whl", f"deepseek_triton-{version}.tar.gz")
    others = (f"deepseek_triton-{version}.cdx.json", f"deepseek_triton-{version}-requirements.txt", "SHA256SUMS")
    assert set(released) == {*built, *others} == names(folder / "dist")
    for line in released["SHA256SUMS"].decode().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256(released[name]).hexdigest() == digest


@pytest.fixture(scope="module")
def released(clone):
    return {path.name: path.read_bytes() for path in make_release.make_release(clone)}


@pytest.mark.nightly
def test_two_clones_give_the_same_bytes(clone, released, tmp_path):
    check_files(clone, released)
    other = tmp_path / "a clone"
    git(tmp_path, "clone", str(clone), str(other))
    (other / "README.md").touch()
    assert {path.name: path.read_bytes() for path in make_release.make_release(other)} == released


@pytest.mark.nightly
def test_a_release_works_in_bare_environments(clone, released, capsys):
    """test_packaging.py has a sample: the wheel in one environment."""
    assert smoke.main([str(clone / "dist"), "--offline"]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out.count(" works\n") == 2


@pytest.mark.slow
def test_a_release_has_its_files_and_their_checksums(small):
    check_files(small, {path.name: path.read_bytes() for path in make_release.make_release(small)})


def test_two_builds_that_differ_are_no_release(small, monkeypatch):
    def built(root, folder, umask, epoch):
        folder.mkdir()
        (folder / "a.whl").write_text(f"built with {umask}")
        (folder / "a.tar.gz").write_text(f"of {epoch}")
        return folder

    monkeypatch.setattr(make_release, "_built", built)
    with pytest.raises(ReleaseError, match=r"these differ: a.whl$"):
        make_release.make_release(small)
    assert not (small / "dist").exists()


def test_all_that_is_wrong_is_said_and_nothing_is_written(small, capsys):
    (small / "new").touch()
    changelog = small / "CHANGELOG.md"
    changelog.write_text(changelog.read_text("utf-8").replace("# Changelog", "# Changelog\n\n## 9.9.9", 1), "utf-8")

    assert make_release.main([str(small)]) == 1
    out, err = capsys.readouterr()
    [line] = err.splitlines()
    assert (out, (small / "dist").exists()) == ("", False)
    assert line.startswith("release: expected a clean tree, and these differ from the commit: CHANGELOG.md, new; ")
    assert "CHANGELOG.md's newest version" in line
    assert "got 9.9.9" in line


def test_the_sbom_has_every_pin_and_depends_on_nothing_else():
    text = sbom(PINNED, version="1.2.3", epoch=1_700_000_000)
    document = json.loads(text)

    assert text == sbom(PINNED, version="1.2.3", epoch=1_700_000_000)
    assert document["metadata"]["timestamp"] == "2023-11-14T22:13:20Z"
    assert [component["purl"] for component in document["components"]] == [
        "pkg:pypi/h11@0.16.0",
        "pkg:pypi/uvloop@0.23.0",
    ]
    assert document["components"][1]["properties"] == [{"name": "marker", "value": "sys_platform != 'win32'"}]
    assert document["dependencies"][0]["dependsOn"] == ["pkg:pypi/h11@0.16.0", "pkg:pypi/uvloop@0.23.0"]
    assert sbom(PINNED + "six==1 \\\n", version="1.2.3", epoch=0) != text


def test_the_pinned_requirements_are_what_pyproject_asks_for():
    text = (ROOT / REQUIREMENTS).read_text("utf-8")
    project = tomli.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["tools"], *extras["gateway"], *extras["tracing"]]
    pinned = {name: version for name, version, _ in pins(text)}

    for requirement in map(Requirement, asked):
        if requirement.name != "deepseek-triton":
            assert requirement.specifier.contains(pinned[requirement.name.lower()]), requirement
    blocks = re.split(r"\n(?=\S)", text[text.index("==") - 60 :].split("\n", 1)[1])
    assert all("--hash=sha256:" in block for block in blocks if "==" in block)
    assert len(pins(text)) == len(re.findall(r"^[A-Za-z].*==", text, re.MULTILINE))
    assert not re.search(r"://|--(extra-)?index|--find-links|--trusted-host| @ ", text)
