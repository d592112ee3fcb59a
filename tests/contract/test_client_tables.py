"""The client is a leaf and may not import the contract, so its own tables are held to it here."""

from __future__ import annotations

from dataclasses import fields

import pytest

from deepseek_backend import contract
from deepseek_triton_client import (
    InvalidRequest,
    Overloaded,
    PerfMetrics,
    SamplingParams,
    ServerUnavailable,
    Timeouts,
)
from deepseek_triton_client._core.checked_request import Request, chat_request, prompt_request
from deepseek_triton_client._core.dialect import Dialect
from deepseek_triton_client._core.exceptions import BY_CODE
from deepseek_triton_client._core.response_reader import OUTPUT_NAMES
from deepseek_triton_client._core.sampling_params import LEFT_OUT, SAMPLING_FIELDS
from deepseek_triton_client._http.http_errors import status_error
from support.contract_metadata import METADATA, on_the_wire

BY_TENSOR = {field.tensor_name: field for field in SAMPLING_FIELDS}


def test_sampling_fields_are_the_contracts() -> None:
    ours = [(f.name, f.tensor_name, f.datatype, f.many, f.json, f.neutral) for f in SAMPLING_FIELDS if not f.plain]
    theirs = [
        (f.name, f.tensor.name, on_the_wire(f.dtype), f.many, f.json, f.neutral) for f in contract.SAMPLING_FIELDS
    ]
    assert ours == theirs


def test_every_input_is_a_field_or_left_out_for_a_reason() -> None:
    declared = {tensor.name for tensor in contract.INPUTS}
    assert BY_TENSOR.keys() | LEFT_OUT.keys() | {"stop"} == declared
    assert not BY_TENSOR.keys() & LEFT_OUT.keys()


@pytest.mark.parametrize("field", [field for field in SAMPLING_FIELDS if field.plain], ids=lambda field: field.name)
def test_fields_of_the_request_are_the_contracts(field) -> None:
    (tensor,) = [tensor for tensor in contract.INPUTS if tensor.name == field.name]
    assert field.datatype == on_the_wire(tensor.dtype)
    assert field.many == (tensor.dims == (-1,))
    checked = {each.name: each for each in contract.REQUEST_FIELDS}.get(field.name)
    assert field.neutral == (checked.neutral if checked else False if field.datatype == "BOOL" else None)


def test_every_field_can_be_sent_to_the_model_and_every_input_sent_is_declared() -> None:
    some = {"BYTES": "a", "BOOL": True, "INT32": 1, "UINT64": 1, "FP32": 0.5}
    params = SamplingParams(**{f.name: [some[f.datatype]] if f.many else some[f.datatype] for f in SAMPLING_FIELDS})
    declared = {tensor.name: tensor for tensor in contract.INPUTS}
    for request in requests(params):
        sent = Dialect(METADATA).inputs(request, streamed=True)
        assert BY_TENSOR.keys() < {each.name for each in sent}
        for each in sent:
            assert each.datatype == on_the_wire(declared[each.name].dtype)
            assert declared[each.name].dims in {(-1,), each.shape}


def requests(params: SamplingParams) -> list[Request]:
    common = {"params": params, "timeouts": Timeouts(), "streaming": False, "request_id": None}
    return [prompt_request("a", **common), prompt_request([1, 2], **common), chat_request("a", **common)]


def test_outputs_read_are_the_contracts() -> None:
    assert {tensor.name for tensor in contract.OUTPUTS} == OUTPUT_NAMES
    assert [each.name for each in fields(PerfMetrics)] == [tensor.name for tensor in contract.PERF_OUTPUTS]


def test_error_codes_are_the_contracts() -> None:
    assert set(BY_CODE) == {code.value for code in contract.ErrorCode}


@pytest.mark.parametrize("code", contract.ErrorCode)
def test_code_and_status_agree(code) -> None:
    """The class chosen by a code is the one that its HTTP status alone would give; Overloaded is finer."""
    status = {"INVALID_ARG": 400, "UNAVAILABLE": 503, "CANCELLED": 499, "INTERNAL": 500}[contract.TRITON_CODES[code]]
    by_code, by_status = BY_CODE[code.value], type(status_error(status, {}, b""))
    assert by_code is (Overloaded if code is contract.ErrorCode.OVERLOADED else by_status)
    assert (by_status is InvalidRequest) == (contract.TRITON_CODES[code] == "INVALID_ARG")
    assert (by_status is ServerUnavailable) == (contract.TRITON_CODES[code] == "UNAVAILABLE")
