"""A secret goes in by every way that there is, and nothing that comes out has it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from deepseek_triton_client import AsyncClient, Client
from deepseek_triton_client.testing import FakeServer
from deepseek_triton_tools.gateway.settings import GatewaySettings, ModelSettings
from support.commands import run_command
from support.servers import build
from support.supervising import free_ports
from support.waiting import wait_for
from support.web import web

MARK = "s3cretMARK"
CLI = [sys.executable, "-m", "deepseek_triton_tools.cli.main"]


def run(*argv: str, **variables: str) -> str:
    """Everything that a command prints, whether it succeeds or not."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        done = run_command(*argv)
    return done.stdout + done.stderr


def test_a_gateway_tells_no_secret(tmp_path: Path) -> None:
    made = subprocess.run([*CLI, "gateway", "--new-key", "ann"], capture_output=True, text=True)
    key = made.stderr.split()[-1]
    (tmp_path / "keys").write_text(f"{made.stdout.strip()} admin=yes\n")
    (tmp_path / "upstream").write_text(f"Bearer {MARK}\n")
    (port,) = free_ports(1)
    with FakeServer() as server:
        options = [
            "--server",
            server.url,
            "--port",
            str(port),
            "--keys",
            str(tmp_path / "keys"),
            "--metrics-port",
            "none",
        ]
        options += [
            "--upstream-header",
            f"Authorization=@{tmp_path / 'upstream'}",
            "--access-log",
            str(tmp_path / "access"),
        ]
        with open(tmp_path / "log", "wb") as log:
            environment = os.environ | {"HF_TOKEN": MARK}
            gateway = subprocess.Popen([*CLI, "gateway", *options], stdout=log, stderr=log, env=environment)
        told = []
        try:
            address = f"http://127.0.0.1:{port}"
            wait_for(lambda: _is_up(address))
            for secret in (key, f"{MARK}-key"):
                headers = {"Authorization": f"Bearer {secret}"}
                for path in ("/v1/models", "/fleet", "/metrics", "/v1/nothing", "/v1/chat/completions"):
                    told.append(web.get(address + path, headers=headers).text)
                body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
                told.append(web.post(f"{address}/v1/chat/completions", json=body, headers=headers).text)
                told.append(web.post(f"{address}/v1/completions", content=b"{", headers=headers).text)
            told.append(Path(f"/proc/{gateway.pid}/cmdline").read_text())
        finally:
            gateway.terminate()
            gateway.wait()
    told += [(tmp_path / name).read_text() for name in ("log", "access")]
    assert (tmp_path / "access").read_text()
    for text in told:
        assert MARK not in text
        assert key not in text


def _is_up(address: str) -> bool:
    try:
        return web.get(f"{address}/health").status_code == 200
    except httpx.TransportError:
        return False


def test_a_refused_header_is_not_shown(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for value in (f"Authorization=Bearer {MARK}\n", f"bad name={MARK}", f"host={MARK}", f"={MARK}"):
        with subtests.test(value.replace(MARK, "...")):
            printed = run("gateway", "--server", "http://127.0.0.1:9", "--upstream-header", value)
            assert "--upstream-header" in printed
            assert MARK not in printed
    for header in ({"Authorization": f"Bearer {MARK}"}, [{"name": "Authorization", "value": MARK}]):
        (tmp_path / "gateway.yaml").write_text(json.dumps({"server": "http://127.0.0.1:9", "upstream-header": header}))
        printed = run("gateway", "--config", str(tmp_path / "gateway.yaml"))
        assert "upstream-header: expected text or a number, got a mapping" in printed
        assert MARK not in printed


def test_a_wrong_file_of_keys_is_told_without_its_keys(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"sk-{MARK}\n{MARK} name=ann\n")
    printed = run("gateway", "--server", "http://127.0.0.1:9", "--keys", str(tmp_path / "keys"))

    assert "line 1" in printed
    assert MARK not in printed


def test_settings_show_no_secret() -> None:
    settings = GatewaySettings((ModelSettings(("http://a:8000",)),), upstream_headers=(("key", MARK),))
    assert MARK not in repr(settings)
    for client in (Client("http://a", token=MARK, headers={"x": MARK}), AsyncClient("http://a", token=MARK)):
        assert MARK not in repr(client)


def test_clients_errors_show_no_secret() -> None:
    printed = run("generate", "hi", "--url", "http://127.0.0.1:9", DEEPSEEK_TRITON_TOKEN=MARK)

    assert printed
    assert MARK not in printed


def test_what_is_rendered_has_no_token(tmp_path: Path, subtests: pytest.Subtests) -> None:
    repository = build(tmp_path / "repository", "deepseek-r1", "--gpu", "h200", "--gpus", "8")
    for form in ("local", "docker", "kubernetes", "slurm"):
        with subtests.test(form):
            launch = ("launch", form, str(repository), "--dry-run")
            printed = run(*launch, HF_TOKEN=MARK, HF_HUB_CACHE=str(tmp_path))
            assert len(printed.splitlines()) > 20
            assert MARK not in printed
            refused = run(*launch, "--env", f"HF_TOKEN={MARK}")
            assert "HF_TOKEN: everybody can read a command line" in refused
            assert MARK not in refused


def test_repositories_and_reports_have_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", MARK)
    repository = build(tmp_path / "repository", "tiny")
    printed = run("check", str(repository)) + run("doctor", "--json", str(repository))

    assert json.loads(printed[printed.index("{") : printed.rindex("}") + 1])
    assert MARK not in printed
    for path in repository.rglob("*"):
        assert not path.is_file() or MARK.encode() not in path.read_bytes()
