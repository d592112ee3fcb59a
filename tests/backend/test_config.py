from pathlib import Path

import pytest

from deepseek_backend.config import BackendConfig, load_config, parse_config
from deepseek_backend.errors import ConfigError


def problems(document):
    with pytest.raises(ConfigError) as caught:
        parse_config(document, version_dir=Path())
    return caught.value.problems


def test_llm_arguments_stand_at_the_top_level_and_ours_below(tmp_path):
    path = tmp_path / "model.yaml"
    path.write_text(
        "model: m\nmax_seq_len: 10\ntriton_config:\n  engine: simulated\n  default_sampling: {top_p: 0.9}\n"
    )

    config = load_config(path)

    assert config.engine == "simulated"
    assert config.llm_args == {"model": "m", "max_seq_len": 10}
    assert config.default_sampling == {"top_p": 0.9}
    assert config.version_dir == tmp_path


def test_every_field_of_ours_can_be_given():
    given = {name for name in BackendConfig.__dataclass_fields__ if name not in ("llm_args", "version_dir")}
    (unknown,) = problems({"model": "m", "triton_config": {"engines": "simulated"}})

    assert all(name in unknown for name in given)


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        ({"engine": "sglang"}, "engine: expected one of tensorrt_llm, vllm, reference, simulated, got 'sglang'"),
        ({"decoupled": 0}, "decoupled: expected true or false, got 0"),
        ({"max_batch_size": 8}, "max_batch_size: expected 0: the engine batches, Triton does not, got 8"),
        ({"default_max_tokens": 0}, "default_max_tokens: expected a whole number from 1, got 0"),
        ({"default_max_tokens": True}, "default_max_tokens: expected a whole number from 1, got True"),
        ({"default_max_tokens": 10**12}, "default_max_tokens: expected"),
        ({"default_sampling": 5}, "default_sampling: expected a mapping, got 5"),
        ({"default_sampling": {"temperature": "hot"}}, "default_sampling.temperature: expected a number, got 'hot'"),
        ({"default_sampling": {"heat": 1}}, "default_sampling.heat: no such sampling field"),
        ({"ignored_parameters": [1]}, "ignored_parameters: expected a list of patterns, got [1]"),
        ({"unknown_parameters": "maybe"}, "unknown_parameters: expected one of error, warn, ignore, got 'maybe'"),
    ],
)
def test_what_is_wrong_is_named_with_what_was_expected(ours, expected):
    (problem,) = problems({"model": "m", "triton_config": ours})

    assert problem.startswith(f"triton_config.{expected}")


def test_all_problems_are_reported_at_once():
    assert len(problems({"triton_config": {"engine": "x", "decoupled": 1, "other": 2}})) == 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [("- a", "expected a mapping of LLM arguments"), ("a: [", "not YAML"), (None, "can't be read")],
)
def test_a_file_that_is_no_configuration(tmp_path, text, expected):
    path = tmp_path / "model.yaml"
    if text is not None:
        path.write_text(text)

    with pytest.raises(ConfigError, match=expected) as caught:
        load_config(path)
    assert "\n" not in str(caught.value)
