"""model.yaml: what the engine is started with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepseek_triton_build.data.planned_settings import Setting
from deepseek_triton_build.render.yaml_text import yaml_lines

if TYPE_CHECKING:
    from deepseek_triton_build.planning.plan import Plan

_OURS = "triton_config."


def model_yaml(plan: Plan, *, stamp: str) -> str:
    """Return the text: LLM arguments at the top level, where upstream's model.py reads them; ours in triton_config."""
    lines = [f"# {stamp}", "# LLM arguments; the backend's own settings are under triton_config."]
    lines += yaml_lines(plan.settings)
    return "\n".join(lines) + "\n"


def llm_arguments(plan: Plan) -> list[Setting]:
    """Return the settings that are the engine's arguments, under the release's own keys."""
    return [setting for setting in plan.settings if not setting.key.startswith(_OURS)]
