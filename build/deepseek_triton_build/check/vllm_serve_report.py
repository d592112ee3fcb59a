"""All checks of a script that starts `vllm serve`: its flags, its variables and the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepseek_triton_build.check.checkpoint_facts import CheckpointFacts
from deepseek_triton_build.check.checkpoint_report import check_checkpoint, mtp_problems
from deepseek_triton_build.check.finding import CheckedModel, Finding
from deepseek_triton_build.check.generated_origin import changed_files, read_recorded, read_stamp
from deepseek_triton_build.check.instance_gpus import VLLM_RANKS, count_problem, hidden_gpus
from deepseek_triton_build.check.model_identity import (
    CheckOptions,
    Identity,
    find_checkpoint_folder,
    find_vllm,
    identify,
    unchecked_facts,
)
from deepseek_triton_build.check.rule_findings import Checked, check_on_vllm
from deepseek_triton_build.check.scripts import Program, ShellScript
from deepseek_triton_build.check.variables import variable_problems, vllm_variable_problems
from deepseek_triton_build.check.vllm_arguments import num_draft_tokens
from deepseek_triton_build.check.vllm_flags import VllmFlags, as_flag, read_vllm_flags
from deepseek_triton_build.render.stamp import RELEASE_RECORD

_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def check_vllm_serve(
    folder: Path, script: ShellScript, program: Program, options: CheckOptions, findings: list[Finding]
) -> Checked:
    """Check `script`, which starts `program`.

    :param findings: what is wrong with its file.
    """
    check = _ServeCheck(folder=folder, script=script, program=program, options=options, findings=list(findings))
    return Checked(check.check(), check.findings)


@dataclass(kw_only=True)
class _ServeCheck:
    """The check of one script, which collects the findings."""

    folder: Path
    script: ShellScript
    program: Program
    options: CheckOptions
    findings: list[Finding] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    def check(self) -> CheckedModel:
        stamp = self.keep(read_stamp(self.folder, ""))
        if not stamp.is_of_triton:
            self.findings += changed_files(stamp, self.folder, self.folder, "")
        recorded, _ = read_recorded(self.folder, "")
        version, version_from, unsure = find_vllm(
            self.options, recorded.vllm, stamp, record_file=RELEASE_RECORD, file=self.script.file
        )
        self.findings += unsure
        self.findings += variable_problems(self.script)
        self.findings += vllm_variable_problems(self.script, version, as_flag)
        given = read_vllm_flags(self.script, self.program, version)
        self.findings += given.findings
        model = self.program.model or ""
        facts = self.checkpoint(model, has_tokenizer="tokenizer" not in given.places)
        known: Identity = self.keep(identify(self.options, stamp, model, facts, self.script.file, None))
        self.findings += self.rank_problems(given, known)
        self.findings += check_on_vllm(given.settings, version, known, given.place, unknown=frozenset(given.unknown))
        if facts is not None:
            self.findings += mtp_problems(facts, num_draft_tokens(given.settings))
        self.unchecked += unchecked_facts(known, has_checkpoint=facts is not None)
        return CheckedModel(
            file=self.script.file,
            model=model or None,
            backend="none",
            engine="vllm",
            release=version.version,
            release_from=version_from,
            variant=known.variant.name if known.variant else None,
            precision=known.precision,
            gpu=known.gpu.name if known.gpu else None,
            num_gpus=known.num_gpus,
            unchecked=tuple(self.unchecked),
        )

    def keep(self, read: tuple[Any, list[Finding]]) -> Any:
        """Return what was read, and add its findings to the others."""
        value, found = read
        self.findings += found
        return value

    def checkpoint(self, model: str, *, has_tokenizer: bool) -> CheckpointFacts | None:
        """Return what the checkpoint's files say; None when it is not on this machine."""
        if not model and self.options.model_root is None:
            return None
        found = find_checkpoint_folder(model, self.folder, self.options.model_root)
        if found is None:
            return None
        label = found.resolve().as_posix().removeprefix(f"{self.folder.resolve().as_posix()}/")
        facts: CheckpointFacts = self.keep(
            check_checkpoint(found, label, found if has_tokenizer else None, for_vllm=True)
        )
        return facts

    def rank_problems(self, given: VllmFlags, known: Identity) -> Iterator[Finding]:
        """Compare the ranks with the GPUs, as far as both are known."""
        if given.unknown.intersection(_SIZES):
            return
        ranks = 1
        for size in _SIZES:
            ranks *= given.settings.get(size, 1)
        yield from hidden_gpus(self.script, ranks, known.gpu, VLLM_RANKS)
        problem = None if known.num_gpus is None else count_problem(ranks, known.num_gpus, "the server", VLLM_RANKS)
        if problem is not None:
            code, message, fix = problem
            line = next((given.places[size][0] for size in _SIZES if size in given.places), None)
            yield code.finding(message, fix, file=self.script.file, line=line, key=_SIZES[0])
