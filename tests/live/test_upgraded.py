"""A repository of an earlier version, upgraded, on a real tritonserver."""

import base64
import bz2
import json
from pathlib import Path

import pytest

from deepseek_triton_build.render.stamp import sha256
from deepseek_triton_client import Client
from deepseek_triton_tools.cli.main import main
from deepseek_triton_tools.server.server_process import ServerProcess
from support.servers import build, change_yaml, url

CONFIG, MODEL_YAML = "tensorrt_llm/config.pbtxt", "tensorrt_llm/1/model.yaml"


def earlier(repository: Path) -> None:
    """Make of `repository` what a version without the input `priority` would have written."""
    path = repository / CONFIG
    lines = path.read_text().splitlines(keepends=True)
    text = "".join(line for line in lines if 'name: "priority"' not in line)
    path.write_text(text)
    stamp = repository / "tensorrt_llm/deepseek-triton.json"
    record = json.loads(stamp.read_text())
    record["files"][CONFIG] = sha256(text.encode())
    record["generated"][CONFIG] = base64.b64encode(bz2.compress(text.encode())).decode()
    stamp.write_text(json.dumps(record))


@pytest.mark.slow
@pytest.mark.nightly
def test_an_upgraded_repository_is_served_with_its_edits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repository = build(tmp_path / "tiny", "tiny", "--engine", "simulated")
    earlier(repository)
    change_yaml(repository / MODEL_YAML, default_max_tokens=3)
    with (repository / CONFIG).open("a") as file:
        file.write('parameters { key: "owner" value: { string_value: "me" } }\n')
    upgrade = ["upgrade", str(repository), "--apply"]

    with ServerProcess.serving(repository):
        assert main(upgrade) == 1
        assert "a server runs from this folder" in capsys.readouterr().err
    assert main(upgrade) == 0
    assert "upgraded" in capsys.readouterr().out

    with ServerProcess.serving(repository) as server, Client(url(server, "http")) as client:
        assert client.generate("hello", priority=1).num_output_tokens == 3
    assert 'key: "owner"' in (repository / CONFIG).read_text()
    assert main(["upgrade", str(repository)]) == 0
    assert "nothing would change" in capsys.readouterr().out
