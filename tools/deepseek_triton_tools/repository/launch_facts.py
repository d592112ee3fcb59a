"""The facts about a model repository or a checkpoint that a deployment needs: names, bytes, image, GPUs."""

import math
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from deepseek_triton_build.catalog import KnownCheckpoint, gpus, variant_of_model, variants
from deepseek_triton_build.check import MANIFEST, Stamp, changed_files, read_stamp, read_yaml, served_model
from deepseek_triton_build.text import safe_name
from deepseek_triton_tools.repository.checkpoint_files import (
    MODEL_YAML,
    NothingToReadError,
    ServedModel,
    find_checkpoints,
    model_yamls,
    served_models,
)
from deepseek_triton_tools.repository.hub_cache import hub_cache, parse_hub_name
from deepseek_triton_tools.tool_errors import CheckpointError, RepositoryError


@dataclass(frozen=True, kw_only=True)
class Serving:
    """The checkpoints that are served, and what serves them."""

    source: str
    """The repository or checkpoint as the user wrote it."""
    folders: tuple[str, ...]
    """Absolute paths of the checkpoints that are folders."""
    names: tuple[str, ...]
    """Names of the checkpoints that are in the Hugging Face cache."""
    hub_cache: str
    """The folder of the Hugging Face cache on this machine."""
    size: int
    """Bytes of all weights."""
    size_from: str
    """The source of `size`, for people."""
    image: str | None = None
    """The container image that a generated repository was made for."""
    num_gpus: int | None = None
    """GPUs of one instance: tensor_parallel_size x pipeline_parallel_size, and for vLLM x data_parallel_size."""
    gpus_per_node: int | None = None
    """GPUs of a machine that has the plan's GPU; None where the GPU is not known."""

    @property
    def gpus_of_node(self) -> int | None:
        """GPUs of the instance on one node."""
        if self.num_gpus is None or self.gpus_per_node is None:
            return self.num_gpus
        return min(self.num_gpus, self.gpus_per_node)

    @property
    def mounts(self) -> Mapping[str, str]:
        """Folders that a container mounts for `folders`: path in the container -> path on this machine."""
        return {place: source for folder in self.folders for place, source in _mounts(folder)}

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """All checkpoints, as arguments of `deepseek-triton warm files`."""
        return (*self.folders, *self.names)


def serving_of(source: str) -> Serving:
    """Read the facts about the model repository or checkpoint at `source`.

    :raises CheckpointError: when there is no checkpoint, or its size is not known.
    """
    yamls = model_yamls(Path(source)) if os.path.exists(source) else []
    if not yamls:
        size = sum(checkpoint.size for checkpoint in find_checkpoints(source))
        named = ServedModel(model_yaml=Path(MODEL_YAML), name=source)
        return _serving(source, [named], Stamp(values={}, file=MANIFEST), (size, "its files"))
    first = yamls[0].resolve()
    stamp, _ = read_stamp(first.parent.parent, "")
    document, _ = read_yaml(first, str(first))
    for lost in stamp.lost_engine(document, first.parent):
        raise CheckpointError(f"{yamls[0]}: {lost.message}; {lost.fix}")
    served = [model for model_yaml in yamls for model in served_models(model_yaml)]
    values = document.values if document else {}
    sizes = [values.get(f"{kind}_parallel_size") for kind in ("tensor", "pipeline", "data")]
    num_gpus = math.prod(size for size in sizes if isinstance(size, int)) if isinstance(sizes[0], int) else None
    return _serving(source, served, stamp, _size(source, served, stamp), num_gpus)


def _serving(
    source: str, served: list[ServedModel], stamp: Stamp, size: tuple[int, str], num_gpus: int | None = None
) -> Serving:
    gpu = gpus().get(stamp.text("gpu") or "")
    names = (f"{each.name}@{each.revision}" if each.revision else each.name for each in served if _is_name(each))
    return Serving(
        source=source,
        folders=tuple(dict.fromkeys(os.path.abspath(model.path) for model in served if not _is_name(model))),
        names=tuple(dict.fromkeys(names)),
        hub_cache=str(hub_cache()[0]),
        size=size[0],
        size_from=size[1],
        image=stamp.text("image"),
        num_gpus=num_gpus,
        gpus_per_node=gpu.gpus_per_node if gpu else None,
    )


def _size(source: str, served: Iterable[ServedModel], stamp: Stamp) -> tuple[int, str]:
    """(bytes, where that was found): by the files where they are on this machine, else by the catalogue."""
    try:
        return sum(checkpoint.size for checkpoint in find_checkpoints(source)), "its files"
    except CheckpointError as error:
        known = [_known(model, stamp, error) for model in served]
    by = ", ".join(f"{each.bytes_status} for {each.model}" for each in known)
    return sum(each.weight_bytes for each in known), f"the catalogue, {by}: it is not on the machine this was made on"


def _known(model: ServedModel, stamp: Stamp, why_not: CheckpointError) -> KnownCheckpoint:
    named = variant_of_model(model.name)
    if named is not None:
        return named[1]
    variant = variants().get(stamp.text("variant") or "")
    planned = variant.checkpoints.get(stamp.text("precision") or "") if variant and not model.is_draft else None
    if planned is None and os.path.exists(model.path):
        raise why_not
    if planned is None:
        raise CheckpointError(
            f"{model}: {safe_name(model.name)} is neither on this machine nor known by name, so its size is not known; "
            "run this on a machine that has the checkpoint"
        )
    return planned


def _is_name(model: ServedModel) -> bool:
    return not os.path.exists(model.path) and parse_hub_name(model.name) is not None


def _mounts(folder: str) -> Iterator[tuple[str, str]]:
    """(path in the container, path on this machine) of each folder that the files of `folder` lie in.

    A snapshot in a Hugging Face cache holds links to ../../blobs, so the model's whole folder is mounted. Elsewhere it
    is the folder itself, and the folders that links in it lead to.
    """
    parent = os.path.dirname(folder)
    if os.path.basename(parent) == "snapshots":
        yield os.path.dirname(parent), os.path.dirname(parent)
        return
    yield folder, folder
    for path in sorted(Path(folder).glob("*")):
        if path.is_symlink():
            there = os.path.dirname(os.path.normpath(os.path.join(folder, os.readlink(path))))
            if not Path(there).is_relative_to(folder):
                yield there, os.path.dirname(os.path.realpath(path))


START_SCRIPT = "start.sh"
SUPERVISOR = "supervise.py"
SERVE_SCRIPT = "serve.sh"
_DYNAMO, _ORCHESTRATOR = "dynamo.yaml", "orchestrator.sh"
"""Files of the other formats of `build`, which start without Triton."""
_GIB = 2**30
_READY_WITHIN = re.compile(r"READY_WITHIN:-(\d+)")
_READY_WITHIN_S = 600
_LAUNCHED = re.compile(r'(?s)DRY_RUN.*\n(?! *for )[^\n]*"\$\{start\[@\]\}"')
OWN_PORT = re.compile(r"\bPORT:-(\d+)")
"""The port that a serve.sh listens on by itself."""


@dataclass(frozen=True, kw_only=True)
class LaunchFacts:
    """One generated repository, by its files and by its stamp (deepseek-triton.json)."""

    source: str
    """The repository's path as the user wrote it."""
    folder: Path
    """The repository's absolute path."""
    model: str
    """The model's name on the server."""
    version_dir: Path
    """The model's version folder, which has model.py and the supervisor."""
    engine: str
    release: str | None
    """The TensorRT-LLM release; None for engines that do without."""
    vllm: str | None
    """The vLLM version; None for other engines."""
    image: str | None
    """The container image that the repository was made for; None for engines that do without."""
    gpu: str | None
    """The catalogue's name of the GPU; None for engines that do without."""
    sm: int | None
    """The GPU's compute capability, such as 90."""
    num_gpus: int
    """GPUs of one instance; 0 for engines that use none."""
    world_size: int
    """Processes that a launch starts: an MPI rank for each GPU; for vLLM, which starts its own workers, one a node."""
    nodes: int
    ready_within_s: int
    """Seconds that start.sh allows a start to take."""
    serving: Serving | None
    """The checkpoint; None for an engine that reads no weights."""
    shared_memory: int = 0
    """Bytes that all ranks share in each node's /dev/shm: the experts' copy of an online load balancer, or Engram's
    tables under data parallelism."""
    pinned_tables: int = 0
    """Bytes of Engram's tables in each node's memory, where they are not in /dev/shm."""
    serve_port: int | None = None
    """The port that serve.sh listens on by itself, of a folder without Triton; None for a repository."""

    @property
    def has_triton(self) -> bool:
        return self.serve_port is None

    @property
    def start_script(self) -> Path:
        return self.folder / (START_SCRIPT if self.has_triton else SERVE_SCRIPT)

    @property
    def supervisor(self) -> Path:
        return self.version_dir / SUPERVISOR

    @property
    def ranks_per_node(self) -> int:
        return self.world_size // self.nodes

    @property
    def gpus_per_node(self) -> int:
        """GPUs of one instance on a node; 0 for engines that use none."""
        return self.num_gpus // self.nodes

    @property
    def workers_per_node(self) -> int:
        """Processes of the engine on a node, whoever starts them."""
        return self.gpus_per_node or self.ranks_per_node

    @property
    def uses_mpi(self) -> bool:
        return self.release is not None

    @property
    def mounts(self) -> dict[str, str]:
        """Folders that a container mounts for the checkpoint: path in the container -> path on this machine. None for
        one inside the repository, which is mounted anyway."""
        mounts = self.serving.mounts.items() if self.serving else ()
        return {place: source for place, source in mounts if not Path(place).is_relative_to(self.folder)}

    @property
    def shm_bytes(self) -> int:
        """Bytes of /dev/shm: 1 GiB for each worker, 1 GiB for the server itself, and what they share.

        NVIDIA's containers ask for --shm-size=1g. That this is enough for each process that uses the transports of NCCL
        and Open MPI, or vLLM's message queues, is an assumption. Only what is used takes memory.
        """
        return (self.workers_per_node + 1) * _GIB + self.shared_memory

    @property
    def shared_memory_why(self) -> str:
        """A sentence about what the ranks share in /dev/shm; empty without it."""
        if not self.shared_memory:
            return ""
        what = "Engram's tables" if self.vllm else "the copy of all experts, which wide EP's load balancer keeps"
        return f" {self.shared_memory / _GIB:,.0f} GiB of it are {what}."


def facts_of(source: str, *, without_triton: bool = False) -> LaunchFacts:
    """Read the facts about the repository at `source`.

    :param without_triton: whether it may be the folder of trtllm-serve or of vLLM's own server.
    :raises RepositoryError: when `deepseek-triton build` has not written the folder, or it was changed since.
    :raises CheckpointError: when the checkpoint's size is not known.
    """
    folder = Path(os.path.abspath(source))
    try:
        problem = _problem(source, folder, without_triton)
    except OSError as error:
        where = os.path.relpath(error.filename, folder) if error.filename else START_SCRIPT
        what = safe_name(source) if where == "." or where.startswith("..") else safe_name(os.path.join(source, where))
        raise RepositoryError(f"{what}: can't be read: {error.strerror}") from error
    if problem:
        raise RepositoryError(problem)
    has_triton = (folder / START_SCRIPT).is_file()
    version_dir = _version_dirs(folder)[0] if has_triton else folder
    home = version_dir.parent if has_triton else folder
    stamp, _ = read_stamp(home, "")
    serving: Serving | None
    try:
        serving = serving_of(source) if has_triton else _serving_of_script(source, folder / SERVE_SCRIPT, stamp)
    except NothingToReadError:
        serving = None
    planned = _planned_size(source, stamp, serving)
    gpu = gpus().get(stamp.text("gpu") or "")
    if gpu is None and (stamp.text("release") or stamp.text("vllm")):
        raise RepositoryError(
            f"{safe_name(source)}: its {MANIFEST} names no GPU that this version of deepseek-triton knows: copy the "
            "folder as it was written, or write it anew"
        )
    nodes = -(-planned // gpu.gpus_per_node) if gpu else 1
    shared, pinned = node_memory(stamp, nodes)
    # The stamp has neither deadline nor port, and who edits a script means the edited one.
    script = (folder / (START_SCRIPT if has_triton else SERVE_SCRIPT)).read_text("utf-8", errors="replace")
    within, port = _READY_WITHIN.search(script), OWN_PORT.search(script)
    if not has_triton and (port is None or "HOST:-" not in script):
        raise RepositoryError(
            f"{safe_name(source)}: expected {SERVE_SCRIPT} to listen at HOST and PORT, which launch sets, found "
            'others: write --host "${HOST:-localhost}" --port "${PORT:-8000}"'
        )
    return LaunchFacts(
        source=source,
        folder=folder,
        model=home.name,
        version_dir=version_dir,
        engine=stamp.text("engine") or "tensorrt_llm",
        release=stamp.text("release"),
        vllm=stamp.text("vllm"),
        image=stamp.text("image"),
        gpu=gpu.name if gpu else None,
        sm=gpu.sm if gpu else None,
        num_gpus=planned if gpu else 0,
        world_size=nodes if stamp.text("vllm") else planned,
        nodes=nodes,
        ready_within_s=int(within[1]) if within else _READY_WITHIN_S,
        serving=serving,
        shared_memory=shared,
        pinned_tables=pinned,
        serve_port=int(port[1]) if port and not has_triton else None,
    )


def node_memory(stamp: Stamp, nodes: int) -> tuple[int, int]:
    """Return the bytes that ranks share in each node's /dev/shm, and those of Engram's tables that are not there."""
    shared = found if isinstance(found := stamp.values.get("shared_memory"), int) and found > 0 else 0
    variant = variants().get(stamp.text("variant") or "")
    shape = variant.architecture if variant is not None else None
    return shared, shape.host_bytes // nodes if shape is not None and not shared else 0


def _serving_of_script(source: str, script: Path, stamp: Stamp) -> Serving:
    name = served_model(script)
    if name is None or not (os.path.isabs(name) or parse_hub_name(name)):
        raise RepositoryError(
            f"{safe_name(source)}: expected {SERVE_SCRIPT} to name the checkpoint's whole path or its name on the "
            f"Hugging Face hub, found {safe_name(name or 'none')}: build it anew with --model and the whole path"
        )
    served = [ServedModel(model_yaml=script, name=name)]
    return _serving(source, served, stamp, _size(name, served, stamp))


def _problem(source: str, folder: Path, without_triton: bool) -> str | None:
    """Return the reason why the folder can't be launched; None where it can."""
    name, typed = safe_name(source), shlex.quote(safe_name(source))
    written = "launch runs what deepseek-triton build writes: deepseek-triton build VARIANT --gpu GPU --output DIR"
    if not source.strip():
        return "the repository's name is empty: is a variable not set?"
    # pathlib's is_dir raises an error for a name that is too long.
    if not os.path.isdir(folder):
        return f"{name} is no folder; {written}"
    if not os.listdir(folder):
        return f"{name} is empty; {written}"
    if not (folder / START_SCRIPT).is_file():
        others = {
            **{up / START_SCRIPT: f"is part of a repository: name {safe_name(str(up))}" for up in folder.parents[:2]},
            folder / "generation" / START_SCRIPT: "is a pair, which launch slurm and launch kubernetes start: name one "
            "of its repositories, context/ or generation/",
            folder
            / _DYNAMO: f"is for Dynamo, which has no Triton server to launch: kubectl apply -f {typed}/{_DYNAMO}",
            folder / _ORCHESTRATOR: "is a pair of trtllm-serve servers, which launch does not start: run "
            f"context/{SERVE_SCRIPT} and generation/{SERVE_SCRIPT} on their machines, and {_ORCHESTRATOR}, which joins "
            "them",
            folder / SERVE_SCRIPT: f"is a server without Triton: deepseek-triton launch docker {typed}",
        }
        kind = next((path for path in others if path.is_file()), None)
        if kind is None or kind.name != SERVE_SCRIPT or not without_triton:
            return f"{name} {others[kind] if kind else f'has no {START_SCRIPT}; {written}'}"
        script, home = kind, folder
    else:
        versions = _version_dirs(folder)
        if not versions:
            for path in filter(os.path.isdir, folder.iterdir()):
                os.listdir(path)  # one that can't be read is the reason
            return f"{name} has no model's folder beside its {START_SCRIPT}; {written}"
        script, home = folder / START_SCRIPT, versions[0].parent
    stamp, _ = read_stamp(home, "")
    if stamp.text("engine") is None:
        more = f"; see deepseek-triton check {typed}" if script.name == START_SCRIPT else ""
        expected = f"{name} has no whole {MANIFEST}, which says what the folder was made for"
        return f"{expected}: copy the whole folder, or write it anew{more}"
    for finding in changed_files(stamp, home, folder, ""):
        if finding.severity == "error":
            return f"{name}: {finding.message}; {finding.fix}"
    # An older start.sh would ignore DRY_RUN and start the server.
    if script.name == START_SCRIPT and not _LAUNCHED.search(script.read_text("utf-8", errors="replace")):
        return (
            f"{name}/{START_SCRIPT} has no DRY_RUN or runs nothing, so it is cut or from before there was a launch: "
            "write it anew, with the options in its first line"
        )
    return None


def _version_dirs(folder: Path) -> list[Path]:
    """The version folders of the models in the repository, sorted."""
    found = {path.parent for path in folder.glob(f"*/1/{MODEL_YAML}")}
    return sorted(found | {path.parent / "1" for path in folder.glob(f"*/{MANIFEST}")})


def _planned_size(source: str, stamp: Stamp, serving: Serving | None) -> int:
    """The number of the engine's workers that start.sh was written for, by the stamp.

    :raises RepositoryError: when model.yaml was changed to another number.
    """
    planned = stamp.num_gpus or 1
    configured = serving.num_gpus if serving and serving.num_gpus and stamp.text("gpu") else planned
    if configured != planned:
        raise RepositoryError(
            f"{safe_name(source)}: {MODEL_YAML} asks for {configured} ranks, {START_SCRIPT} starts {planned}, and the "
            "engine would wait for the others: correct one; deepseek-triton check tells more"
        )
    return planned
