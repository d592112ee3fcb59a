"""A synthetic checkpoint of 2 MB in four shards, made once in a process, of less noise than the bench's."""

import functools
import tempfile
from pathlib import Path
from unittest import mock

from bench import synthetic_checkpoint


@functools.cache
def _files():
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(synthetic_checkpoint, "NOISE_BYTES", 2**16):
        synthetic_checkpoint.make_checkpoint(Path(folder, "R1"), size=2 * 10**6)
        return {path.name: path.read_bytes() for path in Path(folder, "R1").iterdir()}


def write_checkpoint(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in _files().items():
        (folder / name).write_bytes(content)
