"""The calibration of a checkpoint's activations for W4AFP8, as a script: it needs GPUs, ModelOpt and DeepSeek's code.

Sources: TensorRT-LLM's guide to DeepSeek (W4AFP8), and the README of ModelOpt's examples/deepseek.
"""

import os
import shlex
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepseek_triton_build.text import for_comment
from deepseek_triton_tools import text_templates
from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.checkpoints.stored_tensors import open_checkpoint, read_config
from deepseek_triton_tools.doctor.gpu import NoGpusError, gpus
from deepseek_triton_tools.doctor.machine import Machine
from deepseek_triton_tools.host.units import sized
from deepseek_triton_tools.tool_errors import CheckpointError

NUM_GPUS = 8
"""The checkpoint is divided among so many, all of one node."""
_CONFIG_671B: Mapping[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
}
"""The values of DeepSeek's config_671B.json, by the names of config.json."""


@dataclass(frozen=True)
class Calibration:
    """A checkpoint to calibrate, and what that needs."""

    checkpoint: Path
    output: Path
    num_experts: int
    num_bytes: int
    """Bytes of the checkpoint's tensors."""

    @property
    def gpu_bytes(self) -> int:
        """Memory of each GPU: its share of the weights, and a quarter more for activations and calibration."""
        return self.num_bytes * 5 // 4 // NUM_GPUS

    @property
    def disk_bytes(self) -> int:
        """The converted copy of the checkpoint: a tenth more, because every GPU's file has the small tensors."""
        return self.num_bytes * 11 // 10


def plan_calibration(checkpoint: Path, output: Path) -> Calibration:
    """Plan it.

    :raises CheckpointError: when the checkpoint is not DeepSeek-V3's or R1's in FP8, or the output is there.
    """
    config, tensors = read_config(checkpoint), open_checkpoint(checkpoint)
    problems = []
    if config.get("model_type") != "deepseek_v3":
        problems.append(f"model_type is {config.get('model_type')!r}, not 'deepseek_v3'")
    problems += [
        f"{key} is {config.get(key)!r}, not {value}" for key, value in _CONFIG_671B.items() if config.get(key) != value
    ]
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("quant_method") != "fp8":
        problems.append("it is not in FP8, as DeepSeek publishes it")
    if problems:
        raise CheckpointError(
            f"{checkpoint}: expected DeepSeek-V3, R1 or V3.1 as published, which config_671B.json describes, but "
            f"{'; '.join(problems)}"
        )
    if output.exists():
        raise CheckpointError(f"{output}: expected a new folder for the amax files, found one; name another")
    return Calibration(
        checkpoint=Path(os.path.abspath(checkpoint)),
        output=Path(os.path.abspath(output)),
        num_experts=config["n_routed_experts"],
        num_bytes=sum(tensor.num_bytes for tensor in tensors.values()),
    )


def render_calibration(calibration: Calibration) -> str:
    """Return the script."""
    values = {
        "version": __version__,
        "checkpoint": for_comment(str(calibration.checkpoint)),
        "checkpoint_quoted": shlex.quote(str(calibration.checkpoint)),
        "output": for_comment(str(calibration.output)),
        "output_quoted": shlex.quote(str(calibration.output)),
        "gpus": str(NUM_GPUS),
        "gpu_memory": sized(calibration.gpu_bytes),
        "disk": sized(calibration.disk_bytes),
        "experts": str(calibration.num_experts),
    }
    return text_templates.wrapped(text_templates.filled(__package__, "calibrate.sh", values))


def lacking(calibration: Calibration, machine: Machine) -> Iterator[str]:
    """Yield what this machine lacks to run it."""
    try:
        enough = [gpu for gpu in gpus(machine) if gpu.memory_mib * 2**20 >= calibration.gpu_bytes]
        if len(enough) < NUM_GPUS:
            yield f"expected {NUM_GPUS} GPUs with {sized(calibration.gpu_bytes)} each, found {len(enough)} of them"
    except NoGpusError as error:
        yield f"expected {NUM_GPUS} GPUs with {sized(calibration.gpu_bytes)} each, found none: {error}"
    for program in ("git", "python3"):
        if shutil.which(program) is None:
            yield f"{program} is not on PATH"
    parent = next(folder for folder in calibration.output.parents if folder.exists())
    free = shutil.disk_usage(parent).free
    # An earlier run may have made the copy that needs the disk.
    is_converted = Path(f"{calibration.output}.work/convert.done").exists()
    if free < calibration.disk_bytes and not is_converted:
        yield f"{parent}: expected {sized(calibration.disk_bytes)} of free disk, found {sized(free)}"
