"""Finds out this process's place in an MPI world, and prepares it before TensorRT-LLM loads.

tritonserver is started in one of three ways:

* Alone, or by one rank of a launcher whose MPI world isn't ours. The launcher's variables are removed.
* Through trtllm-llmapi-launch, which has a world of its own and says where it is. The variables are removed too.
* On every rank, as by upstream's launch_triton_server.py. Rank 0 leads, and the other ranks work for it.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Mapping, MutableMapping
from typing import Any, NoReturn

from deepseek_backend.errors import EngineError

logger = logging.getLogger(__name__)

_PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")


class WorkerRankEnded(EngineError):
    """This process was a worker rank, and its leader has ended. There is nothing to serve."""


def world_size(environ: Mapping[str, str], mpi: Mapping[str, Any]) -> int:
    """Return the size of the world where tritonserver runs on every rank; 1 where it does not."""
    if any(name.startswith(mpi["llmapi_launch_prefix"]) for name in environ) or not _is_launched(environ, mpi):
        return 1
    sizes = [environ[name] for name in mpi["size_variables"] if environ.get(name, "").isdecimal()]
    return int(sizes[0]) if sizes else 1


def forget_launcher(environ: MutableMapping[str, str], mpi: Mapping[str, Any]) -> list[str]:
    """Remove the variables of an MPI launcher from `environ`; return the removed names.

    Where mpirun has started tritonserver, Triton's stub process, in which this runs, inherits a rank that isn't its
    own. MPI in it would wait for the launcher's world, or break it. Without a launcher, variables with the same
    prefixes are the operator's settings (OMPI_MCA_btl_tcp_if_include) and stay. TLLM_* variables always stay: with them
    trtllm-llmapi-launch says where its world is.
    """
    if not _is_launched(environ, mpi):
        return []
    removed = [name for name in environ if name.startswith(tuple(mpi["launcher_prefixes"]))]
    for name in removed:
        del environ[name]
    logger.info("forgot %d variables of the MPI launcher", len(removed))
    return removed


def lead_or_work(mpi: Mapping[str, Any], llm_args: Mapping[str, Any]) -> dict[str, Any]:
    """On rank 0, return the LLM argument that makes the other ranks its workers; on the others, work until it ends.

    Call it on every rank, after tensorrt_llm was imported.

    :raises WorkerRankEnded: on every rank but 0, when the leader has ended.
    :raises EngineError: when the world does not have as many ranks as the model needs.
    """
    world = importlib.import_module("mpi4py.MPI").COMM_WORLD
    needed = math.prod(int(llm_args.get(name) or 1) for name in _PARALLEL_SIZES)
    if world.Get_size() != needed:
        raise EngineError(
            f"tritonserver runs on {world.Get_size()} MPI ranks, but the model needs {needed} "
            f"({' x '.join(_PARALLEL_SIZES)}): start it on {needed}"
        )
    if world.Get_rank() != 0:
        _work(world)
    session_class = getattr(importlib.import_module("tensorrt_llm.llmapi"), mpi["leader"]["session_class"])
    return {mpi["leader"]["llm_arg"]: session_class(comm=world, n_workers=world.Get_size())}


def _work(world: Any) -> NoReturn:
    futures = importlib.import_module("mpi4py.futures")
    logger.info("rank %d works for rank 0", world.Get_rank())
    with futures.MPICommExecutor(world) as executor:
        if executor is not None:
            raise EngineError(f"MPI rank {world.Get_rank()} was made the leader beside rank 0")
    raise WorkerRankEnded(f"MPI rank {world.Get_rank()} has nothing to serve: its leader has ended")


def _is_launched(environ: Mapping[str, str], mpi: Mapping[str, Any]) -> bool:
    return any(name in environ for name in mpi["launcher_variables"])
