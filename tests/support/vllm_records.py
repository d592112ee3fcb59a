"""Makes the records of vLLM in `data/records` from a wheel of vLLM, or from the folder where it is installed.

It reads the source and imports nothing of it:

    PYTHONPATH=tests python -m support.vllm_records vllm-0.25.1-....whl --write

The part of a record below `_BY_HAND` is written by hand, and stays as it is.
"""

import argparse
import ast
import hashlib
import json
import re
import textwrap
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import deepseek_triton_build

RECORDS = Path(deepseek_triton_build.__file__).parent / "data" / "records"

ATTRIBUTES_OF = ("vllm.v1.engine.async_llm:AsyncLLM",)
"""Classes whose attributes are recorded: those that they assign to `self`, and their properties."""

INTERFACES = (
    "vllm.v1.engine.async_llm:AsyncLLM.from_engine_args",
    "vllm.v1.engine.async_llm:AsyncLLM.get_supported_tasks",
    "vllm.v1.engine.async_llm:AsyncLLM.get_tokenizer",
    "vllm.v1.engine.async_llm:AsyncLLM.generate",
    "vllm.v1.engine.async_llm:AsyncLLM.abort",
    "vllm.v1.engine.async_llm:AsyncLLM.shutdown",
    "vllm.v1.engine.async_llm:AsyncLLM.check_health",
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
    "vllm.v1.engine.input_processor:InputProcessor.assign_request_id",
    "vllm.v1.engine.core_client:AsyncMPClient.get_output_async",
    "vllm.v1.engine.core_client:AsyncMPClient.add_request_async",
    "vllm.v1.engine.core_client:AsyncMPClient.abort_requests_async",
    "vllm.v1.engine.core_client:DPLBAsyncMPClient.get_output_async",
    "vllm.v1.engine.core_client:DPLBAsyncMPClient.add_request_async",
    "vllm.v1.engine.core_client:DPLBAsyncMPClient.abort_requests_async",
    "vllm.v1.engine:EngineCoreRequest",
    "vllm.v1.engine:EngineCoreOutputs",
    "vllm.v1.engine:EngineCoreOutput",
    "vllm.v1.engine:EngineCoreEvent",
    "vllm.v1.engine:EngineCoreEventType",
    "vllm.v1.engine:FinishReason",
    "vllm.v1.engine.exceptions:EngineDeadError",
    "vllm.v1.metrics.stats:SchedulerStats",
    "vllm.v1.metrics.stats:PrefillStats",
    "vllm.v1.metrics.stats:PrefixCacheStats",
    "vllm.v1.spec_decode.metrics:SpecDecodingStats",
    "vllm.v1.metrics.loggers:StatLoggerBase.record",
    "vllm.v1.outputs:LogprobsLists",
    "vllm.v1.outputs:LogprobsTensors",
    "vllm.logprobs:Logprob",
    "vllm.outputs:RequestOutput",
    "vllm.outputs:CompletionOutput",
    "vllm.sampling_params:RequestOutputKind",
    "vllm.usage.usage_lib:UsageContext",
)
"""Everything that the engine calls or reads off the public path. A class stands for its fields or members, or for the
parameters of its own __init__. The engine compares these lists with what dataclasses, msgspec and inspect say of the
installed vLLM (`vllm_release.py`)."""

SECTIONS = {
    "attention_config": "vllm.config.attention:AttentionConfig",
    "compilation_config": "vllm.config.compilation:CompilationConfig",
    "eplb_config": "vllm.config.parallel:EPLBConfig",
    "kernel_config": "vllm.config.kernel:KernelConfig",
    "speculative_config": "vllm.config.speculative:SpeculativeConfig",
    "structured_outputs_config": "vllm.config.structured_outputs:StructuredOutputsConfig",
}
"""Arguments that are mappings, whose keys are recorded too -> the class of them."""

_BOUNDED = {
    "block_size": "vllm.config.cache:CacheConfig",
    "max_num_batched_tokens": "vllm.config.scheduler:SchedulerConfig",
    "max_num_seqs": "vllm.config.scheduler:SchedulerConfig",
}
"""Argument whose own default is None -> the class that it is passed to, whose field of this name has its bounds."""

_ARGUMENTS = "vllm.engine.arg_utils"
_FLAGS = tuple(f"vllm.entrypoints.{folder}.cli_args" for folder in ("openai", "launchers", "common"))
"""The modules of `vllm serve`'s own flags: until 0.27.1, in 0.31.0, and in 0.33.0."""
_BY_HAND = "# From here on written by hand.\n"


class MissingSourceError(Exception):
    """The wheel or folder has no such module, class or function."""


@dataclass(frozen=True)
class Place:
    """A node, and the module in which its names are looked up."""

    module: str
    node: ast.AST


class VllmSource:
    """The Python source of a wheel (`*.whl`), of an installed `vllm` folder, or of the folder around it."""

    def __init__(self, path):
        self.path = path
        self._wheel = None if path.is_dir() else zipfile.ZipFile(path)
        self._root = path.parent if path.name == "vllm" else path
        self._modules = {}

    @property
    def version(self):
        found = re.search(r"^__version__ = version = '([^']+)'", self._text("vllm/_version.py") or "", re.MULTILINE)
        if found is None:
            raise MissingSourceError(f"{self.path}: vllm/_version.py does not give a version")
        return found[1]

    def has(self, module):
        return self._module_text(module) is not None

    def module(self, name):
        if name not in self._modules:
            text = self._module_text(name)
            if text is None:
                raise MissingSourceError(f"{self.path}: no module {name}")
            self._modules[name] = ast.parse(text)
        return self._modules[name]

    def find(self, module, name):
        """Return where `name`, as `module` knows it, is defined; None for what vLLM does not define itself."""
        for node in _statements(self.module(module)):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self._imported(module, node, alias.name)
            elif _defines(node, name):
                return Place(module, node)
        return None

    def require(self, reference):
        """Return the class or function of `module:Name` or `module:Class.method`, an inherited method too."""
        module, _, path = reference.partition(":")
        name, _, method = path.partition(".")
        place = self.find(module, name)
        if place is None:
            raise MissingSourceError(f"{self.path}: no {name} in {module}")
        return self._method(place, method) if method else place

    def _method(self, place, method):
        for owner in self.lineage(place):
            for node in _body(owner.node):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == method:
                    return Place(owner.module, node)
        raise MissingSourceError(f"{self.path}: no {method} in {place.module}")

    def lineage(self, place):
        """Yield a class, and after it those of its bases that vLLM defines."""
        yield place
        for base in getattr(place.node, "bases", ()):
            found = self.find(place.module, base.id) if isinstance(base, ast.Name) else None
            if found is not None:
                yield from self.lineage(found)

    def _imported(self, module, node, name):
        if node.level:
            package = module.split(".") if self._is_package(module) else module.split(".")[:-1]
            origin = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
        else:
            origin = node.module or ""
        try:
            return self.find(origin, name) if origin.split(".")[0] == "vllm" else None
        except MissingSourceError:
            return None  # a module that is made when vLLM is built

    def _is_package(self, module):
        return self._text(f"{module.replace('.', '/')}/__init__.py") is not None

    def _module_text(self, name):
        path = name.replace(".", "/")
        text = self._text(f"{path}.py")
        return self._text(f"{path}/__init__.py") if text is None else text

    def _text(self, file):
        try:
            if self._wheel:
                return self._wheel.read(file).decode()
            return (self._root / file).read_text("utf-8")
        except (KeyError, FileNotFoundError):
            return None


def record(source):
    """Return everything that a record takes from the source, in the record's order."""
    arguments, flags = _arguments(source), list(_flags(source))
    its_flags = {_flag(name): name for name in arguments}
    return {
        "vllm": source.version,
        **_wheel(source.path),
        "arguments": arguments,
        "sections": {name: _section(source, source.require(place)) for name, place in SECTIONS.items()},
        "short_flags": {short: its_flags[name] for name, short in _short_names(flags) if name in its_flags},
        "serve_flags": sorted({name for names in flags for name in names if name.startswith("--")} - its_flags.keys()),
        "environment": sorted(_environment(source)),
        "sampling_params": _public_fields(source, "vllm.sampling_params:SamplingParams"),
        "structured_outputs": _public_fields(source, "vllm.sampling_params:StructuredOutputsParams"),
        "attributes": {name: sorted(_attributes(source.require(name).node)) for name in ATTRIBUTES_OF},
        "interfaces": {name: interface(source, name) for name in INTERFACES},
    }


def interface(source, reference):
    """Return the parameters of a function, or a class's fields or members, in order."""
    place = source.require(reference)
    node = place.node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return _parameters(node)
    if _is_enum(node):
        return _members(node)
    for method in _body(node):
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            return _parameters(method)
    owners = reversed(list(source.lineage(place)))  # a class has its bases' fields before its own
    return list(dict.fromkeys(ast.unparse(each.target) for owner in owners for each in _annotated(owner.node)))


def _wheel(path):
    if not path.is_file():
        return {}
    with path.open("rb") as file:
        return {"wheel": path.name, "wheel_sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _arguments(source):
    engine = source.require(f"{_ARGUMENTS}:EngineArgs")
    own = source.require(f"{_ARGUMENTS}:AsyncEngineArgs")
    rows = _section(source, engine) | _section(source, own)
    for name, reference in SECTIONS.items():
        type_name = reference.partition(":")[2]
        rows[name] = {**rows[name], "type": _with_none(type_name, rows[name]["default"])}
    for name in rows.keys() & _BOUNDED.keys():
        module, _, type_name = _BOUNDED[name].partition(":")
        _, limits = _Reader(source).attribute(type_name, name, module)
        rows[name] = {**rows[name], "type": _typed(rows[name]["type"], limits)}
    return dict(sorted(rows.items()))


def _section(source, place):
    """Return name -> type and default of each field of a dataclass that can be given."""
    reader = _Reader(source)
    rows = {}
    for node in _annotated(place.node):
        name = ast.unparse(node.target)
        spelled = reader.spell(node.annotation, place.module)
        if not name.startswith("_") and not spelled.startswith(("ClassVar", "SkipValidation")):
            default, limits = reader.default(node.value, place.module)
            if default != _NO_INIT:
                rows[name] = {"type": _typed(_with_none(spelled, default), limits), "default": default}
    return rows


def _with_none(spelled, default):
    """Add None to a type whose default it is: `max_model_len: int` has it so."""
    return f"{spelled} | None" if default is None and "None" not in spelled.split(" | ") else spelled


def _typed(spelled, limits):
    """Write bounds into a type as type_strings reads them. Of a float, it can't say that a bound is excluded.

    vLLM takes the names of its enumerations, which are all in capitals, in any case.
    """

    def bound(part):
        if part not in ("int", "float"):
            return part
        step = 1 if part == "int" else 0
        low = limits.get("ge", limits["gt"] + step if "gt" in limits else "")
        high = limits.get("le", limits["lt"] - step if "lt" in limits else "")
        return f"{part} {low}..{high}"

    parts = [bound(part) for part in _parts(spelled)] if limits else [spelled]
    names = _choices(spelled)
    is_enumeration = "Literal[" in spelled and any(map(str.isupper, names)) and not any(map(str.islower, names))
    return " | ".join(parts) + (", in any case" if is_enumeration else "")


_NO_INIT = "init=False"


class _Reader:
    """Reads types and defaults, and follows names from module to module."""

    def __init__(self, source):
        self.source = source

    def spell(self, node, module):
        """Return an annotation as data/type_strings.py spells types, with every alias written out."""
        match node:
            case ast.Constant(value=str(text)):
                return self.spell(ast.parse(text, mode="eval").body, module)
            case ast.BinOp(op=ast.BitOr()):
                parts = [self.spell(node.left, module), self.spell(node.right, module)]
                return _union(parts)
            case ast.Name():
                return self.spell_name(node.id, module)
            case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[first, *_])):
                return self.spell(first, module)
            case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
                return _union([self.spell(inner, module), "None"])
            case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=parts)):
                return _union([self.spell(part, module) for part in parts])
            case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
                return f"Literal[{', '.join(self.literals(inner, module))}]"
            case ast.Subscript(value=ast.Name(id=outer), slice=ast.Tuple(elts=parts)):
                return f"{outer}[{', '.join(self.spell(part, module) for part in parts)}]"
            case ast.Subscript(value=ast.Name(id=outer), slice=inner):
                return f"{outer}[{self.spell(inner, module)}]"
        return ast.unparse(node)

    def spell_name(self, name, module):
        place = self.source.find(module, name)
        match place and place.node:
            case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
                return self.spell(value, place.module)
            case ast.ClassDef() as found if _is_enum(found):
                return f"Literal[{', '.join(_members(found) + _numbers(found))}]"
        return name

    def literals(self, node, module):
        """Return the values in Literal[...], which may be aliases of other Literals."""
        parts = node.elts if isinstance(node, ast.Tuple) else [node]
        values = []
        for part in parts:
            if isinstance(part, ast.Constant):
                values.append(str(part.value))
            else:
                values += _choices(self.spell(part, module))
        return list(dict.fromkeys(values))

    def default(self, node, module):
        """Return a field's default, and the bounds that its Field() gives."""
        match node:
            case None:
                return None, {}
            case ast.Attribute(value=ast.Name(id=owner), attr=name):
                return self.attribute(owner, name, module)
            case ast.Call(func=ast.Name(id="get_field"), args=[ast.Name(id=owner), ast.Constant(value=str(name))]):
                return self.attribute(owner, name, module)
            case ast.Call(func=ast.Name(id="Field" | "field"), keywords=keywords, args=positional):
                given = {word.arg: word.value for word in keywords if word.arg}
                if positional:
                    given["default"] = positional[0]
                return self.field_default(given, module), _limits(given)
            case ast.Name():
                place = self.source.find(module, node.id)
                if place is not None and isinstance(place.node, ast.Assign | ast.AnnAssign):
                    return self.default(place.node.value, place.module)
            case ast.BinOp(op=ast.Mult()):
                return self.default(node.left, module)[0] * self.default(node.right, module)[0], {}
        try:
            return ast.literal_eval(node), {}
        except ValueError:
            return ast.unparse(node), {}

    def field_default(self, given, module):
        match given.get("init"):
            case ast.Constant(value=False):
                return _NO_INIT
        match given.get("default_factory"):
            case None:
                return self.default(given.get("default"), module)[0]
            case ast.Name(id=("list" | "dict" | "set") as kind):
                return {} if kind == "dict" else []
            case ast.Lambda(body=value):
                return self.default(value, module)[0]
            case factory:
                return f"{ast.unparse(factory)}()"

    def attribute(self, owner, name, module):
        place = self.source.find(module, owner)
        if place is None or not isinstance(place.node, ast.ClassDef):
            return f"{owner}.{name}", {}
        if _is_enum(place.node):
            return name, {}
        for ancestor in self.source.lineage(place):
            for field in _annotated(ancestor.node):
                if ast.unparse(field.target) == name:
                    default, limits = self.default(field.value, ancestor.module)
                    return (None if default == _NO_INIT else default), limits
        raise MissingSourceError(f"{self.source.path}: {owner} has no field {name}")


def _limits(given):
    found = {}
    for name in ("ge", "gt", "le", "lt"):
        with suppress(KeyError, ValueError):  # not given, or no number
            found[name] = ast.literal_eval(given[name])
    return found


def _union(parts):
    """Join types, each once. In a union with other text, choices choose nothing."""
    names = list(dict.fromkeys(name for part in parts for name in _parts(part)))
    if "str" in names:
        names = [name for name in names if not name.startswith("Literal[")]
    return " | ".join(names)


def _parts(spelled):
    """Split a type at the bars outside of brackets."""
    return re.split(r" \| (?![^\[]*\])", spelled)


def _choices(spelled):
    return [choice for part in re.findall(r"Literal\[([^]]*)\]", spelled) for choice in part.split(", ")]


def _flags(source):
    """Yield the names of each flag of `vllm serve`: those in add_argument, and those made of FrontendArgs' fields."""
    frontend = next(name for name in _FLAGS if source.has(name))
    for module in (_ARGUMENTS, frontend):
        for node in ast.walk(source.module(module)):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                texts = [each.value for each in node.args if isinstance(each, ast.Constant)]
                yield tuple(text for text in texts if isinstance(text, str) and text.startswith("-"))
    for place in source.lineage(source.require(f"{frontend}:FrontendArgs")):
        for field in _annotated(place.node):
            yield (_flag(ast.unparse(field.target)),)


def _short_names(flags):
    """Return each long flag with its short name."""
    pairs = [(long, short) for names in flags for long in names for short in names]
    return sorted({pair for pair in pairs if pair[0].startswith("--") and not pair[1].startswith("--")})


def _flag(name):
    return f"--{name.replace('_', '-')}"


def _environment(source):
    place = source.require("vllm.envs:environment_variables")
    if not isinstance(place.node, ast.AnnAssign) or not isinstance(place.node.value, ast.Dict):
        raise MissingSourceError(f"{source.path}: environment_variables is not an annotated dictionary")
    for key in place.node.value.keys:
        if isinstance(key, ast.Constant) and str(key.value).startswith("VLLM_"):
            yield str(key.value)


def _public_fields(source, reference):
    return [name for name in interface(source, reference) if not name.startswith("_")]


def _parameters(node):
    """Return the names of the parameters without self, in the order of inspect.signature."""
    given = node.args
    rest = [given.vararg] if given.vararg else []
    options = [given.kwarg] if given.kwarg else []
    names = [each.arg for each in [*given.posonlyargs, *given.args, *rest, *given.kwonlyargs, *options]]
    return [name for name in names if name not in ("self", "cls")]


def _attributes(node):
    """Return what a class assigns to self, and its properties."""
    attributes = [each for each in ast.walk(node) if isinstance(each, ast.Attribute)]
    stored = {each.attr for each in attributes if isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self"}
    functions = [each for each in _body(node) if isinstance(each, ast.FunctionDef)]
    properties = {each.name for each in functions if "property" in map(ast.unparse, each.decorator_list)}
    return {name for name in stored | properties if not name.startswith("_")}


def _annotated(node):
    return (each for each in _body(node) if isinstance(each, ast.AnnAssign))


def _body(node):
    return node.body if isinstance(node, ast.ClassDef) else ()


def _is_enum(node):
    return any("Enum" in ast.unparse(base) for base in node.bases)


def _numbers(node):
    """Return the values of an enumeration of whole numbers, which may be given instead of its names."""
    values = [each.value for each in node.body if isinstance(each, ast.Assign)]
    return [str(each.value) for each in values if isinstance(each, ast.Constant) and isinstance(each.value, int)]


def _members(node):
    return [each.targets[0].id for each in node.body if isinstance(each, ast.Assign)]


def _statements(module):
    """Yield the module's statements, and those below `if TYPE_CHECKING:`."""
    for node in module.body:
        yield node
        if isinstance(node, ast.If):
            yield from node.body


def _defines(node, name):
    match node:
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            return node.name == name
        case ast.Assign(targets=[ast.Name(id=found)]) | ast.AnnAssign(target=ast.Name(id=found), value=ast.expr()):
            return found == name
    return False


def written(source):
    """Return the text of a record down to what is written by hand."""
    found = record(source)
    lines = [
        f"# vLLM {found['vllm']}, as the generator, the backend and the tests read it. Made from the wheel's source by",
        "# tests/support/vllm_records.py, down to the line that says otherwise.",
        "",
    ]
    for name, value in found.items():
        lines += [f"{name}: {_inline(value)}"] if isinstance(value, str) else _block(name, value)
    return "\n".join(lines) + "\n"


def _block(name, value):
    if isinstance(value, list):
        return ["", f"{name}:", *_wrapped(value)]
    lines = ["", f"{name}:"]
    for key, row in value.items():
        if name == "sections":
            lines += [f"  {key}:", *(f"    {below}: {_inline(entry)}" for below, entry in row.items())]
        else:
            lines.append(f"  {_inline(key)}: {_inline(row)}")
    return lines


def _inline(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_inline(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    if isinstance(value, str) and re.fullmatch(r"[a-z][a-z_0-9]*", value) and value not in _YAML_WORDS:
        return value
    return json.dumps(value)


_YAML_WORDS = ("true", "false", "null", "yes", "no", "on", "off")


def _wrapped(names):
    """Return a list of names as YAML, in lines of at most 120 columns."""
    text = ", ".join(map(_inline, names)) + "]"
    return textwrap.wrap(text, 120, initial_indent="  [", subsequent_indent="   ", break_on_hyphens=False)


def by_hand(path):
    """Return the part of a record that is written by hand, its first line included."""
    text = path.read_text("utf-8") if path.exists() else ""
    return "".join(text.partition(_BY_HAND)[1:])


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a wheel of vLLM, or the folder of an installed one")
    parser.add_argument("--write", action="store_true", help="write the record instead of printing it")
    given = parser.parse_args(argv)
    try:
        source = VllmSource(given.source)
        path = RECORDS / f"vllm-{source.version}.yaml"
        text = written(source) + "\n" + (by_hand(path) or f"{_BY_HAND}containers: []\nlimits: {{}}\n")
    except (OSError, zipfile.BadZipFile, MissingSourceError) as error:
        parser.error(str(error))
    if given.write:
        path.write_text(text, "utf-8")
        print(f"wrote {path}")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
