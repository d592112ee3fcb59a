"""The Pareto front of a search as a page in Chromium."""

import pytest

from deepseek_triton_tools.cli.main import main
from support.browser import CHROMIUM, Browser

SEARCH = ["plan", "deepseek-r1", "--gpu", "h200", "--gpus", "16", "--isl", "1024", "--osl", "1024"]
LIMITS = ["--sla", "ttft=2000,tpot=40"]

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def no_aiconfigurator(monkeypatch):
    monkeypatch.delenv("DEEPSEEK_TRITON_AICONFIGURATOR", raising=False)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")
def test_the_page_draws_the_front(capsys, tmp_path):
    page_file = tmp_path / "plan.html"
    assert main([*SEARCH, *LIMITS, "--report", str(page_file)]) == 0
    with Browser(tmp_path / "profile") as browser, browser.page(page_file.as_uri()) as page:
        page.wait("document.querySelectorAll('.picture .js-line').length == 2")
        assert page.run("document.title") == "Plan to an SLA: deepseek-r1 on 16 x h200, 1,024 + 1,024 tokens"
        assert page.run("document.documentElement.scrollWidth <= innerWidth")
        assert page.run("pictures.map(themed).map(({data, layout}) => Plotly.validate(data, layout) ?? [])") == [[]]
        assert page.run("pictures[0].data.map((line) => line.name)") == ["aggregated", "disaggregated", "the best"]
        assert page.complaints() == []
