"""The README, and the documentation as a site."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deepseek_triton_tools.cli.main import VERBS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")


def test_the_readme_is_short() -> None:
    """What doesn't fit belongs in docs/."""
    assert len(README) <= 7_000


def test_the_readme_lists_every_command() -> None:
    assert {verb for verb in VERBS if f"| `{verb}` |" not in README} == set()


def test_the_index_names_every_page() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md", "changelog.md"}
    index = (ROOT / "docs/index.md").read_text("utf-8")
    assert {page for page in pages if f"({page})" not in index} == set()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: a broken link or anchor fails."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", folder / "docs")
    for path in [ROOT / "mkdocs.yml", *ROOT.glob("*.md")]:
        shutil.copy(path, folder)
    done = subprocess.run(
        [Path(sys.executable).with_name("zensical"), "build", "--strict"], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / ".cache/site"


@pytest.mark.slow
def test_the_site_loads_nothing_from_the_network(site: Path) -> None:
    loaded = re.compile(
        r"""<(?:script|img|iframe)[^>]*\ssrc=["']?(https?:[^"' >]+)|<link[^>]*\shref=["']?(https?:[^"' >]+)"""
    )
    assert (site / "index.html").is_file()
    found = {
        address
        for page in site.rglob("*.html")
        for match in loaded.finditer(page.read_text("utf-8"))
        for address in match.groups()
        if address
    }
    assert found == set()
