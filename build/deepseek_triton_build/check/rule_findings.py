"""The steps that every check of a model takes, and the rules applied to the deployment that its arguments describe."""

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from deepseek_triton_build.check import codes
from deepseek_triton_build.check.checkpoint_files import CheckpointFacts, check_checkpoint, mtp_problems
from deepseek_triton_build.check.documents import Document, read_yaml
from deepseek_triton_build.check.finding import CheckedModel
from deepseek_triton_build.check.generated_origin import Stamp, read_stamp
from deepseek_triton_build.check.gpus import vllm_memory_problems
from deepseek_triton_build.check.model_identity import UNKNOWN, CheckOptions, Identity, identify, unchecked_facts
from deepseek_triton_build.check.schema import CheckedArguments
from deepseek_triton_build.check.scripts import ShellScript, env_overrides, variable_problems
from deepseek_triton_build.data import spelling
from deepseek_triton_build.data.finding import Code, Finding, causes
from deepseek_triton_build.data.releases import Release
from deepseek_triton_build.rules import violations
from deepseek_triton_build.rules.moe import BALANCER
from deepseek_triton_build.rules.rule import Deployment, UnknownFactError, Violation, VllmDeployment

Place = tuple[str, int | None, str]
"""File, line and name of a setting."""
FindPlace = Callable[[str | None], Place]
"""A function that returns where a key stands, or would stand: a canonical one, or of vLLM a dotted path."""
_Read = TypeVar("_Read")


@dataclass(kw_only=True)
class ModelCheck:
    """The check of one model, or of one program's arguments, which collects the findings. It is its own result."""

    folder: Path
    """The folder with the stamp: a model's, or that of a program's files."""
    root: Path
    """The folder that is checked. Findings name files relative to it."""
    label: str = ""
    """The beginning of file names in findings: the model's folder, or nothing when the model itself is `root`."""
    options: CheckOptions
    findings: list[Finding] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    version: str = ""
    """Version of the engine's library."""
    version_from: str = ""
    known: Identity = UNKNOWN
    deployment: Deployment | None = None
    """None where the model does not run on TensorRT-LLM."""
    place: FindPlace = field(default=lambda key: ("", None, key or ""))
    variables: dict[str, Place] = field(default_factory=dict)
    """Environment variable that TensorRT-LLM gets -> its place."""
    model: CheckedModel = field(init=False)

    def keep(self, read: tuple[_Read, list[Finding]]) -> _Read:
        """Return what was read, and add its findings to the others."""
        value, findings = read
        self.findings += findings
        return value

    @cached_property
    def stamp(self) -> Stamp:
        return self.keep(read_stamp(self.folder, self.label))

    def read_checkpoint(
        self, folder: Path | None, tokenizer: Path | None, *, for_vllm: bool = False
    ) -> CheckpointFacts | None:
        """Return what the files of a checkpoint say; None when it is not on this machine.

        :param tokenizer: the folder of the tokenizer; None when it is not to be looked at.
        """
        if folder is None:
            return None
        label = folder.resolve().as_posix().removeprefix(f"{self.root.resolve().as_posix()}/")
        facts, findings = check_checkpoint(folder, label, tokenizer, for_vllm=for_vllm)
        # Files of a generated one are told already, with the way to write them again: it is not downloaded.
        told = [f"{one.file}/" for one in self.findings if one.severity == "error"]
        self.findings += [one for one in findings if not any(each.startswith(f"{one.file}/") for each in told)]
        return facts

    def identify(self, model: str, facts: CheckpointFacts | None, file: str, line: int | None) -> None:
        """Find out what the model is, which `file` names in its `line`."""
        self.known = self.keep(identify(self.options, self.stamp, model, facts, file, line))
        self.unchecked += unchecked_facts(self.known, has_checkpoint=facts is not None)

    def check_deployment(
        self, misfits: Iterable[tuple[Code, Violation]], place: FindPlace, facts: CheckpointFacts | None
    ) -> None:
        """Report the rules that the deployment breaks, and its `misfits`, where the settings they are about stand."""
        assert self.deployment is not None
        self.place = place
        self.report([*violations(self.deployment), *misfits])
        if facts is not None:
            self.findings += mtp_problems(facts, self.deployment.num_draft_tokens)

    def check_on_vllm(self, deployment: VllmDeployment, place: FindPlace, facts: CheckpointFacts | None) -> None:
        """Report the rules of vLLM that engine arguments break, and what does not fit the GPUs' memory."""
        self.place = place
        self.report([*violations(deployment), *vllm_memory_problems(deployment)])
        if facts is not None:
            with suppress(UnknownFactError):
                self.findings += mtp_problems(facts, deployment.num_mtp_tokens)

    def report(self, broken: Iterable[tuple[Code, Violation]]) -> None:
        for rule, violation in broken:
            file, line, name = self.variables.get(violation.key or "") or self.place(violation.key)
            key = name or None if violation.key else None
            self.findings.append(rule.finding(violation.message, violation.fix, file=file, line=line, key=key))

    def environment(self, script: ShellScript | None, document: Document | None, release: Release) -> Mapping[str, str]:
        """Return the variables of TensorRT-LLM that are known, and report what is wrong with those of the arguments."""
        own = env_overrides(document) if release.find_key("env_overrides") else {}
        exported = {} if script is None else script.variables
        if script is not None:
            self.variables |= {name: (script.file, variable.line, name) for name, variable in exported.items()}
        if document is not None:
            self.variables |= {name: (document.file, variable.line, name) for name, variable in own.items()}
            self.findings += variable_problems(own, document.file)
        return {name: one.value for name, one in {**exported, **own}.items() if one.value is not None}

    def done(self, file: str, model: str | None, backend: str, engine: str) -> "ModelCheck":
        """Return the check with its result.

        :param file: the one that names the model.
        """
        gone = {finding.file for finding in self.findings if finding.code == codes.MISSING_FILE.code}
        told = (codes.UNREADABLE.code, codes.NO_CONFIG.code)
        self.findings = [one for one in self.findings if one.code not in told or one.file not in gone]
        self.findings = causes(self.findings, lambda finding: finding.code)
        self.model = CheckedModel(
            file=file,
            model=model or None,
            backend=backend,
            engine=engine,
            release=self.version,
            release_from=self.version_from,
            variant=self.known.variant.name if self.known.variant else None,
            precision=self.known.precision,
            gpu=self.known.gpu.name if self.known.gpu else None,
            num_gpus=self.known.num_gpus,
            unchecked=tuple(self.unchecked),
        )
        return self


def canonical_settings(
    arguments: CheckedArguments, release: Release, folder: Path, label: str
) -> tuple[dict[str, Any], list[Finding]]:
    """Return the arguments under canonical keys, with those in the load balancer's file, if it is on this machine. A
    key in a wrong place counts as if it were in the right one.

    :param folder: the folder from which a relative path counts.
    :param label: the beginning of file names in findings.
    """
    settings = arguments.meant | spelling.canonical(arguments.settings, release.version)
    name = settings.get(BALANCER)
    if not isinstance(name, str) or not os.path.isfile(folder / name):
        return settings, []
    document, findings = read_yaml(folder / name, f"{label}{name}")
    values: Mapping[Any, Any] = {} if document is None else document.values
    return settings | {f"{BALANCER}.{key}": value for key, value in values.items() if isinstance(key, str)}, findings


def place_in(document: Document, arguments: CheckedArguments, release: Release) -> FindPlace:
    """Return the function that finds the place of a canonical key in `document`."""
    settings, version = arguments.settings, release.version
    spelled = {ours: key for key in settings for ours in spelling.canonical({key: settings[key]}, version)}
    spelled = arguments.places | spelled

    def place(key: str | None) -> Place:
        return document.place(spelled.get(key or "", key or ""))

    return place
