"""Tensor contents, against numpy and tritonclient."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from deepseek_triton_client import ProtocolError
from deepseek_triton_client._core.tensor_encoding import decode, encode

NUMPY = {
    "BOOL": np.bool_,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
}


def elements(datatype):
    if datatype == "BYTES":
        return st.text()
    if datatype == "BOOL":
        return st.booleans()
    if datatype.startswith("FP"):
        return st.floats(width=int(datatype[2:]), allow_nan=False)
    limits = np.iinfo(NUMPY[datatype])
    return st.integers(int(limits.min), int(limits.max))


@given(st.lists(st.text()))
def test_texts_are_encoded_as_tritonclient_does(texts):
    array = np.array([text.encode() for text in texts], dtype=np.object_)
    theirs = serialize_byte_tensor(array)
    assert encode("BYTES", texts) == (theirs.item() if theirs.size else b"")


@given(st.lists(st.text()))
def test_texts_are_decoded_as_tritonclient_does(texts):
    data = encode("BYTES", texts)
    assert decode("text_output", "BYTES", data) == [each.decode() for each in deserialize_bytes_tensor(data)] == texts


@pytest.mark.slow
@pytest.mark.parametrize("datatype", sorted(NUMPY))
@given(data=st.data())
def test_numbers_are_those_of_numpy(datatype, data):
    values = data.draw(st.lists(elements(datatype)))
    theirs = np.array(values, dtype=NUMPY[datatype])
    assert encode(datatype, values) == theirs.tobytes()
    assert decode("a", datatype, theirs.tobytes()) == theirs.tolist() == values


@pytest.mark.parametrize(
    ("datatype", "data"),
    [
        pytest.param("BYTES", b"\x03\0\0", id="half-a-length"),
        pytest.param("BYTES", b"\x03\0\0\0ab", id="cut-off"),
        pytest.param("BYTES", b"\x01\0\0\0a\x02\0\0\0b", id="the-second-cut-off"),
        pytest.param("BYTES", b"\x01\0\0\0\xff", id="not-UTF-8"),
        pytest.param("BYTES", b"\x03\0\0\0\xed\xa0\x80", id="half-of-a-surrogate-pair"),
        pytest.param("INT32", b"\0\0\0", id="three-bytes"),
        pytest.param("INT64", struct.pack("<iii", 1, 2, 3), id="one-and-a-half"),
    ],
)
def test_contents_that_do_not_fit_are_refused_by_name(datatype, data):
    with pytest.raises(ProtocolError, match=f"text_output: expected {datatype} elements"):
        decode("text_output", datatype, data)


def test_an_unknown_datatype_is_not_decoded():
    assert decode("a", "BF16", b"\0\0") is None
