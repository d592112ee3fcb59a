"""Tensor contents, against numpy and tritonclient."""

import math
import struct

import numpy as np
import pytest
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from deepseek_triton_client import ProtocolError
from deepseek_triton_client._core.tensor_encoding import decode, encode

NUMPY = {f"{kind}{bits}": getattr(np, f"{kind.lower()}{bits}") for kind in ("INT", "UINT") for bits in (8, 16, 32, 64)}
NUMPY |= {"BOOL": np.bool_, "FP16": np.float16, "FP32": np.float32, "FP64": np.float64}


def test_texts_are_encoded_and_decoded_as_tritonclient_does():
    for texts in ([], [""], ["é"], ["你好", "", "🙂\0\n", "a" * 70_000]):
        theirs = serialize_byte_tensor(np.array([text.encode() for text in texts], dtype=np.object_))
        data = encode("BYTES", texts)
        assert data == (theirs.item() if theirs.size else b"")
        found = decode("text_output", "BYTES", data)
        assert found == [each.decode() for each in deserialize_bytes_tensor(data)] == texts


def test_numbers_are_those_of_numpy():
    for datatype, kind in NUMPY.items():
        if datatype == "BOOL":
            values = [True, False, True]
        elif datatype.startswith("FP"):
            values = [0.0, -1.5, float(np.finfo(kind).max), float(np.finfo(kind).tiny), math.inf]
        else:
            values = [int(np.iinfo(kind).min), 0, 1, int(np.iinfo(kind).max)]
        for some in ([], values[:1], values):
            theirs = np.array(some, dtype=kind)
            assert encode(datatype, some) == theirs.tobytes(), datatype
            assert decode("a", datatype, theirs.tobytes()) == theirs.tolist() == some, datatype


def test_contents_that_do_not_fit_are_refused_by_name():
    halves = (b"\x03\0\0", b"\x03\0\0\0ab", b"\x01\0\0\0a\x02\0\0\0b")
    no_utf8 = (b"\x01\0\0\0\xff", b"\x03\0\0\0\xed\xa0\x80")  # the second is half of a surrogate pair
    numbers = [("INT32", b"\0\0\0"), ("INT64", struct.pack("<iii", 1, 2, 3))]
    for datatype, data in [*(("BYTES", data) for data in halves + no_utf8), *numbers]:
        with pytest.raises(ProtocolError, match=f"text_output: expected {datatype} elements"):
            decode("text_output", datatype, data)
    assert decode("a", "BF16", b"\0\0") is None  # an unknown datatype
