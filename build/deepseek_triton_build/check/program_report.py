"""All checks of LLM arguments outside a model repository: a YAML file, the flags of the script beside it, or both."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deepseek_triton_build.check.checkpoint_facts import CheckpointFacts
from deepseek_triton_build.check.checkpoint_report import check_checkpoint, mtp_problems
from deepseek_triton_build.check.codes import UNUSED_ARGUMENTS, WEIGHTS_TOO_LARGE
from deepseek_triton_build.check.documents import Document, read_yaml
from deepseek_triton_build.check.engine_arguments import engine_problems
from deepseek_triton_build.check.finding import CheckCode, CheckedModel, Finding
from deepseek_triton_build.check.flags import YAML_FLAGS, GivenFlags, flag_keys, read_flags, unused_flags
from deepseek_triton_build.check.generated_origin import (
    Stamp,
    changed_files,
    read_recorded,
    read_stamp,
)
from deepseek_triton_build.check.instance_gpus import count_problem
from deepseek_triton_build.check.memory_fit import memory_problems
from deepseek_triton_build.check.model_identity import (
    UNKNOWN,
    CheckOptions,
    Identity,
    find_checkpoint_folder,
    find_release,
    identify,
    unchecked_facts,
)
from deepseek_triton_build.check.rule_findings import (
    Checked,
    Place,
    PlacedDeployment,
    canonical_settings,
    check_deployment,
    make_deployment,
    place_in,
    with_balancer_file,
)
from deepseek_triton_build.check.schema import (
    MODEL_YAML,
    TRITON_SECTION,
    UPSTREAM_KEYS,
    CheckedArguments,
    check_schema,
)
from deepseek_triton_build.check.scripts import (
    PROGRAM_SCRIPTS,
    QUICKSTART,
    VLLM,
    VLLM_BENCH,
    Program,
    ShellScript,
    read_script,
)
from deepseek_triton_build.check.triton_config import triton_settings
from deepseek_triton_build.check.variables import variable_problems
from deepseek_triton_build.check.vllm_serve_report import check_vllm_serve
from deepseek_triton_build.data.releases import Release
from deepseek_triton_build.render.stamp import RELEASE_RECORD
from deepseek_triton_build.render.trtllm_commands import YAML_NAME
from deepseek_triton_build.rules.rule import Deployment, Violation
from deepseek_triton_build.text import first_names

_PROGRAM: Mapping[str, Any] = {"backend": "pytorch"}
"""The arguments that TensorRT-LLM's programs have by themselves."""


def is_program_folder(folder: Path) -> bool:
    """Whether `folder` holds what TensorRT-LLM's own programs are started with."""
    return any(os.path.isfile(folder / name) for name in (YAML_NAME, *PROGRAM_SCRIPTS))


def check_programs(path: Path, options: CheckOptions) -> list[Checked]:
    """Check a folder of one of TensorRT-LLM's programs, or a YAML file of LLM arguments with the scripts beside it."""
    folder = path if os.path.isdir(path) else path.parent
    yaml = folder / YAML_NAME if path == folder else path
    present = [] if yaml.name == MODEL_YAML else [name for name in PROGRAM_SCRIPTS if os.path.isfile(folder / name)]
    read = {name: read_script(folder / name, name) for name in present}
    if path != folder:  # only the scripts that pass the file say something about it
        read = {name: one for name, one in read.items() if one[0] is not None and _passed_yaml(one[0]) == yaml.name}
    starting = {name: one for name, one in read.items() if one[0] is None or not _is_only_a_load(one[0])}
    if read and not starting:
        return []
    checked = [_check_script(folder, yaml, name, script, options, found) for name, (script, found) in starting.items()]
    return checked or [_ProgramCheck(folder=folder, yaml=yaml, options=options).check()]


def _is_only_a_load(script: ShellScript) -> bool:
    """Whether the script measures a server of vLLM that another one starts, and so gives no engine arguments."""
    return script.program is not None and script.program.name == VLLM_BENCH


def _check_script(
    folder: Path, yaml: Path, name: str, script: ShellScript | None, options: CheckOptions, found: list[Finding]
) -> Checked:
    program = None if script is None else script.program
    if script is not None and program is not None and program.name == VLLM:
        return check_vllm_serve(folder, script, program, options, found)
    check = _ProgramCheck(folder=folder, yaml=yaml, script_name=name, script=script, options=options, findings=found)
    return check.check()


@dataclass(frozen=True)
class _Given:
    """The LLM arguments of a program, from its YAML file and its flags."""

    document: Document | None
    arguments: CheckedArguments
    flags: GivenFlags | None
    settings: Mapping[str, Any]
    """The arguments under canonical keys; the file's win over the flags'."""
    unknown: frozenset[str]
    """Canonical keys that may be given elsewhere."""

    def places(self, release: Release) -> Callable[[str | None], Place]:
        """Return the function that finds the place of a canonical key: in the YAML file, or else in the script."""
        in_yaml = None if self.document is None else place_in(self.document, self.arguments, release)
        flags = self.flags

        def place(key: str | None) -> Place:
            if flags is not None and key is not None and key in flags.settings:
                line, flag = flags.places[key]
                return flags.file, line, flag
            if in_yaml is not None:
                return in_yaml(key)
            return (flags.file if flags is not None else ""), None, key or ""

        return place


@dataclass(kw_only=True)
class _ProgramCheck:
    """The check of one script with its YAML file, or of a YAML file by itself, which collects the findings."""

    folder: Path
    yaml: Path
    script_name: str = ""
    script: ShellScript | None = None
    options: CheckOptions
    findings: list[Finding] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    placed: PlacedDeployment | None = None

    def check(self) -> Checked:
        stamp = self.keep(read_stamp(self.folder, ""))
        if not stamp.is_of_triton:
            self.findings += changed_files(stamp, self.folder, self.folder, "")
        program = None if self.script is None else self.script.program
        if self.script is not None:
            self.findings += variable_problems(self.script)
            if program is None:
                why = "because it starts no program that is known here"
                self.unchecked.append(f"the flags in {self.script.file}, {why}")
        document = self.document(program)
        file = self.script_name if document is None and self.script_name else self.yaml.name
        recorded, _ = read_recorded(self.folder, "")
        release, release_from, unsure = find_release(
            self.options, recorded.release, stamp, record_file=RELEASE_RECORD, file=file
        )
        model, known = None, UNKNOWN
        if document is not None or program is not None:
            self.findings += unsure
            model = (program and program.model) or _text(document, "model")
            known = self.check_rules(self.given(document, program, release), release, stamp, model or "")
        checked = CheckedModel(
            file=file,
            model=model,
            backend="none",
            engine="tensorrt_llm",
            release=release.version,
            release_from=release_from,
            variant=known.variant.name if known.variant else None,
            precision=known.precision,
            gpu=known.gpu.name if known.gpu else None,
            num_gpus=known.num_gpus,
            unchecked=tuple(self.unchecked),
        )
        return Checked(checked, self.findings, self.placed)

    def keep(self, read: tuple[Any, list[Finding]]) -> Any:
        """Return what was read, and add its findings to the others."""
        value, found = read
        self.findings += found
        return value

    def document(self, program: Program | None) -> Document | None:
        """Return the content of the YAML file, where one is used."""
        passed = None if self.script is None else _passed_yaml(self.script)
        is_there = os.path.lexists(self.yaml)
        if passed is not None or self.script is None or (program is None and is_there):
            yaml = self.yaml if passed is None else self.folder / passed
            document: Document | None = self.keep(read_yaml(yaml, yaml.name))
            return document
        if program is not None and program.name != QUICKSTART and is_there:
            message = f"{self.script.file} starts {program.name} without {self.yaml.name}"
            fix = f'write {YAML_FLAGS[0]} "$here/{self.yaml.name}" after {program.name}'
            self.findings.append(UNUSED_ARGUMENTS.finding(message, fix, file=self.script.file))
        return None

    def given(self, document: Document | None, program: Program | None, release: Release) -> _Given:
        """Return the arguments wherever they are given, and add findings about the wrong ones."""
        is_model_yaml = document is not None and document.file == MODEL_YAML
        arguments = CheckedArguments()
        if document is not None:
            sections = (TRITON_SECTION, *UPSTREAM_KEYS) if is_model_yaml else ()
            arguments = check_schema(document, release, other_sections=sections)
            self.findings += arguments.findings
        settings: dict[str, Any] = self.keep(
            with_balancer_file(canonical_settings(arguments, release), self.folder, "")
        )
        if self.script is not None and program is not None:
            flags = read_flags(self.script, program)
            if document is not None:
                unused_flags(flags, document.values, settings, document.file)
            self.findings += flags.findings
            if flags.unread:
                self.unchecked.append(f"flags that are not recorded here: {first_names(flags.unread)}")
            settings = {**_PROGRAM} | flags.settings | settings
            return _Given(document, arguments, flags, settings, frozenset(flags.unknown))
        if document is None or is_model_yaml:
            return _Given(document, arguments, None, settings, frozenset())
        self.unchecked.append(
            "the rules about what flags may give, because no script that passes the file is beside it"
        )
        settings = {**_PROGRAM} | _divided(self.options.num_gpus, settings) | settings
        unknown = flag_keys() - settings.keys() - _replaced_flags(document)
        return _Given(document, arguments, None, settings, unknown)

    def check_rules(self, given: _Given, release: Release, stamp: Stamp, model: str) -> Identity:
        """Check the checkpoint, the rules and the memory, and return what the model is."""
        document, facts = given.document, self.checkpoint(model, has_tokenizer="tokenizer" not in given.settings)
        line = None if document is None else document.line("model")
        named_in = self.yaml.name if self.script is None else self.script.file
        known: Identity = self.keep(identify(self.options, stamp, model, facts, named_in, line))
        triton = triton_settings(document) if document is not None and document.file == MODEL_YAML else {}
        variables = {} if self.script is None else self.script.known_values
        deployment = make_deployment(given.settings, release, known, triton, variables, given.unknown)
        place = given.places(release)
        self.placed = PlacedDeployment(deployment=deployment, place=place)
        self.findings += check_deployment(deployment, _misfits(deployment), place)
        if facts is not None:
            self.findings += mtp_problems(facts, deployment.num_draft_tokens)
        self.findings += _count_problems(deployment, known, place)
        if document is not None:
            found, unasked = engine_problems(document, release)
            self.findings += found
            self.unchecked += unasked
        self.unchecked += unchecked_facts(known, has_checkpoint=facts is not None)
        return known

    def checkpoint(self, model: str, *, has_tokenizer: bool) -> CheckpointFacts | None:
        """Return what the checkpoint's files say; None when it is not on this machine.

        :param has_tokenizer: whether its tokenizer is used.
        """
        if not model and self.options.model_root is None:
            return None
        found = find_checkpoint_folder(model, self.folder, self.options.model_root)
        if found is None:
            return None
        label = found.resolve().as_posix().removeprefix(f"{self.folder.resolve().as_posix()}/")
        facts: CheckpointFacts = self.keep(check_checkpoint(found, label, found if has_tokenizer else None))
        return facts


def _passed_yaml(script: ShellScript) -> str | None:
    """Return the name of the YAML file that the script passes to its program; None when it passes none.

    A script may pass a copy of it, under a name that is made when it runs.
    """
    flags = script.program.flags if script.program is not None else ()
    named = next((flag.values[0].text for flag in flags if flag.name in YAML_FLAGS and flag.values), None)
    name = None if named is None else named.rpartition("/")[2]
    if name is None or "$" not in name:
        return name
    found = (_YAML_NAME.search(word.text) for command in script.commands for word in command)
    return next((match[0] for match in found if match is not None), None)


_YAML_NAME = re.compile(r"[\w.-]+\.ya?ml\b")


def _divided(num_gpus: int | None, settings: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes that follow from the number of GPUs: tensor parallelism alone, unless the file says more."""
    ranks = settings.get("tensor_parallel_size", num_gpus)
    if num_gpus is None or not isinstance(ranks, int) or num_gpus % ranks:
        return {}
    return {"tensor_parallel_size": ranks, "pipeline_parallel_size": num_gpus // ranks}


def _text(document: Document | None, key: str) -> str | None:
    value = None if document is None else document.values.get(key)
    return value if isinstance(value, str) else None


def _replaced_flags(document: Document) -> frozenset[str]:
    """Return the keys of flags that a section of the YAML file replaces."""
    return frozenset(key for key in flag_keys() if "." in key and key.partition(".")[0] in document.values)


def _misfits(deployment: Deployment) -> list[tuple[CheckCode, Violation]]:
    """Find what does not fit the memory of the GPUs. Of a file whose flags are not known, only the weights are judged,
    because the weights of a rank hardly depend on the rest."""
    if not deployment.unknown:
        return list(memory_problems(deployment))
    if "tensor_parallel_size" not in deployment.settings:
        return []
    found = memory_problems(replace(deployment, unknown=frozenset()))
    return [(code, violation) for code, violation in found if code is WEIGHTS_TOO_LARGE]


def _count_problems(deployment: Deployment, known: Identity, place: Callable[[str | None], Place]) -> Iterator[Finding]:
    """Compare the ranks with the GPUs, where both are known."""
    ranks = deployment.settings.get("tensor_parallel_size", 1)
    if known.num_gpus is None or "tensor_parallel_size" in deployment.unknown:
        return
    stages = deployment.settings.get("pipeline_parallel_size", 1)
    file, line, name = place("tensor_parallel_size")
    problem = count_problem(ranks * stages, known.num_gpus, "the instance")
    if problem is not None and (ranks > known.num_gpus or "pipeline_parallel_size" not in deployment.unknown):
        code, message, fix = problem
        yield code.finding(message, fix, file=file, line=line, key=name)
