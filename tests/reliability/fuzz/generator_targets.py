"""The files that `check` and `build` read: whatever they hold, it becomes findings or an error of ours."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepseek_backend.contract import SAMPLING_FIELDS
from deepseek_triton_build.build_errors import BuildError, UnusableCheckpointError
from deepseek_triton_build.check.checkpoint_files import read_facts
from deepseek_triton_build.check.repository_report import check_repository
from deepseek_triton_build.check.safetensors import HeaderError, read_header
from deepseek_triton_build.data.setting_types import sampling_problem
from deepseek_triton_build.planning.plan_request import sampling_defaults
from deepseek_triton_build.render.folder_writer import _deployment_diff, _record
from reliability.fuzz.refusals import check_message, may_refuse
from support.checked import MODEL_YAML, OPTIONS, write


def _checked(write_it: Callable[[Path], object]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_it(folder)
        report = check_repository(folder, OPTIONS)
        for finding in report.findings:
            check_message(finding.message)
            check_message(finding.fix)
        report.findings_json()


def checked_model_yaml(data: bytes) -> None:
    _checked(lambda folder: write(folder, model_yaml=data))


def checked_config_pbtxt(data: bytes) -> None:
    _checked(lambda folder: write(folder, config=data))


def _with_file(name: str, data: bytes) -> Callable[[Path], object]:
    """A repository, and a file in it."""

    def write_it(folder: Path) -> None:
        write(folder)
        (folder / name).write_bytes(data)

    return write_it


def checked_start_script(data: bytes) -> None:
    _checked(_with_file("start.sh", data))


def checked_vllm_script(data: bytes) -> None:
    """The script of `vllm serve`."""

    def write_it(folder: Path) -> None:
        (folder / "serve.sh").write_bytes(data)
        (folder / "config.yaml").write_text("")

    with may_refuse(BuildError):
        _checked(write_it)


def checked_manifest(data: bytes) -> None:
    """The manifest of a generated folder."""
    _checked(_with_file("tensorrt_llm/deepseek-triton.json", data))
    record = _record(data.decode("utf-8", "replace"))
    list(_deployment_diff(Path("folder"), record, {"options": "--gpu h200"}))


def checked_checkpoint(data: bytes) -> None:
    """A checkpoint's files, parted by lines of `---`: config.json, hf_quant_config.json, the index, the weights."""
    names = ("config.json", "hf_quant_config.json", "model.safetensors.index.json", "model-00001-of-000001.safetensors")
    parts = data.split(b"\n---\n", 3)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, content in zip(names, parts, strict=False):
            (folder / file).write_bytes(content)
        model = folder / "repository"
        write(model, model_yaml=MODEL_YAML.replace("deepseek-ai/DeepSeek-R1", str(folder)))
        for finding in check_repository(model, OPTIONS).findings:
            check_message(finding.message)
        for for_vllm in (False, True):
            read_facts(folder, "model", for_vllm=for_vllm)


def generation_config(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "generation_config.json").write_bytes(data)
        with may_refuse(UnusableCheckpointError):
            sampling_defaults(Path(folder))


def safetensors_header(data: bytes) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        with may_refuse(HeaderError):
            read_header(file)


def safetensors_seed() -> bytes:
    header = b'{"__metadata__":{"format":"pt"},"w":{"dtype":"F8_E4M3","shape":[2,3],"data_offsets":[0,6]}}'
    return len(header).to_bytes(8, "little") + header + b"\0" * 6


def default_sampling(data: bytes) -> None:
    """A value of triton_config.default_sampling, as YAML gives it."""
    try:
        value: Any = json.loads(data)
    except (ValueError, RecursionError):
        return
    for field in SAMPLING_FIELDS:
        problem = sampling_problem(field.name, value)
        if problem is not None:
            check_message(problem)
