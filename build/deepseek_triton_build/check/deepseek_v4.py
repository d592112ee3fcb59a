"""Reads config.json of DeepSeek-V4 and V4.1, and lists the tensors that V4's asks for (data/v4_tensors.yaml)."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from deepseek_triton_build.check import codes
from deepseek_triton_build.data.finding import Finding
from deepseek_triton_build.data.own_files import load_yaml
from deepseek_triton_build.text import first_names, safe_name

Form: TypeAlias = tuple[str, tuple[int, ...]]
"""The format's name of a tensor's data type, such as "F8_E8M0", and the shape."""
# In all layers; no V4 has more than 64 x 384.
_MOST_EXPERTS = 100_000


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the keys of text_config, where V4.1 has its figures, beside the others."""
    text = config.get("text_config")
    return {**text, **config} if isinstance(text, dict) else dict(config)


def is_v4(config: Mapping[str, Any]) -> bool:
    """Whether it is config.json of V4 or V4.1, as it is or flat."""
    return "compress_ratios" in flat_config(config)


def draft_kind(config: Mapping[str, Any]) -> str:
    """Return "mtp" or "dspark", with which num_nextn_predict_layers may be 1 too."""
    return "dspark" if "dspark_block_size" in config else "mtp"


def v4_quantization(config: Mapping[str, Any]) -> str:
    """Return in one word what quantization_config and expert_dtype say of a V4 in FP8."""
    section = config["quantization_config"]
    if section.get("moe_quant_algo"):
        return str(section["moe_quant_algo"])
    dtype = section.get("expert_dtype", config.get("expert_dtype"))
    return f"fp8, experts {dtype}" if dtype else "fp8 without expert_dtype"


def tensor_problems(config: Mapping[str, Any], stored: Mapping[str, Form], label: str) -> Iterator[Finding]:
    """Find tensors that config.json asks for and no file has, or has in another form. The draft's may be left out."""
    expected, fix, file = expected_tensors(config), "download it and the weights again", f"{label}/config.json"
    has_draft = any(name.startswith("mtp.") for name in stored)
    absent = [name for name in expected.keys() - stored.keys() if has_draft or not name.startswith("mtp.")]
    if absent:
        message = f"{len(absent):,} of the {len(expected):,} tensors "
        message += f"that it asks for are missing: {first_names(absent)}"
        yield codes.MISSING_TENSORS.finding(message, fix, file=file)
    others = [name for name, form in expected.items() if stored.get(name, form) != form]
    for name in others[:1]:
        (dtype, shape), (found, found_shape) = expected[name], stored[name]
        message = f"expected {name} as {dtype} {list(shape)}, found {safe_name(found)} {list(found_shape)}"
        message += f"; {len(others):,} tensors are not as it asks"
        yield codes.WRONG_TENSORS.finding(message, fix, file=file)


def expected_tensors(config: Mapping[str, Any]) -> Mapping[str, Form]:
    """Return tensor -> its form by the config.json of a V4; empty for V4.1, and where a figure is missing.

    Where the experts are not MXFP4, they and all scales are left out: their form is not known.
    """
    try:
        is_mxfp4 = v4_quantization(config) == "fp8, experts fp4"
        is_v41 = config["quantization_config"]["weight_block_size"] != [128, 128]
        tensors = {} if is_v41 else dict(_tensors(config))
    except (LookupError, TypeError, ArithmeticError, AttributeError):  # config.json may hold anything
        return {}
    return {n: form for n, form in tensors.items() if is_mxfp4 or not (".ffn.experts." in n or n.endswith(".scale"))}


def _tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, Form]]:
    tables, num_experts = load_yaml("v4_tensors.yaml"), config["n_routed_experts"]
    if config["num_hidden_layers"] * num_experts > _MOST_EXPERTS:
        raise LookupError
    parts = {}
    for layer in range(config["num_hidden_layers"]):
        router = tables["hash" if layer < config["num_hash_layers"] else "bias"]
        parts[f"layers.{layer}."] = router | tables["ratios"][config["compress_ratios"][layer]]
    drafts = tables["drafts"][draft_kind(config)] if config.get("num_nextn_predict_layers") else []
    parts |= {f"mtp.{stage}.": tables["bias"] | own for stage, own in enumerate(drafts)}
    experts = _forms("", tables["expert"], config)
    yield from _forms("", tables["top"], config).items()
    for part, own in parts.items():
        yield from _forms(part, tables["layer"] | own, config).items()
        for expert in range(num_experts):
            yield from ((f"{part}ffn.experts.{expert}.{name}", form) for name, form in experts.items())


def _forms(prefix: str, table: Mapping[str, list[Any]], config: Mapping[str, Any]) -> dict[str, Form]:
    return {prefix + n: (row[0], tuple(_size(str(size), config) for size in row[1:])) for n, row in table.items()}


def _size(text: str, config: Mapping[str, Any]) -> int:
    number, *divisors = (
        sum(math.prod(int(one) if one.isdecimal() else config[one] for one in product.split("*")) for product in terms)
        for terms in (part.split("+") for part in text.split("/"))
    )
    for divisor in divisors:
        number = -(-number // divisor)
    return number
