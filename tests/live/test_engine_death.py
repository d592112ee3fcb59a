"""An engine that dies answers what is open and what comes after, each with a code that says: try another server.

Then the server ends, with a code that makes a supervisor start it again, or stays and is not ready, as on_fatal says.
"""

import pytest

from deepseek_triton_tools.server.server_process import ServerProcess
from deepseek_triton_tools.tool_errors import ServerFailedError
from support.servers import dying_repository, see_it_die
from support.web import web

FATAL_EXIT_CODE = 137


def test_plain_http_has_the_code_in_the_message(dead_server):
    """Not in the status: this tritonserver answers 400 where newer ones may answer 503."""
    address = f"{dead_server.http_url}/v2/models/tensorrt_llm/generate"
    answer = web.post(address, json={"text_input": "too late"})

    assert answer.status_code in (400, 503)
    assert answer.json()["error"].startswith("[E_UNAVAILABLE] ")


@pytest.mark.parametrize("option", ["fail_after", "crash_after"])
def test_on_fatal_exit_ends_the_server_with_a_code_that_is_not_0(tmp_path, option):
    """crash_after: the engine answers nobody, so the backend has to."""
    repository = dying_repository(tmp_path / "repository", engine_options={option: 20}, fatal_grace_s=0)
    server = ServerProcess.serving(repository)
    with server:
        see_it_die(server)
        assert server.wait() == FATAL_EXIT_CODE

    assert isinstance(failure := server.failure(), ServerFailedError)
    assert "the engine died and the backend ended tritonserver, as on_fatal says: " in str(failure)
