"""Makes a running tensorrt_llm.LLM of model.yaml and the release record, on this process's GPUs and MPI ranks.

GPUs: as in upstream's backend, the parameter gpu_device_ids of config.pbtxt names those of each instance, "0,1;2,3" for
two, and an environment variable tells CUDA. It must be set before tensorrt_llm is imported: CUDA opens the GPUs that it
sees then, and workers inherit the variable.

MPI: tritonserver is started in one of three ways:

* Alone, or by one rank of a launcher whose MPI world isn't ours. The launcher's variables are removed.
* Through trtllm-llmapi-launch, which has a world of its own and says where it is. The variables are removed too.
* On every rank, as by upstream's launch_triton_server.py. Rank 0 leads, and the other ranks work for it.
"""

import copy
import importlib
import json
import logging
import math
import re
import threading
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from deepseek_backend.config import BackendConfig
from deepseek_backend.engines.base import TEXT_LAYER_FIELDS
from deepseek_backend.errors import ConfigError, EngineError
from deepseek_backend.release import EngineRelease

logger = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 20.0
"""Seconds that `shut_down` waits for the workers to end."""

APPLIED_OUTSIDE = TEXT_LAYER_FIELDS | {"add_special_tokens", "max_tokens", "truncate_prompt_tokens"}
"""Sampling fields that the backend's text layer and this engine apply themselves, whatever TensorRT-LLM supports."""
VISIBLE_DEVICES = "TRTLLM_VISIBLE_DEVICES"
"""Variable that tells the workers the GPUs; the engine counts gpus_per_node from it."""
_PARAMETER = "gpu_device_ids"
_PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")


def resolved_llm_args(config: BackendConfig, environ: Mapping[str, str], release: EngineRelease) -> dict[str, Any]:
    """Return the LLM arguments with everything that model.yaml leaves open.

    The paths of a model and of a load balancer's file relative to the version folder become absolute, gpus_per_node is
    the number of GPUs of this instance, and the PyTorch backend is named where it is not the release's default.
    """
    llm_args = copy.deepcopy(dict(config.llm_args))
    if release.backend_to_name:
        llm_args.setdefault("backend", release.backend_to_name)
    llm_args["model"] = config.resolved_model
    experts = llm_args.get("moe_config")
    for section, key in ((llm_args, "moe_load_balancer"), (experts, "load_balancer")):
        if isinstance(section, dict) and isinstance(section.get(key), str):
            section[key] = str(config.version_dir.absolute() / section[key])
    if environ.get(VISIBLE_DEVICES):
        llm_args.setdefault("gpus_per_node", len(environ[VISIBLE_DEVICES].split(",")))
    return llm_args


def make_llm(package: Any, llm_args: Mapping[str, Any], objects: Mapping[str, Any]) -> Any:
    """Make the LLM. Only upstream's own parser reads sections of several classes, such as speculative_config.

    :param objects: further arguments, which no YAML can hold.
    """
    utils = importlib.import_module("tensorrt_llm.llmapi.llm_utils")
    llm = package.LLM(**utils.update_llm_args_with_extra_dict({}, copy.deepcopy(dict(llm_args))), **objects)
    if llm.tokenizer is None:
        llm.shutdown()
        raise EngineError("skip_tokenizer_init: expected false, got true; prompts are text")
    return llm


def max_seq_len(llm_args: Mapping[str, Any]) -> int:
    """Return max_seq_len, or else the checkpoint's max_position_embeddings.

    :raises ConfigError: when neither is known.
    """
    if llm_args.get("max_seq_len") is not None:
        return int(llm_args["max_seq_len"])
    config = Path(str(llm_args["model"]), "config.json")
    try:
        return int(json.loads(config.read_text(encoding="utf-8"))["max_position_embeddings"])
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            [f"max_seq_len: expected a number of tokens, got none, and {config} does not say max_position_embeddings"]
        ) from error


def max_prompt_tokens(llm_args: Mapping[str, Any], release: EngineRelease, max_seq_len: int) -> int:
    """Return the length of the longest prompt: it leaves room for a token, and fits an iteration if not chunked."""
    longest = max_seq_len - 1
    if llm_args.get("enable_chunked_prefill"):
        return longest
    max_num_tokens = llm_args.get("max_num_tokens", release.default("max_num_tokens"))
    return longest if max_num_tokens is None else min(longest, int(max_num_tokens))


def shut_down(llm: Any) -> None:
    """Call llm.shutdown(), for SHUTDOWN_TIMEOUT_S at most: it waits for workers that may never answer."""
    thread = threading.Thread(target=llm.shutdown, name="tensorrt_llm-shutdown", daemon=True)
    thread.start()
    thread.join(SHUTDOWN_TIMEOUT_S)
    if thread.is_alive():
        logger.error(
            "TensorRT-LLM has not shut down in %g s; its workers may still hold GPU memory", SHUTDOWN_TIMEOUT_S
        )


def instance_environment(model_config: Mapping[str, Any], instance_name: str) -> dict[str, str]:
    """Return this instance's environment variables; none for a model's only instance without the parameter.

    :param model_config: the parsed model_config of `initialize`.
    :param instance_name: the model_instance_name of `initialize`.
    :raises ConfigError: when the parameter is missing or leaves an instance without GPUs of its own.
    """
    count = sum(int(group.get("count", 1)) for group in model_config.get("instance_group") or [{}])
    text = str(model_config.get("parameters", {}).get(_PARAMETER, {}).get("string_value", ""))
    if not text:
        if count > 1:
            raise ConfigError(
                [f"config.pbtxt: {count} instances need the parameter {_PARAMETER}, with the GPUs of each"]
            )
        return {}
    per_instance = [[gpu.strip() for gpu in part.split(",") if gpu.strip()] for part in text.split(";")]
    problems = []
    if len(per_instance) != count:
        problems.append(f"{_PARAMETER}: expected GPUs for {count} instances, separated by semicolons, got {text!r}")
    if not all(per_instance):
        problems.append(f"{_PARAMETER}: expected at least one GPU for each instance, got {text!r}")
    all_gpus = [gpu for gpus in per_instance for gpu in gpus]
    if len(set(all_gpus)) != len(all_gpus):
        problems.append(f"{_PARAMETER}: expected each GPU once, got {text!r}")
    if problems:
        raise ConfigError(problems)
    suffix = re.search(r"_(\d+)$", instance_name)
    index = int(suffix[1]) if suffix and count > 1 else 0
    if index >= len(per_instance):
        raise ConfigError([f"{_PARAMETER}: {text!r} has no GPUs for instance {index} ({instance_name})"])
    gpus = ",".join(per_instance[index])
    return {"CUDA_VISIBLE_DEVICES": gpus, VISIBLE_DEVICES: gpus}


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
        logger.info("rank %d works for rank 0", world.Get_rank())
        with importlib.import_module("mpi4py.futures").MPICommExecutor(world) as executor:
            if executor is not None:
                raise EngineError(f"MPI rank {world.Get_rank()} was made the leader beside rank 0")
        raise WorkerRankEnded(f"MPI rank {world.Get_rank()} has nothing to serve: its leader has ended")
    session_class = getattr(importlib.import_module("tensorrt_llm.llmapi"), mpi["leader"]["session_class"])
    return {mpi["leader"]["llm_arg"]: session_class(comm=world, n_workers=world.Get_size())}


def _is_launched(environ: Mapping[str, str], mpi: Mapping[str, Any]) -> bool:
    return any(name in environ for name in mpi["launcher_variables"])
