"""The files of a Triton model repository for a plan: paths and bytes. Nothing is written here; see folder_writer.

start.sh runs the repository under the supervisor that lies beside the backend. A variant's own small checkpoint travels
in it, checked by its checksums.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from deepseek_triton_build.arithmetic.gpu_memory import (
    ASSUMED_RATE,
    ENGINE_START_S,
    SMALL_READY_WITHIN_S,
    load_s,
    ready_within_s,
)
from deepseek_triton_build.build_errors import UnusableCheckpointError
from deepseek_triton_build.data import own_files
from deepseek_triton_build.data.planned_settings import is_engine_variable
from deepseek_triton_build.planning.plan import Plan
from deepseek_triton_build.planning.plan_request import ENGINES, PYTHON_BACKEND
from deepseek_triton_build.render import shell
from deepseek_triton_build.render.model_configuration import config_pbtxt, model_yaml, settings_file_text
from deepseek_triton_build.render.stamp import (
    CHECKSUMS,
    MANIFEST,
    RELEASE_RECORD,
    build_options,
    manifest,
    sha256,
    stamp_line,
)
from deepseek_triton_build.render.vllm_commands import engine_flags, model_of, node_values

START_SH = "start.sh"
EXIT_TIMEOUT_S = 30
"""Seconds of a stop, most of which open requests get: tritonserver's own default of --exit-timeout-secs."""
MPIRUN_SPARE_S = 20
"""Seconds that mpirun waits beyond the exit timeout before it kills. The supervisor kills 15 s after the timeout."""
_MAX_RESTARTS = 3
_TAG = "DEEPSEEK_TRITON_LAUNCH"
"""The variable by which the processes of one launch are known."""
# The model card, which says under which licence the rest may travel. No engine reads it, so it needs no checksum.
_CARD = "README.md"
_MEND = "restore the folder from this project's repository, or name another checkpoint with --model"


def carried_files(plan: Plan) -> Mapping[str, bytes]:
    """Return relative path -> content of the checkpoint that goes with `plan`; nothing where none does.

    :raises UnusableCheckpointError: when the checkpoint is not in this installation, or is damaged.
    """
    if not plan.carries_checkpoint:
        return {}
    files = _files(own_files.version_dir() / plan.variant.model, plan.variant.edition)
    return {f"{plan.variant.model}/{name}": content for name, content in files.items()}


@lru_cache(maxsize=4)
def _files(source: Path, edition: str) -> Mapping[str, bytes]:
    """Return the files that the checksums name, checksums of them, and the model card. Files in the folder `edition`
    replace those beside it; those of other editions stay behind."""
    lines = _read(source / CHECKSUMS).decode("utf-8", errors="replace").splitlines()
    recorded = {name: checksum for checksum, _, name in (line.partition("  ") for line in lines if line)}
    if not lines:
        raise UnusableCheckpointError(f"{source / CHECKSUMS}: expected lines with checksums, found none; {_MEND}")
    names = {name: name for name in recorded if "/" not in name}
    inside = f"{edition}/"
    replaced = {name.removeprefix(inside): name for name in recorded if name.startswith(inside)}
    if edition and not replaced:
        raise UnusableCheckpointError(f"{source / CHECKSUMS}: expected files in {inside}, found none; {_MEND}")
    names |= replaced if edition else {}
    content = {name: _read(source / origin) for name, origin in sorted(names.items())}
    for name, data in content.items():
        if sha256(data) != recorded[names[name]]:
            raise UnusableCheckpointError(
                f"{source / names[name]}: expected the file that {CHECKSUMS} names, found another or a cut one; {_MEND}"
            )
    own = "".join(f"{sha256(data)}  {name}\n" for name, data in content.items())
    return content | {_CARD: _read(source / _CARD), CHECKSUMS: own.encode()}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UnusableCheckpointError(f"{path}: can't be read: {error.strerror}; {_MEND}") from error


MODEL = "tensorrt_llm"
"""The model's name: what upstream calls it and what clients put into their URLs."""


_MODULES = ("model.py", "supervise.py")
_PACKAGES = ("deepseek_backend/", "deepseek_launcher/")
_ENGINES = "deepseek_backend/engines/"


@dataclass(frozen=True)
class File:
    """One file that is to be written."""

    path: PurePosixPath
    """Relative to the folder that is written."""
    content: bytes
    executable: bool = False


def text_file(path: str, text: str, *, executable: bool = False) -> File:
    return File(PurePosixPath(path), text.encode(), executable=executable)


def settings_files(plan: Plan, stamp: str, folder: str = "") -> list[File]:
    """Return the files that settings of the plan name."""
    return [text_file(f"{folder}{file.name}", settings_file_text(file, stamp=stamp)) for file in plan.files]


def repository_files(plan: Plan, version: str) -> list[File]:
    """Return every file of the repository, sorted by path; the same plan and version give the same bytes."""
    return stamped(plan, model_files(plan, stamp_line(plan, version)), version=version, format="triton", folder=MODEL)


def stamped(plan: Plan, files: Iterable[File], *, version: str, format: str, folder: str = "") -> list[File]:
    """Return `files` sorted by path, and after them their manifest, which lies in `folder`."""
    ordered = sorted(files, key=lambda file: file.path)
    contents = {file.path.as_posix(): file.content for file in ordered}
    options = build_options(plan, format=format)
    text = manifest(plan, version=version, options=options, format=format, files=contents, of_one_plan=True)
    return [*ordered, File(PurePosixPath(folder, MANIFEST), text)]


def model_files(plan: Plan, stamp: str) -> list[File]:
    """Return the files of the repository but for the manifest."""
    version_dir, backend_name = f"{MODEL}/1/", plan.request.backend_name
    # config.pbtxt is decoupled as model.yaml is, which --set may have changed: the two files must agree.
    is_decoupled = next(bool(setting.value) for setting in plan.settings if setting.key == "triton_config.decoupled")
    files = [
        text_file(START_SH, start_sh(plan, stamp=stamp), executable=True),
        text_file(
            f"{MODEL}/config.pbtxt", config_pbtxt(stamp=stamp, decoupled=is_decoupled, backend_name=backend_name)
        ),
        text_file(f"{version_dir}model.yaml", model_yaml(plan, stamp=stamp)),
        *settings_files(plan, stamp, version_dir),
        *_backend_files(plan),
        *(File(PurePosixPath(version_dir, name), content) for name, content in carried_files(plan).items()),
    ]
    if backend_name != PYTHON_BACKEND:
        # It lies in the model's folder: Triton takes every folder of the repository for a model.
        source = own_files.version_dir() / "named_backend.py"
        files.append(File(PurePosixPath(MODEL, "backends", backend_name, "model.py"), source.read_bytes()))
    record = plan.release or plan.vllm
    if record is not None:
        files.append(text_file(f"{version_dir}{RELEASE_RECORD}", record.text))
    return files


def _backend_files(plan: Plan) -> list[File]:
    """Return model.py, the supervisor and their packages, with the plan's engine as the only one."""
    unused = tuple(f"{_ENGINES}{engine}/" for engine in ENGINES if engine != plan.engine)
    if plan.release is None:  # start.sh uses the overlay of work-arounds for TensorRT-LLM's worker processes alone
        unused += ("deepseek_backend/process/overlay/",)
    version_dir = own_files.version_dir()
    paths = (path for path in version_dir.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    relative = [(path, path.relative_to(version_dir).as_posix()) for path in paths]
    return [
        File(PurePosixPath(MODEL, "1", name), path.read_bytes())
        for path, name in relative
        if name in _MODULES or (name.startswith(_PACKAGES) and not name.startswith(unused))
    ]


def start_sh(plan: Plan, *, stamp: str) -> str:
    """Return start.sh. It runs TensorRT-LLM and vLLM in a stock Triton container; other engines run where tritonserver
    is."""
    ready_within, why_ready_within = _ready_within(plan)
    values = {
        **shell.script_values(plan, stamp, START_SH),
        "tensorrt_llm": plan.release is not None,
        "vllm": plan.vllm is not None,
        "vllm_nodes": plan.vllm is not None and plan.num_nodes > 1,
        "engine_rows": [],
        "where": "where tritonserver and the engine's packages are installed",
        "for_slurm": False,
        "same_in_slurm": "",
        "exit_timeout": EXIT_TIMEOUT_S,
        "ready_within": ready_within,
        "why_ready_within": why_ready_within,
        "restarts": _MAX_RESTARTS,
        "why_restarts": "The pauses between restarts grow.",
        "own_backend": plan.request.backend_name if plan.request.backend_name != PYTHON_BACKEND else "",
        "programs": "python3 | tritonserver",
    }
    own = [variable.name for variable in plan.environment if not is_engine_variable(variable.name)]
    exported = [_TAG, *own]
    if plan.release is not None:
        exported = [_TAG, "PYTHONPATH", *own, '"${engine[@]}"']
        values |= _tensorrt_llm_values(plan)
        exported += ["OMPI_MCA_btl_tcp_if_include"] if values["for_slurm"] else []
    elif plan.vllm is not None:
        exported = [_TAG, "SPT_NOENV", *own, '"${engine[@]}"', *(["MASTER_ADDR"] if plan.num_nodes > 1 else [])]
        values |= {**shell.engine_values(), "where": f"where tritonserver and vLLM {plan.vllm.version} are installed"}
        values |= _vllm_node_values(plan) if plan.num_nodes > 1 else {}
    if plan.image is not None:
        values["where"] = f"in {plan.image}, where nothing has to be installed"
    return shell.filled("start.sh", {**values, "exported": " ".join(exported)})


def _tensorrt_llm_values(plan: Plan) -> dict[str, Any]:
    options = ["--tag-output"]
    if plan.num_nodes == 1:
        options += ["-mca", "odls_base_sigkill_timeout", f'"$((exit_timeout + {MPIRUN_SPARE_S}))"']
    # A Slurm step of one task tells nothing, because every other job has one too.
    for_slurm = plan.world_size > 1
    launch = shell.entry_point(plan)
    return {
        **shell.rank_values(plan, options, [_TAG]),
        "launch": launch,
        "programs": f"python3 | mpirun | {launch} | tritonserver",
        "for_slurm": for_slurm,
        "same_in_slurm": ", the same for all ranks of a Slurm step" if for_slurm else "",
    }


def _vllm_node_values(plan: Plan) -> dict[str, Any]:
    """The server runs on node 0, and vLLM's own program without a server elsewhere. Under Slurm the supervisor has
    started the script on every node."""
    carried = f'"$repository/tensorrt_llm/1/{plan.variant.model}"'
    model = carried if plan.carries_checkpoint else shell.quoted(model_of(plan))
    flags = [" ".join(flag.words) for flag in engine_flags(plan)]
    return {
        **node_values(plan),
        "vllm_serve": [f"vllm serve {model}", *flags, '"${node[@]}"'],
        "restarts": 0,
        "why_restarts": "The default is 0, because the other nodes have to be started again, too.",
    }


def _ready_within(plan: Plan) -> tuple[int, str]:
    """Return the seconds a start may take, and how they were computed."""
    if plan.checkpoint is None:
        assumed = SMALL_READY_WITHIN_S
        return assumed, f"{assumed} s are assumed for a small model, which takes a few seconds."
    size, whole = plan.checkpoint.weight_bytes, ready_within_s(plan.checkpoint.weight_bytes)
    rate = ASSUMED_RATE // 10**6
    return whole, (
        f"{size:,} bytes of weights ({plan.checkpoint.bytes_status}) at {rate} MB/s, which users report for a first "
        f"load from a slow disk, take {load_s(size):,} s. {ENGINE_START_S:,} s more are assumed for kernels and CUDA "
        f"graphs. Rounded up to whole minutes, that is {whole:,} s."
    )
