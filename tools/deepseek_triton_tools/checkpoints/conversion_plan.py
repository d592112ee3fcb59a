"""Plans a conversion: which tensor is written into which file in which format, and the documents beside them.

Nothing is computed here. The same checkpoint and options make the same plan, and so the same bytes, which is why a
conversion can go on where it was stopped.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from deepseek_triton_build.check import is_v4
from deepseek_triton_build.text import first_names
from deepseek_triton_tools.checkpoints import number_formats
from deepseek_triton_tools.checkpoints.activation_scales import ActivationScales, missing_scales
from deepseek_triton_tools.checkpoints.folder_files import CONFIG, HF_QUANT_CONFIG, QUANT_CFG
from deepseek_triton_tools.checkpoints.shard_writer import OutputTensor, dealt, file_size
from deepseek_triton_tools.checkpoints.stored_tensors import StoredTensors, config_number, in_order, layer_of
from deepseek_triton_tools.tool_errors import CheckpointError

Target: TypeAlias = Literal["w4afp8", "fp8", "bf16"]
W4AFP8_KV_CACHE = (
    "--kv-cache fp8: expected FP8 weights, found W4AFP8, with which TensorRT-LLM is known to crash "
    "(NVIDIA/TensorRT-LLM#8125); leave it out"
)
INPUT_SCALES_FILE = "input_scales.safetensors"
MOST_SHARD_BYTES, LEAST_SHARD_BYTES = 2_500_000_000, 100_000_000
"""Default limits of a file: a few seconds of work for a core, so that little is done again after a stop."""
_NUM_SHARDS = 64
"""Files of a small checkpoint, so that there are enough for the cores."""
_EXPERT = re.compile(r"model\.layers\.\d+\.mlp\.experts\.(\d+)\.(?:gate|up|down)_proj\.weight")
_LINEAR = re.compile(
    r"model\.layers\.\d+\.(self_attn|mlp|mlp\.shared_experts|mlp\.experts\.\d+)\.\w+_proj(_with_mqa)?\.weight"
)
"""The weights that DeepSeek publishes in FP8: those of attention, MLPs and experts. The router, the indexer of V3.2,
the projection of the MTP layer, embeddings and head stay as they are."""
_FP8_CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [number_formats.BLOCK, number_formats.BLOCK],
}
_PLAIN, _QUANTIZED = ("BF16", "F16", "F32", "F64"), ("F8_E4M3", "I8")
_MOST_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class ConversionOptions:
    """The user's wishes."""

    target: Target
    act_scales: ActivationScales | None = None
    """Needed for w4afp8, and for nothing else."""
    kv_cache_fp8: bool = False
    keep_mtp: bool = True
    shard_bytes: int | None = None
    """Size of a file; None: by the size of the whole."""


@dataclass(frozen=True)
class TensorJob:
    """One tensor of the checkpoint and what becomes of it."""

    weight: number_formats.StoredWeight
    written_as: number_formats.Format
    outputs: tuple[OutputTensor, ...]
    """The tensor, and its scales where it is written as FP8 or INT4."""

    @property
    def name(self) -> str:
        return self.weight.stored.name


@dataclass(frozen=True)
class OutputShard:
    """One file to write."""

    name: str
    jobs: tuple[TensorJob, ...]

    @property
    def outputs(self) -> list[OutputTensor]:
        return [output for job in self.jobs for output in job.outputs]

    @property
    def size(self) -> int:
        return file_size(self.outputs)

    @property
    def source_bytes(self) -> int:
        return sum(job.weight.num_bytes for job in self.jobs)


@dataclass(frozen=True)
class ConversionPlan:
    """Everything that is written."""

    source: Path
    target: Target
    shards: tuple[OutputShard, ...]
    input_scales: Mapping[str, float]
    """Tensor -> its one value; empty where no activation scales are written."""
    documents: Mapping[str, Mapping[str, Any]]
    """Name of a JSON file -> its content, without the index."""

    @property
    def size(self) -> int:
        """Bytes of all shards."""
        return sum(shard.size for shard in self.shards)

    @property
    def source_bytes(self) -> int:
        """Bytes of the checkpoint that are read."""
        return sum(shard.source_bytes for shard in self.shards)

    @property
    def weight_map(self) -> dict[str, str]:
        """Tensor -> the file that has it, as the index says it."""
        files = {output.name: shard.name for shard in self.shards for output in shard.outputs}
        return files | dict.fromkeys(self.input_scales, INPUT_SCALES_FILE)


def plan_conversion(source: StoredTensors, config: Mapping[str, Any], options: ConversionOptions) -> ConversionPlan:
    """Plan it. `config` is the content of config.json.

    :raises CheckpointError: with everything that keeps the checkpoint from being converted so.
    """
    if is_v4(config):
        known = "expected a model before DeepSeek-V4, found V4, which is served as it is published"
        raise CheckpointError(f"{source.folder}: {known}")
    num_layers = config_number(config, "num_hidden_layers")
    num_mtp = config_number(config, "num_nextn_predict_layers", 0) if options.keep_mtp else 0
    jobs, problems = [], []
    for name in sorted(source, key=in_order):
        layer = layer_of(name)
        is_dropped = layer is not None and layer >= num_layers and not options.keep_mtp
        if is_dropped or not number_formats.is_weight(source, name):
            continue
        try:
            jobs.append(_job(source, name, num_layers, options))
        except CheckpointError as error:
            problems.append(str(error))
    problems += _missing_parts(jobs, config, num_layers, num_mtp)
    wishes = [] if problems else [*_wrong_wishes(jobs, config, options)]
    if problems := problems or wishes:
        more = f"; and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
        said = f"{source.folder}: {'; '.join(problems[:_MOST_NAMED])}{more}"
        raise CheckpointError(said, exit_code=2 if wishes else 1)
    total = sum(output.num_bytes for job in jobs for output in job.outputs)
    shard_bytes = options.shard_bytes or min(MOST_SHARD_BYTES, max(LEAST_SHARD_BYTES, total // _NUM_SHARDS))
    shards = dealt(jobs, lambda job: job.outputs, shard_bytes)
    int4_experts = {_expert_of(job.name) for job in jobs if job.written_as == "int4"}
    scales = sorted((options.act_scales or {}).items(), key=lambda item: in_order(item[0]))
    return ConversionPlan(
        source=source.folder,
        target=options.target,
        shards=tuple(OutputShard(name, tuple(mine)) for name, mine in shards.items()),
        input_scales={name: float(value) for name, value in scales if _expert_of(name) in int4_experts},
        documents=_documents(jobs, config, num_layers, options),
    )


def _job(source: StoredTensors, name: str, num_layers: int, options: ConversionOptions) -> TensorJob:
    """:raises CheckpointError: when the tensor can't be written so."""
    tensor = source[name]
    if tensor.dtype not in (*_PLAIN, *_QUANTIZED):
        raise CheckpointError(
            f"{name}: expected FP8 in blocks, W4AFP8 or {', '.join(_PLAIN)}, found {tensor.dtype}; other "
            "quantizations, such as NVFP4 and AWQ, are not converted"
        )
    weight = number_formats.weight_of(source, name)
    written_as = _written_as(weight, num_layers, options)
    if written_as == "plain":
        dtype = tensor.dtype if weight.format == "plain" else "BF16"
        return TensorJob(weight, "plain", (OutputTensor(name, dtype, weight.shape),))
    if len(weight.shape) != 2:
        raise CheckpointError(f"{name}: expected a matrix, found the shape {list(tensor.shape)}")
    rows, columns = weight.shape
    if written_as == "int4" and columns % number_formats.GROUP:
        raise CheckpointError(
            f"{name}: expected a multiple of {number_formats.GROUP} columns for INT4, found {columns:,}"
        )
    values = ("I8", (rows, columns // 2)) if written_as == "int4" else ("F8_E4M3", (rows, columns))
    scales = OutputTensor(name + number_formats.SCALES, "F32", number_formats.scales_shape(weight.shape, written_as))
    return TensorJob(weight, written_as, (OutputTensor(name, *values), scales))


def _written_as(
    weight: number_formats.StoredWeight, num_layers: int, options: ConversionOptions
) -> number_formats.Format:
    if options.target == "bf16":
        return "plain"
    name = weight.stored.name
    # The MTP layer is never calibrated, so its experts have no activation scales; upstream keeps them in FP8 too.
    is_mtp = (layer_of(name) or 0) >= num_layers
    if options.target == "w4afp8" and _EXPERT.fullmatch(name) and not is_mtp:
        return "int4"
    is_linear = len(weight.shape) == 2 and _LINEAR.fullmatch(name)
    return "fp8" if weight.format != "plain" or is_linear else "plain"


def _missing_parts(
    jobs: Sequence[TensorJob], config: Mapping[str, Any], num_layers: int, num_mtp: int
) -> Iterator[str]:
    """Yield what config.json says that the checkpoint has, and that is missing."""
    experts: dict[int, set[str]] = {}
    for job in jobs:
        layer, match = layer_of(job.name), _EXPERT.fullmatch(job.name)
        if layer is not None:
            experts.setdefault(layer, set()).update([match[1]] if match else [])
    # Only the first, because config.json may ask for any number.
    missing = next((layer for layer in range(num_layers) if layer not in experts), None)
    if missing is not None:
        yield f"expected layers 0 to {num_layers - 1} by config.json, found no {missing}; download it again"
    if num_mtp and num_layers + num_mtp - 1 not in experts:
        yield "expected the MTP layer by config.json, found none; leave it out with --mtp drop, or download it again"
    num_experts = config.get("n_routed_experts")
    few = [str(layer) for layer, numbers in experts.items() if numbers and len(numbers) != num_experts]
    if few:
        yield f"expected {num_experts} routed experts by config.json, found others in layer {first_names(few)}"


def _wrong_wishes(jobs: Sequence[TensorJob], config: Mapping[str, Any], options: ConversionOptions) -> Iterator[str]:
    is_w4afp8 = options.target == "w4afp8"
    if is_w4afp8 and options.act_scales is None:
        yield "expected --act-scales for w4afp8: the calibrated scales of the experts' inputs (checkpoint calibrate)"
    if is_w4afp8 and options.act_scales is not None and (missing := missing_scales(options.act_scales, config)):
        more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        yield f"--act-scales: expected a scale for the input of every expert, found none for {missing[0]}{more}"
    if is_w4afp8 and not any(job.written_as == "int4" for job in jobs):
        yield "expected a checkpoint with routed experts, found none"
    if is_w4afp8 and options.act_scales is not None:
        experts = {_expert_of(job.name) for job in jobs if _EXPERT.fullmatch(job.name)}
        layers = {expert.partition(".mlp.")[0] for expert in experts}
        others = {_expert_of(name) for name in options.act_scales} - experts
        if others := {expert for expert in others if expert.partition(".mlp.")[0] in layers}:
            expected = "--act-scales: expected scales of this checkpoint's experts"
            yield f"{expected}, found some of {min(others)}; are they another model's?"
    if options.act_scales is not None and not is_w4afp8:
        yield f"--act-scales goes with --to w4afp8 only, not with {options.target}"
    if options.kv_cache_fp8 and is_w4afp8:
        yield W4AFP8_KV_CACHE
    if options.kv_cache_fp8 and options.target == "bf16":
        yield "--kv-cache fp8 is written for fp8; for bf16, set kv_cache_config.dtype: fp8 in your own model.yaml"
    if is_w4afp8 and any(job.weight.format == "int4" for job in jobs):
        yield "expected a checkpoint in FP8 or bfloat16, found W4AFP8 already"
    elif all(job.weight.format == job.written_as for job in jobs) and options.keep_mtp:
        yield f"expected a checkpoint in another precision than {options.target}, found that one already"


def _expert_of(name: str) -> str:
    """Return the beginning of a name: "model.layers.3.mlp.experts.7"."""
    return ".".join(name.split(".")[:6])


def _documents(
    jobs: Sequence[TensorJob], config: Mapping[str, Any], num_layers: int, options: ConversionOptions
) -> dict[str, dict[str, Any]]:
    new = {name: value for name, value in config.items() if name != "quantization_config"}
    num_mtp = config.get("num_nextn_predict_layers") or 0
    if num_mtp and not options.keep_mtp:
        new["num_nextn_predict_layers"] = num_mtp = 0
    documents: dict[str, dict[str, Any]] = {CONFIG: new}
    if options.target == "fp8":
        is_as_it_was = all(job.weight.format == job.written_as for job in jobs)
        # Where only a layer was dropped, the scales are still what the section says of them (V3.1's scale_fmt).
        new["quantization_config"] = config.get("quantization_config", _FP8_CONFIG) if is_as_it_was else _FP8_CONFIG
        if options.kv_cache_fp8:
            documents[HF_QUANT_CONFIG] = _hf_quant_config("FP8_BLOCK_SCALES", "FP8")
    elif options.target == "w4afp8":
        documents[HF_QUANT_CONFIG] = _hf_quant_config("MIXED_PRECISION", None)
        documents[QUANT_CFG] = {
            "quant_algo": "MIXED_PRECISION",
            "kv_cache_quant_algo": None,
            "quantized_layers": _quantized_layers(config, num_layers, num_mtp),
        }
    return documents


def _hf_quant_config(quant_algo: str, kv_cache: str | None) -> dict[str, Any]:
    """Return hf_quant_config.json, which TensorRT-LLM reads (its DeepSeek-V3 README, "FP8 KV Cache and MLA")."""
    return {"quantization": {"quant_algo": quant_algo, "kv_cache_quant_algo": kv_cache}}


def _quantized_layers(config: Mapping[str, Any], num_layers: int, num_mtp: int) -> dict[str, dict[str, str]]:
    """Return how each module is quantized, by the names of TensorRT-LLM's modules, some of which are fused.

    Source: examples/quantization/quantize_mixed_precision_moe.py of TensorRT-LLM, in the version that knows MTP layers.
    """
    blocks, experts = {"quant_algo": "FP8_BLOCK_SCALES"}, {"quant_algo": "W4A8_AWQ"}
    modules: dict[str, dict[str, str]] = {}
    for layer in range(num_layers + num_mtp):
        prefix = f"model.layers.{layer}"
        modules |= {f"{prefix}.self_attn.{name}": blocks for name in ("fused_a", "q_b_proj", "kv_b_proj", "o_proj")}
        mlps = ("gate_up_proj", "down_proj")
        if layer < (config_number(config, "first_k_dense_replace", 0)):
            modules |= {f"{prefix}.mlp.{name}": blocks for name in mlps}
        else:
            modules |= {f"{prefix}.mlp.shared_experts.{name}": blocks for name in mlps}
            modules[f"{prefix}.mlp.experts"] = experts if layer < num_layers else blocks
    return modules
