"""What `doctor` expects of a machine, by the repository that is to be served."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepseek_triton_build.check import CheckOptions, check_repository
from deepseek_triton_tools.cli.main import main
from deepseek_triton_tools.doctor.expected_of_repository import expected_of


@pytest.mark.parametrize(("profile", "uses_nvcc"), [("latency", False), ("throughput", True)])
def test_nvcc_is_expected_where_start_sh_lets_deepgemm_use_it(tmp_path: Path, profile: str, uses_nvcc: bool) -> None:
    folder = tmp_path / "r1"
    assert main(["build", "deepseek-r1", "--gpu", "h200", "--profile", profile, "--output", str(folder)]) == 0

    assert expected_of(folder, check_repository(folder, CheckOptions()), None).uses_nvcc == uses_nvcc
    script = folder / "start.sh"
    script.write_text(script.read_text().replace("TRTLLM_DG_JIT_USE_NVCC:-1", "TRTLLM_DG_JIT_USE_NVCC:-0"))
    assert not expected_of(folder, check_repository(folder, CheckOptions()), None).uses_nvcc
