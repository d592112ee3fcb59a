"""The files of a checkpoint but for its weights: which model it is, its figures, its quantization, its tokenizer."""

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from deepseek_triton_build.check import codes
from deepseek_triton_build.check.deepseek_v4 import draft_kind, flat_config, is_v4, v4_quantization
from deepseek_triton_build.check.documents import read_json
from deepseek_triton_build.check.weights import INDEX, check_weights, instead_of_checkpoint, stored_precisions
from deepseek_triton_build.data.catalog import PRECISIONS, Architecture, Precision, architectures, cut_architecture
from deepseek_triton_build.data.finding import Finding
from deepseek_triton_build.render.hf_quant_config import NAME as QUANT_CONFIG
from deepseek_triton_build.text import nearest_name, safe_name, short_repr

LAYERS_CONFIG = "quant_cfg.json"
"""The file that says how each layer is quantized, beside an hf_quant_config.json with MIXED_PRECISION."""
# Values of quant_method that name a tool and not a precision, which another file gives.
_TOOLS = ("modelopt", "compressed-tensors")
# quant_algo of hf_quant_config.json, or quant_method in config.json's quantization_config -> the precision. These are
# the values of DeepSeek's checkpoints and of those made from them.
_PRECISIONS: Mapping[str, Precision] = {
    "FP8_BLOCK_SCALES": "fp8",
    "fp8": "fp8",
    "fp8_pb_wo": "fp8",
    "NVFP4": "fp4",
    "W4A8_AWQ": "w4a8",
    "MIXED_PRECISION": "w4a8",
    "w4afp8": "w4a8",
    "W4A16_AWQ": "w4a16",
    "W4A16": "w4a16",
    # What v4_quantization calls those of V4; vLLM takes FP4 experts where expert_dtype is missing
    # (vllm/models/deepseek_v4/quant_config.py).
    "fp8, experts fp4": "mxfp4",
    "fp8, experts fp8": "fp8",
    "fp8 without expert_dtype": "mxfp4",
}
# Other names of four-bit integers, such as W4A16_GPTQ. They tell what the weights are not; no plan is made for them.
_INT4 = re.compile(r"int4|w4a16|4.?bit", re.IGNORECASE)


# Key of config.json -> attribute of Architecture. max_position_embeddings may be lowered by hand.
_FIGURES: Mapping[str, str] = {
    "num_hidden_layers": "num_layers",
    "first_k_dense_replace": "num_dense_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "moe_intermediate_size": "moe_intermediate_size",
    "n_routed_experts": "num_routed_experts",
    "n_shared_experts": "num_shared_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "num_attention_heads": "num_heads",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "vocab_size": "vocab_size",
    "index_n_heads": "index_num_heads",
    "index_head_dim": "index_head_dim",
    "index_topk": "index_topk",
    "model_type": "model_type",
}
# The same for Architecture.csa, of V4.
_CSA_FIGURES: Mapping[str, str] = {
    **{name: name for name in ("head_dim", "o_groups", "o_lora_rank", "sliding_window", "num_hash_layers", "hc_mult")},
    "dspark_markov_rank": "markov_rank",
}


_MOST_LAYERS = 10_000
_NUMBERED = re.compile(r"(?:model\.)?layers\.(\d+)\.(?:(?:mlp|ffn)\.experts\.(\d+)\.)?")


@dataclass(frozen=True, kw_only=True)
class CheckpointFacts:
    folder: Path
    label: str
    config: Mapping[str, Any]
    """The content of config.json, V4.1's flat; empty when it can't be read."""
    hf_quant_config: Mapping[str, Any] | None
    """The content of hf_quant_config.json; None without one."""
    class_name: str | None
    architecture: Architecture | None
    """The architecture of that class whose figures are the nearest; None for another class."""
    quantization: str | None
    """The quantization as the checkpoint spells it; None without one."""
    quantization_file: str
    kv_cache_quant_algo: str | None
    is_whole: bool
    """Whether its files could be read and named a known architecture."""
    stored: Mapping[str, str]
    """Precision in which experts are stored ("bf16": not quantized) -> a file that stores them so."""
    for_vllm: bool = False

    @property
    def is_quantization_known(self) -> bool:
        """Whether it is known how the weights are quantized: in one of our precisions, in another, or not at all."""
        return self.is_whole and self.architecture is not None and self.quantization not in _TOOLS

    @property
    def difference(self) -> str:
        """Which figures the architecture has otherwise, the first four; "" for none, or where it is cut from it."""
        differing = {} if self.architecture is None or self.cut else _differing(self.config, self.architecture)
        said = [f"{key} {short_repr(found)}, not {known}" for key, (found, known) in differing.items()]
        return "; ".join(said[:4])

    @cached_property
    def cut(self) -> Architecture | None:
        """The shape of a checkpoint that was cut from the architecture: config.json and the index agree that it has
        the first layers alone, or the first experts. None for any other."""
        cut = cut_architecture(self.config, self.architecture) if self.architecture else None
        if cut is None or _differing(self.config, cut):
            return None
        index, _ = read_json(self.folder / INDEX, INDEX)
        tensors = [match.groups() for name in _section(index, "weight_map") if (match := _NUMBERED.match(name))]
        layers, experts = cut.num_layers + cut.num_mtp_layers, cut.num_routed_experts
        is_within = all(int(layer) < layers and int(expert or 0) < experts for layer, expert in tensors)
        return cut if tensors and is_within else None

    @property
    def said(self) -> str | None:
        """The precision that the engine believes, by the JSON files; "bf16" without one, None where it is not known."""
        return _said(self.quantization) if self.quantization else "bf16"

    @property
    def is_contradictory(self) -> bool:
        """Whether the experts are stored in another precision than the engine believes."""
        return self.architecture is not None and self.said is not None and bool(self.stored.keys() - {self.said})

    @property
    def has_16_bits(self) -> bool:
        """Whether the weights are not quantized: they are bfloat16, as far as is known."""
        return self.is_quantization_known and list(self.stored or [self.said]) == ["bf16"]

    @property
    def precision(self) -> Precision | None:
        """The precision of the weights as they are stored, else as the files say it; None where these name another."""
        stored = next(iter(self.stored)) if self.said and len(self.stored) == 1 else self.said
        return next((precision for precision in PRECISIONS if precision == stored), None)


def read_facts(folder: Path, label: str, *, for_vllm: bool = False) -> tuple[CheckpointFacts, list[Finding]]:
    """Return what config.json, hf_quant_config.json and the shards' headers in `folder` say, and what is wrong there.

    :param for_vllm: whether vLLM reads them, for which config.json comes first.
    """
    config, findings = read_json(folder / "config.json", f"{label}/config.json")
    quant: dict[str, Any] | None = None
    if os.path.exists(folder / QUANT_CONFIG):
        quant, found = read_json(folder / QUANT_CONFIG, f"{label}/{QUANT_CONFIG}")
        findings += found
    config = config and flat_config(config)
    names = (config or {}).get("architectures")
    class_name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    # Several architectures share a class name, so the figures decide.
    alike = [a for a in architectures().values() if a.class_name == class_name]
    architecture = min(alike, key=lambda a: len(_differing(config or {}, a)), default=None)
    if config is not None and architecture is None:
        known = " or ".join(dict.fromkeys(a.class_name for a in architectures().values()))
        message = f"expected architectures: {known}, found {short_repr(class_name)}"
        fix = "point model at the right checkpoint; for another model the rules are not checked"
        findings.append(codes.UNKNOWN_ARCHITECTURE.finding(message, fix, file=f"{label}/config.json"))
    in_config, in_quant = _section(config, "quantization_config"), _section(quant, "quantization")
    by_config = in_config.get("quant_algo") or ("W4A16" if _is_w4a16(in_config) else in_config.get("quant_method"))
    by_quant = in_quant.get("quant_algo")
    if config and is_v4(config) and in_config.get("quant_method") == "fp8":
        by_config = v4_quantization(config)
        by_quant = by_config if by_quant == "MIXED_PRECISION" else by_quant
    # TensorRT-LLM takes hf_quant_config.json first, vLLM config.json.
    is_in_quant = bool(by_quant) and not (for_vllm and by_config)
    algo = by_quant if is_in_quant else by_config
    kv_algo = in_quant.get("kv_cache_quant_algo")
    num_layers = (config or {}).get("num_hidden_layers")
    if algo == "MIXED_PRECISION" and kv_algo is None and os.path.exists(folder / LAYERS_CONFIG):
        layers, found = read_json(folder / LAYERS_CONFIG, f"{label}/{LAYERS_CONFIG}")
        findings += found
        kv_algo = (layers or {}).get("kv_cache_quant_algo")
    facts = CheckpointFacts(
        folder=folder,
        label=label,
        config=config or {},
        hf_quant_config=quant,
        class_name=class_name,
        architecture=architecture,
        quantization=algo if isinstance(algo, str) else None,
        quantization_file=f"{label}/{QUANT_CONFIG if is_in_quant else 'config.json'}",
        kv_cache_quant_algo=kv_algo if isinstance(kv_algo, str) else None,
        is_whole=not findings,
        stored=stored_precisions(folder, num_layers if type(num_layers) is int else _MOST_LAYERS),
        for_vllm=for_vllm,
    )
    # Pairs of INT4 values are I8, or U8 as those of NVFP4 are; V4's pairs of MXFP4 values are I8.
    meant = {"w4a8": "mxfp4"} if is_v4(facts.config) else {"fp4": "w4a8"} if facts.said == "w4a8" else {}
    facts = replace(facts, stored={meant.get(kind, kind): file for kind, file in facts.stored.items()})
    return facts, [*findings, *_contradictions(facts, [by_quant, by_config])]


def _contradictions(facts: CheckpointFacts, statements: list[Any]) -> Iterator[Finding]:
    """Find experts that are stored otherwise than the engine believes, and files that say two things.

    :param statements: what hf_quant_config.json says, and config.json.
    """
    quant, config = (_said(said) if isinstance(said, str) else None for said in statements)
    engine, first, second = "TensorRT-LLM", QUANT_CONFIG, "config.json"
    if facts.for_vllm:
        engine, first, second = "vLLM", second, first
    if facts.is_contradictory:
        stored, file = next(each for each in facts.stored.items() if each[0] != facts.said)
        spelled = "names no quantization" if facts.quantization is None else f"has {short_repr(facts.quantization)}"
        message = f"it says {facts.said}, but the experts are stored as {stored} ({file}); "
        message += f"it {spelled}, which {engine} believes"
        fix = _way_out(facts, stored, other=quant if facts.for_vllm else config)
        yield codes.STORED_OTHERWISE.finding(message, fix, file=facts.quantization_file)
    elif quant is not None and config is not None and quant != config:
        message = f"{QUANT_CONFIG} says {quant}, config.json {config}; {engine} believes {first}"
        fix = f"remove {_statement(second)}, which other programs believe"
        yield codes.TWO_STATEMENTS.finding(message, fix, file=f"{facts.label}/{second}")


def _said(quantization: str) -> Precision | None:
    return _PRECISIONS.get(quantization, "w4a16" if _INT4.search(quantization) else None)


def _statement(file: str) -> str:
    return file if file == QUANT_CONFIG else "quantization_config from config.json"


def _way_out(facts: CheckpointFacts, stored: str, other: Precision | None) -> str:
    """Return how a checkpoint whose experts are stored as `stored` gets the right statement.

    :param other: what the file says that the engine does not believe.
    """
    believed = os.path.basename(facts.quantization_file)
    if len(facts.stored) > 1:
        return "it holds shards of two checkpoints: download the weights again into an empty folder"
    if stored == other and facts.quantization is not None:
        return f"remove {_statement(believed)}: what is left says {stored}"
    if is_v4(facts.config) and stored in ("fp8", "mxfp4"):
        return f'write "expert_dtype": "{stored[-3:]}" into config.json'
    if stored == "bf16":
        folder = shlex.quote(safe_name(str(facts.folder)))
        return f"quantize it: deepseek-triton checkpoint quantize {folder} --to fp8 --output NEW"
    if stored == "fp8":
        too = "" if believed == "config.json" else f"remove {QUANT_CONFIG}, and "
        section = '{"quant_method": "fp8", "weight_block_size": [128, 128]}'
        return f"{too}write DeepSeek's quantization_config: {section} into config.json"
    files = "config.json" if stored == "w4a16" else f"{QUANT_CONFIG} and config.json"
    return f"copy {files} from where the {stored} weights come from"


def _is_w4a16(section: Mapping[str, Any]) -> bool:
    """Tell whether quantization_config names 4-bit integer weights and 16-bit activations, as AWQ, GPTQ and
    compressed-tensors write it."""
    if section.get("quant_method") in ("awq", "gptq"):
        return bool(section.get("bits", section.get("w_bit")) == 4)
    if section.get("quant_method") != "compressed-tensors":
        return False
    groups = [_section(_section(section, "config_groups"), name) for name in _section(section, "config_groups")]
    weights = [_section(group, "weights") for group in groups]
    is_int4 = all((each.get("num_bits"), each.get("type")) == (4, "int") for each in weights)
    return bool(groups) and is_int4 and not any(group.get("input_activations") for group in groups)


def _differing(config: Mapping[str, Any], architecture: Architecture) -> Mapping[str, tuple[Any, Any]]:
    wanted = {key: getattr(architecture, name) for key, name in _FIGURES.items()}
    if architecture.csa is not None:
        wanted |= {key: getattr(architecture.csa, name) for key, name in _CSA_FIGURES.items()}
        ratios, known = config.get("compress_ratios"), list(architecture.csa.compress_ratios)
        is_alike = isinstance(ratios, list) and ratios[: len(known)] == known  # the draft's come after
        if config.get("num_nextn_predict_layers"):  # 0 with MTP, which has no such key
            config = {"dspark_markov_rank": 0, **config}
        wanted["compress_ratios"] = ratios if is_alike else f"those of {architecture.name}"
    return {key: (config[key], value) for key, value in wanted.items() if key in config and config[key] != value}


def _section(document: Mapping[str, Any] | None, key: str) -> Mapping[str, Any]:
    section = (document or {}).get(key)
    return section if isinstance(section, dict) else {}


_TOKENIZER = "tokenizer.json"
# The vocabulary of DeepSeek-V3 and its successors, and the tokens that all of their tokenizers have.
_DEEPSEEK_VOCABULARY = 129_280
_DEEPSEEK_TOKENS: Mapping[str, int] = {"<｜begin▁of▁sentence｜>": 0, "<｜end▁of▁sentence｜>": 1}
# A smaller vocabulary is cut to what a test or a template needs.
_WHOLE_VOCABULARY = 10_000
_MARK = re.compile(r"<[|｜][^<>|｜\s]+[|｜]>")
_TOKENIZER_CONFIG = "tokenizer_config.json"
_DOWNLOAD = "download it again"
# Keys that load_modelopt_quant_config of TensorRT-LLM reads, and those of its quant_cfg.json.
_QUANT_KEYS = (
    "quant_algo",
    "kv_cache_quant_algo",
    "group_size",
    "exclude_modules",
    "quantized_layers",
    "has_zero_point",
    "pre_quant_scale",
)
# QuantAlgo of TensorRT-LLM 1.2 (tensorrt_llm/quantization/mode.py), DeepSeek's own first, and modelopt's fp8_pb_wo.
_ALGOS = (
    "FP8_BLOCK_SCALES",
    "NVFP4",
    "MIXED_PRECISION",
    "W4A8_AWQ",
    "fp8_pb_wo",
    *("W8A16", "W4A16", "W4A16_AWQ", "W8A16_GPTQ", "W4A16_GPTQ", "W8A8_SQ_PER_CHANNEL", "W8A8_SQ_PER_TENSOR_PLUGIN"),
    *("W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN", "W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN", "W4A8_QSERVE_PER_GROUP"),
    *("W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN", "W4A8_QSERVE_PER_CHANNEL", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "INT8"),
    *("W4A8_NVFP4_FP8", "W4A8_MXFP4_FP8", "W4A8_MXFP4_MXFP8", "W4A16_MXFP4", "NO_QUANT"),
)
# Types of the KV cache that MLA has kernels for (TensorRT-LLM examples/models/core/deepseek_v3/README.md).
_KV_ALGOS = ("FP8",)
_GROUP_SIZES = {"NVFP4": 16}
_FP8_BLOCK, _V41_BLOCK = [128, 128], [32, 32]


def check_checkpoint(
    folder: Path, label: str, tokenizer: Path | None, *, for_vllm: bool = False
) -> tuple[CheckpointFacts, list[Finding]]:
    """Return what the files of a checkpoint say, and what is wrong with them.

    :param tokenizer: the folder of the tokenizer where that is another one; None when it is not to be looked at.
    :param for_vllm: whether vLLM reads it. It goes by the index and by config.json, so it ignores a shard that is not
        in the index, and hf_quant_config.json if config.json says how the weights are quantized.
    """
    facts, findings = read_facts(folder, label, for_vllm=for_vllm)
    if instead_of_checkpoint(folder):
        return facts, list(check_weights(folder, label))
    findings += _quantization_problems(facts, for_vllm=for_vllm)
    if tokenizer is not None:
        where = label if tokenizer == folder else str(tokenizer)
        findings += tokenizer_problems(tokenizer, where, facts.config)
    found = check_weights(folder, label)
    return facts, [*findings, *(one for one in found if not (for_vllm and one.code == codes.STRAY_SHARD.code))]


def mtp_problems(facts: CheckpointFacts, num_draft_tokens: int) -> Iterator[Finding]:
    """Find a checkpoint without the MTP layer that its settings ask for."""
    layers = facts.config.get("num_nextn_predict_layers")
    is_dspark = draft_kind(facts.config) == "dspark"
    if not num_draft_tokens or not facts.config or (isinstance(layers, int) and layers > 0 and not is_dspark):
        return
    found = "DSpark's draft" if is_dspark else "none" if layers is None else short_repr(layers)
    message = f"expected num_nextn_predict_layers: 1, because speculative_config asks for MTP, found {found}"
    fix = "use the method dspark" if is_dspark else "download config.json again"
    fix += ", or remove speculative_config"
    yield codes.NO_MTP_LAYER.finding(message, fix, file=f"{facts.label}/config.json", key="num_nextn_predict_layers")


def _quantization_problems(facts: CheckpointFacts, *, for_vllm: bool) -> Iterator[Finding]:
    own = _section(facts.config, "quantization_config")
    expected = _V41_BLOCK if facts.config.get("model_type") == "deepseek_v41" else _FP8_BLOCK
    block = own.get("weight_block_size", expected)
    if own.get("quant_method") == "fp8" and block != expected:
        message = f"expected weight_block_size {expected}, found {short_repr(block)}"
        yield codes.WRONG_QUANT_CONFIG.finding(message, _DOWNLOAD, file=f"{facts.label}/config.json")
    if facts.hf_quant_config is not None and not for_vllm:
        for message, fix in _quant_config_problems(facts.folder, facts.hf_quant_config):
            yield codes.WRONG_QUANT_CONFIG.finding(message, fix, file=f"{facts.label}/{QUANT_CONFIG}")


def _quant_config_problems(folder: Path, document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with hf_quant_config.json, and how to mend it."""
    section = document.get("quantization")
    if not isinstance(section, dict):
        near = next((key for key in document if nearest_name(key, ["quantization"])), None)
        instead = safe_name(near) if near is not None else "none" if section is None else short_repr(section)
        yield f"expected an object under quantization, found {instead}", "write quantization, with quant_algo in it"
        return
    for key in section.keys() - set(_QUANT_KEYS):
        meant = nearest_name(key, _QUANT_KEYS)
        fix = f"did you mean {meant}?" if meant else "remove it"
        yield f"{safe_name(key)} is not a key that TensorRT-LLM reads, so it is ignored", fix
    algo, kv_algo, group = (section.get(key) for key in ("quant_algo", "kv_cache_quant_algo", "group_size"))
    if algo not in _ALGOS:
        likely = nearest_name(algo, _ALGOS) if algo is not None else None
        fix = f"did you mean {likely}?" if likely else f"write one of {', '.join(_ALGOS[:4])}, as the weights are"
        yield f"quant_algo: expected a quantization that TensorRT-LLM knows, found {short_repr(algo)}", fix
    if kv_algo is not None and kv_algo not in _KV_ALGOS:
        fix = "write FP8, or null for 16 bits"
        yield f"kv_cache_quant_algo: expected FP8 or null, found {short_repr(kv_algo)}", fix
    size = _GROUP_SIZES.get(algo) if isinstance(algo, str) else None
    if size is not None and group is not None and group != size:
        yield f"group_size: expected {size} for {algo}, found {short_repr(group)}", f"write {size}"
    if algo == "MIXED_PRECISION" and "quantized_layers" not in section:
        layers, _ = read_json(folder / LAYERS_CONFIG, LAYERS_CONFIG)
        if not isinstance((layers or {}).get("quantized_layers"), dict):
            message = f"MIXED_PRECISION: expected {LAYERS_CONFIG} with quantized_layers beside it, found none"
            yield message, f"copy {LAYERS_CONFIG} from where the weights were quantized"


def tokenizer_problems(folder: Path, label: str, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Find what is missing or of another model in the tokenizer's files.

    :param config: the content of the model's config.json, as far as it is known.
    """
    missing = [name for name in (_TOKENIZER, _TOKENIZER_CONFIG) if not os.path.exists(folder / name)]
    for name in missing:
        message = f"{name} is missing, so the engine has no tokenizer"
        yield codes.NO_TOKENIZER.finding(message, _DOWNLOAD, file=f"{label}/{name}")
    if missing:
        return
    file = f"{label}/{_TOKENIZER}"
    tokenizer, findings = read_json(folder / _TOKENIZER, file)
    names, found = read_json(folder / _TOKENIZER_CONFIG, f"{label}/{_TOKENIZER_CONFIG}")
    yield from (*findings, *found)
    if tokenizer is None or names is None:
        return
    # Token -> id, as far as tokenizer.json has it in the usual form.
    ids: dict[str, Any] = dict(_section(_section(tokenizer, "model"), "vocab"))
    added = tokenizer.get("added_tokens")
    ids |= {str(e.get("content")): e.get("id") for e in added if isinstance(e, dict)} if isinstance(added, list) else {}
    ids = {name: number for name, number in ids.items() if isinstance(number, int)}
    fix = "put the model's own tokenizer there; download it again"
    for why in islice(_foreign_tokens(ids, names, config), 1):
        yield codes.WRONG_TOKENIZER.finding(why, fix, file=file)


def _foreign_tokens(ids: Mapping[str, int], names: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what shows that a tokenizer is another model's.

    :param ids: token -> id.
    :param names: the content of tokenizer_config.json.
    """
    most, highest = config.get("vocab_size"), max(ids.values(), default=-1)
    if isinstance(most, int) and highest >= most:
        yield f"it has token {highest:,}, but config.json gives a vocabulary of {most:,}"
    for kind in ("bos", "eos"):
        token, wanted = names.get(f"{kind}_token"), config.get(f"{kind}_token_id")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and isinstance(wanted, int) and ids.get(token) != wanted:
            found_id = short_repr(ids.get(token))
            yield f"its {kind}_token {safe_name(token)} is token {found_id}, but config.json says {wanted}"
    for token, number in _DEEPSEEK_TOKENS.items() if most == _DEEPSEEK_VOCABULARY else ():
        if ids.get(token) != number:
            yield f"expected {token} as token {number}, as every DeepSeek-V3 has it, found {short_repr(ids.get(token))}"
    template = names.get("chat_template")
    for mark in _MARK.findall(template) if isinstance(template, str) and len(ids) >= _WHOLE_VOCABULARY else ():
        if mark not in ids:
            yield f"its chat template writes {safe_name(mark)}, which is no token of it"
