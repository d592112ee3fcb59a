"""The warm-up of `triton_config.warmup` on a real tritonserver: before READY, without a trace, and never in the way."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from live.conftest import serving

from deepseek_triton_client import Client
from deepseek_triton_tools.server.server_process import ServerProcess
from support.scraping import published, value
from support.servers import build, change_yaml
from support.web import web

TOO_LONG = 1_000_000
MAX_S = 2


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The twin, which is given more than it can take in `max_s`: the third shape alone lasts longer."""
    preset = "h200x8-r1-fp8-min-latency"
    folder = build(
        tmp_path_factory.mktemp("warmed") / "repository", "tiny", "--engine", "simulated", "--preset", preset
    )
    shapes = [[2, 64], [1, TOO_LONG], [1000, 64]]
    change_yaml(folder / "tensorrt_llm/1/model.yaml", warmup={"shapes": shapes, "max_s": MAX_S}, metrics_period_s=0.1)
    return folder


@pytest.fixture(scope="module")
def warmed(repository: Path) -> Iterator[ServerProcess]:
    with serving(repository) as server:
        yield server


def test_the_server_is_ready_after_it_and_no_counter_has_seen_it(warmed: ServerProcess) -> None:
    """What it did not reach by max_s, or could not send, keeps nobody waiting."""
    log = "\n".join(warmed.log_tail)
    series = published(warmed, lambda series: "load_duration_seconds" in {name for name, _ in series})
    counted = {
        key: number
        for key, number in series.items()
        if key[0].endswith(("_total", "_count", "_sum", "_bucket", "inflight_sequences", "inflight_tokens"))
    }

    assert web.get(f"{warmed.http_url}/v2/models/tensorrt_llm/ready").status_code == 200
    assert value(series, "load_duration_seconds", phase="warmup") >= MAX_S
    assert value(series, "ready") == 1
    assert len(counted) > 20
    assert set(counted.values()) == {0}
    assert "warm-up 1 of 3: 2 requests of 64 tokens: first " in log
    assert "left out 1 request of 1,000,000 tokens" in log
    assert "1 of 3 shapes in " in log
    assert log.index(f"ended after max_s, {MAX_S} s") < log.index("is ready after")


def test_the_first_request_is_the_first_that_is_counted(warmed: ServerProcess) -> None:
    with Client(warmed.http_url) as client:
        assert client.generate("Hello", max_tokens=5, ignore_eos=True).num_output_tokens == 5

    series = published(warmed, lambda series: value(series, "requests_finished_total", outcome="length") > 0)
    assert value(series, "requests_accepted_total") == 1
    assert value(series, "generated_tokens_total") == 5
    assert value(series, "inflight_sequences") == 0
