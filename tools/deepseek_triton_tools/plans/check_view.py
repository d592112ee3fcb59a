"""Check a model repository, and print what is wrong with it, line by line."""

import os
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from deepseek_triton_build.check import (
    CheckedModel,
    CheckOptions,
    Finding,
    Report,
    check_repository,
    find_code,
    instead_of_checkpoint,
)
from deepseek_triton_tools.terminal.output_streams import complain, print_json, printable, to_reader
from deepseek_triton_tools.terminal.tables import paragraph, styled
from deepseek_triton_tools.tool_errors import ToolError

SCHEMA = "deepseek-triton/check/1"
_LIBRARIES = {"tensorrt_llm": "TensorRT-LLM", "vllm": "vLLM"}
_STYLES = {"error": "31", "warning": "33", "note": "2"}


def check(repository: Path, options: CheckOptions, *, as_json: bool) -> int:
    """Print the findings of `repository`, and return 1 when there are errors among them. Raises ToolError when --model
    is no folder, and BuildError when there is nothing to check or a name is unknown."""
    if options.model_root and not os.path.isdir(options.model_root):
        found = instead_of_checkpoint(options.model_root)
        raise ToolError(f"--model {options.model_root}: expected the checkpoint's folder, found {found}", exit_code=2)
    report = check_repository(repository, options)
    for option, asked, engine in (("trtllm", options.release, "tensorrt_llm"), ("vllm", options.vllm, "vllm")):
        if asked and report.models and engine not in {model.engine for model in report.models}:
            complain(f"note: --{option} {asked} changes nothing: no model here is for {_LIBRARIES[engine]}")
    code = 1 if report.has_errors else 0
    with to_reader():
        if as_json:
            models = [asdict(model) for model in report.models]
            findings = report.findings_json()
            print_json({"schema": SCHEMA, "ok": not report.has_errors, "models": models, "findings": findings})
        else:
            _show(report)
    return code


def _show(report: Report) -> None:
    same: dict[tuple[str, ...], list[Finding]] = {}  # both servers of a pair may be told the same
    for finding in report.findings:
        same.setdefault((finding.code, finding.message, finding.fix), []).append(finding)
    for findings in same.values():
        show_finding(*findings)
    print(end="\n" if same else "")
    for known in dict.fromkeys(map(_known, report.models)):
        print(paragraph(known, "", "  "))
    for clause in report.unchecked:
        print(paragraph(f"not checked: {clause}", "", "  "))
    print(_counts(report))


def show_finding(finding: Finding, *others: Finding) -> None:
    """Print a finding and its fix.

    :param others: the same one at other places.
    """
    places = [each.file + ("" if each.line is None else f":{each.line}") for each in (finding, *others)]
    severity = styled(finding.severity, _STYLES[finding.severity])
    print(f"{printable(', '.join(places))}: {severity} {finding.code} {printable(finding.message)}")
    print(paragraph(f"fix: {finding.fix}", "    "))


def explain(code: str) -> None:
    """Print what the code of a finding or of a plan's warning stands for.

    :raises UnknownNameError: for an unknown code.
    """
    entry = find_code(code)
    with to_reader():
        print(paragraph(f"{entry.code} {entry.title} ({entry.severity}; releases: {entry.releases})", "", "  "))
        print(paragraph(f"{entry.why} Source: {entry.source}", "  "))


def _known(model: CheckedModel) -> str:
    """Say as what the model was checked."""
    library = _LIBRARIES.get(model.engine)
    if library is None:
        return f"{model.file}: {model.model or 'no model named'}, for the {model.engine} engine"
    target = [model.variant, model.precision, model.gpu and f"{model.num_gpus or '?'} x {model.gpu}"]
    known = ", ".join(part for part in target if part) or "variant and GPU not known"
    return f"{model.file}: {known}; {library} {model.release} ({model.release_from})"


def _counts(report: Report) -> str:
    if not report.findings:
        return "ok: nothing found in what was checked" if report.unchecked else "ok: nothing found"
    counts = Counter(finding.severity for finding in report.findings)
    shown = [f"{counts[name]} {name}{'' if counts[name] == 1 else 's'}" for name in ("error", "warning", "note")]
    verdict = "not ok" if report.has_errors else "ok"
    return f"{verdict}: {', '.join(shown)}; deepseek-triton check --explain CODE says more"
