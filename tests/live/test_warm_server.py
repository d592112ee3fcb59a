"""`deepseek-triton warm server` on real servers, whose times are their own: what is sent, taken and left out."""

import functools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench._served import serving_repository

from deepseek_triton_client import AsyncClient, Client
from deepseek_triton_tools.server.server_process import ServeOptions, ServerProcess
from deepseek_triton_tools.tool_errors import ServerFailedError
from deepseek_triton_tools.warming.server import ServerWarmOptions, warm_server
from support.servers import twin, url

DONE = (0, 3)
"""How steady a shared machine is, is not for these tests to say."""


@pytest.fixture
def warm(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(
        server: ServerProcess,
        scheme: str = "http",
        *,
        model: str = "tensorrt_llm",
        model_version: str = "",
        **options: Any,
    ) -> Any:
        client = functools.partial(AsyncClient, url(server, scheme), model_name=model, model_version=model_version)
        options = {"metrics_url": server.metrics_url, "max_rounds": 4, "limit_s": 300, "as_json": True, **options}
        code = warm_server(ServerWarmOptions(client=client, **options))
        return SimpleNamespace(code=code, document=json.loads(capsys.readouterr().out))

    return run


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_the_twin_is_warmed_with_as_many_tokens_as_planned(
    simulated_server: ServerProcess, warm: Any, scheme: str
) -> None:
    def served(name: str) -> float:
        with Client(url(simulated_server, "http"), metrics_url=simulated_server.metrics_url) as client:
            return client.metrics().value(f"deepseek_triton_{name}")

    before = served("requests_accepted_total")
    done = warm(simulated_server, scheme, batch_sizes=(1, 2), input_lengths=(64, 200_000), max_tokens=4)

    assert done.code in DONE
    shapes = {(each["num_requests"], each["num_input_tokens"]): each for each in done.document["shapes"]}
    assert "E_PROMPT_TOO_LONG" in shapes[2, 200_000]["reason"]
    assert {shapes[1, 200_000]["status"], shapes[2, 200_000]["status"]} == {"left out"}
    sent = sum(each["num_requests"] for key in ((1, 64), (2, 64)) for each in shapes[key]["rounds"])
    assert sent >= 2 * (1 + 2)
    assert all(each["num_refused"] == 0 and each["answer_s"] > 0 for each in shapes[2, 64]["rounds"])
    assert before + sent <= served("requests_accepted_total") + 3 * 4  # counted a moment later


def test_a_repository_says_the_shapes(trtllm_server: ServerProcess, trtllm_repository: Path, warm: Any) -> None:
    """Those of a server of many GPUs, of which only the lengths are taken here."""
    planned = warm(
        trtllm_server, repository=trtllm_repository, batch_sizes=(1,), max_rounds=1, max_tokens=2, limit_s=120
    ).document
    assert "--batch-sizes" in planned["shapes_from"]
    assert str(trtllm_repository) in planned["shapes_from"]
    assert len(planned["shapes"]) > 2
    assert {shape["status"] for shape in planned["shapes"]} <= {"not steady", "left out", "not reached"}
    assert planned["shapes"][0]["rounds"]


def test_a_server_that_dies_is_a_failure_with_its_logs_words(tmp_path: Path, warm: Any) -> None:
    repository = twin(tmp_path / "repository", engine_options={"fail_after": 30}, on_fatal="unready")
    with serving_repository(repository, tmp_path / "log") as server:
        ready = tmp_path / "ready"
        ready.touch()
        words = r"the server failed at 1 x 32 prompt tokens: .*; its log says: .*fail_after"
        with pytest.raises(ServerFailedError, match=words):
            warm(server, batch_sizes=(1,), input_lengths=(32,), log=tmp_path / "log", ready_file=ready, max_rounds=9)
        assert not ready.exists()


def test_a_server_that_loads_is_waited_for_in_the_phases_of_its_log(tmp_path: Path, warm: Any) -> None:
    repository = twin(tmp_path / "repository", engine_options={"load_seconds": 2.0})
    options = ServeOptions(
        repository=repository, http_port="auto", grpc_port="auto", metrics_port="auto", log_file=tmp_path / "log"
    )
    with ServerProcess(options) as server:
        server.start()
        done = warm(server, batch_sizes=(1,), input_lengths=(32,), log=tmp_path / "log")
        server.wait_until_ready()  # the metrics too
    assert done.code in DONE
    assert "loading" in done.document["phases_s"]
    assert done.document["waited_s"] >= 1


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("others") / "repository"
    models = Path(__file__).resolve().parents[1] / "other_models"
    shutil.copytree(models, folder, ignore=shutil.ignore_patterns("__pycache__"))
    with ServerProcess.serving(folder) as server:
        yield server


@pytest.mark.parametrize("scheme", ["http", "grpc"])
@pytest.mark.parametrize("model", ["llmapi", "vllm"])
def test_models_of_others_are_warmed_with_words(others: ServerProcess, warm: Any, model: str, scheme: str) -> None:
    done = warm(others, scheme, model=model, batch_sizes=(2,), input_lengths=(16,), max_tokens=8, max_rounds=2)
    [shape] = done.document["shapes"]
    assert done.code in DONE
    assert [each["num_requests"] for each in shape["rounds"]] == [2, 2]
