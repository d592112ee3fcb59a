"""The wheel is whole: built, installed into a fresh environment, and a repository generated from it."""

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from deepseek_triton_build.source import model_repository

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


def test_the_wheel_holds_every_package_and_the_model_repository(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())

    for name in (
        "deepseek_triton_client/py.typed",
        "deepseek_triton_build/planning/plan.py",
        "deepseek_triton_build/catalog/variants.yaml",
        "deepseek_triton_build/releases/1.2.1.yaml",
        "deepseek_triton_tools/cli.py",
        "deepseek_triton_tools/monitoring/grafana-dashboard.json",
        "deepseek_triton_build/model_repository/tensorrt_llm/config.pbtxt",
        "deepseek_triton_build/model_repository/tensorrt_llm/1/model.py",
    ):
        assert name in names
    backend = model_repository() / "tensorrt_llm/1"
    for path in backend.rglob("*.py"):
        relative = path.relative_to(model_repository()).as_posix()
        assert f"deepseek_triton_build/model_repository/{relative}" in names


def test_the_wheel_holds_nothing_else(wheel):
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}

    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "deepseek_triton_build", "deepseek_triton_client", "deepseek_triton_tools",
    }  # fmt: skip


def test_a_fresh_environment_generates_a_repository_from_the_wheel(wheel, tmp_path):
    # The dependencies come from this environment's site-packages: what is tested is the wheel, not the network.
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check", wheel], check=True
    )
    site = subprocess.run(
        [python, "-c", "import site; print(site.getsitepackages()[0])"], check=True, capture_output=True, text=True
    ).stdout.strip()
    here = next(path for path in sys.path if path.endswith("site-packages"))
    for package in (
        "yaml",
        "rich",
        "httpx",
        "httpcore",
        "h11",
        "anyio",
        "idna",
        "certifi",
        "pygments",
        "markdown_it",
        "mdurl",
    ):
        (Path(site) / package).symlink_to(Path(here) / package)

    command = [tmp_path / "venv" / "bin" / "deepseek-triton", "build", "tiny", "--output", tmp_path / "repo"]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, env={"PATH": ""})

    assert (tmp_path / "repo/tensorrt_llm/1/deepseek_backend/contract.py").is_file()
    assert not list((tmp_path / "repo").rglob("__pycache__"))
