"""The scales of the experts' inputs: FP8 activations of W4AFP8 are a value divided by the scale of their matrix.

They are read from one safetensors file, as it is published beside W4AFP8 checkpoints, or from what ModelOpt's
examples/deepseek/ptq.py writes. There every rank has the largest magnitudes (amax) that its quantizers have seen. The
scale is the largest of all ranks divided by 448, the largest number of FP8.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from deepseek_triton_build.text import first_names, safe_name
from deepseek_triton_tools.checkpoints.number_formats import LARGEST_FP8
from deepseek_triton_tools.checkpoints.stored_tensors import Array, config_number, read_tensors
from deepseek_triton_tools.checkpoints.torch_archive import read_torch_archive
from deepseek_triton_tools.tool_errors import CheckpointError

_SCALE = re.compile(r"model\.layers\.\d+\.mlp\.experts\.\d+\.w[123]\.input_scale")
_AMAX = re.compile(
    r"(?:model\.)?layers\.(\d+)\.(?:ffn|mlp)\.experts\.(\d+)\.(w[123]|gate_proj|down_proj|up_proj)"
    r"\.input_quantizer\._amax"
)
_RANK_FILE = re.compile(r"amax_dict_rank(\d{1,6})-mp(\d{1,6})\.pt", re.ASCII)
_MOST_EXPERTS = 1_000_000
"""Experts of all layers, to keep from endless ones: DeepSeek-R1 has 14,848."""
_MATRICES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


ActivationScales: TypeAlias = Mapping[str, np.float32]
"""The scale of each input, by its name in the checkpoint: model.layers.3.mlp.experts.7.w1.input_scale.

w1 is gate_proj, w2 is down_proj, w3 is up_proj.
"""


def missing_scales(scales: ActivationScales, config: Mapping[str, Any]) -> list[str]:
    """Return the scales that the experts of config.json need and that are not there.

    Those of the MTP layer are not needed: it is never calibrated.

    :raises CheckpointError: when config.json has no such numbers, or endless ones.
    """
    layers = range(config_number(config, "first_k_dense_replace", 0), config_number(config, "num_hidden_layers", 0))
    num_experts = config_number(config, "n_routed_experts", 0)
    if len(layers) * num_experts > _MOST_EXPERTS:
        raise CheckpointError(
            f"config.json: expected at most {_MOST_EXPERTS:,} experts in all layers, found "
            f"{len(layers) * num_experts:,}; download it again"
        )
    names = (
        f"model.layers.{layer}.mlp.experts.{expert}.{matrix}.input_scale"
        for layer in layers
        for expert in range(num_experts)
        for matrix in ("w1", "w2", "w3")
    )
    return [name for name in names if name not in scales]


def read_activation_scales(path: Path) -> ActivationScales:
    """Read a safetensors file, or the folder of amax_dict_rank{r}-mp{n}.pt files.

    :raises CheckpointError: with all that is wrong with it.
    """
    if path.is_dir():
        return _scales_of_export(path)
    if not path.exists():
        raise CheckpointError(
            f"{path}: expected a safetensors file or a folder of ModelOpt's amax files, found nothing; correct the path"
        )
    tensors = read_tensors(path)
    scales = {name: tensor.read() for name, tensor in tensors.items() if _SCALE.fullmatch(name)}
    if not scales:
        raise CheckpointError(
            f"{path}: expected tensors such as model.layers.3.mlp.experts.0.w1.input_scale, found "
            f"{first_names(tensors) or 'none'}"
        )
    return _checked(path, scales, "scale")


def _scales_of_export(folder: Path) -> ActivationScales:
    largest: dict[str, np.float32] = {}
    problems = []
    for path in _rank_files(folder):
        try:
            amaxes = _checked(path, read_torch_archive(path, lambda name: bool(_AMAX.fullmatch(name))), "amax")
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for name, amax in amaxes.items():
            key = _scale_name(name)
            largest[key] = max(amax, largest.get(key, amax))
    if problems:
        raise CheckpointError("; ".join(problems))
    if not largest:
        raise CheckpointError(
            f"{folder}: expected names such as layers.3.ffn.experts.0.w1.input_quantizer._amax, found none; was it "
            "calibrated with FP8_DEFAULT_CFG?"
        )
    for name in [name for name in largest if ".w1." in name]:
        up = name.replace(".w1.", ".w3.")
        # Gate and up are one product, with one input.
        if up in largest:
            largest[name] = largest[up] = max(largest[name], largest[up])
    return {name: amax / np.float32(LARGEST_FP8) for name, amax in largest.items()}


def _rank_files(folder: Path) -> list[Path]:
    """The files of all ranks, in their order.

    :raises CheckpointError: when some are missing, or are of another run.
    """
    by_size: dict[int, dict[int, Path]] = defaultdict(dict)
    for path in folder.iterdir():
        if match := _RANK_FILE.fullmatch(path.name):
            by_size[int(match[2])][int(match[1])] = path
    if not by_size:
        raise CheckpointError(f"{folder}: expected amax_dict_rank0-mp8.pt and so on, as ptq.py writes them, found none")
    if len(by_size) > 1:
        sizes = ", ".join(f"mp{size}" for size in sorted(by_size))
        raise CheckpointError(f"{folder}: expected the files of one run, found those of {sizes}; remove the others")
    ((size, paths),) = by_size.items()
    others = [path.name for rank, path in paths.items() if rank >= size]
    if others or len(paths) < size:
        missing = (f"amax_dict_rank{rank}-mp{size}.pt" for rank in range(size) if rank not in paths)
        # There may be a million of them, by one name.
        first = ", ".join(islice(missing, 3))
        what = f"{len(paths) - len(others):,} of {size:,}, no {first}" if first else f"{first_names(others)} too"
        raise CheckpointError(f"{folder}: expected the files of ranks 0 to {size - 1}, found {what}; copy them all")
    return [paths[rank] for rank in sorted(paths)]


def _scale_name(amax: str) -> str:
    match = _AMAX.fullmatch(amax)
    assert match is not None
    return f"model.layers.{match[1]}.mlp.experts.{match[2]}.{_MATRICES.get(match[3], match[3])}.input_scale"


def _checked(path: Path, tensors: Mapping[str, Array], what: str) -> dict[str, np.float32]:
    """The one value of each tensor.

    :raises CheckpointError: naming those that are no finite number above 0, or have several.
    """
    several = [f"{safe_name(name)} has {values.size:,} values" for name, values in tensors.items() if values.size != 1]
    numbers = {name: values.astype(np.float32).item() for name, values in tensors.items() if values.size == 1}
    wrong = several + [f"{name} is {value:g}" for name, value in numbers.items() if not 0 < value < float("inf")]
    if wrong:
        more = f" and {len(wrong) - 3:,} more" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"{path}: expected one number above 0 for each {what}, but {', '.join(wrong[:3])}{more}; calibrate again"
        )
    return {name: np.float32(value) for name, value in numbers.items()}
