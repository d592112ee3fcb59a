"""The codes of findings that no rule makes, the report of a check, and the meaning of each code.

Everywhere in this package `file` and `label` are the names by which findings call a file and a folder.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from deepseek_triton_build.build_errors import UnknownNameError
from deepseek_triton_build.rules import PAIR_RULES, RULES, VLLM_RULES
from deepseek_triton_build.rules.finding import Code, Finding


@dataclass(frozen=True, kw_only=True)
class CheckedModel:
    """One model that was checked, as far as it is known."""

    file: str
    """Path of its model.yaml, relative to what was checked."""
    model: str | None
    """The checkpoint's folder or name, as model.yaml gives it."""
    backend: str
    """`deepseek-triton`, `upstream` (any other model.py), or `none` for a YAML file by itself."""
    engine: str
    release: str
    release_from: str
    """Where the release is known from, for people."""
    variant: str | None
    precision: str | None
    gpu: str | None
    num_gpus: int | None
    """GPUs of one instance."""
    unchecked: tuple[str, ...] = ()
    """Clauses about what could not be checked, and how it can be."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that `check` found."""

    findings: tuple[Finding, ...]
    """All findings, sorted by file, line and code."""
    models: tuple[CheckedModel, ...]

    @property
    def unchecked(self) -> tuple[str, ...]:
        """The clauses of all models, each once."""
        return tuple(dict.fromkeys(clause for model in self.models for clause in model.unchecked))

    @property
    def has_errors(self) -> bool:
        return any(finding.severity == "error" for finding in self.findings)

    def findings_json(self) -> list[dict[str, Any]]:
        """Return the findings as json.dumps takes them."""
        return [asdict(finding) for finding in self.findings]


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings sorted by file, line and code, without duplicates."""
    return tuple(sorted(set(findings), key=lambda f: (f.file, f.line or 0, f.code, f.key or "", f.message)))


_error, _warning, _note = (partial(Code, severity=severity) for severity in ("error", "warning", "note"))

UNREADABLE = _error("S001")
BROKEN = _error("S002")
NOT_A_MAPPING = _error("S003")
DUPLICATE_KEY = _error("S004")
CHANGED = _note("S005")
MISSING_FILE = _error("S008")
CHANGED_PROGRAM = _warning("S009")
BROKEN_SCRIPT = _error("S010")
BAD_RECORD = _warning("S006")
RELEASE_ASSUMED = _note("S007")

WRONG_KEY = _error("S011")
UNKNOWN_KEY = _warning("S012")
MOVED_KEY = _error("S013")
WRONG_TYPE = _error("S014")
WRONG_CHOICE = _error("S015")
OUT_OF_RANGE = _error("S016")
WRONG_NULL = _error("S017")
NOT_A_SECTION = _error("S018")
NOT_LOOKED_INTO = _note("S019")
MODEL_MISSING = _error("S020")
IGNORED_KEY = _warning("S021")

WRONG_FLAG = _error("S022")
UNUSED_FLAG = _warning("S023")
UNUSED_ARGUMENTS = _error("S024")
MISSPELLED_VARIABLE = _warning("S025")
WRONG_VARIABLE = _warning("S026")
OBSOLETE_VARIABLE = _warning("S028")
OTHER_RECORD = _error("S029")
REFUSED_BY_ENGINE = _error("S027")

WRONG_SETTING = _error("T001")
WRONG_SETTING_VALUE = _error("T002")

NO_PROTOBUF = _note("C001")
NO_CONFIG = _error("C002")
BROKEN_CONFIG = _error("C003")
WRONG_NAME = _error("C004")
WRONG_BACKEND = _error("C005")
POLICY_DIFFERS = _error("C006")
POLICY_ONLY_COMPLETED = _warning("C007")
WRONG_VLLM_BACKEND = _error("C010")
MISSING_TENSOR = _error("C008")
EXTRA_TENSOR = _warning("C009")

NO_GPUS = _error("T011")
GPUS_SHARED = _error("T012")
TOO_FEW_GPUS = _error("T013")
IDLE_GPUS = _warning("T014")
WRONG_KIND = _warning("T015")
WEIGHTS_TOO_LARGE = _error("T016")
NO_ROOM_FOR_CACHE = _warning("T017")

MODEL_NOT_HERE = _warning("W001")
MODEL_GONE = _error("W002")
MODEL_ON_HUB = _note("W003")
WRONG_ARCHITECTURE = _error("W004")
UNKNOWN_ARCHITECTURE = _warning("W005")
WRONG_PRECISION = _error("W006")
NO_WEIGHTS = _error("W007")
MISSING_SHARD = _error("W008")
BROKEN_SHARD = _error("W009")
WRONG_LENGTH = _error("W010")
MISSING_TENSORS = _error("W011")
STRAY_SHARD = _warning("W012")
UNLISTED_TENSORS = _warning("W013")

NO_TOKENIZER = _error("W014")
WRONG_TOKENIZER = _error("W015")
WRONG_SHAPE = _error("W016")
NO_MTP_LAYER = _error("W017")
WRONG_QUANT_CONFIG = _error("W018")
OTHER_FOLDER = _warning("W019")
CHANGED_CHECKPOINT = _error("W020")
CUT_CHECKPOINT = _warning("W021")

CHECKS = tuple(sorted((value for value in globals().values() if isinstance(value, Code)), key=lambda c: c.code))
"""All codes of this file, sorted."""


_INTRODUCTION = """\
# Rules

This page lists what `deepseek-triton build` refuses or warns about, and what `deepseek-triton check` finds. `check
--explain CODE` prints one of them.

An **error** is something that can't work, or that is known to crash, to hang or to be refused by the engine. If there
is an error, nothing is built, and `check` ends with exit code 1. A **warning** is something that is known to go wrong
in some circumstances, or that has no effect. A **note** is worth knowing. A rule is skipped when it needs a fact that
is not known (the GPU, the release, the checkpoint). A key that the release is known not to have is an error, or a
warning where the release ignores it. A key that this project has no record of is a warning.

Each title says what must be true. Issues and pull requests are those of
[NVIDIA/TensorRT-LLM](https://github.com/NVIDIA/TensorRT-LLM). "Releases" names the TensorRT-LLM releases (vLLM
versions, of the rules X) that the rule applies to, as far as the sources say: "before 1.1" says that 1.1 has the fix
or the feature, not that every older release was tried.
"""

_TOPICS = {
    "H": "Hardware, weights and releases",
    "P": "Parallelism",
    "A": "Attention and prefill",
    "M": "Mixture of experts",
    "K": "KV cache",
    "D": "Speculative decoding and sampling",
    "L": "Limits and sizes",
    "G": "Context and generation servers",
    "V": "V3.2",
    "X": "vLLM",
    "E": "Environment and engine",
    "S": "Files, keys and values",
    "T": "triton_config, instances and GPUs",
    "C": "config.pbtxt",
    "W": "The checkpoint",
}
"""First letter of a code -> the title of its section, in the page's order."""


def find_code(code: str) -> Code:
    """Return the rule or finding of that code in any case, or raise UnknownNameError."""
    entries = {entry.code: entry for entry in _entries()}
    if code.upper() not in entries:
        raise UnknownNameError("code", code, entries)
    return entries[code.upper()]


def rules_page() -> str:
    """Return the rules and the other findings of `check` as a page for people, in Markdown."""
    parts = [_INTRODUCTION]
    for letter, title in _TOPICS.items():
        parts += [f"## {title}", ""]
        for entry in _entries():
            if entry.code[0] == letter:
                facts = f"*{entry.severity.capitalize()}; releases: {entry.releases}.*"
                heading = f'### <a id="{entry.code.lower()}"></a>{entry.code} {entry.title}'
                parts.append(f"{heading}\n\n{facts} {entry.why}\n\nSource: {entry.source}\n")
    return "\n".join(parts)


def _entries() -> list[Code]:
    return [*RULES, *PAIR_RULES, *VLLM_RULES, *CHECKS]
