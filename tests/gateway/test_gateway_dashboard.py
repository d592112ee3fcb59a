"""The gateway's Grafana dashboard shows every metric of the gateway, and nothing else."""

import json
import re
from pathlib import Path

from deepseek_triton_tools.gateway.observers import FAMILIES, PREFIX

DASHBOARD = json.loads(
    (Path(__file__).resolve().parents[2] / "tools/monitoring/grafana-gateway.json").read_text("utf-8")
)
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [variable["query"]["query"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"]
TARGETS = [target for panel in PANELS for target in panel["targets"]]
FAMILY_OF = {
    series: family
    for family in FAMILIES
    for series in ([family.name + end for end in ("_bucket", "_sum", "_count")] if family.buckets else [family.name])
}


def names_in(expression):
    return re.findall(rf"\b{PREFIX}\w+", expression)


def test_every_metric_is_shown():
    shown = {FAMILY_OF[name].name for target in TARGETS for name in names_in(target["expr"])}
    assert shown == {family.name for family in FAMILIES}


def grouped(expression):
    return {label for labels in re.findall(r"by \(([^)]*)\)", expression) for label in labels.split(", ")}


def test_an_expression_has_labels_that_exist():
    for expression in [*QUERIES, *(target["expr"] for target in TARGETS)]:
        for name in names_in(expression):
            family = FAMILY_OF[name]
            labels = {*family.labels, "instance", "job"} | ({"le"} if family.buckets else set())
            selectors = re.findall(rf"{name}\{{([^}}]*)\}}", expression)
            used = {label for selector in selectors for label in re.findall(r"(\w+)(?:=~|!=|=)", selector)}
            assert used | grouped(expression) <= labels, expression
            is_rate = family.kind != "gauge" and not expression.startswith("label_values")
            assert ("rate(" in expression) is is_rate, expression
            assert "histogram_quantile" not in expression or name.endswith("_bucket"), expression
    for target in TARGETS:
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= grouped(target["expr"])
