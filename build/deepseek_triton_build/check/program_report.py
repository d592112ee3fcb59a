"""All checks of arguments outside a model repository: a YAML file, the flags of the script beside it, or both."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepseek_triton_build.check import codes
from deepseek_triton_build.check.checkpoint_files import CheckpointFacts
from deepseek_triton_build.check.documents import Document, read_yaml
from deepseek_triton_build.check.engine_arguments import engine_problems
from deepseek_triton_build.check.flags import (
    YAML_FLAGS,
    ProgramFlags,
    as_flag,
    flag_keys,
    read_flags,
    read_vllm_flags,
    unused_flags,
)
from deepseek_triton_build.check.generated_origin import Recorded, changed_files, read_recorded
from deepseek_triton_build.check.gpus import VLLM_RANKS, count_findings, hidden_gpus, memory_problems
from deepseek_triton_build.check.model_identity import (
    CheckOptions,
    find_checkpoint_folder,
    find_release,
    find_vllm,
)
from deepseek_triton_build.check.rule_findings import ModelCheck, Place, canonical_settings, place_in
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
from deepseek_triton_build.check.start_script import lost_exports
from deepseek_triton_build.data.releases import Release
from deepseek_triton_build.data.spelling import flattened
from deepseek_triton_build.render.stamp import RELEASE_RECORD
from deepseek_triton_build.render.trtllm_commands import YAML_NAME
from deepseek_triton_build.rules.finding import Code
from deepseek_triton_build.rules.rule import Deployment, Violation, VllmDeployment
from deepseek_triton_build.text import first_names

_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
_YAML_NAME = re.compile(r"[\w.-]+\.ya?ml\b")
# The arguments that TensorRT-LLM's programs have by themselves.
_PROGRAM: Mapping[str, Any] = {"backend": "pytorch"}


def is_program_folder(folder: Path) -> bool:
    """Whether `folder` holds what TensorRT-LLM's own programs are started with."""
    return any(os.path.isfile(folder / name) for name in (YAML_NAME, *PROGRAM_SCRIPTS))


def check_programs(path: Path, options: CheckOptions) -> list[ModelCheck]:
    """Check a folder of one of TensorRT-LLM's programs, or a YAML file of LLM arguments with the scripts beside it."""
    folder = path if os.path.isdir(path) else path.parent
    yaml = folder / YAML_NAME if path == folder else path
    present = [] if yaml.name == MODEL_YAML else [name for name in PROGRAM_SCRIPTS if os.path.isfile(folder / name)]
    read = {name: read_script(folder / name, name) for name in present}
    if path != folder:  # only the scripts that pass the file say something about it
        read = {name: one for name, one in read.items() if one[0] is not None and _passed_yaml(one[0]) == yaml.name}
    programs = {name: script.program.name for name, (script, _) in read.items() if script and script.program}
    # A script that measures a server of vLLM, which another one starts, gives no engine arguments.
    starting = {name: one for name, one in read.items() if programs.get(name) != VLLM_BENCH}
    if read and not starting:
        return []
    checked: list[ModelCheck] = []
    for name, (script, findings) in starting.items():
        check = _ServeCheck if programs.get(name) == VLLM else _ProgramCheck
        checked.append(
            check(
                folder=folder, root=folder, options=options, findings=[*findings], yaml=yaml, name=name, script=script
            ).check()
        )
    return checked or [_ProgramCheck(folder=folder, root=folder, options=options, yaml=yaml).check()]


@dataclass(kw_only=True)
class _ProgramCheck(ModelCheck):
    """The check of one script with its YAML file, or of a YAML file by itself."""

    yaml: Path
    name: str = ""
    """The script's name, also where it can't be read."""
    script: ShellScript | None = None
    flags: ProgramFlags | None = None

    @property
    def program(self) -> Program | None:
        return None if self.script is None else self.script.program

    def check_files(self) -> Recorded:
        """Check the stamp and the script, and return what the record beside them is of."""
        if not self.stamp.is_of_triton:
            self.findings += changed_files(self.stamp, self.folder, self.folder, "")
        if self.script is not None:
            self.findings += variable_problems(self.script.variables, self.name)
            self.findings += lost_exports(self.script, self.stamp, self.name)
        return read_recorded(self.folder, "")[0]

    def checkpoint(
        self, model: str, file: str, line: int | None, *, has_tokenizer: bool, for_vllm: bool = False
    ) -> CheckpointFacts | None:
        """Find out what the model is, which `file` names in its `line`, and return what the checkpoint's files say.

        :param has_tokenizer: whether its tokenizer is used.
        """
        is_named = bool(model) or self.options.model_root is not None
        folder = find_checkpoint_folder(model, self.folder, self.options.model_root) if is_named else None
        facts = self.read_checkpoint(folder, folder if has_tokenizer else None, for_vllm=for_vllm)
        self.identify(model, facts, file, line)
        return facts

    def check(self) -> ModelCheck:
        recorded = self.check_files()
        if self.script is not None and self.program is None:
            self.unchecked.append(f"the flags in {self.name}, because it starts no program that is known here")
        document = self.document()
        file = self.name if document is None and self.name else self.yaml.name
        release, self.version_from, unsure = find_release(
            self.options, recorded.release, self.stamp, record_file=RELEASE_RECORD, file=file
        )
        self.version, model = release.version, None
        if document is not None or self.program is not None:
            self.findings += unsure
            in_yaml = None if document is None else document.values.get("model")
            model = (self.program and self.program.model) or (in_yaml if isinstance(in_yaml, str) else None)
            self.check_rules(document, release, model or "")
        return self.done(file, model, "none", "tensorrt_llm")

    def document(self) -> Document | None:
        """Return the content of the YAML file, where one is used."""
        passed = None if self.script is None else _passed_yaml(self.script)
        is_there = os.path.lexists(self.yaml)
        if passed is not None or self.script is None or (self.program is None and is_there):
            yaml = self.yaml if passed is None else self.folder / passed
            return self.keep(read_yaml(yaml, yaml.name))
        if self.program is not None and self.program.name != QUICKSTART and is_there:
            message = f"{self.name} starts {self.program.name} without {self.yaml.name}"
            fix = f'write {YAML_FLAGS[0]} "$here/{self.yaml.name}" after {self.program.name}'
            self.findings.append(codes.UNUSED_ARGUMENTS.finding(message, fix, file=self.name))
        return None

    def check_rules(self, document: Document | None, release: Release, model: str) -> None:
        """Check the arguments wherever they are given, the checkpoint, the rules and the memory."""
        is_model_yaml = document is not None and document.file == MODEL_YAML
        arguments = CheckedArguments()
        if document is not None:
            sections = (TRITON_SECTION, *UPSTREAM_KEYS) if is_model_yaml else ()
            arguments = check_schema(document, release, other_sections=sections)
            self.findings += arguments.findings
        settings, unknown = self.settings(document, arguments, release)
        line = None if document is None else document.line("model")
        file = self.name if self.script is not None else self.yaml.name
        facts = self.checkpoint(model, file, line, has_tokenizer="tokenizer" not in settings)
        self.deployment = Deployment(
            settings=settings,
            unknown=unknown,
            release=release,
            triton=flattened(triton_settings(document)) if document is not None and is_model_yaml else {},
            environment=self.environment(self.script, document, release),
            **self.known.facts,
        )
        in_yaml = None if document is None else place_in(document, arguments, release)

        def place(key: str | None) -> Place:
            if self.flags is not None and (in_yaml is None or key in self.flags.settings):
                return self.flags.place(key)
            return in_yaml(key) if in_yaml is not None else ("", None, key or "")

        self.check_deployment(_misfits(self.deployment), place, facts)
        self.check_ranks(self.deployment)
        if document is not None:
            self.unchecked += self.keep(engine_problems(document, release))

    def settings(
        self, document: Document | None, arguments: CheckedArguments, release: Release
    ) -> tuple[Mapping[str, Any], frozenset[str]]:
        """Return the arguments of file and flags under canonical keys, where the file's win, and the keys that may be
        given elsewhere."""
        settings: Mapping[str, Any] = self.keep(canonical_settings(arguments, release, self.folder, ""))
        if self.script is not None and self.program is not None:
            self.flags = flags = read_flags(self.script, self.program)
            if document is not None:
                unused_flags(flags, document.values, settings, document.file)
            self.findings += flags.findings
            if flags.unread:
                self.unchecked.append(f"flags that are not recorded here: {first_names(flags.unread)}")
            return {**_PROGRAM, **flags.settings, **settings}, frozenset(flags.unknown)
        if document is None or document.file == MODEL_YAML:
            return settings, frozenset()
        self.unchecked.append(
            "the rules about what flags may give, because no script that passes the file is beside it"
        )
        settings = {**_PROGRAM, **_divided(self.options.num_gpus, settings), **settings}
        replaced = {key for key in flag_keys() if "." in key and key.partition(".")[0] in document.values}
        return settings, flag_keys() - settings.keys() - replaced

    def check_ranks(self, deployment: Deployment) -> None:
        """Compare the ranks with the GPUs, where both are known."""
        ranks, gpus = deployment.settings.get("tensor_parallel_size", 1), self.known.num_gpus
        if gpus is None or "tensor_parallel_size" in deployment.unknown:
            return
        stages = deployment.settings.get("pipeline_parallel_size", 1)
        if ranks > gpus or "pipeline_parallel_size" not in deployment.unknown:
            file, line, key = self.place("tensor_parallel_size")
            self.findings += count_findings(ranks * stages, gpus, "the instance", file=file, line=line, key=key)


class _ServeCheck(_ProgramCheck):
    """The check of a script that starts `vllm serve`."""

    def check(self) -> ModelCheck:
        script, program, recorded = self.script, self.program, self.check_files()
        assert script is not None
        assert program is not None
        version, self.version_from, unsure = find_vllm(
            self.options, recorded.vllm, self.stamp, record_file=RELEASE_RECORD, file=self.name
        )
        self.version = version.version
        self.findings += unsure
        self.findings += vllm_variable_problems(script, version, as_flag)
        flags = read_vllm_flags(script, program, version)
        self.findings += flags.findings
        model, has_tokenizer = program.model or "", "tokenizer" not in flags.places
        facts = self.checkpoint(model, self.name, None, has_tokenizer=has_tokenizer, for_vllm=True)
        self.check_vllm_ranks(script, flags)
        deployment = VllmDeployment(
            settings=flags.settings, unknown=frozenset(flags.unknown), vllm=version, **self.known.facts
        )
        self.check_on_vllm(deployment, flags.place, facts)
        return self.done(self.name, model, "none", "vllm")

    def check_vllm_ranks(self, script: ShellScript, flags: ProgramFlags) -> None:
        """Compare the ranks with the GPUs, as far as both are known."""
        if flags.unknown.intersection(_SIZES):
            return
        ranks = math.prod(flags.settings.get(size, 1) for size in _SIZES)
        self.findings += hidden_gpus(script, ranks, self.known.gpu, VLLM_RANKS)
        if self.known.num_gpus is not None:
            line = next((flags.places[size][0] for size in _SIZES if size in flags.places), None)
            self.findings += count_findings(
                ranks, self.known.num_gpus, "the server", VLLM_RANKS, file=self.name, line=line, key=_SIZES[0]
            )


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
    return [(code, violation) for code, violation in found if code is codes.WEIGHTS_TOO_LARGE]
