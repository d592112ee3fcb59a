"""docs/configuration.md names every key of triton_config, with its default, and every option of each engine."""

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from deepseek_backend.config import ENGINE_NAMES, BackendConfig
from deepseek_backend.engines.reference.reference_engine import EngineOptions as ReferenceOptions
from deepseek_backend.engines.simulated.simulated_options import _RULES
from deepseek_backend.release import _OPTIONS as RECORDED

KEYS, _, OPTIONS = (Path(__file__).parents[2] / "docs/configuration.md").read_text().partition("\n## engine_options\n")


def rows(section):
    return {match[1]: match[2] for match in re.finditer(r"^\| `(\w+)` \| (.+?) \|", section, re.MULTILINE)}


ROWS = rows(KEYS)
ENGINE_ROWS = {name: rows(text) for name, text in re.findall(r"^### (\w+)\n(.*?)(?=^### |\Z)", OPTIONS, re.M | re.S)}
REFERENCE = {option.name: option.default for option in dataclasses.fields(ReferenceOptions)}
SIMULATED = {*_RULES, "preset"}
NOT_KEYS = {"llm_args", "version_dir"}


def test_every_key_is_on_the_page_and_no_other():
    assert set(ROWS) == set(BackendConfig.__dataclass_fields__) - NOT_KEYS


@pytest.mark.parametrize("key", sorted(ROWS))
def test_the_default_is_the_one_on_the_page(key):
    default = getattr(BackendConfig(), key)
    if default is None:
        assert "`" not in ROWS[key]
    else:
        assert yaml.safe_load(ROWS[key].strip("`")) == (list(default) if isinstance(default, tuple) else default)


@pytest.mark.parametrize(
    ("engine", "options"),
    [("tensorrt_llm", RECORDED), ("vllm", RECORDED), ("reference", REFERENCE), ("simulated", SIMULATED)],
)
def test_every_option_of_an_engine_is_on_the_page_and_no_other(engine, options):
    assert engine in ENGINE_NAMES
    assert set(ENGINE_ROWS[engine]) == set(options)
