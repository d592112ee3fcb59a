"""SamplingParams: what is refused here, and what is left to the server."""

import numpy as np
import pytest

from deepseek_triton_client import InvalidRequest, SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 2**31),
        ("max_tokens", 1.5),
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("seed", -1),
        ("seed", 2**64),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 1e39),
        ("temperature", 10**400),
        ("temperature", "0.5"),
        ("temperature", True),
        ("ignore_eos", 1),
        ("stop", 5),
        ("stop", [5]),
        ("stop", b"bytes"),
        ("stop", ["\ud800"]),
        ("stop_token_ids", 5),
        ("stop_token_ids", ["5"]),
        ("stop_token_ids", [2**31]),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequest, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("fields", [{"temperature": -3.0}, {"top_p": 9.0}, {"max_tokens": -1}])
def test_ranges_are_left_to_the_server(fields):
    assert {field.name: value for field, value in SamplingParams(**fields).given()} == fields


def test_values_become_plain_python():
    params = SamplingParams(
        max_tokens=np.int64(5),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_p=1,
        stop="END",
        stop_token_ids=range(2),
    )
    assert (
        repr(params) == "SamplingParams(max_tokens=5, temperature=0.5, top_p=1.0, stop=('END',), stop_token_ids=(0, 1))"
    )
    assert hash(params) == hash(
        SamplingParams(max_tokens=5, temperature=0.5, top_p=1, stop=["END"], stop_token_ids=[0, 1])
    )


def test_an_empty_list_is_not_sent():
    assert SamplingParams(stop=[]) == SamplingParams()


def test_merged_fields_win_and_none_takes_back():
    params = SamplingParams(temperature=0.5, top_k=3, seed=1)
    assert params.merged({"temperature": 0.7, "seed": None}) == SamplingParams(temperature=0.7, top_k=3)


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(InvalidRequest, match=r"'max_token'; did you mean 'max_tokens'\?"):
        SamplingParams().merged({"max_token": 5})
    with pytest.raises(InvalidRequest, match="'zzz'; known are max_tokens, temperature"):
        SamplingParams().merged({"zzz": 5})
