"""The wheel is whole: built, installed into a fresh environment, and a repository generated from it."""

import json
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from deepseek_triton_build import model_repository
from deepseek_triton_tools.pages import install_extra

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    # hatchling is in the development environment, so that the build fetches nothing.
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_every_package_the_model_repository_and_every_page(wheel):
    """Messages name the pages. The wheel has nothing else, and installs the command."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entries,) = [name for name in names if name.endswith("entry_points.txt")]
        assert "deepseek-triton = deepseek_triton_tools.cli.main:main" in archive.read(entries).decode()
    expected = {
        "deepseek_triton_client/py.typed",
        "deepseek_triton_client/testing.py",
        "deepseek_triton_build/planning/plan.py",
        "deepseek_triton_build/data/variants.yaml",
        "deepseek_triton_build/data/records/trtllm-1.2.1.yaml",
        "deepseek_triton_tools/cli/main.py",
        "deepseek_triton_tools/checkpoints/templates/calibrate.sh",
        "deepseek_triton_tools/monitoring/grafana-dashboard.json",
    }
    for path in (model_repository() / "tensorrt_llm").rglob("*"):
        if path.is_file() and path.parent.name != "__pycache__":
            relative = path.relative_to(model_repository()).as_posix()
            expected.add(f"deepseek_triton_build/model_repository/{relative}")
    expected |= {f"deepseek_triton_tools/docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    for part in ("build", "tools"):
        package = ROOT / part / f"deepseek_triton_{part}"
        templates = [path for path in package.rglob("templates/*.*") if path.suffix != ".pyc"]
        expected |= {path.relative_to(ROOT / part).as_posix() for path in templates}
    assert expected - names == set()
    tops = {name.split("/")[0] for name in names}
    packages = {"deepseek_triton_build", "deepseek_triton_client", "deepseek_triton_tools"}
    assert {top for top in tops if not top.endswith(".dist-info")} == packages


OF_THEIR_OWN = {"aiperf", "lm-eval", "pyarrow"}
"""Not installed here: programs whose extras stand alone (AIPerf needs transformers); pyarrow, which lm-eval brings."""


def test_no_extra_needs_torch(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = archive.read(name).decode().splitlines()
    required = [Requirement(line.partition(": ")[2]) for line in lines if line.startswith("Requires-Dist: ")]
    required = [requirement for requirement in required if requirement.name not in OF_THEIR_OWN]

    others = [requirement for requirement in required if requirement.name != "deepseek-triton"]
    needed = {requirement.name for requirement in others}
    for requirement in others:
        needed |= _needed(metadata.requires(requirement.name) or [], requirement.extras)
    assert {"numpy", "tokenizers", "huggingface-hub", "nvidia-pytriton"} <= needed
    assert needed.isdisjoint({"torch", "transformers"})


class Environment:
    """A fresh one with the wheel and what its metadata asks for, and nothing else.

    The dependencies are those of this environment, linked: what is tested is the wheel, not the network.
    """

    def __init__(self, folder, wheel, *extras):
        venv.create(folder)
        self.bin = folder / "bin"
        (site,) = folder.glob("lib/python*/site-packages")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
            (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        self.distributions = _needed(metadata.Distribution.at(site / name).requires, extras)
        for distribution in map(metadata.distribution, self.distributions):
            for top in {file.parts[0] for file in distribution.files if file.parts[0] != ".."} - {"__pycache__"}:
                (site / top).symlink_to(distribution.locate_file(top))

    def run(self, *argv, **options):
        """The command line; nothing of this environment is on the path."""
        command = [self.bin / "python", "-I", "-m", "deepseek_triton_tools.cli.main", *argv]
        return subprocess.run(command, capture_output=True, text=True, env={"PATH": ""}, **options)

    def python(self, program, **options):
        command = [self.bin / "python", "-I", "-c", program]
        return subprocess.run(command, capture_output=True, text=True, check=True, **options).stdout


def _needed(requirements, extras):
    """Names of the distributions, and of all that they need in turn."""
    found = set()
    for requirement in map(Requirement, requirements):
        marked = requirement.marker
        if marked is None or any(marked.evaluate({"extra": extra}) for extra in (*extras, "")):
            found.add(requirement.name)
            found |= _needed(metadata.requires(requirement.name) or [], requirement.extras)
    return found


@pytest.fixture(scope="module")
def base(wheel, tmp_path_factory):
    return Environment(tmp_path_factory.mktemp("base") / "venv", wheel)


def test_a_base_install_has_both_clients_and_both_verbs(base, model_server):
    assert base.distributions == {"certifi", "h11"}
    program = "from deepseek_triton_client import AsyncClient, Client; print(Client('localhost'), AsyncClient.__name__)"
    assert base.python(program) == "Client('http://localhost:8000', model_name='tensorrt_llm') AsyncClient\n"
    assert base.run("generate", "hi", "--url", model_server.url).stdout == "HI\n"
    assert base.run("chat", "--url", model_server.url, input="hi\n").stdout == "HI\n"
    many = base.run("generate", "--input", "-", "--output", "-", "--url", model_server.url, input='"hi"\n')
    assert '"text": "HI"' in many.stdout


EACH = """
import contextlib, io, json, sys
from deepseek_triton_tools.cli.main import main
found = []
for argv in json.loads(sys.stdin.read()):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(argv)
        except SystemExit as ended:
            code = ended.code or 0
    found.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(found))
"""
"""Runs each command line in one process, and prints the exit code and what was written to stdout and stderr."""


def test_a_base_install_says_what_other_verbs_need(base):
    plain = [["demo"], ["variants"], ["plan", "deepseek-r1"], ["build", "tiny", "--output", "x"], ["check", "."]]
    plain += [["warm", "files", "."], ["launch", "local", "."], ["completion", "bash"]]
    helps = [[argv[0], "--help"] for argv in plain] + [["generate", "--help"], ["chat", "--help"]]
    asked = [*plain, ["generate", "hi", "--url", "grpc://localhost"], ["--help"], *helps]
    found = json.loads(base.python(EACH, input=json.dumps(asked)))
    for argv, (code, out, err) in zip(plain, found, strict=False):
        assert (code, out) == (1, ""), argv
        [line] = err.splitlines()
        assert line.startswith(f"deepseek-triton {argv[0]}: ")
        assert line.endswith(f"; {install_extra('demo' if argv == ['demo'] else 'tools')}")
    (code, _, err), (_, page, _), *helped = found[len(plain) :]
    assert (code, len(err.splitlines()), "pip install '.[grpc]'" in err) == (2, 1, True)
    folder = Path(page.partition("such as docs/contract.md, are in ")[2].strip())
    assert ("site-packages" in str(folder), (folder / "contract.md").is_file()) == (True, True)
    for argv, (code, out, err) in zip(helps, helped, strict=True):
        assert (code, err, "examples:" in out) == (0, "", True), argv


def test_a_fresh_environment_generates_a_repository_from_the_wheel(wheel, tmp_path):
    environment = Environment(tmp_path / "venv", wheel, "tools")

    done = environment.run("build", "tiny", "--output", tmp_path / "repo", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "repo/tensorrt_llm/1/deepseek_backend/contract.py").is_file()
    supervise = tmp_path / "repo/tensorrt_llm/1/supervise.py"
    subprocess.run([sys.executable, "-E", "-B", supervise, "run", "--help"], check=True, capture_output=True)
    assert not list((tmp_path / "repo").rglob("__pycache__"))
