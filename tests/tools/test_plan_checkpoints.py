"""`plan --model DIR` says what the folder holds where that isn't a whole checkpoint in a precision that is planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepseek_triton_tools.cli.main import main

_CONFIG = {"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 61}
_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def _plan(folder: Path, **config: object) -> int:
    (folder / "config.json").write_text(json.dumps({**_CONFIG, **config}))
    return main(["plan", "deepseek-r1", "--gpu", "h200", "--model", str(folder), "--brief"])


def test_16_bit_weights_are_refused_with_what_makes_them_fp8(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _plan(tmp_path) == 2

    [line] = capsys.readouterr().err.splitlines()
    assert "16-bit weights" in line
    assert "deepseek-triton checkpoint quantize" in line


def test_a_cut_checkpoint_is_planned_with_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = {"weight_map": {"model.layers.4.mlp.experts.0.up_proj.weight": "model-00001-of-000001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    assert _plan(tmp_path, num_hidden_layers=5, quantization_config=_FP8) == 0

    out, err = capsys.readouterr()
    assert "5 of 61 layers" in err
    assert "1 x NVIDIA H200" in out
