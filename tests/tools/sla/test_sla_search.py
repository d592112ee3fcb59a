import json
import stat
import sys

import pytest

import deepseek_triton_tools.sla  # noqa: F401  (puts the backend's folder on the path)
from deepseek_backend.engines.simulated.pace_table import read_table
from deepseek_backend.engines.simulated.simulated_options import parse_options
from deepseek_triton_tools.cli.main import main
from deepseek_triton_tools.sla.model_paces import ModelPaces
from deepseek_triton_tools.sla.predictions import (
    PacedServer,
    SlaWorkload,
    aggregated_times,
    burst_ttft_ms,
    context_busy,
    context_ttft_ms,
)
from deepseek_triton_tools.sla.server_layouts import PacedModel, ServerLayout

SEARCH = ["plan", "deepseek-r1", "--gpu", "h200", "--isl", "1024", "--osl", "1024"]
H200 = PacedModel(architecture="deepseek-v3", precision="fp8", gpu="h200", kv_dtype="fp8")
TP8 = ServerLayout(num_gpus=8, expert_parallel_size=8)
WORKLOAD = SlaWorkload(isl=1024, osl=1024)


@pytest.fixture
def server():
    table = read_table(
        ModelPaces().tables(H200, [TP8])[TP8],
        num_ranks=1,
        num_draft_tokens=0,
        kv_cache_tokens=10**6,
        kv_token_bytes=35136,
    )
    return PacedServer(table=table, max_num_tokens=8192)


@pytest.fixture(autouse=True)
def no_aiconfigurator(monkeypatch, tmp_path):
    monkeypatch.delenv("DEEPSEEK_TRITON_AICONFIGURATOR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def document(capsys, *argv):
    assert main([*SEARCH, *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_more_requests_take_longer(server):
    times = [aggregated_times(server, WORKLOAD, rows) for rows in range(1, 200)]

    assert [one.tpot_ms for one in times] == sorted(one.tpot_ms for one in times)
    assert [one.ttft_ms for one in times] == sorted(one.ttft_ms for one in times)


def test_requests_that_come_at_once_wait_longer(server):
    (alone, several, most) = (burst_ttft_ms(server, WORKLOAD, requests) for requests in (1, 8, 80))

    assert alone == pytest.approx(aggregated_times(server, WORKLOAD, 1).ttft_ms, rel=0.01)
    # Eight prompts of 1,024 tokens fill one iteration; of 80, a request waits for 5.5 on average.
    assert most == pytest.approx(5.5 * several)


def test_a_context_server_is_as_busy_as_ttft_allows(server):
    busy = context_busy(server, WORKLOAD, 150)

    assert 0 < busy < 0.9
    assert context_ttft_ms(server, WORKLOAD, busy) == pytest.approx(150)
    assert context_busy(server, WORKLOAD, 1) == 0


@pytest.mark.slow
def test_the_best_fleet_keeps_the_limits_with_its_margin(capsys):
    found = document(capsys, "--gpus", "16", "--sla", "ttft=2000,tpot=40")

    assert "own deployment model" in found["source"]
    for fleet in found["fleets"]:
        assert fleet["tpot_ms"] * fleet["margin"] <= 40.1
        assert fleet["ttft_ms"] * fleet["margin"] <= 2001
        assert fleet["burst_ttft_ms"] > fleet["ttft_ms"]
        assert fleet["gpus_used"] <= 16
    assert {fleet["context_servers"] for fleet in found["fleets"]} == {0, 1}
    rates = [fleet["output_tps"] / fleet["margin"] for fleet in found["fleets"]]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--gpus", "8", "--sla", "tpot=40"], {"server"}),
        (
            ["--gpus", "32", "--isl", "4096", "--osl", "512", "--sla", "ttft=1000,tpot=25"],
            {"context", "generation"},
        ),
    ],
    ids=["a server", "a pair"],
)
def test_the_command_and_the_paces_are_accepted(capsys, tmp_path, options, names):
    found = document(capsys, *options, "--write-pace", str(tmp_path / "paces"))

    assert main([*found["build"].split()[1:-1], str(tmp_path / "built")]) == 0
    assert {file.stem for file in (tmp_path / "paces").iterdir()} == names
    for file in (tmp_path / "paces").iterdir():
        parse_options({"preset": json.loads(file.read_text())})


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        pytest.param(["--sla", "tpot=40"], "needs --gpus", id="no GPUs"),
        pytest.param(["--sla", "itl=40", "--gpus", "8"], "--sla has no itl", id="itl"),
        pytest.param(["--sla", "tpot=40", "--gpus", "8", "--mtp", "2"], "--mtp 0 and 3 only", id="drafts"),
        pytest.param(["--gpus", "8", "--write-pace", "paces"], "add --sla", id="no search"),
        pytest.param(["--sla", "tpot=40", "--gpus", "8", "--concurrency", "9"], "leave --concurrency out", id="load"),
    ],
)
def test_a_wrong_command_line_is_refused(capsys, argv, said):
    assert main([*SEARCH, *argv]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_limits_that_nothing_keeps_are_refused_with_the_nearest(capsys):
    assert main([*SEARCH, "--gpus", "8", "--sla", "tpot=1"]) == 1
    assert "the shortest TPOT is" in capsys.readouterr().err


@pytest.mark.slow
def test_a_python_without_aiconfigurator_is_refused_with_the_way_to_make_one(capsys):
    code = main([*SEARCH, "--gpus", "8", "--sla", "tpot=40", "--aiconfigurator", sys.executable])

    assert code == 1
    assert "pip install aiconfigurator-core==0.12.0" in capsys.readouterr().err


@pytest.mark.slow
def test_answers_of_aiconfigurator_are_kept(capsys, tmp_path):
    table = ModelPaces().tables(H200, [TP8])[TP8]
    asked = tmp_path / "asked"
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\nimport json, sys\nquestion = json.load(sys.stdin)\n"
        f"table = {table!r}\n"
        f"open({str(asked)!r}, 'a').write(str(len(question['layouts'])) + ' ')\n"
        "print(json.dumps({'version': '0.12.0', 'tables': [table if one['tp_size'] == 8 and one['moe_ep_size'] == 8"
        " else {'error': 'no data'} for one in question['layouts']]}))\n"
    )
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    options = ["--gpus", "8", "--sla", "tpot=40", "--aiconfigurator", str(python)]

    first = document(capsys, *options)
    again = document(capsys, *options)

    assert first == again
    assert first["source"].startswith("aiconfigurator-core 0.12.0")
    assert {fleet["layout"] for fleet in first["fleets"]} == {"TP8 EP8"}
    assert "no data" in first["refused"].values()
    counts = asked.read_text().split()
    assert counts.count("0") == 2  # each search asks for the version
    assert len(counts) == 3


@pytest.mark.slow
def test_the_simulated_engine_takes_the_pace_that_is_written(capsys, tmp_path):
    (tmp_path / "paces").mkdir()
    (tmp_path / "paces/context.json").write_text("of an earlier plan")
    found = document(capsys, "--gpus", "8", "--sla", "tpot=40", "--write-pace", str(tmp_path / "paces"))
    options = parse_options({"preset": json.loads((tmp_path / "paces" / "server.json").read_text())})

    (best, *_) = found["fleets"]
    assert options.limits.max_batch_size == best["requests_per_rank"]
    assert best["layout"] in options.preset
    assert [path.name for path in (tmp_path / "paces").iterdir()] == ["server.json"]
