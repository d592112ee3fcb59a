"""The files of a checkpoint beside its weights that a checkpoint made of it takes along."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from deepseek_triton_build.check import INDEX
from deepseek_triton_tools.repository.checkpoint_manifest import MANIFEST_NAME, SUMS_FILE

CONFIG = "config.json"
CONVERSION = ".conversion"
"""Folder in the output of a conversion. When it is complete, only the plan stays in it, by which the same command knows
that."""
HF_QUANT_CONFIG = "hf_quant_config.json"
QUANT_CFG = "quant_cfg.json"
UNFINISHED = "expected a whole checkpoint, found a conversion that was stopped; run the same checkpoint quantize again"
_NOT_COPIED = ("README.md", CONFIG, INDEX, HF_QUANT_CONFIG, QUANT_CFG, MANIFEST_NAME)
"""Files that are written anew, or that would be wrong beside other weights."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def is_unfinished(folder: Path) -> bool:
    """Tell whether a conversion into the folder was stopped: its config.json comes last."""
    return (folder / CONVERSION).is_dir() and not (folder / CONFIG).exists()


def companion_files(folder: Path) -> Iterator[Path]:
    """Yield the files beside the weights that stay as they are: tokenizer, generation_config.json, model code."""
    for path in sorted(folder.iterdir()):
        is_of_weights = path.name.endswith(_WEIGHTS) or SUMS_FILE.fullmatch(path.name)
        if path.is_file() and not is_of_weights and path.name not in _NOT_COPIED and not path.name.startswith("."):
            yield path
