"""What doctor has found, and the settings of `doctor --tune`: as text for people, and as JSON documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from deepseek_triton_tools.doctor.findings import LEVELS, Capability, Expected, Level, Reported
from deepseek_triton_tools.doctor.hosts import HostResult
from deepseek_triton_tools.doctor.tuning import SettingState
from deepseek_triton_tools.terminal.tables import paragraph, styled

SCHEMA = "deepseek-triton/doctor/1"
TUNING_SCHEMA = "deepseek-triton/tune/1"
_CODES: Mapping[Level, int] = {"ok": 0, "skipped": 0, "note": 0, "warning": 3, "error": 1}
"""Level -> exit code. The worst finding decides."""
_WORDS: Mapping[Level, tuple[str, str]] = {
    "ok": ("ok     ", "32"),
    "skipped": ("-      ", "2"),
    "note": ("note   ", "2"),
    "warning": ("warning", "33"),
    "error": ("error  ", "31"),
}
"""Level -> (the word in front of a finding, its ANSI style)."""
_ANSWERS = {True: ("yes", "32"), False: ("no ", "31")}
"""Whether something works -> (the word in front of it, its ANSI style)."""
_STATES: Mapping[SettingState, str] = {"differs": "33", "as advised": "32", "unknown": "2"}
"""State of a setting -> ANSI style, in the order in which the states are shown."""
_HIDDEN = ("ok", "skipped")
"""Levels that only --verbose shows."""
# Bytes of weights from which a rehearsal is worth its minute.
_LARGE = 10**10
# The most GPUs that can share the tiny model's 8 experts.
_MOST_GPUS_OF_TINY = 16


def exit_code(findings: Sequence[Reported]) -> int:
    return _CODES[max((each.finding.level for each in findings), key=LEVELS.index)]


def findings_document(
    findings: Sequence[Reported], capabilities: Sequence[Capability], facts: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    """:param facts: host -> its facts."""
    code = exit_code(findings)
    return {
        "schema": SCHEMA,
        "ok": code == 0,
        "exit_code": code,
        "findings": [
            {
                "check": each.check,
                "title": each.title,
                "host": each.host,
                **asdict(each.finding),
                "blocks": list(each.needs) if each.finding.blocks else [],
            }
            for each in findings
        ],
        "facts": facts,
        "capabilities": [
            {
                "id": each.id,
                "title": each.title,
                "works": each.works,
                "in_the_way": [{"check": blocking.check, "host": blocking.host} for blocking in each.blocked_by],
            }
            for each in capabilities
        ],
    }


def show_findings(
    findings: Sequence[Reported], capabilities: Sequence[Capability], *, verbose: bool, several: bool
) -> None:
    """Print the findings, and what works.

    :param verbose: show what is in order, too.
    :param several: the findings are of several hosts, so name the host of each.
    """
    shown = [reported for reported in findings if verbose or reported.finding.level not in _HIDDEN]
    for reported in shown:
        where = f"{reported.host}: " if several else ""
        _print_marked(_WORDS[reported.finding.level], f"{where}{reported.title}: {reported.finding.result}")
        if reported.finding.level in _HIDDEN:
            continue
        for label, text in (("", reported.finding.cause), ("fix: ", reported.finding.fix)):
            if text:
                print(paragraph(f"{label}{text}", "         "))
    if shown:
        print()
    counts = Counter(reported.finding.level for reported in findings)
    parts = [f"{counts[level]} {level}{'' if counts[level] == 1 else 's'}" for level in ("error", "warning", "note")]
    parts += [f"{counts['ok']} ok", f"{counts['skipped']} skipped"]
    print(", ".join(parts) + ("" if verbose else " (-v shows them)"))
    print(f"\n{styled('what works here', '1')}")
    for capability in capabilities:
        blocked = [
            f"{reported.host}: {reported.title}" if several else reported.title for reported in capability.blocked_by
        ]
        why = f" (in the way: {', '.join(dict.fromkeys(blocked))})" if blocked else ""
        _print_marked(_ANSWERS[capability.works], f"{capability.title}{why}", "  ")


def _print_marked(mark: tuple[str, str], text: str, indent: str = "") -> None:
    """Print a word in its style, and `text` behind it in a column of its own."""
    word, style = mark
    column = f"{indent}{' ' * len(word)}  "
    print(f"{indent}{styled(word, style)}  {paragraph(text, column, '').removeprefix(column)}")


def show_rehearsal(expected: Expected) -> None:
    """Print how to try this machine before the weights are loaded; nothing where they are small or unknown."""
    if not expected.uses_gpus or not expected.gpu or (expected.checkpoint_bytes or 0) < _LARGE:
        return
    gpus = min(expected.world_size or 1, _MOST_GPUS_OF_TINY)
    versions = {"--trtllm": expected.release, "--vllm": expected.vllm}
    release = "".join(f" {option} {version}" for option, version in versions.items() if version)
    mpi = ", MPI" if expected.is_tensorrt_llm else ""
    text = (
        f"rehearse it, because these are {expected.checkpoint_bytes or 0:,} bytes of weights: the tiny model "
        f"should take about a minute, on the same container, driver, NCCL{mpi} and kernels: "
        f"deepseek-triton build tiny --engine {expected.engine} --gpu {expected.gpu} --gpus {gpus}{release} "
        "--output rehearsal"
    )
    print(f"\n{styled('first', '1')}\n{paragraph(text, '  ')}")


def tuning_exit_code(results: Sequence[HostResult]) -> int:
    """Return 1 when a host could not be looked at. A setting that differs is no fault."""
    return 0 if all(result.report for result in results) else 1


def tuning_document(results: Sequence[HostResult]) -> dict[str, Any]:
    hosts = [
        {
            "host": result.host,
            "problems": _problems(result),
            "settings": [asdict(setting) for setting in result.report.settings] if result.report else [],
        }
        for result in results
    ]
    code = tuning_exit_code(results)
    return {"schema": TUNING_SCHEMA, "ok": code == 0, "exit_code": code, "hosts": hosts}


def show_tuning(results: Sequence[HostResult], *, verbose: bool) -> None:
    """Print the settings of each host.

    :param verbose: give the advice for every setting, not only for those that differ from it.
    """
    counts: Counter[SettingState] = Counter()
    indent = " " * 14
    for result in results:
        print(styled(result.host, "1"))
        for problem in _problems(result):
            print(paragraph(problem, "  "))
        settings = result.report.settings if result.report else ()
        counts.update(setting.state for setting in settings)
        for setting in sorted(settings, key=lambda setting: [*_STATES].index(setting.state)):
            word = styled(f"{setting.state:<10}", _STATES[setting.state])
            print(f"  {word}  {paragraph(f'{setting.title}: {setting.found}', indent, '').strip()}")
            if setting.state == "differs" or verbose:
                print(paragraph(f"advised: {setting.advised}; {setting.reason} ({setting.source})", indent))
                for command in setting.commands:
                    print(f"{indent}{command}")  # it is to be copied, so it is not wrapped
        print()
    print(", ".join(f"{counts[state]} {state}" for state in _STATES))
    print("nothing was changed; what the commands change lasts until the machine restarts")


def _problems(result: HostResult) -> list[str]:
    """Return why the host could not be looked at, or not well."""
    findings = [each.finding for each in result.findings if each.finding.level not in _HIDDEN]
    return [f"{each.result}: {each.cause}; fix: {each.fix}" for each in findings]
