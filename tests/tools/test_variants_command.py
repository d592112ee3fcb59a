import json
from dataclasses import replace

import pytest

from deepseek_triton_build import PlanRequest, make_plan
from deepseek_triton_build.catalog import PRECISIONS, RELEASES, VLLM_VERSIONS, gpus, profiles, variants
from deepseek_triton_tools.cli.main import main
from deepseek_triton_tools.terminal import tables


def printed_by(capsys, *argv):
    assert main(["variants", *argv]) == 0
    return capsys.readouterr().out


VLLM_TABLE = "With --engine vllm"


def rows_of(printed):
    return {tuple(row[:2]): row[2:] for line in printed.splitlines() if (row := line.split())[2:]}


def test_everything_that_can_be_typed_is_in_it(capsys):
    printed = printed_by(capsys)

    served = [name for name, variant in variants().items() if variant.checkpoints]
    for name in (*served, *gpus(), *profiles(), *RELEASES, *VLLM_VERSIONS, *PRECISIONS, "26.07", "25.08"):
        assert name in printed
    assert "\x1b" not in printed


@pytest.mark.slow
def test_the_counts_are_the_published_ones(capsys):
    """Hardware requirements of TensorRT-LLM examples/models/core/deepseek_v3/README.md."""
    rows = rows_of(printed_by(capsys).partition(VLLM_TABLE)[0])

    names = rows["variant", "precision"]
    counts = dict(zip(names, rows["deepseek-r1", "fp8"], strict=True))
    assert counts == {
        "h100": "16",
        "h200": "8",
        "h20-96": "8",
        "h20-141": "8",
        "b200": "8",
        "gb200": "8",
        "gb200-nvl72": "8",
        "a100": "-",
        "since": "0.21.0",
    }
    assert dict(zip(names, rows["deepseek-r1", "fp4"], strict=True)) | {"since": ""} == {
        **dict.fromkeys(("h100", "h200", "h20-96", "h20-141", "a100"), "-"),
        **dict.fromkeys(("b200", "gb200", "gb200-nvl72"), "4(8)"),
        "since": "",
    }


def test_the_counts_with_vllm_are_those_of_its_plans(capsys):
    rows = rows_of(printed_by(capsys).partition(VLLM_TABLE)[2])

    names = rows["variant", "precision"]
    assert dict(zip(names, rows["deepseek-r1", "w4a16"], strict=True)) == {
        "h100": "8",
        "h200": "4",
        "h20-96": "8",
        "h20-141": "4",
        "a100": "-",
        **dict.fromkeys(("b200", "gb200", "gb200-nvl72"), "4"),
    }
    fp8 = dict(zip(names, rows["deepseek-r1", "fp8"], strict=True))
    assert fp8.pop("a100") == "-"
    wanted = PlanRequest(variant="deepseek-r1", precision="fp8", engine="vllm")
    assert fp8 == {gpu: str(make_plan(replace(wanted, gpu=gpu)).world_size) for gpu in fp8}


def test_weights_that_nobody_publishes_are_marked(capsys):
    rows = [row for line in printed_by(capsys).splitlines() if (row := line.split())[1:]]
    assert {tuple(row[:2]) for row in rows if row[1].endswith("*")} == {
        ("deepseek-v3", "fp4*"),
        ("deepseek-v3", "w4a8*"),
        ("deepseek-v3.1", "w4a8*"),
        ("deepseek-v3.2-exp", "fp4*"),
    }


def test_one_gpu_narrows_it(capsys):
    printed = printed_by(capsys, "--gpu", "H200")
    assert "h200" in printed
    assert "b200" not in printed
    assert main(["variants", "--gpu", "h300"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_json_has_reasons_and_what_fits_by_arithmetic(capsys):
    got = json.loads(printed_by(capsys, "--json"))

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
    assert [row["release"] for row in got["releases"]] == list(RELEASES)


@pytest.mark.slow
def test_on_a_terminal_no_name_is_broken(capsys, monkeypatch):
    monkeypatch.setattr(tables, "is_terminal", lambda: True)
    for columns in ("80", "140"):
        monkeypatch.setenv("COLUMNS", columns)
        printed = printed_by(capsys)
        for name in ("deepseek-v3.2-exp", "gb200-nvl72", "h20-141", "0.21.0", "precision", "26.07, 26.06"):
            assert name in printed
        assert "…" not in printed
