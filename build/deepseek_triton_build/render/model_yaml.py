"""model.yaml: what the engine is started with."""

from __future__ import annotations

from deepseek_triton_build.planning.plan import Plan
from deepseek_triton_build.render.yaml_text import yaml_lines

_PREFIX = "triton_config."


def model_yaml(plan: Plan, *, stamp: str) -> str:
    """LLM arguments at the top level, where upstream's model.py reads them; ours under triton_config."""
    arguments = [setting for setting in plan.settings if not setting.key.startswith(_PREFIX)]
    own = [setting for setting in plan.settings if setting.key.startswith(_PREFIX)]
    lines = [f"# {stamp}", "# LLM arguments; the backend's own settings are under triton_config."]
    lines += [*yaml_lines(arguments), *yaml_lines(own)]
    return "\n".join(lines) + "\n"
