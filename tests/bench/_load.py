"""Requests in Triton's own messages, as /generate would map the same fields."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.utils import serialize_byte_tensor

from deepseek_backend.contract import INPUTS, Dtype
from deepseek_backend.errors import describe

Fields: TypeAlias = Mapping[str, Any]


def why_lost(error: Exception) -> str:
    """In one line, cut: gRPC's errors have all that its core knew."""
    return describe(error)[:300]


_DTYPES = {
    Dtype.BOOL: ("BOOL", np.bool_),
    Dtype.INT32: ("INT32", np.int32),
    Dtype.INT64: ("INT64", np.int64),
    Dtype.UINT64: ("UINT64", np.uint64),
    Dtype.FP32: ("FP32", np.float32),
}
_INPUT_DTYPES = {tensor.name: tensor.dtype for tensor in INPUTS}


def infer_message(model: str, fields: Fields) -> Any:
    """A ModelInferRequest with nothing but these."""
    message = service_pb2.ModelInferRequest(model_name=model)
    for name, value in fields.items():
        if name in _INPUT_DTYPES:
            _add_tensor(message, name, value if isinstance(value, list) else [value])
        else:
            _set_parameter(message.parameters[name], value)
    return message


def _add_tensor(message: Any, name: str, values: list[Any]) -> None:
    tensor = message.inputs.add(name=name, shape=[len(values)])
    dtype = _INPUT_DTYPES[name]
    if dtype is Dtype.STRING:
        tensor.datatype = "BYTES"
        array = serialize_byte_tensor(np.array([value.encode() for value in values], dtype=np.object_))
        message.raw_input_contents.append(array.item())
        return
    tensor.datatype, numpy_type = _DTYPES[dtype]
    message.raw_input_contents.append(np.array(values, dtype=numpy_type).tobytes())


def _set_parameter(parameter: Any, value: bool | int | float | str) -> None:
    kinds = ((bool, "bool_param"), (int, "int64_param"), (float, "double_param"), (str, "string_param"))
    setattr(parameter, next(name for kind, name in kinds if isinstance(value, kind)), value)


def strings(raw: bytes) -> list[bytes]:
    """The values of a BYTES tensor: each has its length before it."""
    values, at = [], 0
    while at < len(raw):
        size = int.from_bytes(raw[at : at + 4], "little")
        values.append(raw[at + 4 : at + 4 + size])
        at += 4 + size
    return values
