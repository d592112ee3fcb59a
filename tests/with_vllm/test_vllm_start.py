"""A start that fails is one clear line, and leaves no process."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import yaml

from deepseek_backend.errors import ConfigError, EngineError
from deepseek_triton_build.data.vllm import VLLM_VERSIONS, load_vllm
from support.vllm_arguments import installed_version
from support.vllm_in_process import running_engine

OTHER_VERSION = next(version for version in VLLM_VERSIONS if version != installed_version())


def test_an_unknown_argument_is_named_with_the_nearest(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"max_model_length: .*max_model_len"),
        running_engine(tmp_path, max_model_length=4096),
    ):
        pass


def test_a_checkpoint_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError) as caught, running_engine(tmp_path / "a", model=tmp_path / "nowhere"):
        pass

    assert str(tmp_path / "nowhere") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_argument_that_vllm_refuses_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(EngineError) as caught, running_engine(tmp_path, dtype="no such type"):
        pass

    assert "\n" not in str(caught.value)


def test_an_executor_that_fails_to_load_is_an_error_and_leaves_no_process(tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(EngineError) as caught, running_engine(tmp_path, additional_config={"no such option": 1}):
        pass

    assert "\n" not in str(caught.value)
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert not [child for child in left if "EngineCore" in " ".join(child.cmdline())]


def test_another_version_is_refused_unless_that_is_allowed(tmp_path: Path) -> None:
    with (
        pytest.raises(EngineError, match="allow_version_mismatch"),
        running_engine(tmp_path, release=load_vllm(OTHER_VERSION).text),
    ):
        pass


def test_a_file_that_is_no_record_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="generate the repository again"),
        running_engine(tmp_path, release=yaml.safe_dump({"release": "1.2.1"})),
    ):
        pass
