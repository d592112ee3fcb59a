"""How long the iterations of a server take: AIConfigurator's measured tables, or the simulated engine's own model.

AIConfigurator is asked through a Python that has it; its answers are kept in the user's cache.
"""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from deepseek_backend.engines.simulated.presets import B200, H200, DeploymentModel, find_preset
from deepseek_backend.engines.simulated.scheduler import RankLoad
from deepseek_triton_build.catalog import find_gpu
from deepseek_triton_tools.host.whole_file import whole_file
from deepseek_triton_tools.tool_errors import InstallationError, ToolError

Json: TypeAlias = dict[str, Any]

ENVIRONMENT_VARIABLE = "DEEPSEEK_TRITON_AICONFIGURATOR"
HOW_TO_INSTALL = (
    "python3.12 -m venv ~/aiconfigurator && ~/aiconfigurator/bin/pip install aiconfigurator-core==0.12.0 (520 MB; "
    f"Python 3.11 to 3.13), then --aiconfigurator ~/aiconfigurator/bin/python or {ENVIRONMENT_VARIABLE}"
)
GRID: Mapping[str, list[int]] = {
    "batches": [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024],
    "contexts": [1024, 4096, 16384, 65536],
    "prompt_batches": [0, 1, 16, 64, 256, 1024],
    "tokens": [64, 256, 1024, 2048, 4096, 8192, 16384, 32768],
}
"""The points of every table: decoding rows and mean cached tokens, decoding rows and prompt tokens, of one rank."""
_SCRIPT = Path(__file__).with_name("ask_aiconfigurator.py")
_TIMEOUT_S = 600
_MODELS = {
    ("deepseek-v3", "fp8"): "deepseek-ai/DeepSeek-V3",
    ("deepseek-v3", "fp4"): "nvidia/DeepSeek-V3.1-NVFP4",
    ("deepseek-v3.2", "fp8"): "deepseek-ai/DeepSeek-V3.2",
    ("deepseek-v3.2", "fp4"): "nvidia/DeepSeek-V3.2-NVFP4",
}
"""(Architecture, precision) -> a model that AIConfigurator knows without the network. V3, V3.1 and R1 are alike."""
_KV = {"bf16": "bfloat16", "fp8": "fp8"}
_OWN_GPUS = {"h200": H200, "b200": B200}
_OWN_PRECISIONS = {"fp8": ("fp8", "fp8"), "fp4": ("nvfp4", "bf16")}
"""Precision -> those of experts and attention."""
_ONE_NODE = 8


@dataclass(frozen=True, kw_only=True)
class ServerLayout:
    """How one server divides the model."""

    num_gpus: int
    expert_parallel_size: int
    attention_dp: bool = False

    @property
    def num_ranks(self) -> int:
        """Ranks with requests of their own."""
        return self.num_gpus if self.attention_dp else 1

    @property
    def expert_tensor_size(self) -> int:
        """GPUs among which each expert is divided."""
        return self.num_gpus // self.expert_parallel_size

    def __str__(self) -> str:
        return f"{'DP' if self.attention_dp else 'TP'}{self.num_gpus} EP{self.expert_parallel_size}"


def layouts_up_to(num_gpus: int) -> Iterator[ServerLayout]:
    """Yield the layouts of servers of 1, 2, 4 and so on GPUs: whole experts on each, or divided among 2, 4 or all."""
    size = 1
    while size <= num_gpus:
        for attention_dp in (False, True):
            for experts in sorted({size, size // 2, size // 4, 1} - {0}, reverse=True):
                yield ServerLayout(num_gpus=size, expert_parallel_size=experts, attention_dp=attention_dp)
        size *= 2


@dataclass(frozen=True, kw_only=True)
class PacedModel:
    """The model, GPU and options that a table is for."""

    architecture: str
    precision: str
    gpu: str
    kv_dtype: str
    """bf16 or fp8."""
    num_draft_tokens: int = 0


class ModelPaces:
    """Computed durations, fitted to five published runs on one node; other loads and sizes are extrapolated."""

    source = "the simulated engine's own deployment model (no AIConfigurator)"

    def tables(self, model: PacedModel, layouts: Sequence[ServerLayout]) -> dict[ServerLayout, Json | str]:
        """Return for each layout its table over GRID, or why there is none."""
        return {layout: self._table(model, layout) for layout in layouts}

    def _table(self, model: PacedModel, layout: ServerLayout) -> Json | str:
        gpu = _OWN_GPUS.get(model.gpu)
        if gpu is None or model.architecture != "deepseek-v3" or model.precision not in _OWN_PRECISIONS:
            return f"our own model knows DeepSeek-V3 and R1 in fp8 or fp4 on {' or '.join(_OWN_GPUS)}"
        if model.precision == "fp4" and model.gpu != "b200":
            return "fp4 needs Blackwell"
        if layout.num_gpus > _ONE_NODE or layout.expert_tensor_size > 1:
            return "our own model knows servers of one node with whole experts on each GPU"
        experts, attention = _OWN_PRECISIONS[model.precision]
        deployment = DeploymentModel(
            gpu=gpu,
            num_gpus=layout.num_gpus,
            expert_precision=experts,
            attention_precision=attention,
            kv_precision=model.kv_dtype,
            attention_dp=layout.attention_dp,
            num_draft_tokens=model.num_draft_tokens,
        )

        def step_ms(rows: int, context: int, tokens: int = 0, before: int = 0) -> float:
            load = RankLoad(rows, rows * context, tokens, tokens * (before + tokens / 2))
            return 1000 * deployment.step_seconds([load] * layout.num_ranks)

        shortest, prompts = GRID["contexts"][0], GRID["tokens"]
        return {
            **GRID,
            "decode": [[round(step_ms(rows, c), 2) for c in GRID["contexts"]] for rows in GRID["batches"]],
            "prompt": [[round(step_ms(rows, shortest, n), 2) for n in prompts] for rows in GRID["prompt_batches"]],
            "pair_ns": [round((step_ms(0, 0, n, n) - step_ms(0, 0, n)) / n**2 * 1e6, 3) for n in prompts],
        }


@dataclass(frozen=True)
class SiliconPaces:
    """The tables of aiconfigurator-core."""

    python: Path
    """The Python of the environment that has it."""

    @cached_property
    def version(self) -> str:
        """:raises InstallationError: where that Python does not have it."""
        return str(self._ask({"layouts": []})["version"])

    @property
    def source(self) -> str:
        return f"aiconfigurator-core {self.version}, measured tables of TensorRT-LLM"

    def tables(self, model: PacedModel, layouts: Sequence[ServerLayout]) -> dict[ServerLayout, Json | str]:
        """Return for each layout its table over GRID, or why there is none."""
        name, system = _MODELS.get((model.architecture, model.precision)), find_gpu(model.gpu).aiconfigurator
        if name is None or not system:
            what = f"{model.architecture} in {model.precision} on {model.gpu}"
            return dict.fromkeys(layouts, f"AIConfigurator has no tables of {what}")
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "deepseek-triton", "paces")
        folder = f"{model.architecture}-{model.precision}-{model.gpu}-kv-{model.kv_dtype}-mtp{model.num_draft_tokens}"
        places = {layout: cache / self.version / folder / f"{str(layout).replace(' ', '-')}.json" for layout in layouts}
        if missing := [layout for layout, place in places.items() if not place.is_file()]:
            question = {
                "model": name,
                "system": system,
                "kv": _KV[model.kv_dtype],
                "layouts": [
                    {
                        "tp_size": 1 if layout.attention_dp else layout.num_gpus,
                        "attention_dp_size": layout.num_ranks,
                        "moe_tp_size": layout.expert_tensor_size,
                        "moe_ep_size": layout.expert_parallel_size,
                        "nextn": model.num_draft_tokens,
                    }
                    for layout in missing
                ],
                "grid": GRID,
            }
            for layout, table in zip(missing, self._ask(question)["tables"], strict=True):
                _keep(places[layout], table)
        tables: dict[ServerLayout, Json | str] = {}
        for layout, place in places.items():
            try:
                kept = json.loads(place.read_text("utf-8"))
            except (OSError, ValueError) as error:
                raise ToolError(f"{place} can't be read: {error}; remove it, and it is made again") from error
            tables[layout] = str(kept["error"]) if "error" in kept else {**GRID, **kept}
        return tables

    def _ask(self, question: Json) -> Json:
        try:
            done = subprocess.run(
                [self.python, _SCRIPT], input=json.dumps(question), capture_output=True, text=True, timeout=_TIMEOUT_S
            )
        except OSError as error:
            raise InstallationError(
                f"{self.python} does not run: {error.strerror}; make it: {HOW_TO_INSTALL}"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise ToolError(f"{self.python}: AIConfigurator did not answer within {_TIMEOUT_S} seconds") from error
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise InstallationError(f"{self.python} can't ask AIConfigurator: {last}; make it: {HOW_TO_INSTALL}")
        answer: Json = json.loads(done.stdout)
        return answer


def _keep(place: Path, table: Json) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ToolError(
            f"{place.parent} can't be made: {error.strerror}; XDG_CACHE_HOME names another cache"
        ) from error
    # The grid is the same for all, and would be most of a file.
    own = {name: rows for name, rows in table.items() if name not in GRID}
    with whole_file(place) as file:
        json.dump(own, file, separators=(",", ":"))


def check_pace(place: Path) -> None:
    """Check what `plan --sla --write-pace` wrote.

    :raises ValueError: where the file can't be read, or the simulated engine does not take its document.
    """
    try:
        document = json.loads(place.read_text("utf-8"))
        if not isinstance(document, dict):
            raise ValueError("expected a mapping")
        find_preset(document)
    except OSError as error:
        raise ValueError(f"{place} can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: {error}") from error
