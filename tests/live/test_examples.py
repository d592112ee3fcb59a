"""Every program in examples/ runs as its README says, and so does what the pages ask a server."""

import ast
import asyncio
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from conformance.running import gateway
from deepseek_triton_client import Client
from deepseek_triton_tools.server.server_process import ServerProcess
from support.documents import PAGES, Command, commands, snippets
from support.servers import url

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ENVIRONMENT = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}


def run(program: str, *argv: object) -> str:
    """Run an example; its standard output. `deepseek-triton` is the one beside this Python."""
    path = EXAMPLES / program
    command = [sys.executable, path] if path.suffix == ".py" else [path]
    done = subprocess.run([*command, *map(str, argv)], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_is_listed_and_run():
    programs = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")}
    readme, tests = (EXAMPLES / "README.md").read_text(), Path(__file__).read_text()
    rows = {
        name: rf"\| \[{name}\]\({name}\) .*`{'python ' * name.endswith('.py')}examples/{name} \[" for name in programs
    }
    assert {name for name in programs if not re.search(rows[name], readme) or f'"{name}"' not in tests} == set()


def test_curl(simulated_server):
    output = run("curl.sh", url(simulated_server, "http"))
    assert output.count('"text_output"') >= 5
    assert '"error"' not in output.partition("--- start a long request")[0]


def test_the_gateway(simulated_server, tmp_path):
    with gateway(url(simulated_server, "http"), log=tmp_path / "log") as address:
        output = run("gateway.sh", address)
    assert output.count('"object":"chat.completion"') == 3
    assert output.count('"object":"chat.completion.chunk"') > 3
    assert "data: [DONE]" in output


@pytest.mark.parametrize("scheme", ["http", "grpc"])
@pytest.mark.parametrize(
    ("program", "last"), [("client_sync.py", "refused: "), ("client_async.py", "left after 3 chunks")]
)
def test_clients(simulated_server, program, last, scheme):
    assert run(program, url(simulated_server, scheme)).splitlines()[-1].startswith(last)


def test_tritonclient(simulated_server):
    address = url(simulated_server, "grpc").removeprefix("grpc://")
    assert run("tritonclient_grpc.py", address).splitlines()[-1] == "asyncio: done"


def test_a_batch_is_answered_and_resumed(simulated_server, tmp_path):
    answers = tmp_path / "answers.jsonl"
    run("batch.sh", url(simulated_server, "http"), answers)
    first = answers.read_text()
    assert [json.loads(line)["finish_reason"] for line in first.splitlines()] == ["length"] * 3
    run("batch.sh", url(simulated_server, "http"), answers)
    assert answers.read_text() == first


def test_kubernetes_manifests(tmp_path):
    run("kubernetes.sh", tmp_path)
    documents = list(yaml.safe_load_all((tmp_path / "r1.yaml").read_text()))
    assert "Deployment" in {document["kind"] for document in documents}


def test_a_slurm_job(tmp_path):
    run("slurm.sh", tmp_path)
    script = tmp_path / "r1x2.sbatch"
    assert "#SBATCH --nodes=2" in script.read_text()
    subprocess.run(["bash", "-n", script], check=True)


ASKING = {"curl", "generate", "probe", "chat"}


def at(server: ServerProcess, text: str) -> str:
    """What a page says, for this server in place of the one on the default ports."""
    text = re.sub(r"grpc://\w+:8001", url(server, "grpc"), text)
    text = text.replace("localhost:8001", url(server, "grpc").removeprefix("grpc://"))
    return re.sub(r"(http://)?localhost:8000", url(server, "http"), text)


def asking(page: str) -> list[Command]:
    """The commands of a page that need nothing but a server; the stop request has a test of its own."""
    found = (command for command in commands(page) if {command.program, *command.argv[1:2]} & ASKING)
    return [command for command in found if "job-7" not in command.statement]


def shell(server: ServerProcess, folder: Path, statement: str) -> subprocess.CompletedProcess[str]:
    # What a reader waits for is there, so it is asked once. Commands without an address ask the default port.
    statement = re.sub(r"^until (.*?); do .*; done", r"\1", statement)
    statement = re.sub(r"(deepseek-triton (?:generate|chat))(?!.*--url)", r"\1 --url http://localhost:8000", statement)
    script = at(server, f"U=localhost:8000/v2/models/tensorrt_llm\n{statement}")
    command = ["bash", "-euo", "pipefail", "-c", script]
    environment = {**ENVIRONMENT, "XDG_STATE_HOME": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, input="", capture_output=True, text=True)


# test_gateway_page.py asks a gateway what the gateway's page asks; the other page asks TensorRT-LLM's orchestrator.
ELSEWHERE = {"docs/gateway.md", "docs/disaggregated.md"}


@pytest.mark.documents
@pytest.mark.parametrize("page", [page for page in PAGES if asking(page) and page not in ELSEWHERE])
def test_what_a_page_asks_a_server_is_answered(simulated_server, tmp_path, page):
    (tmp_path / "report.txt").write_text("A report.")
    (tmp_path / "talk.json").write_text('[{"role": "user", "content": "Why?"}]')
    (tmp_path / "prompts.jsonl").write_text('"Why?"\n')
    for command in asking(page):
        done = shell(simulated_server, tmp_path, command.statement)
        assert done.returncode == 0, f"{command.statement}: {done.stdout}{done.stderr}"
        assert command.program != "curl" or '"text_output"' in done.stdout, done.stdout


@pytest.mark.documents
def test_the_stream_of_the_page_still_runs_when_its_stop_is_typed(simulated_server, tmp_path):
    """A reader needs some seconds to type it in a second terminal."""
    stream, stop = (command for command in commands("docs/contract.md") if "job-7" in command.statement)
    request = json.loads(stream.argv[-1])
    with Client(url(simulated_server, "http")) as client:
        assert request["max_tokens"] > 30 * 100, "a deployment makes some hundred tokens a second"
        client.generate("first", max_tokens=1)
    began = f"{stream.statement} > stream & sleep 2; {stop.statement} > stop; wait"
    assert shell(simulated_server, tmp_path, began).returncode == 0
    events = [json.loads(line[6:]) for line in (tmp_path / "stream").read_text().splitlines() if line[:5] == "data:"]
    assert len(events) > 10
    assert events[-1]["finish_reason"] == "cancelled"
    assert json.loads((tmp_path / "stop").read_text())["error"].startswith("[E_CANCELLED]")


PYTHON = [
    snippet
    for snippet in snippets("python")
    # test_tiny_model.py has those of docs/engines.md: the simulated engine knows no tools.
    if "Client(" in snippet.text and "pytest" not in snippet.text and snippet.page != "docs/engines.md"
]


@pytest.mark.documents
@pytest.mark.parametrize("snippet", PYTHON, ids=str)
def test_the_python_of_a_page_runs(simulated_server, snippet, capsys):
    code = compile(at(simulated_server, snippet.text), str(snippet), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, {})
    if inspect.iscoroutine(result):
        asyncio.run(result)
    assert len(capsys.readouterr().out) > 100
