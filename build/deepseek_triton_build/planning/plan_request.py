"""The user's request for a plan, and the small JSON files of the checkpoint that it may name."""

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from deepseek_triton_build.build_errors import UnusableCheckpointError
from deepseek_triton_build.data.profiles import ANY_WORKLOAD, DEFAULT_PROFILE, Workload
from deepseek_triton_build.data.setting_types import sampling_problem
from deepseek_triton_build.text import printable_line

EMBEDDED_ENGINES = ("reference", "simulated")
ENGINES = ("tensorrt_llm", "vllm", *EMBEDDED_ENGINES)
PYTHON_BACKEND = "python"
BACKEND_NAMES = (PYTHON_BACKEND, "vllm")


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A request for a plan. It is hashable, as plans are cached."""

    variant: str
    gpu: str | None = None
    num_gpus: int | None = None
    """GPUs of one model instance. None: the recipe's number, else the smallest published one."""
    precision: str | None = None
    """None: FP4 on Blackwell where the variant has it, else FP8."""
    profile: str = DEFAULT_PROFILE
    release: str | None = None
    """TensorRT-LLM's. None: the default of `load_release`, or for Dynamo the nearest to its build."""
    vllm: str | None = None
    """None: the version of Triton's newest known container, or the oldest after it that has the model."""
    parallel: Literal["tp", "dp"] | None = None
    """How vLLM divides attention: tensor or data parallelism. None: dp for profile throughput, and for V4 where more
    requests fit so, unless the profile is latency; else tp."""
    container: str | None = None
    """Tag, such as 26.07, of the Triton container it will run in. None: the newest with the release."""
    workload: Workload = ANY_WORKLOAD
    mtp: int | None = None
    """MTP layers; 0 turns MTP off. None: the recipe's number."""
    relaxed_acceptance: bool = False
    kv_dtype: Literal["auto", "fp8"] | None = None
    """dtype of the KV cache; "auto" is the checkpoint's own. None: FP8 where it is supported."""
    pipeline_parallel_size: int = 1
    engine: str | None = None
    """Engine to run on. None: the variant's default."""
    preset: str | None = None
    """The deployment whose pace the simulated engine keeps: its name, or the JSON file of
    another."""
    decoupled: bool = True
    """Whether a request may get several responses. False: no streams, but ModelInfer and /infer work."""
    backend_name: str = PYTHON_BACKEND
    """The backend that config.pbtxt names, one of BACKEND_NAMES. Triton's OpenAI front end chooses by it how to ask."""
    model: str | None = None
    """A checkpoint's folder or Hugging Face name, which replaces the variant's own name."""
    dynamo: str | None = None
    """The Dynamo release that a deployment for Dynamo is for. None: the newest."""
    kv_routing: bool = False
    """Whether Dynamo chooses a replica by the KV blocks that it holds."""
    allow_unpublished: bool = False
    """Whether to plan what fits by arithmetic though it is not published."""
    overrides: tuple[tuple[str, Any], ...] = ()
    """The user's own settings, applied last: LLM arguments under the release's keys, or triton_config.*."""
    measured: tuple[tuple[str, str], ...] = ()
    """(option or key of an override, where its value is from); the reasons of a plan repeat it."""

    def why_measured(self, name: str) -> str:
        """The reason of a value that was measured, computed or published; "" for another one."""
        return dict(self.measured).get(name, "")

    @property
    def takes_unpublished_experts(self) -> bool:
        """Whether it plans what no document has about the experts: asked for, or by their settings."""
        return self.allow_unpublished or any(key.startswith("moe_") for key, _ in self.overrides)


OPTIONS = {
    "gpu": "--gpu",
    "num_gpus": "--gpus",
    "precision": "--precision",
    "profile": "--profile",
    "engine": "--engine",
    "preset": "--preset",
    "backend_name": "--backend-name",
    "model": "--model",
    "mtp": "--mtp",
    "kv_dtype": "--kv-cache-dtype",
    "pipeline_parallel_size": "--pp",
    "parallel": "--parallel",
    "release": "--trtllm",
    "vllm": "--vllm",
    "container": "--image",
    "dynamo": "--dynamo",
}
"""Field of PlanRequest -> the option of `build` that takes its value, in the order in which a stamp has them."""


SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The sampling fields that have the same name in Hugging Face's GenerationConfig and in the wire contract."""


def sampling_defaults(checkpoint: Path) -> Mapping[str, float] | None:
    """Return the sampling defaults that the makers of the checkpoint in the folder `checkpoint` advise.

    Greedy decoding (`do_sample` is false) is temperature 0. None when there is no generation_config.json, or none of
    SAMPLING_FIELDS in it.

    :raises UnusableCheckpointError: when the file can't be read, or a request may not have one of its values.
    """
    path = checkpoint / "generation_config.json"
    if not os.path.lexists(path):
        return None
    config = read_json_object(path)
    if config.get("do_sample") is False:
        return {"temperature": 0.0}
    defaults = {name: config[name] for name in SAMPLING_FIELDS if config.get(name) is not None}
    wrong = [f"{name}: {problem}" for name, value in defaults.items() if (problem := sampling_problem(name, value))]
    if wrong:
        raise UnusableCheckpointError(f"{path}: {'; '.join(wrong)}; correct the file or remove it")
    return defaults or None


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file `path`.

    :raises UnusableCheckpointError: when the file can't be read or isn't a JSON object.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe would never end
            raise UnusableCheckpointError(f"{path}: expected a file, found something else; download it again")
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UnusableCheckpointError(f"{path}: can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UnusableCheckpointError(
            f"{path}: expected JSON: {printable_line(str(error))}; download it again"
        ) from error
    if not isinstance(value, dict):
        raise UnusableCheckpointError(
            f"{path}: expected a JSON object, found {type(value).__name__}; download it again"
        )
    return value
