"""The records of vLLM versions: what they say, and that the wheels' own source says so too."""

import importlib.util
import os
from pathlib import Path

import pytest

from deepseek_triton_build.build_errors import UnknownNameError
from deepseek_triton_build.data import type_strings
from deepseek_triton_build.data.vllm import (
    DEFAULT_VLLM,
    VLLM_VERSIONS,
    load_vllm,
    nearest_vllm,
    vllm_containers,
    vllm_for_container,
)
from deepseek_triton_build.text import parse_yaml
from support.vllm_records import (
    INTERFACES,
    RECORDS,
    MissingSourceError,
    VllmSource,
    by_hand,
    interface,
    record,
    written,
)

SOURCES = "VLLM_SOURCES"
"""Environment variable: folders or wheels of vLLM, separated as in PATH. Each is compared with its record."""


def _sources():
    given = [Path(path) for path in os.environ.get(SOURCES, "").split(os.pathsep) if path]
    installed = importlib.util.find_spec("vllm")
    return given if installed is None or installed.origin is None else [*given, Path(installed.origin).parent]


@pytest.mark.skipif(not _sources(), reason=f"no vLLM is installed, and {SOURCES} names no wheel of it")
@pytest.mark.parametrize("path", _sources(), ids=str)
def test_a_record_is_what_the_source_says(path):
    source = VllmSource(path)
    committed = RECORDS / f"{source.version}.yaml"
    assert committed.exists(), f"vLLM {source.version} has no record: python -m support.vllm_records {path} --write"
    if path.is_file():
        assert f"{written(source)}\n{by_hand(committed)}" == committed.read_text("utf-8")
    else:
        recorded = parse_yaml(committed.read_text("utf-8"))
        assert {name: recorded[name] for name in record(source)} == record(source)


@pytest.mark.parametrize("version", VLLM_VERSIONS)
def test_a_record_is_whole(version):
    loaded = load_vllm(version)
    raw = parse_yaml(loaded.text)
    assert loaded.version == raw["vllm"] == version
    assert version in raw["wheel"]
    assert len(raw["wheel_sha256"]) == 64
    assert set(raw["interfaces"]) == set(INTERFACES)
    assert {"model", "tensor_parallel_size", "enable_log_requests"} <= loaded.arguments.keys()
    assert loaded.arguments["max_model_len"].type == "int -1.. | None"
    assert loaded.arguments["max_num_seqs"].type == "int 1.. | None"
    assert "flashinfer_trtllm" in loaded.arguments["moe_backend"].choices
    assert "CUTLASS_MLA" in loaded.arguments["attention_backend"].choices
    assert type_strings.fits("cutlass_mla", loaded.arguments["attention_backend"].type)
    assert loaded.sections["speculative_config"]["num_speculative_tokens"].type == "int 1.. | None"
    assert "VLLM_USE_DEEP_GEMM" in loaded.environment
    assert not loaded.environment & loaded.replaced_environment.keys()
    assert set(loaded.containers) == {tag for tag, has in vllm_containers().items() if has == version}
    assert {"engine_core", "input_processor", "output_handler"} <= set(next(iter(raw["attributes"].values())))
    assert set(loaded.limits) - {"priority"} <= {*loaded.sampling_params, *loaded.arguments}
    assert set(loaded.limits["speculative_config"]["refuses"]) <= set(loaded.sampling_params)


@pytest.mark.parametrize("version", VLLM_VERSIONS)
def test_every_default_fits_its_type(version):
    arguments = load_vllm(version).arguments.values()
    objects = [row for row in arguments if str(row.default).endswith("()")]
    assert [row.name for row in arguments if row not in objects and not type_strings.fits(row.default, row.type)] == []


@pytest.mark.parametrize("version", VLLM_VERSIONS)
@pytest.mark.parametrize("kind", ["replaced_environment", "moved_arguments"])
def test_every_replacement_is_an_argument_of_the_version(version, kind):
    loaded = load_vllm(version)
    rows = getattr(loaded, kind)
    assert rows
    for name, row in rows.items():
        known = row.by and loaded.find(row.by)
        assert known if row.by else row.why, name
        wrong = [value for value in (row.values or {}).values() if not type_strings.fits(value, known.type)]
        assert wrong == [], name


def test_a_replacement_translates_the_value():
    moved = load_vllm("0.24.0").moved_arguments
    assert moved["disable_log_requests"].new_value(True) is False
    assert moved["max_batch_size"].new_value(64) == 64
    assert moved["moe_expert_parallel_size"].new_value(8) is True
    assert moved["worker_use_ray"].new_value("maybe") is None


def test_an_unknown_version_is_told_its_container_and_the_nearest():
    with pytest.raises(UnknownNameError, match=r"Triton's container 26\.06 has it; the nearest known is 0\.24\.0"):
        load_vllm("0.22.1")
    with pytest.raises(UnknownNameError, match=r"'0\.25\.0': known so far: 0\.24\.0, 0\.25\.1, 0\.33\.0"):
        load_vllm("0.25.0")


@pytest.mark.parametrize(
    ("version", "nearest"),
    [("0.22.1", "0.24.0"), ("0.25.0", "0.25.1"), ("0.40.0", "0.33.0"), ("0.30.0rc1", DEFAULT_VLLM)],
)
def test_nearest_version(version, nearest):
    assert nearest_vllm(version) == nearest


@pytest.mark.parametrize("tag", ["26.07", "26.07-vllm-python-py3", "nvcr.io/nvidia/tritonserver:26.07-vllm-python-py3"])
def test_a_container_names_its_version(tag):
    assert vllm_for_container(tag) is load_vllm("0.24.0")


def test_an_unknown_container_is_refused():
    with pytest.raises(UnknownNameError, match=r"unknown Triton container '27\.01'"):
        vllm_for_container("27.01")
    with pytest.raises(UnknownNameError, match=r"unknown vLLM version '0\.22\.1'"):
        vllm_for_container("26.06")


_TREE = {
    "_version.py": "__version__ = version = '9.1.0'\n",
    "engine/arg_utils.py": """
from typing import TYPE_CHECKING, Literal
from vllm.config import ModelConfig
from vllm.config.model import Mode, Level
from .registry import Backend

if TYPE_CHECKING:
    from vllm.config.model import Loads

Word = Literal["a", "b"]
SIZE = 4

@dataclass
class EngineArgs:
    model: str = ModelConfig.model
    length: int = ModelConfig.length
    share: float = get_field(ModelConfig, "share")
    word: Word | None = None
    mode: Mode = ModelConfig.mode
    open: str | Mode = "slow"
    loads: "Loads" = "lazy"
    level: Level = Level.O1
    backend: Backend | None = None
    many: list[str] = ModelConfig.many
    size: int = SIZE * 2 * 1024
    attention_config: AttentionConfig = get_field(ModelConfig, "attention_config")
    speculative_config: dict | None = None
    compilation_config: dict | None = None
    structured_outputs_config: dict | None = None
    eplb_config: dict | None = None
    kernel_config: dict | None = None
    hidden: ClassVar[int] = 1
    _private: int = 1

    def add_cli_args(parser):
        parser.add_argument("--model", "-m")

@dataclass
class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False
""",
    "engine/registry.py": "class Backend(Enum):\n    FAST = 'x'\n    SLOW = ''\n",
    "engine/__init__.py": "",
    "config/__init__.py": "from vllm.config.model import ModelConfig\n",
    "config/model.py": """
Mode = Literal["quick", Word]
Word = Literal["slow"]
Loads = Literal["lazy", "eager"]

class Level(IntEnum):
    O0 = 0
    O1 = 1

class Base:
    model: str = "some/model"

class ModelConfig(Base):
    length: int = Field(default=None, ge=-1)
    share: float = Field(default=0.9, gt=0, le=1)
    mode: Mode = "quick"
    many: list[str] = Field(default_factory=lambda: ["x"])
    attention_config: AttentionConfig = field(default_factory=AttentionConfig)
""",
    "entrypoints/openai/cli_args.py": """
class BaseFrontendArgs:
    chat_template: str | None = None

class FrontendArgs(BaseFrontendArgs):
    port: int = 8000

def make_arg_parser(parser):
    parser.add_argument("model_tag")
    parser.add_argument("--headless", help="--not-a-flag")
""",
    "envs.py": "environment_variables: dict = {'VLLM_B': 1, 'VLLM_A': 2, 'LD_LIBRARY_PATH': 3}\n",
    "sampling_params.py": """
class SamplingParams(msgspec.Struct):
    n: int = 1
    _eos: int = 0
    seed: int | None = None

class StructuredOutputsParams:
    json: str | None = None

class RequestOutputKind(Enum):
    DELTA = 1
""",
}
_SECTIONS = {
    "attention": "AttentionConfig",
    "compilation": "CompilationConfig",
    "parallel": "EPLBConfig",
    "kernel": "KernelConfig",
    "speculative": "SpeculativeConfig",
    "structured_outputs": "StructuredOutputsConfig",
}


@pytest.fixture
def tree(tmp_path):
    files = {**_TREE}
    for module, name in _SECTIONS.items():
        rows = [
            "target: SkipValidation[int] = None",
            "made: int = field(init=False)",
            "depth: int = Field(1, ge=0, lt=9)",
        ]
        files[f"config/{module}.py"] = f"class {name}:\n    " + "\n    ".join(rows)
    methods = {}
    for reference in INTERFACES:
        module, _, path = reference.partition(":")
        name, _, method = path.partition(".")
        methods.setdefault(module, {}).setdefault(name, []).extend([method] if method else [])
    for module, classes in methods.items():
        file = f"{module.removeprefix('vllm').removeprefix('.').replace('.', '/')}"
        file = file + "/__init__.py" if file == "v1/engine" else f"{file}.py"
        for name, names in classes.items():
            body = [f"    def {each}(self, first, *, second=1): ..." for each in names]
            files.setdefault(file, "")
            if f"class {name}:" not in files[file]:
                files[file] += f"class {name}:\n    field: int = 0\n" + "\n".join(body) + "\n"
    for name, text in files.items():
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return VllmSource(tmp_path / "vllm")


def test_arguments_are_read_through_the_configuration_classes(tree):
    expected = {
        "model": ("str", "some/model"),
        "length": ("int -1.. | None", None),
        "share": ("float 0..1", 0.9),
        "word": ("Literal[a, b] | None", None),
        "mode": ("Literal[quick, slow]", "quick"),
        "open": ("str", "slow"),
        "loads": ("Literal[lazy, eager]", "lazy"),
        "level": ("Literal[O0, O1, 0, 1], in any case", "O1"),
        "backend": ("Literal[FAST, SLOW] | None, in any case", None),
        "many": ("list[str]", ["x"]),
        "size": ("int", 8192),
        "attention_config": ("AttentionConfig", "AttentionConfig()"),
        "speculative_config": ("SpeculativeConfig | None", None),
        "enable_log_requests": ("bool", False),
    }
    found = record(tree)
    rows = {name: (row["type"], row["default"]) for name, row in found["arguments"].items() if name in expected}
    assert rows == expected
    assert not {"hidden", "_private"} & found["arguments"].keys()
    assert found["sections"]["kernel_config"] == {"depth": {"type": "int 0..8", "default": 1}}
    assert found["serve_flags"] == ["--chat-template", "--headless", "--port"]
    assert found["short_flags"] == {"-m": "model"}
    assert found["environment"] == ["VLLM_A", "VLLM_B"]
    assert found["sampling_params"] == ["n", "seed"]
    assert found["vllm"] == "9.1.0"
    assert found["interfaces"]["vllm.v1.engine.async_llm:AsyncLLM.generate"] == ["first", "second"]


def test_a_record_that_is_written_reads_as_the_same(tree):
    found = record(tree)
    assert parse_yaml(written(tree)) == found
    assert max(map(len, written(tree).splitlines())) < 200


def test_interfaces_are_read_as_they_are_called(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "core.py").write_text(
        """
from vllm.base import Base as Parent
class Core(Parent):
    def __init__(self, size, *rest, deep=1, **more):
        self.size = size
class Kind(Enum):
    ONE = 1
class Small:
    first: int
    both: int = 0
class Large(Small):
    both: int = 1
    _last: int = 2
class Child(Core):
    @classmethod
    async def make(cls, path, /, kind=None): ...
""",
        "utf-8",
    )
    (tmp_path / "vllm" / "base.py").write_text("class Base:\n    def stop(self, timeout=None): ...\n", "utf-8")
    source = VllmSource(tmp_path)
    assert interface(source, "vllm.core:Core") == ["size", "rest", "deep", "more"]
    assert interface(source, "vllm.core:Kind") == ["ONE"]
    assert interface(source, "vllm.core:Large") == ["first", "both", "_last"]
    assert interface(source, "vllm.core:Child.make") == ["path", "kind"]
    assert interface(source, "vllm.core:Child.stop") == ["timeout"]
    with pytest.raises(MissingSourceError, match=r"no Nothing in vllm\.core"):
        interface(source, "vllm.core:Nothing")
    with pytest.raises(MissingSourceError, match=r"no gone in vllm\.core"):
        interface(source, "vllm.core:Child.gone")
