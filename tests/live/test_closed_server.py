"""A real server, and those who would harm it: clients at its side doors, and a hostile checkpoint."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from deepseek_triton_client import Client
from deepseek_triton_tools.host.tritonserver import find_tritonserver
from deepseek_triton_tools.server.server_process import ServerProcess
from support.servers import build
from support.supervising import free_ports
from support.web import web

Addresses = tuple[str, str, int]
"""HTTP and gRPC, and the process above the server."""
TRIGGER = "please loop"
LOOP = "{% for a in range(99999) %}"
HOSTILE = (
    f"{{% if messages[-1].content == '{TRIGGER}' %}}{LOOP * 4}{'{% endfor %}' * 4}{{% endif %}}"
    "{{ messages[-1].content }}"
)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build(tmp_path_factory.mktemp("closed") / "repository", "tiny")
    (template,) = folder.glob("tensorrt_llm/1/*/tokenizer_config.json")
    (template.parent / "chat_template.jinja").write_text(HOSTILE)
    return folder


@pytest.fixture(scope="module", params=["serve", "start.sh"])
def addresses(repository: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if request.param == "serve":
        own = ("--http-restricted-api", "trace,statistics:key=value")  # the others stay closed
        with ServerProcess.serving(repository, server_args=own) as server:
            yield server.http_url, f"127.0.0.1:{server.grpc_port}", server.pid
        return
    yield from started_by_script(repository, tmp_path_factory.mktemp("script"))


def started_by_script(repository: Path, folder: Path) -> Iterator[Addresses]:
    installation = find_tritonserver()
    program = folder / "tritonserver"
    extra = " ".join(f'"{argument}"' for argument in installation.extra_args)
    program.write_text(f'#!/usr/bin/env bash\nexec "{installation.binary}" {extra} "$@"\n')
    program.chmod(0o755)
    http, grpc, metrics = free_ports(3)
    environment = os.environ | dict(installation.environment)
    environment |= {"HTTP_PORT": str(http), "GRPC_PORT": str(grpc), "METRICS_PORT": str(metrics)}
    environment |= {"PATH": f"{folder}:{environment['PATH']}", "HTTP_ADDRESS": "127.0.0.1", "GRPC_ADDRESS": "127.0.0.1"}
    with open(folder / "log", "w") as log:
        process = subprocess.Popen([repository / "start.sh"], env=environment, stdout=log, stderr=log)
    try:
        with Client(f"http://127.0.0.1:{http}") as client:
            client.wait_until_ready(60)
        yield f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc}", process.pid
    finally:
        process.terminate()
        process.wait()
    assert process.returncode == 0, (folder / "log").read_text()


REGION: dict[str, Any] = {"key": "/anything", "offset": 0, "byte_size": 64}


SIDE_DOORS = [
    ("POST", "/v2/systemsharedmemory/region/x/register", REGION),
    ("GET", "/v2/systemsharedmemory/status", None),
    ("POST", "/v2/cudasharedmemory/region/x/register", {"raw_handle": {"b64": "AA=="}, "byte_size": 1}),
    ("POST", "/v2/trace/setting", {"trace_file": "/tmp/written-by-a-client", "trace_level": ["TIMESTAMPS"]}),
    ("POST", "/v2/models/tensorrt_llm/trace/setting", {"trace_file": "/tmp/written-by-a-client"}),
    ("GET", "/v2/trace/setting", None),
    ("POST", "/v2/logging", {"log_verbose_level": 9}),
    ("GET", "/v2/logging", None),
]


def test_side_doors_are_closed(addresses: Addresses, subtests: pytest.Subtests) -> None:
    for method, path, body in SIDE_DOORS:
        with subtests.test(f"{method} {path}"):
            answer = web.request(method, addresses[0] + path, json=body)
            assert answer.status_code == 403
            assert "restricted" in answer.text
    client: Any = InferenceServerClient(addresses[1])
    for call in (
        lambda: client.register_system_shared_memory("x", "/anything", 64),
        lambda: client.update_trace_settings(settings={"trace_file": "/tmp/written-by-a-client"}),
        lambda: client.update_log_settings({"log_verbose_level": 9}),
    ):
        with pytest.raises(InferenceServerException, match="restricted"):
            call()
    client.close()


def test_no_client_loads_or_unloads_a_model(addresses: Addresses) -> None:
    model = {"parameters": {"config": json.dumps({"backend": "python"}), "file:1/model.py": "aW1wb3J0IG9z"}}
    for what, body in {"load": model, "unload": {}}.items():
        answer = web.post(f"{addresses[0]}/v2/repository/models/tensorrt_llm/{what}", json=body)
        assert answer.status_code >= 400
        assert "not allowed" in answer.text
    assert web.get(f"{addresses[0]}/v2/models/tensorrt_llm/ready").status_code == 200


def chat(address: str, text: str) -> httpx.Response:
    messages = json.dumps([{"role": "user", "content": text}])
    body = {"messages": messages, "max_tokens": 2}
    return web.post(f"{address}/v2/models/tensorrt_llm/generate", json=body)


@pytest.mark.nightly  # ten seconds of the processor; tests/backend/test_chat_template.py has one
@pytest.mark.parametrize("addresses", ["serve"], indirect=True, scope="module")
def test_a_checkpoints_template_without_an_end_harms_one_request(addresses: Addresses) -> None:
    refused = chat(addresses[0], TRIGGER)
    assert refused.status_code >= 400
    assert "it took more than 10 s of the processor" in refused.text
    assert chat(addresses[0], "Hello").status_code == 200


@pytest.mark.parametrize("addresses", ["serve"], indirect=True, scope="module")
def test_the_server_outlives_the_process_of_its_templates(addresses: Addresses) -> None:
    """A write to it raises SIGPIPE, which would end a process that doesn't ignore the signal."""
    assert chat(addresses[0], "Hello").status_code == 200
    programs = [pid for pid in below(addresses[2]) if b"template_program.py" in read(pid, "cmdline")]
    assert programs
    for program in programs:
        os.kill(program, signal.SIGKILL)
    assert chat(addresses[0], "Hello").status_code == 200


def below(pid: int) -> Iterator[int]:
    """Yield the processes that a process has started, and those of these."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in read(pid, f"task/{task.name}/children").split():
            yield int(child)
            yield from below(int(child))


def read(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()
