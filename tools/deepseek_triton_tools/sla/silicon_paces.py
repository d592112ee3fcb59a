"""AIConfigurator's measured tables, asked through a Python that has them; the answers are kept in the user's cache."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from deepseek_triton_tools.host.whole_file import whole_file
from deepseek_triton_tools.sla.server_layouts import GRID, Json, PacedModel, ServerLayout
from deepseek_triton_tools.tool_errors import InstallationError, ToolError

ENVIRONMENT_VARIABLE = "DEEPSEEK_TRITON_AICONFIGURATOR"
HOW_TO_INSTALL = (
    "python3.12 -m venv ~/aiconfigurator && ~/aiconfigurator/bin/pip install aiconfigurator-core==0.12.0 (520 MB; "
    f"Python 3.11 to 3.13), then --aiconfigurator ~/aiconfigurator/bin/python or {ENVIRONMENT_VARIABLE}"
)
_SCRIPT = Path(__file__).with_name("ask_aiconfigurator.py")
_TIMEOUT_S = 600

_MODELS = {
    ("deepseek-v3", "fp8"): "deepseek-ai/DeepSeek-V3",
    ("deepseek-v3", "fp4"): "nvidia/DeepSeek-V3.1-NVFP4",
    ("deepseek-v3.2", "fp8"): "deepseek-ai/DeepSeek-V3.2",
    ("deepseek-v3.2", "fp4"): "nvidia/DeepSeek-V3.2-NVFP4",
}
"""(Architecture, precision) -> a model that AIConfigurator knows without the network. V3, V3.1 and R1 are alike."""
_SYSTEMS = {
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "gb200": "gb200",
    "gb200-nvl72": "gb200",
}
_KV = {"bf16": "bfloat16", "fp8": "fp8"}


@dataclass(frozen=True)
class SiliconPaces:
    """The tables of aiconfigurator-core."""

    python: Path
    """The Python of the environment that has it."""

    @cached_property
    def version(self) -> str:
        """Raises InstallationError where that Python does not have it."""
        return str(self._ask({"layouts": []})["version"])

    @property
    def source(self) -> str:
        return f"aiconfigurator-core {self.version}, measured tables of TensorRT-LLM"

    def tables(self, model: PacedModel, layouts: Sequence[ServerLayout]) -> dict[ServerLayout, Json | str]:
        name, system = _MODELS.get((model.architecture, model.precision)), _SYSTEMS.get(model.gpu)
        if name is None or system is None:
            what = f"{model.architecture} in {model.precision} on {model.gpu}"
            return dict.fromkeys(layouts, f"AIConfigurator has no tables of {what}")
        places = {layout: self._place(model, layout) for layout in layouts}
        missing = [layout for layout, place in places.items() if not place.is_file()]
        if missing:
            question = {
                "model": name,
                "system": system,
                "kv": _KV[model.kv_dtype],
                "layouts": [_question(layout, model.num_draft_tokens) for layout in missing],
                "grid": GRID,
            }
            for layout, table in zip(missing, self._ask(question)["tables"], strict=True):
                _keep(places[layout], table)
        return {layout: _kept(place) for layout, place in places.items()}

    def _place(self, model: PacedModel, layout: ServerLayout) -> Path:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "deepseek-triton", "paces")
        name = f"{model.architecture}-{model.precision}-{model.gpu}-kv-{model.kv_dtype}-mtp{model.num_draft_tokens}"
        return folder / self.version / name / f"{str(layout).replace(' ', '-')}.json"

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


def _question(layout: ServerLayout, num_draft_tokens: int) -> dict[str, int]:
    return {
        "tp_size": 1 if layout.attention_dp else layout.num_gpus,
        "attention_dp_size": layout.num_ranks,
        "moe_tp_size": layout.expert_tensor_size,
        "moe_ep_size": layout.expert_parallel_size,
        "nextn": num_draft_tokens,
    }


def _keep(place: Path, table: Any) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ToolError(
            f"{place.parent} can't be made: {error.strerror}; XDG_CACHE_HOME names another cache"
        ) from error
    with whole_file(place) as file:
        json.dump({name: value for name, value in table.items() if name not in GRID}, file, separators=(",", ":"))


def _kept(place: Path) -> Json | str:
    try:
        kept = json.loads(place.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ToolError(f"{place} can't be read: {error}; remove it, and it is made again") from error
    return str(kept["error"]) if "error" in kept else {**GRID, **kept}
