"""Reads this process's MPI rank and world size from the environment variables that the ranks' launcher sets."""

from __future__ import annotations

from collections.abc import Mapping

_RANK = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
_SIZE = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""PMIx gives the size by a call, not by a variable; Slurm and Open MPI set their own variables beside it."""


def rank(environment: Mapping[str, str]) -> int:
    return _first(environment, _RANK, 0)


def size(environment: Mapping[str, str]) -> int:
    return _first(environment, _SIZE, 1)


def _first(environment: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    found = (environment.get(name, "") for name in names)
    return next((int(value) for value in found if value.isdecimal()), default)
