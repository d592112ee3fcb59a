"""The records of vLLM versions: what they say, and that the wheels' own source says so too."""

import importlib.util
import os
from pathlib import Path

import pytest

from deepseek_triton_build.build_errors import UnknownNameError
from deepseek_triton_build.data import type_strings
from deepseek_triton_build.data.vllm import (
    DEFAULT_VLLM,
    VLLM_VERSIONS,
    load_vllm,
    nearest_vllm,
    vllm_containers,
    vllm_for_container,
)
from deepseek_triton_build.text import parse_yaml
from support.vllm_records import INTERFACES, RECORDS, VllmSource, by_hand, record, written

SOURCES = "VLLM_SOURCES"
"""Environment variable: folders or wheels of vLLM, separated as in PATH. Each is compared with its record."""


def _sources():
    given = [Path(path) for path in os.environ.get(SOURCES, "").split(os.pathsep) if path]
    installed = importlib.util.find_spec("vllm")
    return given if installed is None or installed.origin is None else [*given, Path(installed.origin).parent]


@pytest.mark.skipif(not _sources(), reason=f"no vLLM is installed, and {SOURCES} names no wheel of it")
@pytest.mark.parametrize("path", _sources(), ids=str)
def test_a_record_is_what_the_source_says(path):
    source = VllmSource(path)
    committed = RECORDS / f"vllm-{source.version}.yaml"
    assert committed.exists(), f"vLLM {source.version} has no record: python -m support.vllm_records {path} --write"
    if path.is_file():
        assert f"{written(source)}\n{by_hand(committed)}" == committed.read_text("utf-8")
    else:
        recorded = parse_yaml(committed.read_text("utf-8"))
        assert {name: recorded[name] for name in record(source)} == record(source)


@pytest.mark.parametrize("version", VLLM_VERSIONS)
def test_a_record_is_whole(version):
    loaded = load_vllm(version)
    raw = parse_yaml(loaded.text)
    assert version in raw["wheel"]
    assert len(raw["wheel_sha256"]) == 64
    assert set(raw["interfaces"]) == set(INTERFACES)
    assert {"model", "tensor_parallel_size", "enable_log_requests"} <= loaded.arguments.keys()
    assert loaded.arguments["max_model_len"].type == "int -1.. | None"
    assert loaded.arguments["max_num_seqs"].type == "int 1.. | None"
    assert "flashinfer_trtllm" in type_strings.choices(loaded.arguments["moe_backend"].type)
    assert "CUTLASS_MLA" in type_strings.choices(loaded.arguments["attention_backend"].type)
    assert type_strings.fits("cutlass_mla", loaded.arguments["attention_backend"].type)
    assert loaded.sections["speculative_config"]["num_speculative_tokens"].type == "int 1.. | None"
    assert "VLLM_USE_DEEP_GEMM" in loaded.environment
    assert not loaded.environment & loaded.replaced_environment.keys()
    assert set(loaded.containers) == {tag for tag, has in vllm_containers().items() if has == version}
    assert {"engine_core", "input_processor", "output_handler"} <= set(next(iter(raw["attributes"].values())))
    assert set(loaded.limits) - {"priority"} <= {*loaded.sampling_params, *loaded.arguments}
    assert set(loaded.limits["speculative_config"]["refuses"]) <= set(loaded.sampling_params)


@pytest.mark.parametrize("version", VLLM_VERSIONS)
def test_defaults_and_replacements_are_those_of_an_argument(version):
    loaded = load_vllm(version)
    arguments = [row for row in loaded.arguments.values() if not str(row.default).endswith("()")]
    assert [row.name for row in arguments if not type_strings.fits(row.default, row.type)] == []
    for rows in (loaded.replaced_environment, loaded.moved_arguments):
        assert rows
        for name, row in rows.items():
            known = row.by and loaded.find(row.by)
            assert known if row.by else row.why, name
            wrong = [value for value in (row.values or {}).values() if not type_strings.fits(value, known.type)]
            assert wrong == [], name


def test_a_replacement_translates_the_value():
    moved = load_vllm("0.24.0").moved_arguments
    assert moved["disable_log_requests"].new_value(True) is False
    assert moved["max_batch_size"].new_value(64) == 64
    assert moved["moe_expert_parallel_size"].new_value(8) is True
    assert moved["worker_use_ray"].new_value("maybe") is None


def test_an_unknown_version_is_told_its_container_and_the_nearest():
    with pytest.raises(UnknownNameError, match=r"Triton's container 26\.06 has it; the nearest known is 0\.24\.0"):
        load_vllm("0.22.1")
    with pytest.raises(UnknownNameError, match=r"'0\.25\.0': known so far: 0\.24\.0, 0\.25\.1, "):
        load_vllm("0.25.0")


def test_nearest_version():
    nearest = {"0.22.1": "0.24.0", "0.25.0": "0.25.1", "0.40.0": VLLM_VERSIONS[-1], "0.30.0rc1": DEFAULT_VLLM}
    assert {version: nearest_vllm(version) for version in nearest} == nearest


def test_a_container_names_its_version():
    assert next(version for version in vllm_containers().values() if version in VLLM_VERSIONS) == DEFAULT_VLLM
    for tag in ("26.07", "26.07-vllm-python-py3", "nvcr.io/nvidia/tritonserver:26.07-vllm-python-py3"):
        assert vllm_for_container(tag) is load_vllm("0.24.0")
    with pytest.raises(UnknownNameError, match=r"unknown Triton container '27\.01'.* far: 26\.08, 26\.07$"):
        vllm_for_container("27.01")
    with pytest.raises(UnknownNameError, match=r"unknown vLLM version '0\.22\.1'"):
        vllm_for_container("26.06")
