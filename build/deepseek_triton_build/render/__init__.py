"""A plan -> the text of its files. Deterministic: the same plan gives the same bytes."""

from __future__ import annotations

from deepseek_triton_build.render.config_pbtxt import config_pbtxt
from deepseek_triton_build.render.model_yaml import model_yaml
from deepseek_triton_build.render.start_sh import start_sh

__all__ = ["config_pbtxt", "model_yaml", "start_sh"]
