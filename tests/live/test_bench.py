"""`deepseek-triton bench` against a real tritonserver, over HTTP, over gRPC, and through the gateway."""

import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from conformance.running import gateway
from deepseek_triton_tools.bench.result import read_result
from deepseek_triton_tools.server.server_process import ServerProcess
from support.commands import run_command
from support.made_up_bench import read_samples
from support.servers import build, url
from support.waiting import wait_for

_BENCH = (sys.executable, "-m", "deepseek_triton_tools.cli.main", "bench")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The simulated engine without a pace: as fast as the machine is."""
    with ServerProcess.serving(
        build(tmp_path_factory.mktemp("bench") / "r", "tiny", "--engine", "simulated")
    ) as served:
        yield served


def bench(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = run_command("bench", *words)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def metrics(server: ServerProcess) -> tuple[str, str]:
    return "--metrics-url", server.metrics_url


def only_run(*words: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The result and the figures of its one run."""
    document = json.loads(bench(*words, "--json").stdout)
    (run,) = document["points"][0]["runs"]
    return document, run["figures"]


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_sweep_counts_every_token_and_writes_every_file(server, scheme, tmp_path):
    folder = tmp_path / "result"
    load = ("--concurrency", "1,4", "--rounds", "3", "--repeat", "2", "--isl", "100", "--osl", "20")
    more = ("--gpus", "8", "--slo", "ttft=60000,tpot=60000", "--output", str(folder))
    done = bench(url(server, scheme), *load, *more, *metrics(server))

    result = read_result(folder)
    assert [(point.load.concurrency, len(point.runs)) for point in result.points] == [(1, 2), (4, 2)]
    assert (result.endpoint, result.gpus) == (f"triton-{scheme}", 8)
    for point in result.points:
        for run in point.runs:
            figures = run.figures
            assert figures.completed == figures.ttft_ms.count == 3 * point.load.concurrency
            assert (figures.failed, figures.cancelled, figures.short) == (0, 0, 0)
            assert figures.total_input_tokens == 100 * figures.completed
            assert figures.total_output_tokens == 20 * figures.completed
            assert figures.good_share == 1
            assert any(name.startswith("nv_inference_request_success") for name in run.server_metrics)
    serving = json.loads((folder / "concurrency_4.json").read_text())
    assert (serving["completed"], serving["max_concurrency"], serving["total_output_tokens"]) == (12, 4, 240)
    assert len(read_samples(folder / "concurrency_4_run_2.requests.jsonl.gz")) == 12
    assert len(list(csv.DictReader((folder / "figures.csv").read_text().splitlines()))) == 4
    assert "plotly" in (folder / "report.html").read_text().lower()
    assert "concurrency 4" in done.stdout
    assert "tok/s/GPU" in done.stdout
    assert "12 completed" in done.stderr


def test_later_turns_hold_the_answers_before(server):
    load = ("--concurrency", "2", "--num-prompts", "4", "--turns", "3", "--isl", "50", "--later-isl", "10")
    _, figures = only_run(server.http_url, *load, "--osl", "8", *metrics(server))
    # 50, then 50 + 8 + 10, then 50 + 8 + 10 + 8 + 10 tokens in each of four conversations.
    assert (figures["completed"], figures["total_input_tokens"]) == (12, 4 * (50 + 68 + 86))


def test_an_openai_endpoint_gives_the_same_counts(server, tmp_path):
    load = ("--rate", "50", "--num-prompts", "12", "--isl", "40", "--osl", "9", "--burstiness", "0.5")
    with gateway(server.http_url, log=tmp_path / "log") as address:
        document, figures = only_run(f"{address}/v1", *load)
        assert f"{address}/v1" in bench(address, code=1).stderr
        (tmp_path / "f").write_text('[{"conversations": [{"value": "Hello"}, {"value": "Hi"}]}]')
        only_run(f"{address}/v1", "--dataset", str(tmp_path / "f"), "--osl", "8", "--num-prompts", "1")
    assert document["endpoint"] == "openai"
    assert document["server"]["vocab_size"] > 0
    assert figures["completed"] == figures["lag_ms"]["count"] == 12
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (480, 108)


def test_texts_of_a_file_as_chats(server, tmp_path):
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"prompt": f"Question {number}?"}) + "\n" for number in range(5)))
    more = ("--set", "temperature=0.5", "--set", "ignore_eos=true", "--warmup", "2", *metrics(server))
    _, figures = only_run(server.http_url, "--dataset", str(texts), "--chat", "--osl", "6", *more)
    assert (figures["completed"], figures["total_output_tokens"]) == (3, 18)


def test_what_was_measured_is_shown_when_a_later_run_fails(server, tmp_path):
    folder = tmp_path / "result"
    folder.mkdir()
    (folder / "concurrency_2.json").mkdir()  # in the place of the second run's file
    load = ("--concurrency", "1,2,4", "--rounds", "2", "--isl", "8", "--osl", "4", "--seed", "4294967295")
    done = bench(server.http_url, *load, "--output", str(folder), *metrics(server), code=1)
    assert "concurrency 1" in done.stdout
    assert "concurrency 4" not in done.stdout
    assert "of 3 runs were measured" in done.stderr
    assert "concurrency_2.json" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert read_result(folder).points[0].runs[0].figures.completed == 2
    (folder / "bench.json").unlink()
    alone = bench(server.http_url, "--concurrency", "2", *load[2:], "--output", str(folder), *metrics(server), code=1)
    assert " runs" not in alone.stderr


def test_ctrl_c_keeps_what_was_measured(server, tmp_path):
    folder = tmp_path / "result"
    load = ("--concurrency", "2,4", "--num-prompts", "100000", "--isl", "8", "--osl", "4")
    with subprocess.Popen(
        [*_BENCH, server.http_url, *load, "--output", str(folder), *metrics(server)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        try:
            wait_for(lambda: _open_requests(server))
            os.killpg(running.pid, signal.SIGINT)
            out, err = running.communicate()
        finally:
            running.kill()
    assert running.returncode == 130, out + err
    assert "interrupted" in err
    (point,) = read_result(folder).points
    assert 0 < point.runs[0].figures.completed < 100_000
    assert point.runs[0].interrupted


def _open_requests(server: ServerProcess) -> bool:
    text = httpx.get(server.metrics_url, headers={"Connection": "close"}, trust_env=False).text
    lines = [line for line in text.splitlines() if line.startswith("deepseek_triton_requests_accepted_total")]
    return any(float(line.split()[-1]) > 500 for line in lines)


WRONG = [
    (("http://127.0.0.1:9",), "http://127.0.0.1:9"),
    (("URL", "--model", "gpt"), "gpt"),
    (("URL", "grpc://127.0.0.1:9"), "expected servers of one kind, got triton-grpc and triton-http"),
    (("URL/v2/models/tensorrt_llm",), "expected the server's own address"),
    (("http://127.0.0.1:9/v1", "--turns", "2"), "--turns: an OpenAI endpoint gives no token ids"),
    (("URL", "--rounds", "2", "--rate", "2"), "--rounds: with --rate only if there is --concurrency"),
    (("URL", "--set", "max_tokens=20"), "--set max_tokens: say it with --osl"),
    (
        ("URL", "--burstiness", "2", "--cancel-after", "1", "--full", "--later-isl", "5", "--num-prefixes", "2"),
        "--burstiness: only with --rate; --cancel-after: only with --cancel; --full: only with --preset; "
        "--later-isl: only with --turns; --num-prefixes: only with --prefix-len",
    ),
    (("URL", "--preset", "balanced", "--cancel", "5", "--cancel-after", "1"), "--cancel, --cancel-after: not with"),
    (("URL", "--json", "--against", "deepseek-r1 --gpu h200"), "--against: not with --json"),
    (("URL/v1", "--model-version", "1"), "--model-version: an OpenAI endpoint has none"),
    (("URL/v1",), "for Triton, leave /v1 and --endpoint out"),
    (("URL", "--chat"), "--chat: random prompts are token ids"),
    (("URL", "--set", "temprature=1"), "did you mean 'temperature'?"),
    (("URL", "--preset", "r1-h200-max-throughpu"), "did you mean r1-h200-max-throughput"),
    (("URL", "--slo", "ttft"), "expected limits in ms of ttft, tpot, itl, e2el, such as ttft=500,tpot=30"),
    (("URL", "--concurrency", "0"), "expected whole numbers from 1, such as 1,8,64"),
    (("URL", "--dataset", "/nowhere"), "/nowhere: No such file"),
    (("URL", "--isl", "9999999"), "expected prompts and answers of at most 163,840 tokens together"),
]
"""(words, what is said of them)"""


def test_a_wrong_command_is_one_line(server, subtests, tmp_path):
    folder = tmp_path / "result"
    for words, expected in WRONG:
        with subtests.test(words=words):
            given = [word.replace("URL", server.http_url) for word in words]
            done = run_command("bench", *given, "--output", str(folder))
            assert done.returncode in (1, 2)
            assert expected in done.stderr
            assert not (folder / "bench.json").exists()

    (tmp_path / "bench.json").write_text("{}")
    done = bench(server.http_url, "--output", str(tmp_path), code=2)
    assert "has a result already" in done.stderr
    assert (tmp_path / "bench.json").read_text() == "{}"
