import json
import os

import pytest

from deepseek_triton_build import UnusableCheckpointError
from deepseek_triton_build.planning.plan_request import sampling_defaults

R1, ALL = {"temperature": 0.6, "top_p": 0.95}, {"temperature": 1, "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.1}
DEFAULTS = [
    (R1 | {"do_sample": True}, R1),
    (ALL | {"eos_token_id": 1}, ALL),
    ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
    ({"temperature": None, "top_p": 0.9}, {"top_p": 0.9}),
    ({"bos_token_id": 0}, None),
]
UNUSABLE = {
    "{": "expected JSON",
    "3": "expected a JSON object, found int",
    "[" * 100_000: "expected JSON",
    '{"temperature": "hot", "top_p": true}': "temperature: expected a number",
    '{"temperature": 1, "top_p": true}': "top_p: expected a number",
    '{"temperature": NaN}': "temperature: expected a number",
    '{"temperature": -5}': "temperature: expected a number",
    '{"top_k": 2.5}': "top_k: expected a whole number",
    '{"top_p": 7}': "top_p: expected a number >= 0 and <= 1, found 7",
    '{"repetition_penalty": -1}': "repetition_penalty: expected a number",
}


def test_the_checkpoints_own_sampling(tmp_path):
    assert sampling_defaults(tmp_path) is sampling_defaults(tmp_path / "gone") is None
    path = tmp_path / "generation_config.json"
    for config, expected in DEFAULTS:
        path.write_text(json.dumps(config))
        assert sampling_defaults(tmp_path) == expected
    for text, expected in UNUSABLE.items():
        path.write_text(text)
        with pytest.raises(UnusableCheckpointError) as caught:
            sampling_defaults(tmp_path)
        assert f"generation_config.json: {expected}" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_every_problem_is_reported_at_once(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": -5, "top_k": 2.5}')

    with pytest.raises(
        UnusableCheckpointError, match=r"temperature: .*, found -5; top_k: .*, found 2\.5; correct the file"
    ):
        sampling_defaults(tmp_path)


@pytest.mark.parametrize("kind", ["folder", "fifo", "dangling-link"])
def test_anything_but_a_file_is_refused_at_once(tmp_path, kind):
    path = tmp_path / "generation_config.json"
    {"folder": path.mkdir, "fifo": lambda: os.mkfifo(path), "dangling-link": lambda: path.symlink_to("gone")}[kind]()

    with pytest.raises(UnusableCheckpointError, match=r"generation_config\.json: (expected a file|can't be read)"):
        sampling_defaults(tmp_path)
