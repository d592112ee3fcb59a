"""Which GPUs the instances of a model take. The backend and upstream's model.py read them from config.pbtxt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from deepseek_triton_build.check.codes import GPUS_SHARED, IDLE_GPUS, NO_GPUS, TOO_FEW_GPUS, WRONG_KIND
from deepseek_triton_build.check.finding import CheckCode, Finding
from deepseek_triton_build.check.pbtxt import ModelConfig
from deepseek_triton_build.check.scripts import ShellScript
from deepseek_triton_build.data.catalog import Gpu
from deepseek_triton_build.text import short_repr

PARAMETER = "gpu_device_ids"
KIND_CPU = "KIND_CPU"
TRTLLM_RANKS = "tensor x pipeline parallelism"
VLLM_RANKS = "tensor x pipeline x data parallelism"
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def check_gpus(config: ModelConfig, *, num_ranks: int | None, num_gpus: int | None) -> Iterator[Finding]:
    """Find wrong kinds of instances, and instances whose GPUs are missing, shared, too few or too many.

    :param num_ranks: tensor x pipeline parallelism; None when model.yaml gives no valid numbers.
    :param num_gpus: the GPUs of one instance, when the user or the stamp says so.
    """
    yield from check_kinds(config, KIND_CPU)
    text = config.message.parameters[PARAMETER].string_value if PARAMETER in config.message.parameters else ""
    count = sum(group.count or 1 for group in config.message.instance_group) or 1
    if not text:
        if count > 1:
            message = f"{count} instances need the parameter {PARAMETER}, with the GPUs of each instance"
            yield config.finding(NO_GPUS, message, _example(count, num_ranks), at="instance_group")
        elif num_ranks and num_gpus:
            yield from _check_count(config, num_ranks, num_gpus, "the instance", at="instance_group")
        return
    instances = [[_gpu(gpu) for gpu in part.split(",") if gpu.strip()] for part in text.split(";")]
    if len(instances) != count or not all(instances):
        wanted = "one instance" if count == 1 else f"{count} instances, separated by semicolons"
        message = f"expected the GPUs of {wanted}, found {short_repr(text)}"
        yield config.finding(NO_GPUS, message, _example(count, num_ranks), at=PARAMETER)
    uses = Counter(gpu for gpus in instances for gpu in gpus)
    if twice := [gpu for gpu, times in uses.items() if times > 1]:
        message = f"GPU {', '.join(twice)} is given more than once in {short_repr(text)}"
        yield config.finding(GPUS_SHARED, message, "give each GPU to one instance", at=PARAMETER)
    for index, gpus in enumerate(instances):
        if num_ranks and gpus:
            yield from _check_count(config, num_ranks, len(gpus), f"instance {index}", at=PARAMETER)


def check_vllm_gpus(config: ModelConfig, *, num_ranks: int | None, num_gpus: int | None) -> Iterator[Finding]:
    """Find more than one instance, and one whose GPUs are too few or too many.

    :param num_ranks: tensor x pipeline x data parallelism; None when the arguments give no valid numbers.
    """
    count = sum(group.count or 1 for group in config.message.instance_group) or 1
    if count > 1:
        message = f"{count} instances would all take the same GPUs, because each loads a vLLM of its own"
        fix = "write count: 1, and raise data_parallel_size for more engines"
        yield config.finding(GPUS_SHARED, message, fix, at="instance_group")
    elif num_ranks and num_gpus:
        yield from _check_count(config, num_ranks, num_gpus, "the instance", at="instance_group", way=VLLM_RANKS)


def hidden_gpus(script: ShellScript, num_ranks: int, gpu: Gpu | None, way: str = TRTLLM_RANKS) -> Iterator[Finding]:
    """Find a CUDA_VISIBLE_DEVICES that shows the ranks of a node fewer GPUs than they need."""
    variable = script.variables.get(_VISIBLE)
    if variable is None or variable.value is None:
        return
    shown = len([name for name in variable.value.split(",") if name.strip()])
    needed = min(num_ranks, gpu.gpus_per_node) if gpu is not None else num_ranks
    if shown < needed:
        message = f"{_VISIBLE}={variable.value} shows {shown} GPUs to {needed} ranks ({way})"
        fix = f"name {needed} GPUs, or remove the variable"
        yield TOO_FEW_GPUS.finding(message, fix, file=script.file, line=variable.line, key=_VISIBLE)


def check_kinds(config: ModelConfig, wanted: str) -> Iterator[Finding]:
    """Find instances of another kind than `wanted`."""
    groups = config.message.instance_group
    if not groups:
        fix = f"write instance_group [ {{ count: 1, kind: {wanted} }} ]"
        yield config.finding(WRONG_KIND, "there is no instance_group", fix, at="instance_group")
    for number in sorted({group.kind for group in groups}):
        kind = groups[0].DESCRIPTOR.enum_types_by_name["Kind"].values_by_number.get(number)
        if kind is None:
            yield config.unknown_number("kind", number, at="kind")
        elif kind.name != wanted:
            message = f"expected instances of {wanted}, found {kind.name}"
            yield config.finding(WRONG_KIND, message, f"write kind: {wanted}", at="kind")


def _gpu(name: str) -> str:
    """Return the GPU's name without leading zeros: 0 and 00 are the same GPU."""
    name = name.strip()
    return str(int(name)) if name.isdecimal() and len(name) < 10 else name


def _check_count(
    config: ModelConfig, num_ranks: int, num_gpus: int, what: str, *, at: str, way: str = TRTLLM_RANKS
) -> Iterator[Finding]:
    problem = count_problem(num_ranks, num_gpus, what, way)
    if problem is not None:
        code, message, fix = problem
        yield config.finding(code, message, fix, at=at)


def count_problem(
    num_ranks: int, num_gpus: int, what: str, way: str = TRTLLM_RANKS
) -> tuple[CheckCode, str, str] | None:
    """Return code, message and fix when `what` has more or fewer GPUs than ranks.

    :param way: what multiplies to the number of ranks.
    """
    message = f"{what} has {num_gpus} GPUs for {num_ranks} ranks ({way})"
    if num_gpus < num_ranks:
        fix = f"give it {num_ranks} GPUs, or make {way} {num_gpus}"
        return TOO_FEW_GPUS, message, fix
    if num_gpus > num_ranks:
        return IDLE_GPUS, message, f"raise tensor_parallel_size, or name {num_ranks} GPUs"
    return None


def _example(count: int, num_ranks: int | None) -> str:
    """Return a fix that shows what to write for `count` instances, shortened to fit a line."""
    size = num_ranks or 1
    ids = ";".join(_ids(index * size, size) for index in range(min(count, 4))) + (";..." if count > 4 else "")
    parameter = f'parameters [ {{ key: "{PARAMETER}", value: {{ string_value: "{ids}" }} }} ]'
    if count == 1:
        return f"write {parameter}, or leave the parameter out"
    return f"write {parameter}, with the GPUs of this machine, or count: 1 for one instance"


def _ids(first: int, size: int) -> str:
    """Return the numbers of `size` GPUs, beginning with `first`."""
    listed = ",".join(map(str, range(first, first + (size if size <= 16 else 2))))
    return listed + (",..." if size > 16 else "")
