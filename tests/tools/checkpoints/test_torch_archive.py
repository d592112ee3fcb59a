"""Reading files of torch.save without PyTorch: real ones, damaged ones, and ones that want code run."""

import os
import pickle
import zipfile
from contextlib import suppress
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_triton_tools.checkpoints.activation_scales import read_torch_archive
from deepseek_triton_tools.tool_errors import CheckpointError

ARCHIVES = Path(__file__).parent / "torch_archives"
FLOAT = b"ctorch\nFloatStorage\n"
NESTED = b"q\x00" + b"".join(b"h%c\x86q%c" % (i, i + 1) for i in range(45))
"""Makes a tuple of two tuples of two tuples and so on, out of the object on the stack."""
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"


def everything(name):
    return name != "not a tensor"


def archive(path, pickled, compression=zipfile.ZIP_STORED, **entries):
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("a/data.pkl", pickled)
        for name, content in entries.items():
            file.writestr(f"a/data/{name.removeprefix('d')}", content)
    return path


def tensor(offset=b"K\x00", shape=b"K\x02\x85", strides=b"K\x01\x85"):
    """A pickle of {"t": a tensor of two values in data/0}; the parts are pickled numbers and tuples."""
    storage = b"(X\x07\x00\x00\x00storage" + FLOAT + b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x02tQ"
    return b"\x80\x02}(X\x01\x00\x00\x00t" + REBUILD + b"(" + storage + offset + shape + strides + b"\x89NtRu."


def test_all_tensors_that_pytorch_wrote():
    found = read_torch_archive(ARCHIVES / "tensors.pt", everything)
    numbers = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    expected = {
        "scalar": np.float32(1.5),
        "one": np.array([2.5], np.float32),
        "bfloat16": np.array([1, 3.140625], ml_dtypes.bfloat16),
        "half": np.float16(0.5),
        "double": np.float64(0.1),
        "whole numbers": np.array([1, -2]),
        "turned": numbers.transpose(2, 0, 1),
        "slice": numbers[1, 1:, ::2],
        "shared": np.float32(5),
        "expanded": np.full((2, 3), 3, np.float32),
        "empty": np.empty((0, 3), np.float32),
    }
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert (found[name].dtype, found[name].shape) == (values.dtype, values.shape), name
        np.testing.assert_array_equal(found[name], values)


def test_only_what_is_wanted_is_read(tmp_path):
    path = archive(tmp_path / "a.pt", tensor())  # without the values of t
    assert read_torch_archive(path, lambda name: name == "another") == {}
    with pytest.raises(CheckpointError, match="expected data/0 in the archive, found none"):
        read_torch_archive(path, everything)


def test_other_files_are_refused():
    messages = {
        "legacy.pt": "expected a zip archive, as torch.save of PyTorch 1.6",
        "list.pt": "expected a dictionary of tensors, found list",
        "tensors.pt": "not a tensor: expected a tensor, found dict",
        "missing.pt": "No such file or directory",
    }
    for name, message in messages.items():
        with pytest.raises(CheckpointError, match=message):
            read_torch_archive(ARCHIVES / name, lambda _: True)


class Touch:
    """Makes a file when it is unpickled by a loader that runs what it is told."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return (os.mkdir, (str(self._path),))


def test_no_code_is_run(tmp_path):
    for protocol in range(6):
        marker = tmp_path / str(protocol)
        pickled = pickle.dumps({"t": Touch(marker)}, protocol=protocol)
        with pytest.raises(CheckpointError, match=r"nothing of it was run: it (asks for|has the operation)"):
            read_torch_archive(archive(tmp_path / "a.pt", pickled), everything)
        assert not marker.exists()
        pickle.loads(pickled)
        assert marker.exists(), "the pickle is harmless, so the test says nothing"


DICT = b"ccollections\nOrderedDict\n]])"
REFUSED = {
    "eval": (b"cbuiltins\neval\n(X\x01\x00\x00\x001tR.", "asks for builtins.eval"),
    "torch's own": (b"ctorch.serialization\nload\n.", "asks for torch.serialization.load"),
    "an attribute": (b"ctorch\nFloatStorage.dtype\n.", "asks for"),
    "INST": (b"(ios\nsystem\n.", "the operation INST"),
    "BUILD sets attributes": (REBUILD + b"}b.", "the operation BUILD"),
    "a strange storage": (b"X\x01\x00\x00\x00xQ.", "nothing of it was run"),
    "no storage": (REBUILD + b"(K\x00K\x00K\x00K\x00tR.", "nothing of it was run"),
    "a storage that is called": (FLOAT + b")R.", "calls what no tensor needs"),
    "an offset below 0": (tensor(offset=b"J\xff\xff\xff\xff"), "no storage, shape or strides"),
    "a stride below 0": (tensor(strides=b"J\xff\xff\xff\xff\x85"), "no storage, shape or strides"),
    "too few strides": (tensor(strides=b")"), "no storage, shape or strides"),
    "beyond the end": (tensor(shape=b"K\x03\x85"), "expected 12 bytes in data/0, found 8"),
    "beyond the end by offset": (tensor(offset=b"K\x01"), "expected 12 bytes in data/0, found 8"),
    "expanded": (tensor(shape=b"J\xff\xff\xff\x7f\x85", strides=b"K\x00\x85"), "expected a small tensor"),
    "a key that takes years": (b"})" + NESTED + b"Ns.", "a key that is no text"),
    "one of two keys": (b"}()" + NESTED + b"NX\x01\x00\x00\x00xNu.", "a key that is no text"),
    "a key in a call": (DICT + NESTED + b"aNaa\x85R.", "nothing of it was run"),
    "a number as key": (b"}K\x01Ns.", "a key that is no text"),
    "no end": (b"}", "nothing of it was run"),
}


def test_what_no_tensor_needs_is_refused(tmp_path, subtests):
    values = np.array([1, 2], "<f4").tobytes()
    for name, (pickled, message) in {**REFUSED, "empty": (b"", "nothing of it was run")}.items():
        with subtests.test(name):
            start = b"\x80\x02" if pickled and not pickled.startswith(b"\x80") else b""
            path = archive(tmp_path / "a.pt", start + pickled, d0=values)
            with pytest.raises(CheckpointError, match=message):
                read_torch_archive(path, everything)
    assert read_torch_archive(archive(tmp_path / "a.pt", tensor(), d0=values), everything)["t"].tolist() == [1, 2]


def test_an_archive_that_grows_is_refused(tmp_path):
    path = archive(tmp_path / "a.pt", b"\x80\x02}." + b"\0" * 2**16, zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="uncompressed bytes of data"):
        read_torch_archive(path, everything)


def test_big_endian_values_are_refused(tmp_path):
    path = archive(tmp_path / "a.pt", tensor(), d0=bytes(8))
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("a/byteorder", "big")
    with pytest.raises(CheckpointError, match="expected little-endian values"):
        read_torch_archive(path, everything)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("archives") / "a.pt"


def found_or_refused(path):
    """Return the tensors; none where the archive is refused in the way that users are to see."""
    with suppress(CheckpointError):
        return read_torch_archive(path, everything)
    return {}


@pytest.mark.slow
@given(data=st.data())
def test_a_damaged_archive_is_refused_or_read(scratch, data):
    content = bytearray((ARCHIVES / "tensors.pt").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    scratch.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    found = found_or_refused(scratch)
    assert all(isinstance(values, np.ndarray) for values in found.values())


@pytest.mark.slow
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_as_a_pickle(scratch, content):
    archive(scratch, b"\x80\x02" + content)
    assert found_or_refused(scratch) == {}
