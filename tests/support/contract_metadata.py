"""The model's metadata, as Triton makes it of the contract's tables."""

from deepseek_backend.contract import INPUTS, OUTPUTS, Dtype, TensorSpec
from deepseek_triton_client import ModelMetadata, TensorMetadata


def on_the_wire(dtype: Dtype) -> str:
    """Triton's protocols say BYTES where config.pbtxt says TYPE_STRING."""
    return "BYTES" if dtype is Dtype.STRING else dtype.value.removeprefix("TYPE_")


def _metadata(tensors: tuple[TensorSpec, ...]) -> tuple[TensorMetadata, ...]:
    return tuple(TensorMetadata(each.name, on_the_wire(each.dtype), each.dims) for each in tensors)


METADATA = ModelMetadata("tensorrt_llm", ("1",), "python", _metadata(INPUTS), _metadata(OUTPUTS))
