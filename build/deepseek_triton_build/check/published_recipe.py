"""A file of somebody else's as the start of a plan: an engine configuration of TensorRT-LLM, or a `vllm serve` command.

The readers are those of the check, so that nothing of the file is run. What they don't take is left out, with a line.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepseek_triton_build.build_errors import RefusedPlanError
from deepseek_triton_build.check.codes import MOVED_KEY
from deepseek_triton_build.check.documents import read_written_yaml
from deepseek_triton_build.check.flags import read_vllm_flags
from deepseek_triton_build.check.schema import check_schema
from deepseek_triton_build.check.script_lines import mended_lines
from deepseek_triton_build.check.scripts import VLLM, Program, ShellScript
from deepseek_triton_build.data import spelling
from deepseek_triton_build.data.finding import Finding
from deepseek_triton_build.data.releases import load_release
from deepseek_triton_build.data.vllm import load_vllm
from deepseek_triton_build.text import printable_line, yaml_flow

# A place in TensorRT-LLM's database, whose index says the same (examples/configs/database/lookup.yaml@97408a34).
_DATABASE = re.compile(
    r"(?:database/(?P<variant>[^/]+/[^/]+)/(?P<gpu>[^/_]+)[^/]*/)?"
    r"(?P<isl>\d{1,4})k(?P<osl>\d{1,4})k_tp(?P<gpus>\d{1,4})_conc(?P<concurrency>\d{1,6})\.ya?ml$"
)
_FENCE = re.compile(r"\s*(```+|~~~+)\s*(\w*)")
_SHELLS = ("", "bash", "sh", "shell", "console")
_DRAFTS, _DRAFTS_ANEW = "speculative_config.num_nextn_predict_layers", "speculative_config.max_draft_len"
_NO_CODE = "DeepSeek needs no Python files of the checkpoint"
# Arguments of one of several nodes.
_OF_A_NODE = ("nnodes", "node_rank", "master_addr", "master_port", "headless")


@dataclass(kw_only=True)
class PublishedRecipe:
    """A file's part that a plan can take."""

    name: str
    """The file's, as reasons and notes call it."""
    engine: str
    options: dict[str, Any] = field(default_factory=dict)
    """Option of `plan`, without its dashes -> value; None where the file says nothing."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The engine's arguments, by dotted paths, as --set takes them."""
    notes: list[str] = field(default_factory=list)
    """Lines about each thing that is not taken as it stands."""

    def leave_out(self, said: str) -> None:
        self.notes.append(f"{self.name}: {said}; left out")

    def drop(self, key: str, why: str) -> None:
        if key in self.settings:
            self.leave_out(f"{key}: {yaml_flow(self.settings.pop(key))}: {why}")


def read_recipe(text: str, place: str, version_of: Callable[[str], str]) -> PublishedRecipe:
    """Return what the file at `place`, a path or an address, says.

    :param place: `#L40` at its end names the command that has this line.
    :param version_of: engine -> the version that the plan is for.
    :raises RefusedPlanError: when the file is none of these, or has several commands.
    """
    place, _, fragment = place.partition("#")
    place = place.partition("?")[0] if "://" in place else Path(place).absolute().as_posix()
    found = _DATABASE.search(place)
    name = printable_line(found[0].removeprefix("database/") if found else place.rpartition("/")[2])
    blocks = list(_shell_blocks(text))
    if place.endswith((".yaml", ".yml")) and not any(VLLM in block for block in blocks):
        in_name = {} if found is None else found.groupdict()
        return _of_configuration(text, name, in_name, version_of("tensorrt_llm"))
    return _of_command(*_chosen(blocks, name, fragment), version_of("vllm"))


def _of_configuration(text: str, name: str, in_name: dict[str, Any], version: str) -> PublishedRecipe:
    document, findings = read_written_yaml(text, name, 1)
    if document is None:
        raise RefusedPlanError(f"{name}: {findings[0].message}", fix=findings[0].fix)
    arguments = check_schema(document, load_release(version))
    recipe = PublishedRecipe(name=name, engine="tensorrt_llm")
    for finding in (*findings, *arguments.findings):
        ending = "taken as that" if finding.code == MOVED_KEY.code else f"{finding.fix}; left out"
        recipe.notes.append(f"{name}:{finding.line}: {finding.message}; {ending}")
    moved = tuple(f"{finding.key}." for finding in arguments.findings if finding.code == MOVED_KEY.code)
    meant = {key: value for key, value in arguments.meant.items() if f"{arguments.places[key]}.".startswith(moved)}
    settings = recipe.settings = meant | spelling.canonical(arguments.settings, version)
    if not settings:
        raise RefusedPlanError(f"{name}: expected LLM arguments, found none that TensorRT-LLM {version} has")
    ranks, stages = settings.pop("tensor_parallel_size", None), settings.pop("pipeline_parallel_size", 1)
    if settings.get("backend", "pytorch") != "pytorch":
        recipe.drop("backend", "DeepSeek runs on pytorch only")
    settings.pop("backend", None)
    if _DRAFTS_ANEW in settings and settings.get("speculative_config.decoding_type") == "MTP":
        settings.setdefault(_DRAFTS, settings.pop(_DRAFTS_ANEW))  # no release here counts the newer key (rule D003)
    numbers = {key: int(value) for key, value in in_name.items() if key not in ("variant", "gpu")}
    if ranks is not None and numbers.get("gpus", ranks) != ranks:
        recipe.notes.append(f"{name}: tensor_parallel_size: {ranks}: the file's name says {numbers['gpus']}; taken")
    recipe.options = {
        "variant": settings.pop("model", in_name.get("variant")),
        "gpu": in_name.get("gpu"),
        "gpus": numbers.get("gpus") if ranks is None else ranks * stages,
        "pp": stages,
        **{key: 1024 * numbers[key] for key in ("isl", "osl") if key in numbers},
        "concurrency": numbers.get("concurrency"),
        "mtp": settings.get(_DRAFTS, 0),
    }
    recipe.drop("trust_remote_code", _NO_CODE)
    for key in [key for key, value in settings.items() if value == {}]:
        recipe.drop(key, "nothing is in it")
    recipe.settings = spelling.spell(settings, version)
    return recipe


def _shell_blocks(text: str) -> Iterator[str]:
    """Yield the shell code of a Markdown page, each below empty lines for those before it; a script as it is."""
    fence = language = ""
    start, lines, is_page = 0, text.splitlines(keepends=True), False
    for number, line in enumerate(lines):
        found = _FENCE.match(line)
        if found is not None and not fence:
            (fence, language), start, is_page = found.groups(), number + 1, True
        elif fence and line.strip() == fence:
            if language in _SHELLS:
                yield "\n" * start + "".join(lines[start:number])
            fence = ""
    if not is_page:
        yield text


def _chosen(blocks: Iterable[str], name: str, fragment: str) -> tuple[ShellScript, Program, list[Finding]]:
    """Return the command of `vllm serve` that is meant, with its script and what is wrong with its lines."""
    scripts = [
        (ShellScript(file=name, text=mended), found) for mended, found in (mended_lines(b, name) for b in blocks)
    ]
    known: dict[str, tuple[ShellScript, Program, list[Finding]]] = {}
    for script, found in scripts:
        for program in script.programs:
            if program.name == VLLM and program.is_engine and re.search(r"\w", program.model or "model"):
                # A page may have one command twice, for two kinds of machine.
                known.setdefault(" ".join(word.text for word in program.words), (script, program, found))
    named = re.match(r"L(\d{1,9})", fragment)
    line = int(named[1]) if named else 0
    chosen = [one for one in known.values() if not fragment or one[1].line <= line <= one[1].words[-1].line]
    if len(chosen) == 1:
        return chosen[0]
    which = "; ".join(f"{name}#L{program.line} ({words})" for words, (_, program, _) in known.items())
    said = f"expected LLM arguments in YAML or one command of vllm serve, found {which or 'none'}"
    raise RefusedPlanError(printable_line(f"{name}: {said}"), fix="name one of these lines" if known else "")


def _of_command(script: ShellScript, program: Program, findings: list[Finding], version: str) -> PublishedRecipe:
    recipe, vllm = PublishedRecipe(name=script.file, engine="vllm"), load_vllm(version)
    flags = read_vllm_flags(script, program, vllm)
    problems = [*findings, *flags.findings]
    recipe.notes += [f"{script.file}:{each.line}: {each.message}; {each.fix}; left out" for each in problems]
    told = {flag for _, flag in flags.places.values()} | {each.message.partition(" ")[0] for each in problems}
    if others := dict.fromkeys(flag.name for flag in program.flags if flag.name not in told):
        recipe.leave_out(f"flags of vLLM's own server: {', '.join(others)}")
    for words in flags.unseen:
        recipe.leave_out(f"{words}: the file does not say its value")
    if script.variables:
        recipe.leave_out(f"variables: {', '.join(script.variables)}: a plan has its own")
    settings = recipe.settings = dict(flags.settings)
    ranks, replicas, stages = (settings.pop(f"{kind}_parallel_size", None) for kind in ("tensor", "data", "pipeline"))
    if (ranks or 1) > 1 and (replicas or 1) > 1:
        recipe.notes.append(f"{script.file}: -tp {ranks} within -dp {replicas}: a plan has one; --parallel dp is taken")
    for key in _OF_A_NODE:
        recipe.drop(key, "each node's own, which the plan writes")
    recipe.drop("trust_remote_code", _NO_CODE)
    is_mtp = settings.get("speculative_config.method") in ("mtp", "deepseek_mtp")
    recipe.options = {
        "variant": settings.pop("model", program.model),
        "gpus": math.prod(size or 1 for size in (ranks, replicas, stages)) if ranks or replicas else None,
        "pp": stages,
        "parallel": "dp" if (replicas or 1) > 1 else ranks and "tp",
        "mtp": settings.get("speculative_config.num_speculative_tokens") if is_mtp else None,
    }
    return recipe
