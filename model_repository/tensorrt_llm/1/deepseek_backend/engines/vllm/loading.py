"""Makes a running AsyncLLM of model.yaml and release.yaml, the record of a vLLM version."""

import copy
import dataclasses
import importlib
import inspect
import locale
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from deepseek_backend.config import BackendConfig, nearest
from deepseek_backend.errors import ConfigError
from deepseek_backend.release import FILE_NAME, read_record

CORE_ATTRIBUTES = ("engine_core", "input_processor")
logger = logging.getLogger(__name__)
DRAIN_S = 600
"""Seconds that the engine core goes on with its requests after a signal to itself, where drain_s does not say. Before
that, the backend's own drain ends them."""
_ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # vLLM would fork this process, which has threads
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE": "1024",  # generate() gives out so many outputs of an iteration in a turn
}
QUEUE_LIMITS = {"max_num_queued_reqs": "max_inflight", "max_num_queued_tokens": "max_inflight_tokens"}
"""Engine arguments that only AsyncLLM.generate() reads -> our setting."""


@dataclass(frozen=True)
class VllmRelease:
    """The record of one vLLM version."""

    record: Mapping[str, Any]

    @property
    def version(self) -> str:
        return str(self.record["vllm"])

    @property
    def where(self) -> str:
        """Where this version is to be had."""
        containers = self.record.get("containers")
        image = f"; it is part of nvcr.io/nvidia/tritonserver:{containers[0]}-vllm-python-py3" if containers else ""
        return f"install vllm=={self.version}{image}"

    @property
    def max_temperature(self) -> float | None:
        """The highest temperature that vLLM takes; None where it takes any."""
        limit = (self.record["limits"].get("temperature") or {}).get("max")
        return None if limit is None else float(limit)

    @property
    def refused_with_drafts(self) -> frozenset[str]:
        """The fields of vLLM's SamplingParams that it refuses with speculative decoding."""
        return frozenset((self.record["limits"].get("speculative_config") or {}).get("refuses") or ())

    @property
    def spreads_by_reports(self) -> bool:
        """Whether vLLM spreads requests over ranks of data parallelism by their reports alone (`RankChoice`)."""
        return (self.record["limits"].get("data_parallel_size") or {}).get("spreads_by") == "reports"

    def differences(self, llm: Any) -> list[str]:
        """Return how the installed vLLM's own objects differ from those in the record, a line for each.

        :param llm: the AsyncLLM, of which `CoreConnection` reads two attributes that its class does not have.
        """
        missing = [f"AsyncLLM.{name} is not there" for name in CORE_ATTRIBUTES if not hasattr(llm, name)]
        interfaces = self.record["interfaces"].items()
        return missing + [line for name, recorded in interfaces if (line := _difference(str(name), recorded))]


def read_vllm_release(version_dir: Path) -> VllmRelease:
    """Read the record of a vLLM version in `version_dir`.

    :raises ConfigError: when the file is missing or is not such a record.
    """
    record = read_record(version_dir, option="--engine vllm --vllm VERSION")
    if not {"vllm", "arguments", "sampling_params", "structured_outputs", "limits", "interfaces"} <= record.keys():
        path = version_dir / FILE_NAME
        raise ConfigError([f"{path}: not the record of a vLLM version; generate the repository again"])
    return VllmRelease(record)


def _difference(name: str, recorded: Sequence[str]) -> str:
    """Return how the object `name`, such as "vllm.v1.engine:EngineCoreOutput", differs; "" when it does not."""
    module, _, path = name.partition(":")
    try:
        subject: Any = importlib.import_module(module)
        for part in path.split("."):
            subject = getattr(subject, part)
    except (ImportError, AttributeError):
        return f"{name} is not there"
    # The fields of a class (a dataclass, a Struct of msgspec, a NamedTuple, an Enum), or the parameters of a function.
    kinds = ("__struct_fields__", "_fields", "__members__") if isinstance(subject, type) else ()
    found = next((fields for kind in kinds if (fields := getattr(subject, kind, None)) is not None), None)
    if isinstance(subject, type) and dataclasses.is_dataclass(subject):
        found = [each.name for each in dataclasses.fields(subject)]
    parameters = found if found is not None else inspect.signature(subject).parameters
    names = [parameter for parameter in parameters if found is not None or parameter not in ("self", "cls")]
    return "" if names == list(recorded) else f"{name} has {', '.join(names)} instead of {', '.join(recorded)}"


def prepare_process() -> None:
    """Set what vLLM and torch need, before they are imported.

    Triton's stub runs in the locale C, in which importing torch fails: some of its files are not ASCII.
    """
    with suppress(locale.Error):
        locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def engine_arguments(config: BackendConfig, known: Iterable[str]) -> dict[str, Any]:
    """Return the engine arguments with everything that model.yaml leaves open.

    :param known: the names of AsyncEngineArgs.
    :raises ConfigError: for each name that is not known.
    """
    names = list(known)
    if problems := [
        f"{name}: vLLM has no such engine argument{nearest(name, names)}"
        for name in config.llm_args
        if name not in names
    ]:
        raise ConfigError(problems)
    if problems := [
        f"{name}: expected triton_config.{ours}, which counts running requests too; vLLM's own has no effect here"
        for name, ours in QUEUE_LIMITS.items()
        if config.llm_args.get(name) is not None
    ]:
        raise ConfigError(problems)
    llm_args = {"disable_log_stats": True, **copy.deepcopy(dict(config.llm_args)), "model": config.resolved_model}
    # By itself vLLM checks a guide with one library and then with another, and compiles it with that of its first
    # request. A guide that only the other library takes would end the engine core.
    if isinstance(guiding := llm_args.setdefault("structured_outputs_config", {}), dict):
        guiding.setdefault("backend", "xgrammar")
    if llm_args.get("nnodes", 1) > 1:
        # Only a launch knows the address of this node. start.sh takes it from this variable.
        llm_args.setdefault("master_addr", os.environ.get("MASTER_ADDR", "127.0.0.1"))
    if "shutdown_timeout" in names:
        llm_args.setdefault("shutdown_timeout", DRAIN_S if config.drain_s is None else config.drain_s)
    return llm_args


def make_llm(config: BackendConfig, stat_logger: Any) -> Any:
    """Make the AsyncLLM; return when it is loaded. Its processes are in a process group of their own.

    `stat_logger` makes the engine core report statistics, also when vLLM's own loggers are off.
    """
    args_class = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs
    llm_class = importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM
    llm_args = engine_arguments(config, (field.name for field in dataclasses.fields(args_class)))
    with own_process_group():
        return llm_class.from_engine_args(args_class(**llm_args), stat_loggers=[lambda *_: stat_logger])


@contextmanager
def own_process_group() -> Iterator[None]:
    """Put the processes that are started within into a process group of their own, whose number is this process's id.

    A signal to the server's group, such as Ctrl-C's, would end the engine core's requests, and vLLM's workers at once,
    before the backend's drain. After a crash of this process the guard process ends this group. multiprocessing's
    resource tracker stays outside of it: it then removes the shared memory that the others leave.
    """
    resource_tracker.ensure_running()
    group = os.getpgrp()
    try:
        os.setpgid(0, 0)
    except PermissionError:
        # This process leads a session, and so its group already.
        yield
        return
    try:
        yield
    finally:
        with suppress(PermissionError, ProcessLookupError):  # everybody else of that group has gone
            os.setpgid(0, group)
