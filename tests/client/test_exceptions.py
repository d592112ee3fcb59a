"""Which error each message of the server becomes."""

import copy
import itertools
import pickle

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


def test_the_code_decides_before_the_status():
    """Only refusals are surely unprocessed."""
    for (code, kind), otherwise in itertools.product(errors.BY_CODE.items(), (InvalidRequest, ServerError)):
        error = errors.error_from_server(f"[{code}] what happened", otherwise=otherwise, unprocessed=True)
        assert type(error) is kind
        assert (error.code, error.message, str(error)) == (code, "what happened", f"[{code}] what happened")
        assert error.unprocessed is (code in ("E_OVERLOADED", "E_UNAVAILABLE"))


def test_otherwise_the_status_and_tritons_words_decide():
    """A code counts at the beginning only: Triton's own messages may quote the caller's words."""
    unknown = "Request for unknown model: 'x'"
    for message, otherwise, kind, code, unprocessed in (
        ("[E_NEW] what", ServerUnavailable, ServerUnavailable, "E_NEW", False),
        ("bad input '[E_OVERLOADED] full'", InvalidRequest, InvalidRequest, None, False),
        ("no", Overloaded, Overloaded, None, True),
        (f"{unknown} is not found", ServerError, ModelNotFound, None, False),
        (f"{unknown} has no available versions", ModelNotFound, ModelNotReady, None, True),
        (f"{unknown} version 1 is not at ready state", ModelNotFound, ModelNotReady, None, True),
    ):
        error = errors.error_from_server(message, otherwise=otherwise, unprocessed=kind is Overloaded)
        assert (type(error), error.code, error.unprocessed) == (kind, code, unprocessed), message


def test_errors_survive_pickling_and_copying():
    """Errors cross process boundaries in test runners and pools."""
    for kind in tree(DeepseekTritonError):
        error = kind("full", code="E_OVERLOADED", request_id="r1", url="http://h:8000", unprocessed=True)
        for same in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert (type(same), vars(same), str(same)) == (kind, vars(error), "[E_OVERLOADED] full")
