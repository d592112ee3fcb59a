"""`check` judges values: types, the backend's own settings, and arbitrary input."""

import json
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_backend.config import parse_config
from deepseek_backend.errors import ConfigError
from deepseek_triton_build.catalog import READABLE_RELEASES, load_release
from deepseek_triton_build.check import CheckOptions, check_repository, read_yaml
from deepseek_triton_build.check.schema import check_schema
from deepseek_triton_build.data.setting_types import BACKEND_SETTINGS, WARMUP_SETTINGS, sampling_problem, warmup_problem
from deepseek_triton_build.data.type_strings import fits
from support.checked import CONFIG, write

VALUES = [None, True, False, 0, 1, -1, 0.05, 1.5, 300, 10**12, 2**70, "", "x", "5", [], ["a"], [1], {}]
CHOICES = ["exit", "unready", "error", "warn", "ignore", "delta", "cumulative"]
CHOICES += ["tensorrt_llm", "reference", "simulated", "v4-preview", "v4-0731", "v4.1"]


def backend_takes(settings):
    try:
        parse_config({"model": "m", "triton_config": settings}, version_dir=Path())
    except ConfigError:
        return False
    return True


def test_triton_config_is_judged_as_the_backend_does():
    for key, kind in BACKEND_SETTINGS.items():
        for value in [*VALUES, *CHOICES]:
            if key == "warmup" and value == {}:  # a section that lacks something, which check finds by itself
                assert not backend_takes({key: value})
            else:
                assert fits(value, kind) == backend_takes({key: value}), (key, value)


def test_triton_config_and_a_warmup_have_the_backends_keys():
    for given_settings, known in (
        ({"nope": 1}, sorted(BACKEND_SETTINGS)),
        ({"warmup": {"nope": 1, "shapes": [[1, 1]]}}, sorted(WARMUP_SETTINGS)),
    ):
        with pytest.raises(ConfigError) as raised:
            parse_config({"model": "m", "triton_config": given_settings}, version_dir=Path())
        assert str(raised.value).partition("known: ")[2].split(", ") == known


SHAPES = [
    [[1, 64]], [[1, 64], [2, 8]], [[1]], [[1, 2, 3]], [[0, 1]], [[1, -1]], [[True, 1]], [[1.0, 1]], [["1", 1]],
    [[2**31 - 1, 1]], [[2**31, 1]], [1, 64], [[]], [[1, 64], 5], {"1": 64},
]  # fmt: skip


def test_a_warmup_is_judged_as_the_backend_does():
    for name in WARMUP_SETTINGS:
        for value in [*VALUES, *SHAPES, 0.99, 1000, 1001, 86_400, 86_400.5, float("nan"), float("inf")]:
            problem = warmup_problem(name, value)
            taken = backend_takes({"warmup": {"shapes": [[1, 1]], name: value}})
            assert (problem is None) == taken, (name, value, problem)


def test_sampling_defaults_are_judged_by_the_backends_check():
    """YAML has dates, which that check never gets from JSON."""
    for name, values in (
        ("temperature", [0.5, -0.1, True]),
        ("guided_json", [{"a": 1}, "[1]", {"a": date(2026, 1, 1)}]),
    ):
        assert [sampling_problem(name, value) is None for value in values] == [True, False, False]
    assert "temperature" in sampling_problem("temprature", 1)


@pytest.mark.parametrize("version", READABLE_RELEASES)
def test_every_type_in_the_records_is_understood(version):
    """The default of a key fits its type, where it is a plain value."""
    release = load_release(version)
    keys = release.keys()
    for key in keys:
        field = release.find_key(key)
        assert field is not None
        if field.default is not None and not str(field.default).endswith("()"):
            assert fits(field.default, field.type), (key, field.type, field.default)
            assert not fits(object(), field.type) or field.type.startswith("object"), (key, field.type)


TYPES = [
    ("int", 5, True), ("int", True, False), ("int", 5.0, False), ("float", 5, True), ("float", True, False),
    ("int | None", None, True), ("int", None, False), ("Literal[a, b] | None", "b", True),
    ("Literal[a, b]", "c", False),
    ("Literal[A, B], in any case", "a", True), ("list[int]", [1, 2], True), ("list[int]", [1, "2"], False),
    ("list[Literal[a, b]]", ["a"], True), ("list[Literal[a, b]]", ["c"], False), ("dict", {}, True),
    ("dict", [], False),
    ("dict[int, list[int]]", {1: [2]}, True), ("dict[int, list[int]]", {"1": [2]}, False), ("LoraConfig", {}, True),
    ("LoraConfig", 5, False), ("object | None", 5, True), ("int 1..8", 8, True), ("int 1..8", 9, False),
    ("int 1.. | None", None, True), ("int 1..", 0, False), ("true", 1, False),
]  # fmt: skip


def test_types_as_records_spell_them():
    assert [(spelled, value, fits(value, spelled)) for spelled, value, _ in TYPES] == TYPES


# Anything at all

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["DEEPGEMM", "WIDEEP", "MTP", "fp8", "dsa", "pytorch", "tensorrt", "2026-01-01", "1e400"]),
    st.lists(st.integers(-3, 3), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
)
KEYS = sorted(set().union(*(load_release(version).keys() for version in READABLE_RELEASES)))


def nested(settings):
    document = {}
    for key, value in settings.items():
        *sections, name = key.split(".")
        place = document
        for section in sections:
            below = place.get(section)
            place[section] = below if isinstance(below, dict) else {}
            place = place[section]
        place[name] = value
    return document


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    values=st.dictionaries(st.sampled_from(KEYS), SCALARS, max_size=12),
    release=st.sampled_from(READABLE_RELEASES),
    gpu=st.sampled_from([None, "h200", "b200", "gb200-nvl72", "a100"]),
    model=st.sampled_from(
        ["deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V3.2-Exp", "nvidia/DeepSeek-R1-FP4", "/gone"]
    ),
)
def test_no_value_at_any_key_ends_in_an_exception(tmp_path_factory, values, release, gpu, model):
    path = tmp_path_factory.mktemp("any") / "model.yaml"
    path.write_text(json.dumps(nested({"model": model, **values})), "utf-8")

    report = check_repository(path, CheckOptions(release=release, gpu=gpu))

    assert all("\n" not in finding.message + finding.fix for finding in report.findings)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(model_yaml=st.binary(max_size=200) | st.text(max_size=200).map(str.encode), config=st.binary(max_size=100))
def test_no_bytes_end_in_an_exception(tmp_path_factory, model_yaml, config):
    root = write(tmp_path_factory.mktemp("bytes"), model_yaml=model_yaml, config=CONFIG.encode()[:300] + config)
    (root / "tensorrt_llm" / "deepseek-triton.json").write_bytes(model_yaml)

    assert check_repository(root).findings


def test_the_schemas_settings_are_those_that_are_right(tmp_path):
    """The rules get no value of a wrong type and no key that the release lacks."""
    path = tmp_path / "model.yaml"
    path.write_text("tensor_parallel_size: x\nmax_batch_size: 8\nnope: 1\ncuda_graph_config: null\nmoe_config: {}\n")
    document, _ = read_yaml(path, "model.yaml")
    assert document is not None

    found = check_schema(document, load_release("1.2.1"))

    assert found.settings == {"max_batch_size": 8, "cuda_graph_config": None, "moe_config": {}}
