"""model.yaml, and docs/configuration.md, which names every key of triton_config and every option of an engine."""

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from deepseek_backend.config import ENGINE_NAMES, BackendConfig, load_config, parse_config
from deepseek_backend.engines.reference.reference_engine import EngineOptions as ReferenceOptions
from deepseek_backend.engines.simulated.simulated_options import RULES
from deepseek_backend.errors import ConfigError
from deepseek_backend.release import _OPTIONS as RECORDED


def problems(document):
    with pytest.raises(ConfigError) as caught:
        parse_config(document, version_dir=Path())
    return caught.value.problems


def test_llm_arguments_stand_at_the_top_level_and_ours_below(tmp_path):
    path = tmp_path / "model.yaml"
    ours = {"engine": "simulated", "default_sampling": {"top_p": 0.9}}
    path.write_text(yaml.safe_dump({"model": "m", "max_seq_len": 10, "triton_config": ours}))
    config = load_config(path)
    assert config.engine == "simulated"
    assert config.llm_args == {"model": "m", "max_seq_len": 10}
    assert config.default_sampling == {"top_p": 0.9}
    assert config.version_dir == tmp_path


def test_every_field_of_ours_can_be_given():
    given = {name for name in BackendConfig.__dataclass_fields__ if name not in ("llm_args", "version_dir")}
    (unknown,) = problems({"model": "m", "triton_config": {"engines": "simulated"}})
    assert all(name in unknown for name in given)


WRONG = [
    ({"engine": "sglang"}, "engine: expected one of tensorrt_llm, vllm, reference, "),
    ({"decoupled": 0}, "decoupled: expected true or false, got 0"),
    ({"max_batch_size": 8}, "max_batch_size: expected 0: the engine batches, Triton does not, got 8"),
    *(({"default_max_tokens": bad}, "default_max_tokens: expected a whole number from 1") for bad in (0, True, 10**12)),
    ({"default_sampling": 5}, "default_sampling: expected a mapping, got 5"),
    ({"default_sampling": {"temperature": "hot"}}, "default_sampling.temperature: expected a number, got 'hot'"),
    ({"default_sampling": {"heat": 1}}, "default_sampling.heat: no such sampling field"),
    ({"ignored_parameters": [1]}, "ignored_parameters: expected a list of patterns, got [1]"),
    ({"unknown_parameters": "maybe"}, "unknown_parameters: expected one of error, warn, ignore, got 'maybe'"),
]


def test_what_is_wrong_is_named_with_what_was_expected(subtests):
    for ours, expected in WRONG:
        with subtests.test(expected):
            (problem,) = problems({"model": "m", "triton_config": ours})
            assert problem.startswith(f"triton_config.{expected}")
    assert len(problems({"triton_config": {"engine": "x", "decoupled": 1, "other": 2}})) == 4


def test_a_file_that_is_no_configuration(tmp_path):
    path = tmp_path / "model.yaml"
    for text, expected in (None, "can't be read"), ("- a", "expected a mapping of LLM arguments"), ("a: [", "not YAML"):
        if text is not None:
            path.write_text(text)
        with pytest.raises(ConfigError, match=expected) as caught:
            load_config(path)
        assert "\n" not in str(caught.value)


KEYS, _, OPTIONS = (Path(__file__).parents[2] / "docs/configuration.md").read_text().partition("\n## engine_options\n")


def rows(section):
    return {match[1]: match[2] for match in re.finditer(r"^\| `(\w+)` \| (.+?) \|", section, re.MULTILINE)}


ROWS = rows(KEYS)
ENGINE_ROWS = {name: rows(text) for name, text in re.findall(r"^### (\w+)\n(.*?)(?=^### |\Z)", OPTIONS, re.M | re.S)}
REFERENCE = {option.name: option.default for option in dataclasses.fields(ReferenceOptions)}
SIMULATED = set(RULES)
NOT_KEYS = {"llm_args", "version_dir"}


def test_every_key_and_option_is_on_the_page_with_its_default_and_no_other():
    assert set(ROWS) == set(BackendConfig.__dataclass_fields__) - NOT_KEYS
    for key, shown in ROWS.items():
        default = getattr(BackendConfig(), key)
        if default is None:
            assert "`" not in shown, key
        else:
            assert yaml.safe_load(shown.strip("`")) == (list(default) if isinstance(default, tuple) else default), key
    options = {"tensorrt_llm": RECORDED, "vllm": RECORDED, "reference": REFERENCE, "simulated": SIMULATED}
    assert set(options) == set(ENGINE_NAMES)
    for engine, known in options.items():
        assert set(ENGINE_ROWS[engine]) == set(known), engine
