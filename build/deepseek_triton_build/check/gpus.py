"""The GPUs of a model: which of them its instances take, and whether the model fits their memory."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise, permutations
from typing import Any, NamedTuple

from deepseek_triton_build.arithmetic.gpu_memory import GIB, LEAST_KV_TOKENS, Layout, minimum_gpus
from deepseek_triton_build.check import codes
from deepseek_triton_build.check.pbtxt import ModelConfig
from deepseek_triton_build.check.scripts import VISIBLE_GPUS, Program
from deepseek_triton_build.check.shell_words import Variable, Word, base_name
from deepseek_triton_build.data.catalog import Gpu
from deepseek_triton_build.data.finding import Code, Finding
from deepseek_triton_build.rules.rule import MLA_OFF, Deployment, UnknownFactError, Violation, VllmDeployment
from deepseek_triton_build.text import short_repr

PARAMETER = "gpu_device_ids"
KIND_CPU = "KIND_CPU"
TRTLLM_RANKS = "tensor x pipeline x context parallelism"
VLLM_RANKS = "tensor x pipeline x data parallelism"
LAUNCHER = "trtllm-llmapi-launch"
_TOOLS = ("mpirun", "mpiexec", "orterun", "srun")
_NODES, _TASKS, _PER_NODE = ("-N", "--nodes"), ("-n", "--ntasks"), ("--ntasks-per-node",)
# Stands for a word that depends on more than the script.
_UNKNOWN = "$"
# What takes a command to another machine, or to GPUs that it is given there.
_ELSEWHERE = frozenset({"ssh", "srun", "mpirun", "mpiexec", "docker", "podman", "nerdctl", "kubectl"})
# vLLM's smallest defaults, which AsyncLLM has by itself (vllm/engine/arg_utils.py, get_batch_defaults).
_LEAST_LIMITS: Mapping[str, Any] = {"max_num_batched_tokens": 2048, "max_num_seqs": 128}


def check_gpus(config: ModelConfig, *, num_ranks: int | None, num_gpus: int | None) -> Iterator[Finding]:
    """Find wrong kinds of instances, and instances whose GPUs are missing, shared, too few or too many.

    :param num_ranks: tensor x pipeline x context parallelism; None when model.yaml gives no valid numbers.
    :param num_gpus: the GPUs of one instance, when the user or the stamp says so.
    """
    yield from check_kinds(config, KIND_CPU)
    text = config.message.parameters[PARAMETER].string_value if PARAMETER in config.message.parameters else ""
    count = sum(group.count or 1 for group in config.message.instance_group) or 1
    if not text:
        if count > 1:
            message = f"{count} instances need the parameter {PARAMETER}, with the GPUs of each instance"
            yield config.finding(codes.NO_GPUS, message, _example(count, num_ranks), at="instance_group")
        elif num_ranks and num_gpus:
            yield from count_findings(num_ranks, num_gpus, "the instance", **config.at("instance_group"))
        return
    instances = [[_gpu(gpu) for gpu in part.split(",") if gpu.strip()] for part in text.split(";")]
    if len(instances) != count or not all(instances):
        wanted = "one instance" if count == 1 else f"{count} instances, separated by semicolons"
        message = f"expected the GPUs of {wanted}, found {short_repr(text)}"
        yield config.finding(codes.NO_GPUS, message, _example(count, num_ranks), at=PARAMETER)
    uses = Counter(gpu for gpus in instances for gpu in gpus)
    if twice := [gpu for gpu, times in uses.items() if times > 1]:
        message = f"GPU {', '.join(twice)} is given more than once in {short_repr(text)}"
        yield config.finding(codes.GPUS_SHARED, message, "give each GPU to one instance", at=PARAMETER)
    for index, gpus in enumerate(instances):
        if num_ranks and gpus:
            yield from count_findings(num_ranks, len(gpus), f"instance {index}", **config.at(PARAMETER))


def check_vllm_gpus(config: ModelConfig, *, num_ranks: int | None, num_gpus: int | None) -> Iterator[Finding]:
    """Find more than one instance, and one whose GPUs are too few or too many.

    :param num_ranks: tensor x pipeline x data parallelism; None when the arguments give no valid numbers.
    """
    count = sum(group.count or 1 for group in config.message.instance_group) or 1
    if count > 1:
        message = f"{count} instances would all take the same GPUs, because each loads a vLLM of its own"
        fix = "write count: 1, and raise data_parallel_size for more engines"
        yield config.finding(codes.GPUS_SHARED, message, fix, at="instance_group")
    elif num_ranks and num_gpus:
        yield from count_findings(num_ranks, num_gpus, "the instance", **config.at("instance_group"), way=VLLM_RANKS)


def hidden_gpus(
    visible: Variable | None,
    num_ranks: int,
    gpu: Gpu | None,
    way: str = TRTLLM_RANKS,
    *,
    file: str,
    name: str = VISIBLE_GPUS,
) -> Iterator[Finding]:
    """Find a CUDA_VISIBLE_DEVICES, or another `name`, that shows the ranks of a node fewer GPUs than they need."""
    shown = visible_gpus(visible)
    needed = min(num_ranks, gpu.gpus_per_node) if gpu is not None else num_ranks
    if visible is not None and shown is not None and len(shown) < needed:
        message = f"{name}={visible.value} shows {len(shown)} GPUs to {needed} ranks ({way})"
        fix = f"name {needed} GPUs, or remove {'the variable' if name == VISIBLE_GPUS else name}"
        yield codes.TOO_FEW_GPUS.finding(message, fix, file=file, line=visible.line, key=name)


def visible_gpus(visible: Variable | None) -> list[str] | None:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names; None where it is not set, or not known."""
    if visible is None or visible.value is None:
        return None
    return [_gpu(name) for name in visible.value.split(",") if name.strip()]


class Server(NamedTuple):
    """A program that a script starts, with its ranks and the GPU, where they are known."""

    program: Program
    num_ranks: int | None
    gpu: Gpu | None


def shared_gpus(servers: Sequence[Server], file: str) -> Iterator[Finding]:
    """Find servers of one script that run at the same time on the same GPUs of its machine."""
    here = [server for server in servers if not _names(server.program) & _ELSEWHERE]
    for later, earlier in permutations(here, 2):
        first, second = _gpus_of(earlier), _gpus_of(later)
        shared = [gpu for gpu in second if gpu in first]
        if shared and later.program.beside.intersection(earlier.program.numbers):
            message = f"GPU {', '.join(shared)} is taken by the server of line {earlier.program.line} too"
            fix = f"give each server GPUs of its own, by {VISIBLE_GPUS}=... before its command"
            line = later.program.line
            yield codes.GPUS_SHARED.finding(message, fix, file=file, line=line, key=VISIBLE_GPUS)


def _gpus_of(server: Server) -> list[str]:
    """Return the GPUs that a server takes: of those that it sees, the first ones."""
    visible, shown = server.program.visible_gpus, visible_gpus(server.program.visible_gpus)
    if server.num_ranks is None or (visible is not None and shown is None):
        return []
    return (shown if shown is not None else [str(gpu) for gpu in range(server.num_ranks)])[: server.num_ranks]


def _names(program: Program) -> set[str]:
    return {base_name(word.text) for start in program.starts for word in start}


class _Launch(NamedTuple):
    """One command of the script that starts the processes of a program."""

    tool: Word | None
    """mpirun or srun; None where nothing does."""
    processes: int | None
    """None where that is not known."""
    num_nodes: int | None
    has_launcher: bool


def _launch(start: Sequence[Word], batch: Sequence[str]) -> _Launch:
    """Read the words before a program.

    :param batch: the options that the batch script gives to Slurm.
    """
    at = max((place for place, word in enumerate(start) if base_name(word.text) in _TOOLS), default=None)
    has_launcher = any(base_name(word.text) == LAUNCHER for word in start)
    if at is None:
        # A batch script runs once, on the first of its nodes. Any other may be started by srun or mpirun itself.
        is_alone = bool(batch) and all(word.is_known for word in start)
        return _Launch(None, 1 if is_alone else None, None, has_launcher)
    words = [word.text if word.is_known else _UNKNOWN for word in start[at + 1 :]]
    if base_name(start[at].text) != "srun":
        hosts = _number(words, ("-H", "-host", "--host", "-hostfile", "--hostfile", "-N", "--npernode"))
        processes = _int(_number(words, ("-n", "-np", "--np", "-c", "--n")))
        return _Launch(start[at], processes, 1 if hosts == "" else None, has_launcher)
    nodes = _number(words, _NODES) or _number(batch, _NODES) or "1"
    tasks, per_node = _number(words, _TASKS), _number(words, _PER_NODE)
    if tasks == "" and per_node == "":
        tasks, per_node = _number(batch, _TASKS), _number(batch, _PER_NODE)
    known, each = _int(nodes), _int(per_node)
    count = _int(tasks) if tasks else each * known if each is not None and known is not None else None
    return _Launch(start[at], known if tasks == per_node == "" else count, known, has_launcher)


def _number(words: Sequence[str], names: Sequence[str]) -> str:
    """Return the value of an option with one of these names; an empty string where it is not given."""
    for word, following in pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else following
        short = next((one for one in names if len(one) == 2 and word.startswith(one) and word[2:].isdecimal()), None)
        if short is not None:
            return word[2:]
    return ""


def _int(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < 8 else None


def are_left_to_slurm(program: Program, batch: Sequence[str]) -> bool:
    """Tell whether Slurm is asked for tasks, and nothing in the script starts them: the one that starts it may."""
    launches = [_launch(start, batch) for start in program.starts]
    is_bare = any(launch.tool is None and not launch.has_launcher for launch in launches)
    return is_bare and bool(_number(batch, _TASKS) or _number(batch, _PER_NODE))


def started_ranks(
    program: Program, programs: Sequence[Program], num_ranks: int, gpu: Gpu | None, batch: Sequence[str], *, file: str
) -> Iterator[Finding]:
    """Compare the processes that are started for a program of TensorRT-LLM with its ranks.

    :param programs: all that the script starts.
    :param batch: the options that the batch script gives to Slurm.
    """
    # Beside the right number, one process by itself prepares something, such as the dataset of a benchmark.
    is_prepared = any(_launch(start, batch).processes == num_ranks for one in programs for start in one.starts)
    for start in program.starts:
        tool, count, num_nodes, has_launcher = _launch(start, batch)
        if count == 1 and is_prepared:
            continue
        name = "the batch script" if tool is None else base_name(tool.text)
        each = -(-count // num_nodes) if count is not None and num_nodes else 1
        if has_launcher and count is not None and count != num_ranks:
            message = f"{name} starts {count} processes for {num_ranks} ranks ({TRTLLM_RANKS})"
            option = "--ntasks" if tool is None or name == "srun" else "-n"
            program_of = "srun --mpi=pmix" if tool is None else name
            fix = f"start as many as there are ranks: {program_of} {option} {num_ranks}, or make {TRTLLM_RANKS} {count}"
        elif tool is not None and not has_launcher and each > 1:
            message = f"{name} starts {count} servers of {num_ranks} ranks each, because each process is one by itself"
            fix = f"write {LAUNCHER} before {program.name}, and start {num_ranks} processes"
        elif tool is None and not has_launcher and gpu is not None and num_ranks > gpu.gpus_per_node:
            if any(word.is_open for word in start):
                continue
            nodes = f"more than one node of {gpu.gpus_per_node} GPUs"
            message = f"nothing starts the {num_ranks} ranks ({TRTLLM_RANKS}) on {nodes}"
            fix = f"write srun --mpi=pmix --ntasks {num_ranks} {LAUNCHER} "
            fix += f"before {program.name}, or mpirun -n {num_ranks}"
        else:
            continue
        line = (tool and tool.line) or program.line
        yield codes.WRONG_RANKS.finding(message, fix, file=file, line=line, key=None)


def repeated_servers(program: Program, batch: Sequence[str], *, file: str) -> Iterator[Finding]:
    """Find a `vllm serve` that is started more than once on a node. It starts its ranks itself."""
    for start in program.starts:
        tool, count, num_nodes, _ = _launch(start, batch)
        is_same = all(word.is_known for word in (*start, *program.words)) and program.visible_gpus is None
        if tool is not None and count is not None and num_nodes and count > num_nodes and is_same:
            message = f"{base_name(tool.text)} starts {count} servers on {num_nodes} nodes, "
            message += "and each starts its ranks itself"
            fix = "start one process for each node"
            yield codes.WRONG_RANKS.finding(message, fix, file=file, line=tool.line or program.line, key=None)


def check_kinds(config: ModelConfig, wanted: str) -> Iterator[Finding]:
    """Find instances of another kind than `wanted`."""
    groups = config.message.instance_group
    if not groups:
        fix = f"write instance_group [ {{ count: 1, kind: {wanted} }} ]"
        yield config.finding(codes.WRONG_KIND, "there is no instance_group", fix, at="instance_group")
    for number in sorted({group.kind for group in groups}):
        kind = groups[0].DESCRIPTOR.enum_types_by_name["Kind"].values_by_number.get(number)
        if kind is None:
            yield config.unknown_number("kind", number, at="kind")
        elif kind.name != wanted:
            message = f"expected instances of {wanted}, found {kind.name}"
            yield config.finding(codes.WRONG_KIND, message, f"write kind: {wanted}", at="kind")


def _gpu(name: str) -> str:
    """Return the GPU's name without leading zeros: 0 and 00 are the same GPU."""
    name = name.strip()
    return str(int(name)) if name.isdecimal() and len(name) < 10 else name


def count_findings(
    num_ranks: int, num_gpus: int, what: str, way: str = TRTLLM_RANKS, *, file: str, line: int | None, key: str
) -> Iterator[Finding]:
    """Find more or fewer GPUs than ranks.

    :param way: what multiplies to the number of ranks.
    """
    message = f"{what} has {num_gpus} GPUs for {num_ranks} ranks ({way})"
    if num_gpus < num_ranks:
        fix = f"give it {num_ranks} GPUs, or make {way} {num_gpus}"
        yield codes.TOO_FEW_GPUS.finding(message, fix, file=file, line=line, key=key)
    elif num_gpus > num_ranks:
        fix = f"raise tensor_parallel_size, or name {num_ranks} GPUs"
        yield codes.IDLE_GPUS.finding(message, fix, file=file, line=line, key=key)


def _example(count: int, num_ranks: int | None) -> str:
    """Return a fix that shows what to write for the first two of `count` instances, at most 16 GPUs of each."""
    size = num_ranks or 1
    lists = [",".join(map(str, range(first, first + min(size, 16)))) for first in range(0, min(count, 2) * size, size)]
    more = ";..." if count > 2 else ",..." if size > 16 else ""
    parameter = f'parameters [ {{ key: "{PARAMETER}", value: {{ string_value: "{";".join(lists)}{more}" }} }} ]'
    if count == 1:
        return f"write {parameter}, or leave the parameter out"
    return f"write {parameter}, with the GPUs of this machine, or count: 1 for one instance"


def memory_problems(deployment: Deployment) -> Iterator[tuple[Code, Violation]]:
    """Find weights or a KV cache that don't fit; nothing when a fact that they depend on is unknown."""
    deployment = deployment.well_typed()
    with suppress(UnknownFactError):
        gpu, architecture, checkpoint = deployment.gpu, deployment.architecture, deployment.checkpoint
        budget = deployment.budget()
        if budget is None or gpu is None or architecture is None or checkpoint is None:
            return
        held, context = budget.weights / GIB, budget.context / GIB
        has = f"a GPU has {budget.memory / GIB:.1f} GiB"
        if budget.weights + budget.context > budget.memory:
            message = f"{has}, of which the weights take {held:.1f} and a CUDA context about {context:.0f}"
            key = "enable_attention_dp" if deployment.layout.attention_dp else "tensor_parallel_size"
            fix = _more_gpus(gpu, minimum_gpus(gpu, architecture, checkpoint), deployment.layout)
            yield codes.WEIGHTS_TOO_LARGE, Violation(key=key, message=message, fix=fix)
        elif budget.kv_tokens < min(LEAST_KV_TOKENS, deployment.get("max_seq_len") or LEAST_KV_TOKENS):
            message = (
                f"{has}, of which the weights take {held:.1f} and an iteration with its CUDA graphs about "
                f"{budget.workspace / GIB:.1f}; that leaves a KV cache of {budget.kv_tokens:,} tokens"
            )
            raised = "raise free_gpu_memory_fraction, " if budget.kv_cache > 0 else ""
            fix = f"{raised}lower max_num_tokens or max_batch_size, or take more GPUs"
            yield codes.NO_ROOM_FOR_CACHE, Violation(key="max_num_tokens", message=message, fix=fix)


def vllm_memory_problems(deployment: VllmDeployment) -> Iterator[tuple[Code, Violation]]:
    """Find weights or a KV cache that don't fit under vLLM; nothing when a fact that they depend on is unknown."""
    deployment = replace(deployment, settings={**_LEAST_LIMITS, **deployment.settings})
    with suppress(UnknownFactError):
        gpu, architecture, checkpoint = deployment.gpu, deployment.architecture, deployment.checkpoint
        budget = deployment.budget()
        if budget is None or gpu is None or architecture is None or checkpoint is None:
            return
        held = f"a GPU has {budget.memory / GIB:.1f} GiB, of which the weights take {budget.weights / GIB:.1f}"
        longest = deployment.get("max_model_len")
        longest = longest if isinstance(longest, int) and longest > 0 else architecture.max_position_embeddings
        if budget.weights + budget.context > budget.memory:
            key = "data_parallel_size" if deployment.layout.attention_dp else "tensor_parallel_size"
            fix = _more_gpus(gpu, minimum_gpus(gpu, architecture, checkpoint), deployment.layout)
            yield codes.WEIGHTS_TOO_LARGE, Violation(key=key, message=held, fix=fix)
        elif budget.longest_start < longest:
            share = deployment.get("gpu_memory_utilization")
            message = (
                f"{held} and an iteration with its CUDA graphs about {budget.workspace / GIB:.1f}; within the share of "
                f"{share} that leaves a KV cache of {budget.longest_start:,} tokens, and vLLM does not start with "
                f"less than max_model_len {longest:,}"
            )
            fix = "lower max_model_len or max_num_batched_tokens, raise gpu_memory_utilization, or take more GPUs"
            if deployment.has_mla_off:
                fix = f"remove {MLA_OFF}: without MLA a token takes {budget.kv_bytes_per_token:,} bytes of a GPU"
            yield codes.NO_ROOM_FOR_CACHE, Violation(key="max_model_len", message=message, fix=fix)


def _more_gpus(gpu: Gpu, least: int | None, layout: Layout) -> str:
    if least is None:
        return "take another GPU"
    if least <= layout.num_gpus:
        return f"use tensor parallelism alone, without attention DP and MTP: then {least} {gpu.name} hold the weights"
    return f"take {least} {gpu.name} or more, and raise tensor_parallel_size"
