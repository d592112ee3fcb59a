"""Every error of the libraries below becomes one of ours."""

import pickle

import grpc
import httpx
import pytest

from deepseek_triton_client import (
    Cancelled,
    DeadlineExceeded,
    DeepseekTritonError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    ProtocolError,
    ServerError,
    ServerUnavailable,
)
from deepseek_triton_client import _errors as errors
from deepseek_triton_client._grpc import BY_STATUS_CODE
from deepseek_triton_client._http import HTTPX_ERRORS, error_from_httpx, error_from_status


def tree(root):
    yield root
    for child in root.__subclasses__():
        yield from tree(child)


EXPORTED_BY_HTTPX = [
    getattr(httpx, name)
    for name in httpx.__all__
    if isinstance(getattr(httpx, name), type) and issubclass(getattr(httpx, name), Exception)
]


@pytest.mark.parametrize("kind", EXPORTED_BY_HTTPX)
def test_every_exception_of_httpx_is_mapped(kind):
    assert issubclass(kind, tuple(HTTPX_ERRORS))
    assert issubclass(error_from_httpx(kind.__new__(kind)), DeepseekTritonError)


@pytest.mark.parametrize(
    ("kind", "ours"),
    [
        (httpx.ConnectError, ServerUnavailable),
        (httpx.ConnectTimeout, ServerUnavailable),
        (httpx.ReadTimeout, DeadlineExceeded),
        (httpx.ReadError, ServerUnavailable),
        (httpx.LocalProtocolError, InvalidRequest),
        (httpx.RemoteProtocolError, ProtocolError),
        (httpx.DecodingError, ProtocolError),
    ],
)
def test_the_nearest_class_decides(kind, ours):
    assert error_from_httpx(kind("what")) is ours


def test_every_status_of_grpc_is_mapped():
    assert set(BY_STATUS_CODE) == set(grpc.StatusCode)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (302, ProtocolError),
        (400, InvalidRequest),
        (403, InvalidRequest),
        (404, ModelNotFound),
        (429, Overloaded),
        (499, Cancelled),
        (500, ServerError),
        (501, ServerError),
        (502, ServerUnavailable),
        (503, ServerUnavailable),
        (504, DeadlineExceeded),
    ],
)
def test_statuses_of_http(status, kind):
    assert error_from_status(status) is kind


def test_the_code_decides_before_the_status():
    error = errors.error_from_server("[E_OVERLOADED] full", otherwise=InvalidRequest)
    assert isinstance(error, Overloaded)
    assert (error.code, error.message, str(error)) == ("E_OVERLOADED", "full", "[E_OVERLOADED] full")


def test_a_code_counts_at_the_beginning_only():
    """Triton's own messages may quote the caller's words."""
    error = errors.error_from_server("bad input '[E_OVERLOADED] full'", otherwise=InvalidRequest)
    assert type(error) is InvalidRequest
    assert error.code is None


def test_an_unknown_model_is_known_by_its_words():
    error = errors.error_from_server("Request for unknown model: 'x' is not found", otherwise=ServerError)
    assert isinstance(error, ModelNotFound)


def test_errors_survive_pickling():
    """They cross process borders in test runners and pools."""
    error = Overloaded("full", code="E_OVERLOADED", request_id="r1")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), vars(copy), str(copy)) == (Overloaded, vars(error), str(error))


def test_the_drawn_tree_is_the_real_one():
    drawn = [line.split("── ")[1].split()[0] for line in (errors.__doc__ or "").splitlines() if "── " in line]
    assert drawn == [kind.__name__ for kind in tree(DeepseekTritonError)][1:]
