"""An engine that dies answers what is open and what comes after, each with a code that says: try another server."""

import httpx
import pytest
import yaml
from servers import build, url

from deepseek_triton_client import Client, ServerUnavailable
from deepseek_triton_tools.server_process import ServerProcess


@pytest.fixture(scope="module")
def dead_server(tmp_path_factory):
    """The twin's engine dies after 20 tokens."""
    repository = build(tmp_path_factory.mktemp("dying") / "repository", "tiny", "--engine", "simulated")
    path = repository / "tensorrt_llm/1/model.yaml"
    document = yaml.safe_load(path.read_text())
    document["triton_config"]["engine_options"] = {"fail_after": 20}
    path.write_text(yaml.safe_dump(document))
    with ServerProcess.serving(repository) as server:
        with Client(url(server, "grpc")) as client, pytest.raises(ServerUnavailable) as caught:
            client.generate("the one that sees it happen", max_tokens=100)
        assert caught.value.code == "E_UNAVAILABLE"
        yield server


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_later_requests_are_refused_with_the_code(dead_server, scheme):
    with Client(url(dead_server, scheme)) as client, pytest.raises(ServerUnavailable) as caught:
        client.generate("too late")
    assert caught.value.code == "E_UNAVAILABLE"


def test_plain_http_has_the_code_in_the_message(dead_server):
    """Not in the status: this tritonserver answers 400 where newer ones may answer 503."""
    address = f"{url(dead_server, 'http')}/v2/models/tensorrt_llm/generate"
    answer = httpx.post(address, json={"text_input": "too late"}, timeout=60)

    assert answer.status_code in (400, 503)
    assert answer.json()["error"].startswith("[E_UNAVAILABLE] ")
