import json

import pytest

from deepseek_triton_build.checkpoint_defaults import sampling_defaults
from deepseek_triton_build.errors import CheckpointError


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param(
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95}, {"temperature": 0.6, "top_p": 0.95}, id="r1"
        ),
        pytest.param(
            {"temperature": 1, "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.1, "eos_token_id": 1},
            {"temperature": 1, "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.1},
            id="all",
        ),
        pytest.param({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}, id="greedy"),
        pytest.param({"temperature": None, "top_p": 0.9}, {"top_p": 0.9}, id="null"),
        pytest.param({"bos_token_id": 0}, None, id="says-nothing-of-it"),
    ],
)
def test_the_checkpoints_own_sampling(tmp_path, config, expected):
    (tmp_path / "generation_config.json").write_text(json.dumps(config))

    assert sampling_defaults(tmp_path) == expected


def test_no_generation_config_is_no_advice(tmp_path):
    assert sampling_defaults(tmp_path) is None
    assert sampling_defaults(tmp_path / "gone") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "expected JSON"),
        ("3", "expected a JSON object, found int"),
        ('{"temperature": "hot", "top_p": true}', "expected numbers, found temperature: 'hot', top_p: True"),
        ('{"temperature": NaN}', "temperature: nan"),
    ],
    ids=["cut", "number", "not-numbers", "nan"],
)
def test_a_generation_config_nobody_can_use_is_named_in_one_line(tmp_path, text, expected):
    (tmp_path / "generation_config.json").write_text(text)

    with pytest.raises(CheckpointError) as caught:
        sampling_defaults(tmp_path)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
