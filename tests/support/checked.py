"""A correct repository for the tests of `check`, and helpers that spoil it and read reports."""

import json
import struct
import tempfile
from pathlib import Path

from deepseek_triton_build.catalog import RELEASES
from deepseek_triton_build.check import CheckOptions, check_repository

CHECKOUT = Path(__file__).parents[2] / "model_repository"
CONFIG = (CHECKOUT / "tensorrt_llm/config.pbtxt").read_text()
MODEL_YAML = """\
model: deepseek-ai/DeepSeek-R1
backend: pytorch
tensor_parallel_size: 8
moe_expert_parallel_size: 8
max_num_tokens: 8192
kv_cache_config:
  free_gpu_memory_fraction: 0.8
  dtype: fp8
cuda_graph_config:
  enable_padding: true
  max_batch_size: 128
triton_config:
  engine: tensorrt_llm
  decoupled: true
  max_batch_size: 0
"""
OPTIONS = CheckOptions(release=RELEASES[0], gpu="h200", num_gpus=8)


def write(root, *, model_yaml=MODEL_YAML, config=CONFIG, ours=True):
    model = root / "tensorrt_llm"
    (model / "1").mkdir(parents=True)
    if ours:
        (model / "1" / "deepseek_backend").mkdir()
    (model / "1" / "model.py").touch()
    for path, content in ((model / "1" / "model.yaml", model_yaml), (model / "config.pbtxt", config)):
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def check(model_yaml=MODEL_YAML, config=CONFIG, options=OPTIONS):
    """Return the report about a repository with these files."""
    with tempfile.TemporaryDirectory() as root:
        return check_repository(write(Path(root), model_yaml=model_yaml, config=config), options)


def check_alone(text, **options):
    """Return the report about a YAML file by itself."""
    with tempfile.TemporaryDirectory() as root:
        path = Path(root, "extra.yaml")
        path.write_text(text)
        return check_repository(path, CheckOptions(**options))


def edited(text, old, new):
    assert text.count(old) >= 1, f"{old!r} is not in the file to edit"
    return text.replace(old, new, 1)


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def tree(folder):
    """Return path -> bytes of all files in a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def only(report, code):
    """Return the only finding with `code`."""
    found = [finding for finding in report.findings if finding.code == code]
    assert len(found) == 1, f"expected one {code}, found {report.findings}"
    return found[0]


def serious(report):
    return [finding for finding in report.findings if finding.severity != "note"]


def safetensors(sizes, metadata=None):
    """Return a file of weights with tensors of the given sizes in bytes."""
    header, end = {"__metadata__": metadata} if metadata else {}, 0
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)
