"""Makes the stand-ins importable as tensorrt_llm, for one release, and as mpi4py."""

import importlib
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

PACKAGE_PARENT = Path(__file__).parent


@contextmanager
def standin(release_yaml):
    """Import the stand-in of the release whose record is in `release_yaml`; forget it at the end."""
    with (
        mock.patch.dict(os.environ, STANDIN_RELEASE=str(release_yaml)),
        mock.patch.object(sys, "path", [str(PACKAGE_PARENT), *sys.path]),
        mock.patch.dict(sys.modules),
    ):
        _forget()
        importlib.invalidate_caches()
        try:
            yield importlib.import_module("tensorrt_llm")
        finally:
            _forget()


def _forget():
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tensorrt_llm", "mpi4py")]:
        del sys.modules[name]
