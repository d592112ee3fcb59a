"""An engine that dies answers what is open and what comes after, each with a code that says: try another server.

Then the server ends, with a code that makes a supervisor start it again, or stays and is not ready, as on_fatal says.
"""

import pytest

from deepseek_triton_tools.server.server_process import ServerProcess
from deepseek_triton_tools.tool_errors import ServerFailedError
from support.servers import see_it_die, twin

FATAL_EXIT_CODE = 137


@pytest.mark.parametrize("option", ["fail_after", "crash_after"])
def test_on_fatal_exit_ends_the_server_with_a_code_that_is_not_0(tmp_path, option):
    """crash_after: the engine answers nobody, so the backend has to."""
    repository = twin(tmp_path / "repository", engine_options={option: 20}, fatal_grace_s=0)
    server = ServerProcess.serving(repository)
    with server:
        see_it_die(server)
        assert server.wait() == FATAL_EXIT_CODE

    assert isinstance(failure := server.failure(), ServerFailedError)
    assert "the engine died and the backend ended tritonserver, as on_fatal says: " in str(failure)
