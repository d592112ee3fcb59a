"""Tables that two parts have each for itself, because neither may import the other."""

from dataclasses import fields

from deepseek_backend import contract, engine_warmup
from deepseek_backend.config import ENGINE_NAMES
from deepseek_backend.engines import ENGINES
from deepseek_triton_build.catalog import gpus
from deepseek_triton_build.planning import plan
from deepseek_triton_client import InvalidRequest, Overloaded, PerfMetrics, SamplingParams, ServerUnavailable, Timeouts
from deepseek_triton_client._core.checked_request import chat_request, prompt_request
from deepseek_triton_client._core.dialect import Dialect
from deepseek_triton_client._core.exceptions import BY_CODE
from deepseek_triton_client._core.response_reader import _OTHER_OUTPUTS
from deepseek_triton_client._core.sampling_params import LEFT_OUT, SAMPLING_FIELDS
from deepseek_triton_client._http.http_errors import status_error
from deepseek_triton_tools.doctor.gpu import _CATALOGUE_NAMES
from deepseek_triton_tools.gateway.model_front import CODES
from deepseek_triton_tools.warming import server
from support.contract_metadata import METADATA, on_the_wire

BY_TENSOR = {field.tensor_name: field for field in SAMPLING_FIELDS}


def test_sampling_fields_are_the_contracts():
    ours = [(f.name, f.tensor_name, f.datatype, f.many, f.json, f.neutral) for f in SAMPLING_FIELDS if not f.plain]
    theirs = [
        (f.name, f.tensor.name, on_the_wire(f.dtype), f.many, f.json, f.neutral) for f in contract.SAMPLING_FIELDS
    ]
    assert ours == theirs


def test_every_input_is_a_field_or_left_out_for_a_reason():
    declared = {tensor.name for tensor in contract.INPUTS}
    assert BY_TENSOR.keys() | LEFT_OUT.keys() | {"stop"} == declared
    assert not BY_TENSOR.keys() & LEFT_OUT.keys()


def test_fields_of_the_request_are_the_contracts():
    tensors, checked = ({each.name: each for each in table} for table in (contract.INPUTS, contract.REQUEST_FIELDS))
    for field in [field for field in SAMPLING_FIELDS if field.plain]:
        tensor = tensors[field.name]
        assert field.datatype == on_the_wire(tensor.dtype)
        assert field.many == (tensor.dims == (-1,))
        otherwise = False if field.datatype == "BOOL" else None
        assert field.neutral == (checked[field.name].neutral if field.name in checked else otherwise), field.name


def test_every_field_can_be_sent_to_the_model_and_every_input_sent_is_declared():
    some = {"BYTES": "a", "BOOL": True, "INT32": 1, "UINT64": 1, "FP32": 0.5}
    params = SamplingParams(**{f.name: [some[f.datatype]] if f.many else some[f.datatype] for f in SAMPLING_FIELDS})
    declared = {tensor.name: tensor for tensor in contract.INPUTS}
    for request in requests(params):
        sent = Dialect(METADATA).inputs(request, streamed=True)
        assert BY_TENSOR.keys() < {each.name for each in sent}
        for each in sent:
            assert each.datatype == on_the_wire(declared[each.name].dtype)
            assert declared[each.name].dims in {(-1,), (len(each.values),)}


def requests(params):
    common = {"params": params, "timeouts": Timeouts(), "streaming": False, "request_id": None}
    return [prompt_request("a", **common), prompt_request([1, 2], **common), chat_request("a", **common)]


def test_outputs_read_are_the_contracts():
    # Two servers that share a request are joined by the gateway.
    read = {"text_output", "model_info", *_OTHER_OUTPUTS}
    assert {tensor.name for tensor in contract.OUTPUTS} == read | {"context_phase_params"}
    assert [each.name for each in fields(PerfMetrics)] == [tensor.name for tensor in contract.PERF_OUTPUTS]


def test_code_and_status_agree():
    """The class chosen by a code is the one that its HTTP status alone would give; Overloaded is finer."""
    statuses = {"INVALID_ARG": 400, "UNAVAILABLE": 503, "CANCELLED": 499, "INTERNAL": 500}
    # Where the KV cache is lost, the gateway itself sends the request again.
    assert set(BY_CODE) == {*CODES, "E_CONTEXT_LOST"} == {code.value for code in contract.ErrorCode}
    assert set(contract.TRITON_CODES) == set(contract.ERROR_MEANINGS) == set(contract.ErrorCode)
    for code in contract.ErrorCode:
        triton = contract.TRITON_CODES[code]
        by_code, by_status = BY_CODE[code.value], type(status_error(statuses[triton], {}, b""))
        assert by_code is (Overloaded if code is contract.ErrorCode.OVERLOADED else by_status)
        assert (by_status is InvalidRequest) == (triton == "INVALID_ARG")
        assert (by_status is ServerUnavailable) == (triton == "UNAVAILABLE")


def test_the_parts_know_the_same_engines_and_gpus():
    assert set(ENGINE_NAMES) == set(ENGINES) == set(plan.ENGINES)
    assert set(gpus()) == {name for names in _CATALOGUE_NAMES.values() for name in names}


def test_the_backends_warm_up_and_that_of_the_command_send_the_same_and_mean_the_same_by_steady():
    assert (engine_warmup._FEW_IDS, engine_warmup.STEADY) == (server._IDS, server._STEADY)
