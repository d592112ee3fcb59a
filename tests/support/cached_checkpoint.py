"""A synthetic checkpoint of 2 MB in four shards. It is made once in a process, because its noise takes seconds."""

import functools
import tempfile
from pathlib import Path

from bench.synthetic_checkpoint import make_checkpoint


@functools.cache
def _files():
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder, "R1"), size=2 * 10**6)
        return {path.name: path.read_bytes() for path in Path(folder, "R1").iterdir()}


def write_checkpoint(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in _files().items():
        (folder / name).write_bytes(content)
