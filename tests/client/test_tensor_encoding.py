"""Tensor contents, against numpy and tritonclient."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from deepseek_triton_client import ProtocolError
from deepseek_triton_client._core.tensor_encoding import decode, encode

NUMPY = {f"{kind}{bits}": getattr(np, f"{kind.lower()}{bits}") for kind in ("INT", "UINT") for bits in (8, 16, 32, 64)}
NUMPY |= {"BOOL": np.bool_, "FP16": np.float16, "FP32": np.float32, "FP64": np.float64}


def elements(datatype):
    if datatype == "BOOL":
        return st.booleans()
    if datatype.startswith("FP"):
        return st.floats(width=int(datatype[2:]), allow_nan=False)
    limits = np.iinfo(NUMPY[datatype])
    return st.integers(int(limits.min), int(limits.max))


@pytest.mark.slow
@given(st.lists(st.text()))
def test_texts_are_encoded_and_decoded_as_tritonclient_does(texts):
    theirs = serialize_byte_tensor(np.array([text.encode() for text in texts], dtype=np.object_))
    data = encode("BYTES", texts)
    assert data == (theirs.item() if theirs.size else b"")
    assert decode("text_output", "BYTES", data) == [each.decode() for each in deserialize_bytes_tensor(data)] == texts


@pytest.mark.slow
@pytest.mark.parametrize("datatype", sorted(NUMPY))
@given(data=st.data())
def test_numbers_are_those_of_numpy(datatype, data):
    values = data.draw(st.lists(elements(datatype)))
    theirs = np.array(values, dtype=NUMPY[datatype])
    assert encode(datatype, values) == theirs.tobytes()
    assert decode("a", datatype, theirs.tobytes()) == theirs.tolist() == values


def test_contents_that_do_not_fit_are_refused_by_name():
    halves = (b"\x03\0\0", b"\x03\0\0\0ab", b"\x01\0\0\0a\x02\0\0\0b")
    no_utf8 = (b"\x01\0\0\0\xff", b"\x03\0\0\0\xed\xa0\x80")  # the second is half of a surrogate pair
    numbers = [("INT32", b"\0\0\0"), ("INT64", struct.pack("<iii", 1, 2, 3))]
    for datatype, data in [*(("BYTES", data) for data in halves + no_utf8), *numbers]:
        with pytest.raises(ProtocolError, match=f"text_output: expected {datatype} elements"):
            decode("text_output", datatype, data)


def test_an_unknown_datatype_is_not_decoded():
    assert decode("a", "BF16", b"\0\0") is None
