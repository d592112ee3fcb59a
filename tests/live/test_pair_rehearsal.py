"""The rehearsal of a disaggregated pair: what `build --profile disagg` writes, served and joined by the gateway."""

from pathlib import Path

import pytest
from live.conftest import serving

from conformance.running import gateway
from deepseek_triton_tools.server.server_process import ServerProcess
from support.restarted_server import fleet_of, up
from support.servers import build
from support.waiting import wait_for
from support.web import web


def line(server: ServerProcess) -> str:
    return f"{server.http_url}#metrics={server.metrics_port}"


@pytest.mark.parametrize("variant", ["tiny", pytest.param("tiny-r1", marks=pytest.mark.nightly)])
def test_a_built_pair_shares_a_chat(variant: str, tmp_path: Path) -> None:
    pair = build(tmp_path / "pair", variant, "--engine", "simulated", "--profile", "disagg")

    with serving(pair / "context") as context, serving(pair / "generation") as generation:
        access_log = tmp_path / "access.jsonl"
        options = ("--context-server", line(context), "--access-log", str(access_log))
        with gateway(line(generation), options=options, log=tmp_path / "log") as address:
            wait_for(lambda: up(address) == {context.http_url, generation.http_url}, lambda: fleet_of(address))
            [model] = web.get(f"{address}/v1/models").json()["data"]
            chat = {
                "model": model["id"],
                "messages": [{"role": "user", "content": "Why is the sky blue?"}],
                "max_tokens": 8,
            }
            answer = web.post(f"{address}/v1/chat/completions", json=chat).raise_for_status().json()

            assert answer["usage"]["completion_tokens"] == 8
            wait_for(lambda: f'"context_server":"{context.http_url}' in access_log.read_text(), access_log.read_text)
