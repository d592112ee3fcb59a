"""The settings of `doctor --tune`, as text and as a JSON document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from deepseek_triton_tools.doctor.hosts import HostResult
from deepseek_triton_tools.doctor.tuning import MachineSetting, SettingState
from deepseek_triton_tools.terminal.tables import paragraph, styled

SCHEMA = "deepseek-triton/tune/1"
_STYLES: dict[SettingState, str] = {"differs": "33", "as advised": "32", "unknown": "2"}
"""State -> ANSI style, in the order in which the states are shown."""


def tuning_document(visits: Sequence[HostResult]) -> dict[str, Any]:
    hosts = [
        {
            "host": visit.host,
            "problems": _problems(visit),
            "settings": [asdict(setting) for setting in visit.report.settings] if visit.report else [],
        }
        for visit in visits
    ]
    code = tuning_exit_code(visits)
    return {"schema": SCHEMA, "ok": code == 0, "exit_code": code, "hosts": hosts}


def tuning_exit_code(visits: Sequence[HostResult]) -> int:
    """Return 1 when a host could not be looked at. A setting that differs is no fault."""
    return 0 if all(visit.report for visit in visits) else 1


def show_tuning(visits: Sequence[HostResult], *, verbose: bool) -> None:
    """Print the settings of each host.

    :param verbose: give the advice for every setting, not only for those that differ from it.
    """
    for visit in visits:
        print(styled(visit.host, "1"))
        for problem in _problems(visit):
            print(paragraph(problem, "  "))
        settings = visit.report.settings if visit.report else ()
        for state in _STYLES:
            for setting in settings:
                if setting.state == state:
                    _show_setting(setting, verbose=verbose)
        print()
    counts = Counter(setting.state for visit in visits if visit.report for setting in visit.report.settings)
    print(", ".join(f"{counts[state]} {state}" for state in _STYLES))
    print("nothing was changed; what the commands change lasts until the machine restarts")


def _problems(visit: HostResult) -> list[str]:
    """Return why the host could not be looked at, or not well."""
    found = [each.finding for each in visit.findings if each.finding.level not in ("ok", "skipped")]
    return [f"{each.result}: {each.cause}; fix: {each.fix}" for each in found]


def _show_setting(setting: MachineSetting, *, verbose: bool) -> None:
    word = styled(f"{setting.state:<10}", _STYLES[setting.state])
    print(f"  {word}  {paragraph(f'{setting.title}: {setting.found}', ' ' * 14, '').strip()}")
    if setting.state != "differs" and not verbose:
        return
    print(paragraph(f"advised: {setting.advised}; {setting.reason} ({setting.source})", " " * 14))
    for command in setting.commands:
        print(f"{' ' * 14}{command}")  # it is to be copied, so it is not wrapped
