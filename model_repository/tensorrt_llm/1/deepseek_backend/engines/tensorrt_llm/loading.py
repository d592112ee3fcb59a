"""Makes a running tensorrt_llm.LLM of model.yaml and the release record, and derives its capabilities."""

from __future__ import annotations

import copy
import importlib
import json
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepseek_backend.config import BackendConfig
from deepseek_backend.engines.base import TEXT_LAYER_FIELDS, Capabilities
from deepseek_backend.engines.tensorrt_llm.placement import VISIBLE_DEVICES
from deepseek_backend.engines.tensorrt_llm.shared_requests import SharingSupport
from deepseek_backend.errors import ConfigError, EngineError, describe
from deepseek_backend.release import EngineRelease, SamplerSupport

logger = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 20.0
"""Seconds that `shut_down` waits for the workers to end."""

APPLIED_OUTSIDE = TEXT_LAYER_FIELDS | {"add_special_tokens", "max_tokens", "truncate_prompt_tokens"}
"""Sampling fields that the backend's text layer and this engine apply themselves, whatever TensorRT-LLM supports."""


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


def import_tensorrt_llm(release: EngineRelease, allow_mismatch: bool) -> Any:
    """Import the package, and check its version.

    :raises EngineError: when it can't be imported, or is of another release and `allow_mismatch` is False.
    """
    try:
        package = importlib.import_module("tensorrt_llm")
    except ImportError as error:
        raise EngineError(
            f"tensorrt_llm can't be imported: {describe(error)}; it is part of the containers "
            f"nvcr.io/nvidia/tritonserver:{release.record['containers'][0]}-trtllm-python-py3"
        ) from error
    installed = str(package.__version__)
    if not release.matches(installed):
        if not allow_mismatch:
            raise EngineError(
                f"this repository was generated for TensorRT-LLM {release.version}, but {installed} is installed; "
                "generate it again with --trtllm, or set triton_config.engine_options: {allow_version_mismatch: true}"
            )
        logger.warning("TensorRT-LLM %s runs a repository generated for %s", installed, release.version)
    return package


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


def make_capabilities(
    max_seq_len: int,
    support: SamplerSupport,
    bos_token: str,
    max_prompt_bytes: int | None,
    *,
    has_statistics: bool,
    sharing: SharingSupport,
    version: str = "",
) -> Capabilities:
    """Return what the engine can do.

    :param has_statistics: TensorRT-LLM reports its iterations. Without them, or without the times of its tokens, an
        answer that comes whole would tell nothing while it is made, and no time to its first token afterwards.
    """
    unsupported = {name: why for name, why in support.unsupported.items() if name not in APPLIED_OUTSIDE}
    if "logprobs" in unsupported:
        unsupported["best_of"] = f"needs logprobs to choose by; {unsupported['logprobs']}"
    else:
        unsupported.pop("best_of", None)
    if sharing.refusal:
        unsupported["request_type"] = sharing.refusal
    return Capabilities(
        sampling_fields=support.fields | APPLIED_OUTSIDE,
        max_seq_len=max_seq_len,
        max_prompt_bytes=max_prompt_bytes,
        bos_token=bos_token,
        version=version,
        whole_answers=has_statistics and "return_perf_metrics" in support.fields,
        handover_form=sharing.form,
        formats_refused=unsupported.get("guided_structural_tag") or support.formats_refused,
        unsupported=unsupported,
    )


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
