"""The dashboard and the scrape example name only metrics that the backend has, and the dashboard shows all of them."""

import json
import re
from pathlib import Path

import pytest
import yaml

from deepseek_backend.backend_metrics import COMMON_LABELS, FAMILIES, PREFIX, ROUTED_BLOCKS, ROUTED_REQUESTS
from deepseek_triton_tools.server.server_process import ServeOptions

MONITORING = Path(__file__).resolve().parents[2] / "tools" / "monitoring"
DASHBOARD = json.loads((MONITORING / "grafana-dashboard.json").read_text(encoding="utf-8"))

SCRAPED_LABELS = {"instance", "job", *COMMON_LABELS}
"""Labels that every series has once Prometheus has scraped it."""
NOT_SHOWN = {ROUTED_REQUESTS.name, ROUTED_BLOCKS.name}
"""Metric families that are deliberately on no panel: they repeat numbers of others, for routers."""
FAMILY_OF = {name: family for family in FAMILIES for name in family.series_names}
TARGETS = [(panel["title"], target) for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
QUERIES = [
    (f"${variable['name']}", variable["query"]["query"])
    for variable in DASHBOARD["templating"]["list"]
    if variable["type"] == "query"
]
EXPRESSIONS = [(title, target["expr"]) for title, target in TARGETS] + QUERIES
"""Title and PromQL of every panel and every variable."""


def names_in(expression):
    return re.findall(rf"\b{PREFIX}\w+", expression)


def labels_of(name):
    return {*FAMILY_OF[name].labels, *SCRAPED_LABELS} | ({"le"} if name.endswith("_bucket") else set())


def grouped_by(expression):
    return [set(re.split(r",\s*", labels)) for labels in re.findall(r"\bby \(([^)]*)\)", expression)]


def test_every_expression_names_series_and_labels_that_exist(subtests):
    """Counters are asked for their rate, and quantiles for buckets."""
    for where, expression in EXPRESSIONS:
        with subtests.test(where):
            names = names_in(expression)
            assert names
            assert set(names) <= FAMILY_OF.keys()
            for name, selector in re.findall(rf"\b({PREFIX}\w+)\{{([^}}]*)\}}", expression):
                assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector)) <= labels_of(name)
            for labels in grouped_by(expression):
                assert labels <= set.intersection(*map(labels_of, names))
            for name in names:
                is_counted = name.endswith(("_total", "_bucket", "_sum", "_count"))
                assert bool(re.search(rf"rate\({name}\b", expression)) == is_counted
            if "histogram_quantile" in expression:
                assert "by (le)" in expression
                assert all(name.endswith("_bucket") for name in names)
    for title, target in TARGETS:  # a legend shows labels that the result has
        there = set().union(*grouped_by(target["expr"])[:1])
        if "sum" not in target["expr"]:
            there = set.union(*map(labels_of, names_in(target["expr"])))
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= there, title


def test_every_family_is_on_the_dashboard():
    shown = {name for _, expression in EXPRESSIONS for name in names_in(expression)}
    assert {family.name for family in FAMILIES if not shown & set(family.series_names)} == NOT_SHOWN


def test_the_dashboard_can_be_imported_anywhere():
    """The data source is a variable, ids are unique, and panels don't overlap."""
    panels = DASHBOARD["panels"]
    assert [v["name"] for v in DASHBOARD["templating"]["list"]] == ["datasource", "model", "instance"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        for part in (panel, *panel.get("targets", [])):
            assert part.get("datasource", {"uid": "${datasource}"})["uid"] == "${datasource}"


def test_the_scrape_example_has_the_default_metrics_port_of_serve():
    document = yaml.safe_load((MONITORING / "prometheus.yml").read_text(encoding="utf-8"))

    (job,) = document["scrape_configs"]
    assert job["static_configs"][0]["targets"] == [f"localhost:{ServeOptions(repository=Path()).metrics_port}"]


@pytest.mark.documents
def test_docs_metrics_md_describes_every_family():
    page = (MONITORING.parents[1] / "docs/metrics.md").read_text(encoding="utf-8").partition("## The gateway")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \| (.*) \|$", page, re.MULTILINE)

    assert rows == [
        (f.name, f.kind.name.lower(), ", ".join(f"`{label}`" for label in f.labels), f.help) for f in FAMILIES
    ]
