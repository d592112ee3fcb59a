"""Every program in examples/ runs as its README says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from deepseek_triton_tools.server.server_process import ServerProcess
from support.servers import url

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(program: str, *argv: object) -> str:
    """Run an example; its standard output. `deepseek-triton` is the one beside this Python."""
    path = EXAMPLES / program
    command = [sys.executable, path] if path.suffix == ".py" else [path]
    bin_folder = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": os.pathsep.join([bin_folder, os.environ["PATH"]])}
    done = subprocess.run([*command, *map(str, argv)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_is_listed_and_run() -> None:
    programs = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")}
    readme, tests = (EXAMPLES / "README.md").read_text(), Path(__file__).read_text()
    assert {name for name in programs if f"[{name}]({name})" not in readme or f'"{name}"' not in tests} == set()


def test_curl(simulated_server: ServerProcess) -> None:
    output = run("curl.sh", url(simulated_server, "http"))
    assert output.count('"text_output"') >= 5
    assert '"error"' not in output.partition("--- start a long request")[0]


@pytest.mark.parametrize("scheme", ["http", "grpc"])
@pytest.mark.parametrize(
    ("program", "last"), [("client_sync.py", "refused: "), ("client_async.py", "left after 3 chunks")]
)
def test_clients(simulated_server: ServerProcess, program: str, last: str, scheme: str) -> None:
    assert run(program, url(simulated_server, scheme)).splitlines()[-1].startswith(last)


def test_a_batch_is_answered_and_resumed(simulated_server: ServerProcess, tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    run("batch.sh", url(simulated_server, "http"), answers)
    first = answers.read_text()
    assert [json.loads(line)["finish_reason"] for line in first.splitlines()] == ["length"] * 3
    run("batch.sh", url(simulated_server, "http"), answers)
    assert answers.read_text() == first


def test_kubernetes_manifests(tmp_path: Path) -> None:
    run("kubernetes.sh", tmp_path)
    documents = list(yaml.safe_load_all((tmp_path / "r1.yaml").read_text()))
    assert "Deployment" in {document["kind"] for document in documents}


def test_a_slurm_job(tmp_path: Path) -> None:
    run("slurm.sh", tmp_path)
    script = tmp_path / "r1x2.sbatch"
    assert "#SBATCH --nodes=2" in script.read_text()
    subprocess.run(["bash", "-n", script], check=True)
