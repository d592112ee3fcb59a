"""The catalogue: architectures, variants, checkpoints and GPUs. The YAML files give the source of each figure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from deepseek_triton_build.build_errors import UnknownNameError
from deepseek_triton_build.data.own_files import entry_of, load_yaml

Precision = Literal["mxfp4", "fp8", "fp4", "w4a8", "w4a16"]
PRECISIONS: Mapping[Precision, str] = {
    "mxfp4": "MXFP4 experts, the rest FP8: as DeepSeek publishes V4",
    "fp8": "FP8 weights in blocks of 128 x 128, as DeepSeek publishes them up to V3.2",
    "fp4": "NVFP4 weights, Blackwell only",
    "w4a8": "INT4 expert weights with FP8 activations (W4AFP8), Hopper only",
    "w4a16": "INT4 weights in groups of 128 with 16-bit activations (compressed-tensors, AWQ, GPTQ), vLLM only",
}
PRECISION_ALIASES: Mapping[str, Precision] = {
    "nvfp4": "fp4",
    "w4afp8": "w4a8",
    "awq": "w4a16",
    "gptq": "w4a16",
    "compressed-tensors": "w4a16",
}
_PRECISION_WORDS: Mapping[str, Precision] = {**{precision: precision for precision in PRECISIONS}, **PRECISION_ALIASES}


@dataclass(frozen=True, kw_only=True)
class CompressedAttention:
    """The attention of DeepSeek-V4, as far as it is not MLA's, with the figures of its config.json."""

    head_dim: int
    """Width of the one latent of a token that is key and value of every head."""
    o_groups: int
    o_lora_rank: int
    compress_ratios: tuple[int, ...]
    """For each layer, the draft's left out, how many tokens share a compressed entry; 0: it has a window only."""
    sliding_window: int
    num_hash_layers: int
    """The first layers, which route by a table from token to experts."""
    hc_mult: int
    """Copies of the hidden state between layers (hyper-connections)."""
    markov_rank: int = 0
    """Width of the table by which DSpark drafts a token after another (dspark_markov_rank)."""
    kv_source_layers: tuple[int, ...] = ()
    """The layers with compressed entries of their own, where others read theirs; empty: every layer with a ratio."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The shape of a model, with the figures of its config.json."""

    name: str
    class_name: str
    model_type: str
    num_layers: int
    """Transformer layers, the draft's not counted."""
    num_dense_layers: int = 0
    num_mtp_layers: int
    """Layers of the draft: one of MTP, three of DSpark."""
    draft: Literal["mtp", "dspark"] = "mtp"
    hidden_size: int
    intermediate_size: int = 0
    moe_intermediate_size: int
    num_routed_experts: int
    num_shared_experts: int
    num_experts_per_token: int
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int = 0
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    vocab_size: int
    max_position_embeddings: int
    index_num_heads: int
    """Heads of the sparse attention's indexer; 0 for a model without sparse attention."""
    index_head_dim: int
    index_topk: int
    csa: CompressedAttention | None = None
    part_bytes: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Bytes of the published checkpoint by field of Weights, where they are not computed from the shape."""
    host_bytes: int = 0
    """Bytes of tables that stay in the memory of each node (Engram)."""
    source: str

    @property
    def attention(self) -> Literal["mla", "dsa", "csa"]:
        """MLA as in V3, its sparse form as in V3.2, or compressed attention as in V4."""
        if self.csa is not None:
            return "csa"
        return "dsa" if self.index_num_heads else "mla"


@dataclass(frozen=True, kw_only=True)
class KnownCheckpoint:
    """One set of weights of a variant: a published one, or one that a user may have."""

    precision: Precision
    model: str
    """Hugging Face name, `owner/name`; empty for weights of the variant that nobody publishes."""
    weight_bytes: int
    """Bytes of all its files. 0 for weights that nobody publishes: the shapes then give the number."""
    bytes_status: Literal["measured", "computed", "estimated"]
    num_shards: int | None
    """Number of safetensors files; None when it is not known."""
    quant_algo: str
    """`quant_algo` as the checkpoint's hf_quant_config.json says it."""
    kv_cache_quant_algo: str | None
    wo_quantized: bool
    """Whether an NVFP4 checkpoint also stores attention's output projection as NVFP4; its other attention weights have
    16 bits."""
    source: str
    published_for: str = ""
    """The model that the weights belong to, where that is another one of the same architecture."""
    remark: str = ""
    """How that model behaves unlike the variant, or what is known about that checkpoint."""
    alternatives: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, compare=False)
    """Other Hugging Face name -> the fields that differ for the checkpoint of that name."""

    def under_each_name(self) -> "Mapping[str, KnownCheckpoint]":
        """Return Hugging Face name -> the checkpoint of that name, `model` first."""
        own = {self.model: self} if self.model else {}
        return own | {name: replace(self, model=name, **differs) for name, differs in self.alternatives.items()}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A model that can be served."""

    name: str
    title: str
    engines: tuple[str, ...]
    """The engines it runs on; the first is the default."""
    model: str = ""
    """The folder beside model.yaml of a checkpoint that travels in every repository; empty where none does."""
    edition: str = ""
    """The folder in that checkpoint whose files take the place of those beside it; empty for none."""
    profile: str = ""
    """The only profile that the variant has; empty: all but those that other variants keep to themselves."""
    presets: tuple[str, ...] = ()
    """Deployments whose pace the simulated engine can keep. A test compares them with the backend's own list."""
    architecture: Architecture | None = None
    checkpoints: Mapping[str, KnownCheckpoint] = field(default_factory=dict)
    """Precision -> the published weights."""
    own_checkpoints: Mapping[str, KnownCheckpoint] = field(default_factory=dict)
    """Precision -> weights that nobody publishes for this very model, which can be served all the same."""
    min_release: str = ""
    """The oldest TensorRT-LLM release that has the model."""
    min_release_source: str = ""
    min_vllm: str = ""
    """The oldest vLLM version that has the model; empty: every version with a record."""
    min_vllm_source: str = ""
    thinks: bool = False
    """Whether the model reasons before each answer unless its chat template is told otherwise."""
    reasoning_tokens: int = 0
    """Tokens that DeepSeek gives an answer with its reasoning; 0 for a model that doesn't reason, or is tiny."""
    reasoning_source: str = ""
    chat_encoding: str = ""
    """The backend's setting of that name, for a model without a chat template; empty where config.json tells all."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat format that every conversation has to give: the model was made for nothing else."""
    relaxed_acceptance: bool = False
    """Whether TensorRT-LLM's relaxed acceptance of MTP drafts is made for the model."""
    trust_remote_code: bool = False
    trust_remote_code_reason: str = ""
    default_sampling: Mapping[str, float] = field(default_factory=dict)
    default_sampling_source: str = ""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU and the machine it comes in."""

    name: str
    title: str
    architecture: Literal["ampere", "hopper", "blackwell", "rtx_blackwell"]
    sm: int
    sm_count: int = 0
    """Streaming multiprocessors; 0 where they are not known and nothing asks."""
    memory_mib: int
    """Memory in MiB as nvidia-smi reports it (memory.total)."""
    memory_source: str
    gpus_per_node: int
    nvlink_domain: int
    """Number of GPUs that reach each other over NVLink; 1 where they have none."""
    published_min_gpus: Mapping[str, int]
    """Precision -> GPUs of one instance that NVIDIA publishes. A precision without an entry is not published."""
    published_source: str
    recommended_gpus: Mapping[str, int] = field(default_factory=dict)
    """Precision -> GPUs that NVIDIA recommends, where that is more than the published minimum."""
    min_release: str = ""
    """The oldest TensorRT-LLM release that is planned for it; empty: any."""
    min_release_source: str = ""
    aiconfigurator: str = ""
    """AIConfigurator's name of the system; empty where it has no tables."""
    stands_for: Mapping[str, str] = field(default_factory=dict)
    """GPU that is not planned for by itself -> how it differs from this one."""

    @property
    def memory(self) -> int:
        """Memory in bytes."""
        return self.memory_mib * 2**20


@dataclass(frozen=True, kw_only=True)
class MoeBackendRow:
    """One line of the support matrix of moe_config.backend."""

    gpus: Sequence[str]
    precision: Precision
    ep: Literal["<=8", ">8", "any"]
    backends: Sequence[str]
    default: str
    source: str
    measured: Mapping[str, str] = field(default_factory=dict)
    """Back ends that the matrix leaves out and NVIDIA measures -> where its configuration is."""


@dataclass(frozen=True, kw_only=True)
class MoeRefusal:
    """Weights for which a release refuses a value of moe_config.backend."""

    backend: str
    precisions: Sequence[Precision]
    why: str
    source: str
    architectures: Sequence[str] = ()
    """The GPUs' architectures; empty for all."""
    before: str | None = None
    """The first release that refuses it no more; None where all do."""


@cache
def architectures() -> dict[str, Architecture]:
    return {name: _architecture(name, entry) for name, entry in load_yaml("architectures.yaml").items()}


def _architecture(name: str, entry: dict[str, Any]) -> Architecture:
    place, csa = f"architectures.yaml: {name}", entry.get("csa")
    if csa is not None:
        ratios = tuple(ratio for times, repeated in csa["compress_ratios"] for ratio in repeated * times)
        csa = {**csa, "compress_ratios": ratios, "kv_source_layers": tuple(csa.get("kv_source_layers", ()))}
        csa = entry_of(f"{place}: csa", CompressedAttention, csa)
    return entry_of(place, Architecture, {**entry, "csa": csa}, name=name)


@cache
def variants() -> dict[str, Variant]:
    return {name: _variant(name, entry) for name, entry in load_yaml("variants.yaml").items()}


@cache
def gpus() -> dict[str, Gpu]:
    known = {name: entry_of(f"gpus.yaml: {name}", Gpu, row, name=name) for name, row in load_yaml("gpus.yaml").items()}
    if twice := {other for gpu in known.values() for other in gpu.stands_for} & known.keys():
        raise LookupError(f"gpus.yaml: {', '.join(sorted(twice))}: planned for by itself, take it out of stands_for")
    return known


@cache
def moe_backend_rows() -> tuple[MoeBackendRow, ...]:
    return tuple(entry_of(f"moe_backends.yaml: {row}", MoeBackendRow, row) for row in load_yaml("moe_backends.yaml"))


@cache
def moe_refusals() -> tuple[MoeRefusal, ...]:
    return tuple(entry_of(f"moe_refusals.yaml: {row}", MoeRefusal, row) for row in load_yaml("moe_refusals.yaml"))


def find_moe_backends(gpu: Gpu, precision: str, expert_parallel_size: int) -> MoeBackendRow | None:
    """Return the line of the support matrix for this GPU, precision and size; None where nothing is published."""
    sizes = ("any", ">8" if expert_parallel_size > 8 else "<=8")
    rows = (row for row in moe_backend_rows() if gpu.name in row.gpus and precision == row.precision)
    return next((row for row in rows if row.ep in sizes), None)


def full_name(name: str) -> str:
    """Return the variant's name that is meant: in small letters, and with "deepseek-" where only that is missing. A
    name of no variant stays as it is."""
    meant = (name.lower(), f"{_MAKER}{name.lower()}")
    return next((one for one in meant if one in variants()), name)


def find_variant(name: str) -> Variant:
    """Return the variant of that name as `full_name` takes it, or raise UnknownNameError, which names the nearest."""
    found = variants().get(full_name(name))
    if found is None:
        raise UnknownNameError("variant", name, variants(), note=how_to_plan(name))
    return found


def find_served(name: str) -> Variant:
    """Return the variant of that name, or the one as which the model or checkpoint of that name is planned.

    :raises UnknownNameError: when there is none.
    """
    named = None if full_name(name) in variants() else checkpoint_named(name)
    return named[0] if named else find_variant(name)


def find_gpu(name: str) -> Gpu:
    """Return the GPU of that name in any case, or raise UnknownNameError, which names the nearest."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    alike = [
        f"--gpu {gpu.name} plans like it ({other}: {differs})"
        for gpu in gpus().values()
        for other, differs in gpu.stands_for.items()
        if set(other.split("-")) <= words
    ]
    if name.lower() not in gpus():
        raise UnknownNameError("GPU", name, gpus(), note=" or ".join(alike))
    return gpus()[name.lower()]


def find_precision(name: str) -> Precision:
    """Return the precision of that name or alias in any case, or raise UnknownNameError."""
    if name.lower() in _PRECISION_WORDS:
        return _PRECISION_WORDS[name.lower()]
    # BF16 weights would only help GPUs without FP8, where TensorRT-LLM has no MLA kernels for DeepSeek.
    is_bf16 = name.lower() in ("bf16", "bfloat16")
    note = "BF16 helps no GPU that serves DeepSeek (rule H001); leave --precision out" if is_bf16 else ""
    raise UnknownNameError("precision", name, _PRECISION_WORDS, note=note)


def variant_of_model(model: str) -> tuple[Variant, KnownCheckpoint] | None:
    """Return the variant and checkpoint that the Hugging Face name `model` belongs to; None for an unknown name."""
    return _by_name().get(model)


def variant_of_folder(path: str) -> tuple[Variant, KnownCheckpoint] | None:
    """Return the variant and checkpoint whose Hugging Face name ends as `path` does, in any case; None for none."""
    folder = path.rstrip("/").rpartition("/")[2].lower()
    return next((found for name, found in _by_name().items() if name.rpartition("/")[2].lower() == folder), None)


def title_of(variant: Variant, checkpoint: KnownCheckpoint | None) -> str:
    """Say which model it is: the variant, or the one that the weights were published for."""
    remark = f"; {checkpoint.remark}" if checkpoint is not None and checkpoint.remark else ""
    if checkpoint is None or not checkpoint.published_for:
        return f"{variant.title}{remark}"
    return f"{checkpoint.published_for}, planned as {variant.name}, whose architecture it has{remark}"


def checkpoint_named(name: str, precision: str | None = None) -> tuple[Variant, KnownCheckpoint] | None:
    """Return the variant and checkpoint of a name without an owner or without "deepseek-", such as `v3.1-terminus`;
    None for none.

    :param precision: the precision that is preferred, where a model has weights of several.
    """
    short = name.lower().removeprefix(_MAKER)
    meant = [
        found
        for model, found in _by_name().items()
        if short in {one.lower().removeprefix(_MAKER) for one in (model.rpartition("/")[2], found[1].published_for)}
    ]
    wanted = find_precision(precision) if precision else None
    return next((found for found in meant if found[1].precision == wanted), meant[0] if meant else None)


_MAKER = "deepseek-"
# Where the maker's name is left out in front of a model's, or written ds.
_WITHOUT_MAKER = re.compile(r"^(?=[rv]\d)|(?<![a-z0-9])ds-")
# A smaller model, which only learned from the one that it names: all but 671B and 685B.
_SMALLER = re.compile(r"distill|qwen|llama|(?<![a-z0-9.])(?!67|68)\d+(\.\d+)?b(?![a-z0-9])")
# Weights that no engine here reads, by a word of their name, and what to do.
_FOREIGN_WEIGHTS = {
    "GGUF files, which are for llama.cpp": r"gguf|i?q\d",
    "weights for Apple's processors": "mlx",
    "MX weights, which are for AMD's GPUs": r"mxfp\d",
    "INT8 weights, which no engine here reads": "int8|w8a8",
    "weights for ExLlama": r"exl\d",
    "bitsandbytes' weights, which no engine here shares among GPUs": "bnb",
    "16-bit weights, which deepseek-triton checkpoint quantize makes smaller": "bf16|fp16",
}


def foreign_weights(name: str) -> str:
    """Say by a checkpoint's name that no engine here reads its weights; "" where the name doesn't tell."""
    return next((what for what, words in _FOREIGN_WEIGHTS.items() if _word(words).search(name.lower())), "")


def precision_in_name(name: str) -> Precision | None:
    """Return the precision that the name of a checkpoint says; None where it says none, or several."""
    said = {precision for word, precision in _PRECISION_WORDS.items() if _word(word).search(name.lower())}
    return said.pop() if len(said) == 1 else None


def how_to_plan(name: str) -> str:
    """Say how a checkpoint is planned whose name is not known but tells what it is; "" where it doesn't tell."""
    given = re.sub(r"(?<=\d)_(?=\d)", ".", name.lower().rpartition("/")[2]).replace("_", "-")
    foreign, precision = foreign_weights(name), precision_in_name(name)
    stems = {variant: variant for variant, entry in variants().items() if not entry.model}
    stems |= {
        found.published_for.lower(): variant.name for variant, found in _by_name().values() if found.published_for
    }
    if short := [stem for stem in stems if stem.endswith(f"-{given}")]:
        return f"did you mean {short[0]!r}?"
    full = _WITHOUT_MAKER.sub(_MAKER, given)
    meant = [stem for stem in sorted(stems, key=len, reverse=True) if _word(re.escape(stem)).search(full)]
    if not meant or _SMALLER.search(given):
        return ""
    variant = stems[meant[0]]
    if foreign:
        return f"by its name it has {foreign}; {variant} --model NAME takes others"
    if "/" not in name and precision is None and full == given:
        return ""  # a misspelled variant
    weights = f" --precision {precision}" if precision else ""
    weights += " --engine vllm" if precision == "w4a16" else ""
    return f"by its name it is planned as: {variant}{weights} --model {name if '/' in name else 'NAME'}"


def _word(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![a-z0-9.])(?:{pattern})(?![a-z0-9.])")


@cache
def _by_name() -> Mapping[str, tuple[Variant, KnownCheckpoint]]:
    return {
        name: (variant, checkpoint)
        for variant in variants().values()
        for weights in (*variant.checkpoints.values(), *variant.own_checkpoints.values())
        for name, checkpoint in weights.under_each_name().items()
        if not variant.model  # a folder called like it may hold anything
    }


def _variant(name: str, entry: dict[str, Any]) -> Variant:
    place, lists = f"variants.yaml: {name}", {key: tuple(entry.get(key, ())) for key in ("engines", "presets")}
    # Weights that nobody publishes have no name and no measured size; the shapes give the number.
    unnamed = {"model": "", "weight_bytes": 0, "bytes_status": "computed", "num_shards": None, "wo_quantized": False}
    weights = {
        kind: {
            key: entry_of(f"{place}: {key}", KnownCheckpoint, {**unnamed, **row}, precision=find_precision(key))
            for key, row in entry.get(kind, {}).items()
        }
        for kind in ("checkpoints", "own_checkpoints")
    }
    architecture = architectures()[entry["architecture"]] if "architecture" in entry else None
    return entry_of(place, Variant, {**entry, **lists, **weights, "architecture": architecture}, name=name)


# Checkpoints with fewer layers or experts than the model, which test hardware: `checkpoint cut` makes them.

# Key of config.json that a cut lowers -> attribute of Architecture.
_CUT_FIGURES = {"num_hidden_layers": "num_layers", "n_routed_experts": "num_routed_experts"}


def cut_architecture(config: Mapping[str, Any], whole: Architecture) -> Architecture | None:
    """Return the shape that config.json gives a checkpoint cut from one of shape `whole`; None when it isn't cut."""
    shape = {name: config.get(key, getattr(whole, name)) for key, name in _CUT_FIGURES.items()}
    is_within = all(type(found) is int and 0 < found <= getattr(whole, name) for name, found in shape.items())
    is_whole = all(found == getattr(whole, name) for name, found in shape.items())
    if not is_within or is_whole or config.get("hidden_size", whole.hidden_size) != whole.hidden_size:
        return None
    num_mtp = config.get("num_nextn_predict_layers", 0)
    if num_mtp and whole.draft == "dspark":  # whose config.json says 1
        num_mtp = whole.num_mtp_layers
    csa = whole.csa and replace(whole.csa, compress_ratios=whole.csa.compress_ratios[: shape["num_layers"]])
    return replace(
        whole,
        **shape,
        csa=csa,
        num_dense_layers=min(whole.num_dense_layers, shape["num_layers"]),
        num_mtp_layers=num_mtp if type(num_mtp) is int else 0,
    )


def cut_summary(cut: Architecture, whole: Architecture) -> str:
    """Say what is left: "5 of 61 layers, 32 of 256 routed experts"."""
    figures = (("layers", "num_layers"), ("routed experts", "num_routed_experts"))
    pairs = ((noun, getattr(cut, name), getattr(whole, name)) for noun, name in figures)
    return ", ".join(f"{left} of {of} {noun}" for noun, left, of in pairs if left < of)
