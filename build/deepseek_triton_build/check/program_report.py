"""All checks of arguments outside a model repository: a YAML file, the flags of the script beside it, or both."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepseek_triton_build.check.checkpoint_files import CheckpointFacts
from deepseek_triton_build.check.documents import Document, read_yaml
from deepseek_triton_build.check.engine_arguments import engine_problems
from deepseek_triton_build.check.finding import UNUSED_ARGUMENTS, WEIGHTS_TOO_LARGE
from deepseek_triton_build.check.flags import (
    YAML_FLAGS,
    ProgramFlags,
    as_flag,
    flag_keys,
    read_flags,
    read_vllm_flags,
    unused_flags,
)
from deepseek_triton_build.check.generated_origin import changed_files, read_recorded
from deepseek_triton_build.check.gpus import VLLM_RANKS, count_problem, hidden_gpus, memory_problems
from deepseek_triton_build.check.model_identity import (
    UNKNOWN,
    CheckOptions,
    Identity,
    find_checkpoint_folder,
    find_release,
    find_vllm,
)
from deepseek_triton_build.check.rule_findings import (
    Checked,
    ModelCheck,
    Place,
    canonical_settings,
    make_deployment,
    make_vllm_deployment,
    place_in,
    with_balancer_file,
)
from deepseek_triton_build.check.schema import (
    MODEL_YAML,
    TRITON_SECTION,
    UPSTREAM_KEYS,
    CheckedArguments,
    check_schema,
    triton_settings,
)
from deepseek_triton_build.check.scripts import (
    PROGRAM_SCRIPTS,
    QUICKSTART,
    VLLM,
    VLLM_BENCH,
    Program,
    ShellScript,
    read_script,
    variable_problems,
    vllm_variable_problems,
)
from deepseek_triton_build.data.releases import Release
from deepseek_triton_build.render.stamp import RELEASE_RECORD
from deepseek_triton_build.render.trtllm_commands import YAML_NAME
from deepseek_triton_build.rules.finding import Code, Finding
from deepseek_triton_build.rules.rule import Deployment, Violation
from deepseek_triton_build.text import first_names

_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
_YAML_NAME = re.compile(r"[\w.-]+\.ya?ml\b")
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
    # A script that measures a server of vLLM, which another one starts, gives no engine arguments.
    starting = {name: one for name, one in read.items() if _program_of(one[0]) != VLLM_BENCH}
    if read and not starting:
        return []
    checked = []
    for name, (script, found) in starting.items():
        if script is not None and script.program is not None and script.program.name == VLLM:
            serve = _ServeCheck(folder=folder, root=folder, options=options, findings=[*found], script=script)
            checked.append(serve.check(script.program))
        else:
            check = _ProgramCheck(folder=folder, root=folder, options=options, findings=[*found], yaml=yaml)
            checked.append(check.check(name, script))
    return checked or [_ProgramCheck(folder=folder, root=folder, options=options, yaml=yaml).check("", None)]


def _program_of(script: ShellScript | None) -> str:
    return "" if script is None or script.program is None else script.program.name


@dataclass(frozen=True)
class _Arguments:
    """The LLM arguments of a program, from its YAML file and its flags."""

    document: Document | None
    arguments: CheckedArguments
    flags: ProgramFlags | None
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


class _FolderCheck(ModelCheck):
    """The check of what lies in a folder with a program's files."""

    def check_stamp(self) -> None:
        if not self.stamp.is_of_triton:
            self.findings += changed_files(self.stamp, self.folder, self.folder, "")

    def checkpoint(self, model: str, *, has_tokenizer: bool, for_vllm: bool = False) -> CheckpointFacts | None:
        """Return what the checkpoint's files say; None when it is not on this machine.

        :param has_tokenizer: whether its tokenizer is used.
        """
        if not model and self.options.model_root is None:
            return None
        found = find_checkpoint_folder(model, self.folder, self.options.model_root)
        return self.read_checkpoint(found, found if has_tokenizer else None, for_vllm=for_vllm)


@dataclass(kw_only=True)
class _ServeCheck(_FolderCheck):
    """The check of a script that starts `vllm serve`."""

    script: ShellScript

    def check(self, program: Program) -> Checked:
        self.check_stamp()
        recorded, _ = read_recorded(self.folder, "")
        version, version_from, unsure = find_vllm(
            self.options, recorded.vllm, self.stamp, record_file=RELEASE_RECORD, file=self.script.file
        )
        self.findings += unsure
        self.findings += variable_problems(self.script)
        self.findings += vllm_variable_problems(self.script, version, as_flag)
        flags = read_vllm_flags(self.script, program, version)
        self.findings += flags.findings
        model = program.model or ""
        facts = self.checkpoint(model, has_tokenizer="tokenizer" not in flags.places, for_vllm=True)
        known = self.identify(model, facts, self.script.file, None)
        self.findings += self.rank_problems(flags, known)
        deployment = make_vllm_deployment(flags.settings, version, known, {}, flags.unknown)
        self.check_on_vllm(deployment, flags.place, facts)
        self.note_unchecked(known, facts)
        return self.checked(self.script.file, model, "none", "vllm", version.version, version_from, known)

    def rank_problems(self, flags: ProgramFlags, known: Identity) -> Iterator[Finding]:
        """Compare the ranks with the GPUs, as far as both are known."""
        if flags.unknown.intersection(_SIZES):
            return
        ranks = math.prod(flags.settings.get(size, 1) for size in _SIZES)
        yield from hidden_gpus(self.script, ranks, known.gpu, VLLM_RANKS)
        problem = None if known.num_gpus is None else count_problem(ranks, known.num_gpus, "the server", VLLM_RANKS)
        if problem is not None:
            code, message, fix = problem
            line = next((flags.places[size][0] for size in _SIZES if size in flags.places), None)
            yield code.finding(message, fix, file=self.script.file, line=line, key=_SIZES[0])


@dataclass(kw_only=True)
class _ProgramCheck(_FolderCheck):
    """The check of one script with its YAML file, or of a YAML file by itself."""

    yaml: Path

    def check(self, script_name: str, script: ShellScript | None) -> Checked:
        self.check_stamp()
        program = None if script is None else script.program
        if script is not None:
            self.findings += variable_problems(script)
            if program is None:
                self.unchecked.append(f"the flags in {script.file}, because it starts no program that is known here")
        document = self.document(script)
        file = script_name if document is None and script_name else self.yaml.name
        recorded, _ = read_recorded(self.folder, "")
        release, release_from, unsure = find_release(
            self.options, recorded.release, self.stamp, record_file=RELEASE_RECORD, file=file
        )
        model, known = None, UNKNOWN
        if document is not None or program is not None:
            self.findings += unsure
            in_yaml = None if document is None else document.values.get("model")
            model = (program and program.model) or (in_yaml if isinstance(in_yaml, str) else None)
            known = self.check_rules(self.arguments(document, script, release), script, release, model or "")
        return self.checked(file, model, "none", "tensorrt_llm", release.version, release_from, known)

    def document(self, script: ShellScript | None) -> Document | None:
        """Return the content of the YAML file, where one is used."""
        program = None if script is None else script.program
        passed = None if script is None else _passed_yaml(script)
        is_there = os.path.lexists(self.yaml)
        if passed is not None or script is None or (program is None and is_there):
            yaml = self.yaml if passed is None else self.folder / passed
            return self.keep(read_yaml(yaml, yaml.name))
        if program is not None and program.name != QUICKSTART and is_there:
            message = f"{script.file} starts {program.name} without {self.yaml.name}"
            fix = f'write {YAML_FLAGS[0]} "$here/{self.yaml.name}" after {program.name}'
            self.findings.append(UNUSED_ARGUMENTS.finding(message, fix, file=script.file))
        return None

    def arguments(self, document: Document | None, script: ShellScript | None, release: Release) -> _Arguments:
        """Return the arguments wherever they are given, and add findings about the wrong ones."""
        is_model_yaml = document is not None and document.file == MODEL_YAML
        arguments = CheckedArguments()
        if document is not None:
            sections = (TRITON_SECTION, *UPSTREAM_KEYS) if is_model_yaml else ()
            arguments = check_schema(document, release, other_sections=sections)
            self.findings += arguments.findings
        settings = self.keep(with_balancer_file(canonical_settings(arguments, release), self.folder, ""))
        if script is not None and script.program is not None:
            flags = read_flags(script, script.program)
            if document is not None:
                unused_flags(flags, document.values, settings, document.file)
            self.findings += flags.findings
            if flags.unread:
                self.unchecked.append(f"flags that are not recorded here: {first_names(flags.unread)}")
            settings = {**_PROGRAM} | flags.settings | settings
            return _Arguments(document, arguments, flags, settings, frozenset(flags.unknown))
        if document is None or is_model_yaml:
            return _Arguments(document, arguments, None, settings, frozenset())
        self.unchecked.append(
            "the rules about what flags may give, because no script that passes the file is beside it"
        )
        settings = {**_PROGRAM} | _divided(self.options.num_gpus, settings) | settings
        replaced = {key for key in flag_keys() if "." in key and key.partition(".")[0] in document.values}
        return _Arguments(document, arguments, None, settings, flag_keys() - settings.keys() - replaced)

    def check_rules(self, args: _Arguments, script: ShellScript | None, release: Release, model: str) -> Identity:
        """Check the checkpoint, the rules and the memory, and return what the model is."""
        document, facts = args.document, self.checkpoint(model, has_tokenizer="tokenizer" not in args.settings)
        line = None if document is None else document.line("model")
        known = self.identify(model, facts, self.yaml.name if script is None else script.file, line)
        triton = triton_settings(document) if document is not None and document.file == MODEL_YAML else {}
        variables = {} if script is None else script.known_values
        deployment = make_deployment(args.settings, release, known, triton, variables, args.unknown)
        place = args.places(release)
        self.check_deployment(deployment, _misfits(deployment), place, facts)
        self.findings += _count_problems(deployment, known, place)
        if document is not None:
            self.unchecked += self.keep(engine_problems(document, release))
        self.note_unchecked(known, facts)
        return known


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


def _divided(num_gpus: int | None, settings: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes that follow from the number of GPUs: tensor parallelism alone, unless the file says more."""
    ranks = settings.get("tensor_parallel_size", num_gpus)
    if num_gpus is None or not isinstance(ranks, int) or num_gpus % ranks:
        return {}
    return {"tensor_parallel_size": ranks, "pipeline_parallel_size": num_gpus // ranks}


def _misfits(deployment: Deployment) -> list[tuple[Code, Violation]]:
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
