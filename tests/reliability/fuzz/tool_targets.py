"""The parsers of the command line: files of checkpoints, runs and results, and what other programs print."""

import io
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from deepseek_triton_build.build_errors import UnusableCheckpointError
from deepseek_triton_client import SamplingParams
from deepseek_triton_tools.bench.dataset_files import FileConversationSource
from deepseek_triton_tools.bench.result import read_result
from deepseek_triton_tools.bench.workload import DatasetOptions
from deepseek_triton_tools.checkpoints.activation_scales import read_torch_archive
from deepseek_triton_tools.checkpoints.download_target import parsed_holder
from deepseek_triton_tools.checkpoints.stored_tensors import open_checkpoint, read_config, read_tensors
from deepseek_triton_tools.cli.chat import Conversation
from deepseek_triton_tools.doctor import gpu as gpu_checks
from deepseek_triton_tools.doctor import storage
from deepseek_triton_tools.doctor.examine import report_from_json
from deepseek_triton_tools.doctor.findings import Expected
from deepseek_triton_tools.doctor.hosts import compare
from deepseek_triton_tools.doctor.machine import Done, Machine
from deepseek_triton_tools.doctor.mpi_exchange import steps_in
from deepseek_triton_tools.doctor.tuning import Surroundings, UnreadableError
from deepseek_triton_tools.evaluation.harness import read_rows
from deepseek_triton_tools.evaluation.questions import open_answers
from deepseek_triton_tools.generating.batch import BatchRows, open_input
from deepseek_triton_tools.generating.records import read_messages
from deepseek_triton_tools.host.host_memory import parse_mountinfo, read_host_memory
from deepseek_triton_tools.launching.launch_settings import measured_rate
from deepseek_triton_tools.launching.mpirun import read_host_file
from deepseek_triton_tools.plans.folder_changes import changed_lines
from deepseek_triton_tools.repository.checkpoint_manifest import read_manifest
from deepseek_triton_tools.repository.hub_cache import parse_hub_name
from deepseek_triton_tools.server.server_log import dead_engine, failure_cause, parse_log_line
from deepseek_triton_tools.sla.paces import check_pace
from deepseek_triton_tools.tool_errors import ToolError
from deepseek_triton_tools.warming.checksums import _checksums_in
from reliability.fuzz.refusals import check_message, may_refuse
from support.faked_machine import FakedMachine
from support.faked_machine import nvidia_smi as nvidia_smi_runs


@contextmanager
def _file(data: bytes, name: str) -> Iterator[Path]:
    """A file with the data. Lists of problems, which readers print, are thrown away."""
    with tempfile.TemporaryDirectory() as folder, redirect_stderr(io.StringIO()) as told:
        path = Path(folder, name)
        path.write_bytes(data)
        yield path
        for line in told.getvalue().splitlines():
            check_message(line or "-")


def _reads(name: str, read: Callable[[Path], object], *errors: type[Exception]) -> Callable[[bytes], None]:
    """A target that reads a file of this name."""

    def target(data: bytes) -> None:
        with _file(data, name) as path, may_refuse(*errors or (ToolError,)):
            read(path)

    return target


def _reads_text(read: Callable[[str], object], *errors: type[Exception]) -> Callable[[bytes], None]:
    def target(data: bytes) -> None:
        with may_refuse(*errors):
            read(data.decode("utf-8", "replace"))

    return target


def _tensors(path: Path) -> None:
    for tensor in read_tensors(path).values():
        tensor.read(0, 1)


def _answers(path: Path) -> None:
    with open_answers(path, {"url": "u"}, overwrite=False) as answers:
        answers.get("a")


def _dataset(path: Path) -> None:
    options = DatasetOptions(file=path)
    FileConversationSource(options, range(100), count_tokens=lambda texts: [len(text) for text in texts])


def _batch(path: Path) -> None:
    with open_input(path) as file:
        BatchRows(file, "prompts.jsonl", SamplingParams(), chat=False).check()


def _report(text: str) -> None:
    report = report_from_json(text)
    list(compare([report, report], Expected()))


torch_archive = _reads("a.pt", lambda path: read_torch_archive(path, lambda name: True))
stored_tensors = _reads("model.safetensors", _tensors)
checkpoint_manifest = _reads("checkpoint.sha256.json", lambda path: read_manifest(path.parent))
checksums = _reads("checksums.sha256", lambda path: list(_checksums_in(path)))
bench_result = _reads("result.json", read_result)
bench_dataset = _reads("prompts.jsonl", _dataset)
kept_answers = _reads("answers.jsonl", _answers)
task_rows = _reads("rows.jsonl", lambda path: read_rows(path, ("question", "answer")))
task_table = _reads("rows.csv", lambda path: read_rows(path, ("question", "answer")))
conversation = _reads("chat.json", Conversation.loaded)
prompt_messages = _reads("messages.json", read_messages)
warm_document = _reads("warm.json", measured_rate)
pace_document = _reads("pace.json", check_pace, ValueError)
host_file = _reads("hosts", lambda path: read_host_file(path, 8))
batch_rows = _reads("prompts.jsonl", _batch)
lock_file = _reads_text(parsed_holder)
hub_name = _reads_text(parse_hub_name)
host_report = _reads_text(_report, ValueError)
"""What another host's `doctor` sends."""
rank_steps = _reads_text(lambda text: list(steps_in(text)))
"""What the ranks of an exchange print."""
edited_settings = _reads_text(lambda text: changed_lines("model.yaml", b"", text.encode(errors="replace")))
"""A file that `plan --diff` compares."""


def torch_pickle(data: bytes) -> None:
    """The pickle in such an archive, which the bytes of the whole one seldom reach."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("a/data.pkl", data)
        archive.writestr("a/data/0", b"\0" * 64)
    torch_archive(packed.getvalue())


def stored_checkpoint(data: bytes) -> None:
    """The index and config.json, parted by a line of `---`."""
    index, _, config = data.partition(b"\n---\n")
    with _file(index, "model.safetensors.index.json") as path:
        Path(path.parent, "config.json").write_bytes(config)
        with may_refuse(ToolError, UnusableCheckpointError):
            open_checkpoint(path.parent)
        with may_refuse(ToolError, UnusableCheckpointError):
            read_config(path.parent)


def server_log(data: bytes) -> None:
    lines = data.decode("utf-8", "replace").splitlines()
    for line in lines:
        found = parse_log_line(line)
        assert isinstance(found.is_from_model, bool)
        assert isinstance(found.is_table, bool)
    assert isinstance(failure_cause(lines), str)
    assert isinstance(dead_engine(lines), str)


def mount_table(data: bytes) -> None:
    with may_refuse(ValueError):
        parse_mountinfo(os.fsdecode(data))


def host_memory(data: bytes) -> None:
    """The kernel's files of memory, parted by lines of `---`."""
    names = ("proc/meminfo", "proc/self/cgroup", "proc/self/mountinfo", "sys/fs/cgroup/memory.stat")
    with tempfile.TemporaryDirectory() as root:
        for name, content in zip(names, data.split(b"\n---\n", 3), strict=False):
            path = Path(root, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        with may_refuse(OSError, ValueError, KeyError):  # the kernel writes them
            read_host_memory(Path(root))


def gpu_tables(data: bytes) -> None:
    """Answers of nvidia-smi, parted by lines of `---`: GPUs, their health, processes, links."""
    parts = [part.decode("utf-8", "replace") for part in data.split(b"\n---\n", 3)] + [""] * 3
    runs = nvidia_smi_runs()
    for start, text in zip(list(runs), parts, strict=False):
        runs[start] = Done(code=0, out=text)
    machine: Any = FakedMachine(runs=runs)
    expected = Expected()
    with may_refuse(gpu_checks.NoGpusError):
        gpu_checks.gpus(machine)
        gpu_checks.health(machine)
    for check in (gpu_checks.check_gpus, gpu_checks.check_memory, gpu_checks.check_health, gpu_checks.check_links):
        with may_refuse(gpu_checks.NoGpusError):
            check(machine, expected)


def gpu_xml(data: bytes) -> None:
    machine: Any = FakedMachine(runs={"nvidia-smi -q -x": Done(code=0, out=data.decode("utf-8", "replace"))})
    with may_refuse(UnreadableError):
        Surroundings(machine=machine, expected=Expected()).gpus()


def checkpoint_of_host(data: bytes) -> None:
    """A checkpoint as `doctor` reads it on a host: the index, and the weights behind a line of `---`."""
    index, _, weights = data.partition(b"\n---\n")
    with _file(index, "model.safetensors.index.json") as path:
        Path(path.parent, "model.safetensors").write_bytes(weights)
        with may_refuse(OSError):
            storage._inspect(Machine(), str(path.parent))
