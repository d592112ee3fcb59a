"""The number of threads of numpy's matrix products.

OpenBLAS reads OPENBLAS_NUM_THREADS when it is loaded, which Triton's stub process has done before it runs our code. Its
own function changes the number later; numpy has no other way.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

logger = logging.getLogger(__name__)

_FUNCTIONS = (
    "openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads64_",
    "openblas_set_num_threads",
)
"""Names of the function in the builds of OpenBLAS: numpy's wheels until 1.26 and from then on, and distributions'."""


def set_blas_threads(number: int) -> None:
    """Let each product of matrices in this process use `number` threads. Without OpenBLAS, a warning is logged."""
    mapped = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    paths = {fields[5] for fields in mapped if len(fields) == 6 and "openblas" in Path(fields[5]).name}
    found = [function for path in paths for name in _FUNCTIONS if (function := getattr(ctypes.CDLL(path), name, None))]
    for function in found:
        function(number)
    if not found:
        logger.warning("numpy does not use OpenBLAS here: num_threads has no effect; set the threads of its BLAS")
