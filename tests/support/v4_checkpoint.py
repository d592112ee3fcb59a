"""Checkpoints of DeepSeek-V4 as their headers have them: the published shapes, in files without bytes."""

import json
import math
import struct

from deepseek_triton_build.check.checkpoint_files import _CSA_FIGURES, _FIGURES
from deepseek_triton_build.check.deepseek_v4 import expected_tensors
from deepseek_triton_build.data.catalog import architectures

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
DSPARK = {"dspark_block_size": 5, "dspark_target_layer_ids": [40, 41, 42]}
BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BF16": 2, "F32": 4, "I64": 8}


def v4_config(name="deepseek-v4-flash", **changes):
    """config.json of a published V4 by the catalogue, which has its figures, with some layers left out at the end."""
    whole = architectures()[name]
    found = {key: getattr(whole, attribute) for key, attribute in _FIGURES.items()}
    found |= {key: getattr(whole.csa, attribute) for key, attribute in _CSA_FIGURES.items()}
    layers = changes.get("num_hidden_layers", whole.num_layers)
    drafts = whole.num_mtp_layers if changes.get("num_nextn_predict_layers", 1) else 0
    return {
        **{key: value for key, value in found.items() if value},
        "architectures": [whole.class_name],
        "num_nextn_predict_layers": 1,
        "expert_dtype": "fp4",
        "quantization_config": FP8,
        "compress_ratios": [*whole.csa.compress_ratios[:layers], *[0] * drafts],
        **(DSPARK if whole.draft == "dspark" else {}),
        **changes,
    }


def write_v4(folder, config, change=lambda _: None):
    """Write the tensors that config.json asks for, once `change` has changed name -> [data type, shape]."""
    folder.mkdir(parents=True)
    forms = {name: list(form) for name, form in expected_tensors(config).items()}
    change(forms)
    header, end = {}, 0
    for name, (dtype, shape) in forms.items():
        begin, end = end, end + math.prod(shape) * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(file.tell() + end)
    weight_map = dict.fromkeys(forms, "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    tokens = [{"id": 0, "content": "<｜begin▁of▁sentence｜>"}, {"id": 1, "content": "<｜end▁of▁sentence｜>"}]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens, "model": {"vocab": {"a": 2}}}))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder
