"""What is waiting to be sent -> named, typed arrays. Pure: knows numpy, not pb_utils."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deepseek_backend.contract import OUTPUTS, Dtype
from deepseek_backend.request import Call

Outputs = list[tuple[str, npt.NDArray[Any]]]
"""(output name, array of the dtype that contract.OUTPUTS declares)"""

_NUMPY_DTYPES: dict[Dtype, npt.DTypeLike] = {Dtype.STRING: np.object_, Dtype.INT32: np.int32}
_DTYPES = {tensor.name: _NUMPY_DTYPES[tensor.dtype] for tensor in OUTPUTS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What one response says."""

    text: str
    num_input_tokens: int
    num_output_tokens: int
    """Tokens since the previous response that carried the count."""
    final: bool
    finish_reason: str | None = None
    stop_reason: int | str | None = None


def chunk_outputs(chunk: Chunk, call: Call) -> Outputs:
    """The outputs of one response, in the contract's order. Each has shape [1]."""
    outputs = [_output("text_output", chunk.text.encode())]
    if chunk.final:
        outputs.append(_output("finish_reason", str(chunk.finish_reason).encode()))
        if chunk.stop_reason is not None:
            outputs.append(_output("stop_reason", str(chunk.stop_reason).encode()))
    if chunk.final or call.num_input_tokens_always:
        outputs.append(_output("num_input_tokens", chunk.num_input_tokens))
    if chunk.final or call.num_output_tokens_always:
        outputs.append(_output("num_output_tokens", chunk.num_output_tokens))
    return outputs


def _output(name: str, value: bytes | int) -> tuple[str, npt.NDArray[Any]]:
    return name, np.array([value], dtype=_DTYPES[name])
