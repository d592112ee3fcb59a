"""Each field is taken up to the limits that the contract names, and refused beyond them, as a tensor and in JSON."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from deepseek_backend import contract
from deepseek_backend.config import parse_config
from deepseek_backend.contract import Dtype, ErrorCode
from deepseek_backend.errors import RequestError
from deepseek_backend.parsing import parse_request

SUPPORTED = {field.name: "" for field in contract.SAMPLING_FIELDS} | {"priority": ""}
CONFIG = parse_config({"model": "m", "triton_config": {}}, version_dir=Path())
DTYPES = {tensor.name: tensor.dtype for tensor in contract.INPUTS}
NUMPY = {Dtype.INT32: np.int32, Dtype.FP32: np.float32, Dtype.UINT64: np.uint64}

RANGES = {  # the field, its least and its greatest value; None: no limit but that of its type
    "max_tokens": (1, None),
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 10.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "min_tokens": (0, None),
    "stop_token_ids": (0, None),
    "n": (1, 64),
    "best_of": (1, 64),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "truncate_prompt_tokens": (1, None),
}
WRONG = [  # the field, what only JSON can hold or what is no number, and what is said of it
    ("top_k", -2, ">= 0 and <= 2147483647, got -2"),
    ("max_tokens", 2**31, "<= 2147483647, got 2147483648"),
    ("temperature", "hot", "a number, got 'hot'"),
    ("temperature", True, "a number, got True"),
    ("top_p", [0.5], "a number, got [0.5]"),
    ("top_p", math.nan, "a number, got nan"),
    ("top_p", math.inf, "a number, got inf"),
    ("seed", 2**64, "<= 18446744073709551615, got 18446744073709551616"),
    ("seed", -(2**63) - 1, ">= -9223372036854775808"),
    ("seed", float(2**63), "send it as 'sampling_param_seed'"),
    ("ignore_eos", 1, "true or false, got 1"),
    ("ignore_eos", "yes", "true or false, got 'yes'"),
    ("stop", 7, "a string that is not empty, got 7"),
    ("stop", ["x", None], "a string that is not empty, got None"),
    ("bad", [""], "a string that is not empty"),
    ("bad", ["x"] * 65, "at most 64 values, got 65"),
    ("stop_token_ids", ["x"], "a whole number, got 'x'"),
    ("stop_token_ids", [1] * 65, "at most 64 values, got 65"),
    ("n", {"of": 2}, "a whole number, got {'of': 2}"),
    ("guided_json", [], "a JSON object, got []"),
    ("guided_structural_tag", 7, "a JSON object, got 7"),
    ("guided_regex", "x" * 65537, "at most 65536 characters, got 65537"),
    ("guided_grammar", "", "a string that is not empty"),
]
SETTINGS = [  # of the request as a whole, by its plain name
    ("timeout_ms", 0, ">= 1"),
    ("stream_interval", 0, ">= 1"),
    ("stream_interval_ms", 0, ">= 1"),
    ("priority", -(2**31), ">= -2147483647"),
    ("chat_template_kwargs", "true", "a JSON object, got True"),
]


def parse(tensors):
    inputs = {"text_input": np.array([b"hello"], np.object_), **tensors}
    return parse_request(inputs, "{}", CONFIG, SUPPORTED)


def in_json(name, value):
    beside = {"temperature": 1.0} if name in ("n", "best_of") else {}  # greedy answers are all the same
    return {"sampling_parameters": np.array([json.dumps({**beside, name: value}).encode()], np.object_)}


def as_tensor(name, value):
    dtype = DTYPES.get(name) or DTYPES[f"sampling_param_{name}"]
    array = np.array([value.encode()] if isinstance(value, str) else [value], NUMPY.get(dtype, np.object_))
    return {name if name in DTYPES else f"sampling_param_{name}": array}


def assert_refused(tensors, name, limit):
    with pytest.raises(RequestError) as caught:
        parse(tensors)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert str(caught.value).startswith(f"{name}: expected ")
    assert limit in str(caught.value)


def test_a_value_is_taken_up_to_its_limits_and_refused_beyond_them(subtests):
    for name, limits in RANGES.items():
        for limit, sign, beyond in zip(limits, (">=", "<="), (-1, 1), strict=True):
            if limit is None:
                continue
            with subtests.test(f"{name} {sign} {limit}"):
                step = beyond * (1 if isinstance(limit, int) else 0.005)
                assert parse(in_json(name, limit))
                for tensors in (in_json(name, limit + step), as_tensor(name, limit + step)):
                    assert_refused(tensors, name, f"{sign} {limit:g}")


def test_what_a_field_can_not_hold_is_refused(subtests):
    for name, value, limit in WRONG:
        with subtests.test(f"{name} {str(value)[:20]}"):
            assert_refused(in_json(name, value), name, limit)
    for name, value, limit in SETTINGS:
        with subtests.test(f"{name} {value}"):
            assert_refused(as_tensor(name, value), name, limit)
