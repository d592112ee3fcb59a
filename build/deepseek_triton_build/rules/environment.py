"""Rules E: the environment variables that the server is started with, and the choice of engine."""

from collections.abc import Iterator

from deepseek_triton_build.data.catalog import variant_of_model
from deepseek_triton_build.rules.rule import Deployment, RuleTable, Violation
from deepseek_triton_build.text import is_path

RULES = RuleTable()
# The newer name and the older one, which releases before 1.2 need.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# Prompts of 8K tokens with answers of 1K on H200 are the known issue of the deployment guide.
_LONG_INPUT = 8192
_LAYERS = "TLLM_OVERRIDE_LAYER_NUM"
_V4_TOKENIZER = "deepseek_v4"
_V32_TOKENIZER = "deepseek_v32"
REASONING_PARSER = "deepseek-r1"
"""The one name that every release since 0.21 knows for DeepSeek."""


@RULES.note("E001")
def _allocator(d: Deployment) -> Iterator[Violation]:
    if d.gpu is None or d.gpu.name != "h200" or (d.isl or 0) < _LONG_INPUT:
        return
    if not any("max_split_size_mb" in d.environment.get(name, "") for name in _ALLOCATOR):
        name = _ALLOCATOR[1] if d.is_before("1.2.0") else _ALLOCATOR[0]
        message = f"prompts of {d.isl:,} tokens on H200 fragment PyTorch's memory until it runs out"
        yield Violation(None, message, f"start the server with {name}=max_split_size_mb:8192")


@RULES.warning("E002")
def _layers(d: Deployment) -> Iterator[Violation]:
    layers = d.environment.get(_LAYERS, "0")
    if layers not in ("", "0"):
        message = f"{_LAYERS}={layers} loads only {layers} of the model's layers: the answers are noise"
        yield Violation(_LAYERS, message, "remove the variable")


@RULES.error("E004")
def _engine(d: Deployment) -> Iterator[Violation]:
    backend = d.get("backend")
    if backend not in (None, "pytorch"):
        yield Violation("backend", f"backend {backend} is not the engine that runs DeepSeek", "set backend: pytorch")
    elif d.release is not None and d.release.default_backend != "pytorch" and d.get("backend") != "pytorch":
        message = f"TensorRT-LLM {d.release.version} builds a TensorRT engine unless backend is set"
        yield Violation("backend", message, "set backend: pytorch")


@RULES.warning("E005")
def _dummy_weights(d: Deployment) -> Iterator[Violation]:
    if str(d.get("load_format")).upper() == "DUMMY":
        message = "load_format DUMMY serves random weights: the answers are noise"
        yield Violation("load_format", message, "remove load_format")


@RULES.error("E007")
def _custom_tokenizer(d: Deployment) -> Iterator[Violation]:
    custom = d.get("custom_tokenizer")
    if not custom:
        return
    aliases = {_V32_TOKENIZER: "dsa"} if d.is_before("1.3") else {_V32_TOKENIZER: "dsa", _V4_TOKENIZER: "csa"}
    if custom in aliases:
        if d.attention not in ("", aliases[custom]):
            message = f"custom_tokenizer {custom} is for {'V4' if custom == _V4_TOKENIZER else 'V3.2'} only"
            yield Violation("custom_tokenizer", message, "remove custom_tokenizer")
    elif "." not in custom or not all(part.isidentifier() for part in custom.split(".")):
        message = f"custom_tokenizer {custom} is neither {' or '.join(aliases)} "
        message += "nor the path of a class, such as module.Class"
        yield Violation("custom_tokenizer", message, "remove custom_tokenizer, or name the class with its module")


@RULES.error("E008")
def _other_tokenizer(d: Deployment) -> Iterator[Violation]:
    name = d.get("tokenizer")
    if not name or is_path(name) or d.variant is None:
        return
    known = variant_of_model(name)
    if "deepseek" not in name.lower() or (known is not None and known[0].name != d.variant.name):
        message = f"tokenizer {name} is not the tokenizer of {d.variant.name}"
        yield Violation("tokenizer", message, "remove tokenizer: the checkpoint has its own")


@RULES.error("E009")
def _reasoning_parser(d: Deployment) -> Iterator[Violation]:
    parser = d.get("reasoning_parser")
    if parser and parser != REASONING_PARSER and d.architecture is not None:
        message = f"reasoning_parser {parser} is not the parser of DeepSeek's reasoning"
        yield Violation("reasoning_parser", message, f"remove reasoning_parser, or write {REASONING_PARSER}")
