"""The tree of errors, and which error each message of the server becomes."""

import copy
import pickle

import pytest

from deepseek_triton_client import (
    DeepseekTritonError,
    InvalidRequest,
    ModelNotFound,
    ModelNotReady,
    Overloaded,
    ServerError,
    ServerUnavailable,
)
from deepseek_triton_client._core import exceptions as errors


def tree(root):
    yield root
    for child in root.__subclasses__():
        yield from tree(child)


@pytest.mark.parametrize(("code", "kind"), list(errors.BY_CODE.items()))
@pytest.mark.parametrize("otherwise", [InvalidRequest, ServerError])
def test_the_code_decides_before_the_status(code, kind, otherwise):
    error = errors.error_from_server(f"[{code}] what happened", otherwise=otherwise)
    assert type(error) is kind
    assert (error.code, error.message, str(error)) == (code, "what happened", f"[{code}] what happened")


@pytest.mark.parametrize("code", list(errors.BY_CODE))
def test_only_refusals_are_surely_unprocessed(code):
    error = errors.error_from_server(f"[{code}] what", otherwise=ServerError, unprocessed=True)
    assert error.unprocessed is (code in ("E_OVERLOADED", "E_UNAVAILABLE"))


def test_a_code_that_is_not_known_keeps_its_name():
    error = errors.error_from_server("[E_NEW] what", otherwise=ServerUnavailable)
    assert (type(error), error.code) == (ServerUnavailable, "E_NEW")


def test_a_code_counts_at_the_beginning_only():
    """Triton's own messages may quote the caller's words."""
    error = errors.error_from_server("bad input '[E_OVERLOADED] full'", otherwise=InvalidRequest)
    assert type(error) is InvalidRequest
    assert error.code is None


def test_without_a_code_the_status_decides():
    error = errors.error_from_server("no", otherwise=Overloaded, unprocessed=True)
    assert (type(error), error.code, error.unprocessed) == (Overloaded, None, True)


def test_an_unknown_model_is_known_by_its_words():
    error = errors.error_from_server("Request for unknown model: 'x' is not found", otherwise=ServerError)
    assert isinstance(error, ModelNotFound)
    assert error.unprocessed is False


@pytest.mark.parametrize("words", ["'x' has no available versions", "'x' version 1 is not at ready state"])
def test_a_model_that_loads_or_unloads_is_another_servers_to_answer(words):
    error = errors.error_from_server(f"Request for unknown model: {words}", otherwise=ModelNotFound)
    assert (type(error), error.unprocessed) == (ModelNotReady, True)


@pytest.mark.parametrize("kind", list(tree(DeepseekTritonError)))
def test_errors_survive_pickling_and_copying(kind):
    """Errors cross process boundaries in test runners and pools."""
    error = kind("full", code="E_OVERLOADED", request_id="r1", url="http://h:8000", unprocessed=True)
    for same in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert (type(same), vars(same), str(same)) == (kind, vars(error), "[E_OVERLOADED] full")


def test_the_drawn_tree_is_the_real_one():
    drawn = [line.split("── ")[1].split()[0] for line in (errors.__doc__ or "").splitlines() if "── " in line]
    assert drawn == [kind.__name__ for kind in tree(DeepseekTritonError)][1:]
