import json
import shlex
import stat
import sys

import pytest
import yaml

import deepseek_triton_tools.sla  # noqa: F401  (puts the backend's folder on the path)
from deepseek_backend.engines.simulated.presets import read_table
from deepseek_backend.engines.simulated.simulated_options import parse_options
from deepseek_triton_build import DisaggregatedPlan, PlanRequest, Workload
from deepseek_triton_tools.bench.result import Slo
from deepseek_triton_tools.cli.main import main
from deepseek_triton_tools.sla import fleets
from deepseek_triton_tools.sla.paces import ModelPaces, PacedModel, ServerLayout
from deepseek_triton_tools.sla.sla_plan import plan_to_sla

SEARCH = ["plan", "deepseek-r1", "--gpu", "h200", "--isl", "1024", "--osl", "1024"]
H200 = PacedModel(architecture="deepseek-v3", precision="fp8", gpu="h200", kv_dtype="fp8")
TP8 = ServerLayout(num_gpus=8, expert_parallel_size=8)
LIMITS = ["--sla", "tpot=40", "--gpus", "8"]
PAIRED = ["--gpus", "32", "--isl", "4096", "--osl", "512", "--sla", "ttft=1000,tpot=25"]
WORKLOAD = fleets.SlaWorkload(isl=1024, osl=1024)


@pytest.fixture
def server():
    pace = ModelPaces().tables(H200, [TP8])[TP8]
    sizes = {"num_ranks": 1, "num_draft_tokens": 0, "kv_cache_tokens": 10**6, "kv_token_bytes": 35136}
    return fleets.PacedServer(table=read_table(pace, **sizes), max_num_tokens=8192)


@pytest.fixture(autouse=True)
def no_aiconfigurator(monkeypatch, tmp_path):
    monkeypatch.delenv("DEEPSEEK_TRITON_AICONFIGURATOR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def search(capsys):
    """Searches with these words, and returns the JSON document."""

    def run(*argv):
        assert main([*SEARCH, *map(str, argv), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_more_requests_take_longer(server):
    times = [fleets.aggregated_times(server, WORKLOAD, rows) for rows in range(1, 200)]

    assert [one.tpot_ms for one in times] == sorted(one.tpot_ms for one in times)
    assert [one.ttft_ms for one in times] == sorted(one.ttft_ms for one in times)


def test_requests_that_come_at_once_wait_longer(server):
    (alone, several, most) = (fleets.burst_ttft_ms(server, WORKLOAD, requests) for requests in (1, 8, 80))

    assert alone == pytest.approx(fleets.aggregated_times(server, WORKLOAD, 1).ttft_ms, rel=0.01)
    # Eight prompts of 1,024 tokens fill one iteration; of 80, a request waits for 5.5 on average.
    assert most == pytest.approx(5.5 * several)


def test_a_context_server_is_as_busy_as_ttft_allows(server):
    busy = fleets.context_busy(server, WORKLOAD, 150)

    assert 0 < busy < 0.9
    assert fleets.context_ttft_ms(server, WORKLOAD, busy) == pytest.approx(150)
    assert fleets.context_busy(server, WORKLOAD, 1) == 0


@pytest.mark.slow
def test_the_best_fleet_keeps_the_limits_with_its_margin(search):
    found = search("--gpus", "16", "--sla", "ttft=2000,tpot=40")

    assert "own deployment model" in found["source"]
    for fleet in found["fleets"]:
        assert fleet["tpot_ms"] * fleet["margin"] <= 40.1
        assert fleet["ttft_ms"] * fleet["margin"] <= 2001
        assert fleet["burst_ttft_ms"] > fleet["ttft_ms"]
        assert fleet["gpus_used"] <= 16
    assert {fleet["context_servers"] for fleet in found["fleets"]} == {0, 1}
    rates = [fleet["output_tps"] / fleet["margin"] for fleet in found["fleets"]]
    assert rates == sorted(rates, reverse=True)


PAIR = {"context", "generation"}


@pytest.mark.slow
def test_the_fewest_gpus_for_a_rate(search):
    limits = ["--sla", "ttft=2000,tpot=40"]
    needed = []
    for rate in (0.5, 20, 200):
        found = search(*limits, "--rate", rate)
        ranks = [(fleet["gpus_used"], fleet["e2el"]) for fleet in map(with_margin, found["fleets"])]
        assert ranks == sorted(ranks)
        assert found["gpus"] == ranks[0][0]
        needed.append(found["gpus"])
        for fleet in found["fleets"]:
            assert fleet["tpot_ms"] * fleet["margin"] <= 40.1
            assert fleet["ttft_ms"] * fleet["margin"] <= 2001
            assert fleet["requests_per_s"] >= rate - 0.001
            if not fleet["context_servers"]:  # with one server less it would be too few
                assert fleet["requests_per_s"] * (fleet["servers"] - 1) / fleet["servers"] < rate
    assert needed == sorted(needed)
    # The best fleet of so many GPUs serves the rate, and that of the next smaller number does not.
    assert search(*limits, "--gpus", needed[1])["fleets"][0]["requests_per_s"] >= 20
    assert search(*limits, "--gpus", needed[1] - 8)["fleets"][0]["requests_per_s"] < 20


def with_margin(fleet):
    slow = {key: fleet[f"{key}_ms"] * fleet["margin"] for key in ("ttft", "tpot")}
    return {**fleet, "e2el": slow["ttft"] + (1024 - 1) * slow["tpot"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "names", "kv"),
    [
        (LIMITS, {"server"}, ("fp8", 35136)),
        (["--gpus", "8", "--sla", "tpot=60", "--profile", "throughput"], {"server"}, ("auto", 70272)),
        (PAIRED, PAIR, ("auto", 70272)),
        ([*PAIRED, "--kv-cache-dtype", "fp8"], PAIR, ("fp8", 35136)),
        # With drafts, of a checkpoint in FP4 that has an FP8 KV cache.
        ([*PAIRED, "--gpu", "b200", "--mtp", "1"], PAIR, ("auto", 35712)),
    ],
    ids=["a server", "no chunks", "a pair", "a pair of FP8", "a pair with drafts"],
)
def test_the_command_builds_what_was_planned(search, capsys, tmp_path, options, names, kv):
    paces, built = tmp_path / "paces", tmp_path / "built"
    paces.mkdir()
    (paces / "context.json").write_text("of an earlier plan")
    found = search(*options, "--write-pace", paces)

    assert main([*shlex.split(found["build"])[1:-1], str(built)]) == 0
    assert main(["check", str(built)]) == 0
    best = found["fleets"][0]
    layouts = {"server": best["layout"], "generation": best["layout"], "context": best["context_layout"]}
    assert {file.stem for file in paces.iterdir()} == names
    for name in names:
        pace = json.loads((paces / f"{name}.json").read_text())
        (config,) = (built if name == "server" else built / name).glob("*/1/model.yaml")
        written = yaml.safe_load(config.read_text())
        attention = "DP" if written["enable_attention_dp"] else "TP"
        layout = f"{attention}{written['tensor_parallel_size']} EP{written['moe_expert_parallel_size']}"
        assert layout == layouts[name]
        limits = ("max_batch_size", "max_num_tokens")
        assert [written[limit] for limit in limits] == [pace[limit] for limit in limits]
        assert (written["kv_cache_config"]["dtype"], pace["kv_token_bytes"]) == kv
        if name != "context":
            assert written["max_batch_size"] == best["requests_per_rank"]
            assert pace["kv_cache_tokens"] >= best["requests_per_rank"] * sum(found["workload"].values())
        # The simulated engine takes it.
        simulated = parse_options({"preset": pace})
        assert simulated.limits.max_batch_size == written["max_batch_size"]
        assert layouts[name] in simulated.preset

    capsys.readouterr()
    assert main([*shlex.split(found["rehearsal"])[1:-1], str(tmp_path / "rehearsal")]) == 0
    if names == PAIR:
        joined = capsys.readouterr().out
        assert joined.count("--context-server ") == best["context_servers"]
        assert joined.count("--server ") == best["servers"]


@pytest.mark.slow
def test_a_pair_is_searched_with_its_own_kv_cache():
    request = PlanRequest(variant="deepseek-r1", gpu="h200", num_gpus=32, workload=Workload(isl=4096, osl=512))
    plan = plan_to_sla(request, Slo(ttft_ms=1000, tpot_ms=25), None)
    best = plan.fleets[0]

    assert isinstance(plan.built, DisaggregatedPlan)
    for candidate, side in ((best.context, plan.built.context), (best.server, plan.built.generation)):
        assert candidate.table.kv_token_bytes == side.budget.kv_bytes_per_token == 70272


@pytest.mark.slow
def test_the_command_keeps_what_was_asked_for(search):
    asked = ["--image", "26.07", "--model", "/models/R1", "--kv-cache-dtype", "fp8", "--no-decoupled"]
    for options in (LIMITS, PAIRED):
        words = shlex.split(search(*options, *asked, "--set", "stream_interval=5")["build"])
        for option, value in zip(asked[:-1:2], asked[1:-1:2], strict=True):
            assert words[words.index(option) + 1] == value
        assert "--no-decoupled" in words
        assert words[words.index("stream_interval=5") - 1] == "--set"
        assert "--format trtllm-serve" in search(*options, "--trtllm", "1.3.0rc29")["build"]


REFUSED = [
    (["--sla", "tpot=40"], "needs --gpus"),
    ([*LIMITS, "--rate", "2"], "give one of them"),
    (["--gpus", "8", "--rate", "2"], "--rate, --aiconfigurator and --write-pace are for a search"),
    (["--sla", "itl=40", "--gpus", "8"], "--sla has no itl"),
    ([*LIMITS, "--mtp", "4"], "--mtp 0 to 3, not 4"),
    (["--gpus", "8", "--write-pace", "paces"], "add --sla"),
    ([*LIMITS, "--concurrency", "9"], "leave --concurrency out"),
    ([*LIMITS, "--profile", "gen"], "leave --profile gen out"),
    ([*LIMITS, "--engine", "vllm"], "--sla plans for TensorRT-LLM"),
    ([*LIMITS, "--engine", "simulated"], "rehearsed with --write-pace"),
    ([*LIMITS, "--pp", "2"], "leave --pp out"),
    ([*LIMITS, "--trtllm", "0.21.0"], "for TensorRT-LLM 1.0.0 and newer"),
    ([*LIMITS, "--from-bench", "x.json"], "leave --from-bench out"),
    (
        [*LIMITS, "--set", "max_batch_size=3", "--set", "cuda_graph_config=null"],
        "--set max_batch_size, cuda_graph_config: --sla chooses this itself",
    ),
]


def test_a_wrong_command_line_is_refused(capsys):
    of_v4 = (["plan", "deepseek-v4-flash", *SEARCH[2:], *LIMITS], "no paces of deepseek-v4-flash")
    for argv, said in (of_v4, *(([*SEARCH, *argv], said) for argv, said in REFUSED)):
        assert main(argv) == 2
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_search_that_finds_nothing_is_refused_with_the_nearest(capsys):
    refused = {
        ("--gpus", "8", "--sla", "tpot=1"): "the shortest TPOT is",
        ("--rate", "2", "--sla", "tpot=1"): "raise --sla\n",
        ("--rate", "2", "--sla", "tpot=40", "--gpu", "h20"): "how many GPUs serve 2 requests/s is unknown: no layout",
        (*LIMITS, "--gpu", "h100"): "no layout can be searched: TP8 EP8: deepseek-r1 (fp8) on 8 x h100 does not fit",
        (*LIMITS, "--aiconfigurator", sys.executable): "pip install aiconfigurator-core==0.12.0",
    }
    for argv, said in refused.items():
        assert main([*SEARCH, *argv]) == 1
        error = capsys.readouterr().err
        assert said in error
        assert "context" not in error  # what holds of both sides is said once


@pytest.mark.slow
def test_the_rules_about_both_sides_leave_pairs_out(search):
    found = search(*PAIRED, "--set", "disable_overlap_scheduler=false")
    assert {fleet["context_servers"] for fleet in found["fleets"]} == {0}
    assert "G003" in found["refused"]["TP8 EP8 context + TP8 EP8"]


def environment(tmp_path, has_data):
    """A folder like that of an environment, whose Python answers as AIConfigurator does.

    :param has_data: the layouts that it has data for, as an expression on a question's `one`.
    """
    python = tmp_path / "environment/bin/python"
    python.parent.mkdir(parents=True)
    answers = tmp_path / "answers.py"
    answers.write_text(
        "import json, sys\nquestion = json.load(sys.stdin)\n"
        f"table = {ModelPaces().tables(H200, [TP8])[TP8]!r}\n"
        f"open({str(tmp_path / 'asked')!r}, 'a').write(str(len(question['layouts'])) + ' ')\n"
        f"print(json.dumps({{'version': '0.12.0', 'tables': [table if {has_data} else {{'error': 'no data'}}"
        " for one in question['layouts']]}))\n"
    )
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{answers}"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return tmp_path / "environment"


@pytest.mark.slow
def test_answers_of_aiconfigurator_are_kept(search, tmp_path):
    place = environment(tmp_path, "one['tp_size'] == 8 and one['moe_ep_size'] == 8")
    first, again = (search(*LIMITS, "--aiconfigurator", place) for _ in range(2))

    assert first == again
    assert first["source"].startswith("aiconfigurator-core 0.12.0")
    assert {fleet["layout"] for fleet in first["fleets"]} == {"TP8 EP8"}
    assert "no data" in first["refused"].values()
    counts = (tmp_path / "asked").read_text().split()
    assert counts.count("0") == 2  # each search asks for the version
    assert len(counts) == 4  # once for each type of the KV cache: FP8 on a server, 16 bits on a pair
