"""SamplingParams: what the client refuses, and what it leaves to the server."""

import copy
import dataclasses
import json
import pickle

import numpy as np
import pytest

from deepseek_triton_client import InvalidRequest, SamplingParams


def given(params):
    return {field.name: value for field, value in params.given()}


UNSENDABLE = {
    "max_tokens": [2**31, 1.5, "5", True],
    "seed": [-(2**63) - 1, 2**64, True],
    "temperature": [float("nan"), float("inf"), 1e39, 10**400, "0.5", True],
    "ignore_eos": [1, np.int64(1)],
    "stop": [5, [5], b"bytes", ["\ud800"], {"END": 1}],
    "stop_token_ids": [5, ["5"], [2**31]],
    "guided_json": [["a"], {"a": {1, 2}}, {"a": float("nan")}],
    "guided_regex": [{"a": 1}],
    "chat_template_kwargs": [True],
    "priority": [0.5],
    "return_logprobs": [1],
}


def test_what_cannot_be_sent_is_refused_by_name():
    for name, values in UNSENDABLE.items():
        for value in values:
            with pytest.raises(InvalidRequest, match=f"^{name}: "):
                SamplingParams(**{name: value})


def test_every_problem_is_told_at_once():
    with pytest.raises(InvalidRequest, match=r"unknown field 'max_token'.*; max_tokens: .*; timeout_ms: .*; stop: "):
        SamplingParams().merged({"max_tokens": "5", "timeout_ms": 0.5, "max_token": 5, "stop": 3})


def test_ranges_are_left_to_the_server():
    fields = {"temperature": -3.0, "top_p": 9.0, "max_tokens": -1, "n": 0, "stream_interval_ms": 10**9}
    assert given(SamplingParams(**fields)) == fields


def test_values_become_plain_python():
    params = SamplingParams(
        max_tokens=np.int64(5),
        temperature=np.float32(0.5),
        top_p=1,
        ignore_eos=np.bool_(True),
        stop="END",
        stop_token_ids=range(2),
        return_output_ids=True,
    )
    assert repr(params) == (
        "SamplingParams(max_tokens=5, temperature=0.5, top_p=1.0, ignore_eos=True, stop=('END',), "
        "stop_token_ids=(0, 1), return_output_ids=True)"
    )
    assert {type(value) for value in given(params).values()} == {int, float, bool, tuple}
    same = {"max_tokens": 5, "temperature": 0.5, "top_p": 1, "ignore_eos": True, "stop": ["END"]}
    assert hash(params) == hash(SamplingParams(**same, stop_token_ids=[0, 1], return_output_ids=True))


def test_a_mapping_stands_for_its_json():
    document = {"title": "天", "type": "object"}
    text = json.dumps(document)
    for name in ("guided_json", "guided_structural_tag", "chat_template_kwargs"):
        assert json.loads(given(SamplingParams(**{name: document}))[name]) == document
        assert given(SamplingParams(**{name: text})) == {name: text}


def test_a_negative_seed_counts_from_2_to_the_64_down():
    for seed, sent in ((-1, 2**64 - 1), (-(2**63), 2**63), (0, 0), (2**64 - 1, 2**64 - 1)):
        assert SamplingParams(seed=seed).seed == SamplingParams(seed=sent).merged({}).seed == sent
    for name, expected in {"seed": r"from -2\^63", "tools": "a list or a text", "tool_choice": "a mapping or"}.items():
        with pytest.raises(InvalidRequest, match=f"{name}: expected .*{expected}"):
            SamplingParams(**{name: 1.5})


def test_an_empty_list_is_not_sent():
    assert SamplingParams(stop=[], bad=(), stop_token_ids=[]) == SamplingParams(stop="", bad="") == SamplingParams()


def test_merged_fields_win_and_none_takes_back():
    params = SamplingParams(temperature=0.5, top_k=3, seed=1)
    assert params.merged({"temperature": 0.7, "seed": None}) == SamplingParams(temperature=0.7, top_k=3)
    assert params == SamplingParams(temperature=0.5, top_k=3, seed=1)


def test_merged_params_are_like_any_others():
    params = SamplingParams(top_k=3).merged({"max_tokens": np.int64(5), "stop": []})
    same = SamplingParams(top_k=3, max_tokens=5)
    assert (params, hash(params), given(params)) == (same, hash(same), given(same))
    assert repr(params) == "SamplingParams(top_k=3, max_tokens=5)"
    assert (params.stop, params.seed) == (None, None)
    assert dataclasses.replace(params, top_k=None) == SamplingParams(max_tokens=5)
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == same


def test_an_unknown_name_is_refused_with_the_nearest_or_ours():
    hints = {
        "max_token": r"did you mean 'max_tokens'\?",
        "zzz": "the known fields are max_tokens, temperature",
        **dict.fromkeys(("max_new_tokens", "request_output_len"), "use max_tokens"),
        "bad_words": "use bad",
        "random_seed": "use seed",
        "sampling_param_top_k": "use top_k",
        **dict.fromkeys(("timeout", "timeout_s"), r"use timeouts=Timeouts\(total=...\)"),
        **dict.fromkeys(("stream", "streaming"), r"use stream\(\)"),
        "messages": r"use chat\(\)",
        "sampling_parameters": "give its fields by name",
    }
    for name, hint in hints.items():
        with pytest.raises(InvalidRequest, match=f"unknown field '{name}'[:;] {hint}"):
            SamplingParams().merged({name: 5})
    assert SamplingParams(max_tokens=1).merged({"max_completion_tokens": 5, "max_tokens": 2}).max_tokens == 5
