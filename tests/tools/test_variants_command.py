import json
from dataclasses import replace

import pytest

from deepseek_triton_build import PlanRequest, make_plan
from deepseek_triton_build.catalog import CANDIDATES, PRECISIONS, RELEASES, VLLM_VERSIONS, gpus, profiles, variants
from deepseek_triton_tools.terminal import tables
from support.commands import run_command


def printed_by(*argv):
    done = run_command("variants", *argv)
    assert done.returncode == 0, done.stderr
    return done.stdout


VLLM_TABLE = "With --engine vllm"


def rows_of(printed):
    return {tuple(row[:2]): row[2:] for line in printed.splitlines() if (row := line.split())[2:]}


@pytest.mark.slow
def test_everything_that_can_be_typed_is_in_it():
    """Weights that nobody publishes are marked."""
    printed = printed_by()
    served = [name for name, variant in variants().items() if variant.checkpoints]
    names = (*served, *gpus(), *profiles(), *RELEASES, *VLLM_VERSIONS, *PRECISIONS, "26.07", "25.08")
    assert [name for name in names if name not in printed] == []
    assert "\x1b" not in printed
    rows = [row for line in printed.splitlines() if (row := line.split())[1:]]
    unpublished = {(name, f"{each}*") for name, variant in variants().items() for each in variant.own_checkpoints}
    assert {tuple(row[:2]) for row in rows if row[1].endswith("*")} == unpublished != set()
    one = printed_by("--gpu", "H200")
    assert ("h200" in one, "b200" in one) == (True, False)
    for gpu, since in (("gb200", "0.21.0"), ("gb300", "1.2.0")):
        rows = rows_of(printed_by("--gpu", gpu).partition(VLLM_TABLE)[0])
        assert rows["deepseek-r1", "fp8"] == ["8", since]
    refused = run_command("variants", "--gpu", "h300")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)


@pytest.mark.slow
def test_the_counts_are_the_published_ones_and_those_of_vllm_s_plans():
    """Hardware requirements of TensorRT-LLM examples/models/core/deepseek_v3/README.md."""

    def counts(rows, precision):
        return dict(zip(rows["variant", "precision"], rows["deepseek-r1", precision], strict=True))

    published, _, with_vllm = printed_by().partition(VLLM_TABLE)
    rows = rows_of(published)
    blackwell, ultra = ("b200", "gb200", "gb200-nvl72"), ("b300", "gb300", "gb300-nvl72")
    none = {"rtx-pro-6000": "-", "a100": "-"}
    eight = dict.fromkeys(("h200", "h20-96", "h20-141", *blackwell, *ultra), "8")
    assert counts(rows, "fp8") == {"h100": "16", **eight, **none, "since": "0.21.0"}
    none |= dict.fromkeys(("h100", "h200", "h20-96", "h20-141"), "-")
    four = dict.fromkeys(blackwell, "4(8)") | dict.fromkeys(ultra, "4")
    assert counts(rows, "fp4") | {"since": ""} == {**none, **four, "since": ""}

    rows = rows_of(with_vllm)
    four = dict.fromkeys(("h200", "h20-141", *blackwell), "4") | dict.fromkeys(ultra, "2")
    assert counts(rows, "w4a16") == {"h100": "8", "h20-96": "8", "rtx-pro-6000": "8", "a100": "-", **four}
    fp8 = counts(rows, "fp8")
    assert fp8.pop("a100") == "-"
    wanted = PlanRequest(variant="deepseek-r1", precision="fp8", engine="vllm")
    assert fp8 == {gpu: str(make_plan(replace(wanted, gpu=gpu)).world_size) for gpu in fp8}


@pytest.mark.slow
def test_json_has_reasons_and_what_fits_by_arithmetic():
    got = json.loads(printed_by("--json"))

    assert got["schema"] == "deepseek-triton/variants/1"
    (r1,) = [row for row in got["variants"] if (row["variant"], row["precision"]) == ("deepseek-r1", "fp8")]
    cells = {cell["gpu"]: cell for cell in r1["gpus"]}
    assert (cells["b200"]["published_gpus"], cells["b200"]["minimum_gpus"]) == (8, 4)
    assert (cells["h200"]["vllm_gpus"], cells["a100"]["vllm_gpus"]) == (8, None)
    assert [row["version"] for row in got["vllm"]] == list(VLLM_VERSIONS)
    assert "latency" in cells["b200"]["profiles"]
    assert cells["a100"]["published_gpus"] is None
    assert "Ampere" in cells["a100"]["reason"]
    assert {row["profile"] for row in got["profiles"]} == set(profiles())
    assert [row["release"] for row in got["releases"]] == [*CANDIDATES, *RELEASES]


@pytest.mark.slow
def test_on_a_terminal_no_name_is_broken(monkeypatch):
    monkeypatch.setattr(tables, "is_terminal", lambda: True)
    for columns in ("80", "140"):
        monkeypatch.setenv("COLUMNS", columns)
        printed = printed_by()
        for name in ("deepseek-v3.2-exp", "gb200-nvl72", "h20-141", "0.21.0", "precision", "26.07, 26.06"):
            assert name in printed
        assert "…" not in printed
