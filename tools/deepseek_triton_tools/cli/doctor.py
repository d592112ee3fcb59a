"""`deepseek-triton doctor`: what is wrong before a load of twenty minutes, and what works here.

Exit codes by the worst finding: 0 nothing worse than a note, 3 warnings, 1 errors; 2 the command line.
"""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepseek_triton_tools.doctor.comparing import compare
from deepseek_triton_tools.doctor.hosts import (
    HostResult,
    Ssh,
    examine_here,
    examine_hosts,
    examine_through,
    is_here,
    parse_host_file,
)
from deepseek_triton_tools.doctor.machine.capabilities import MPIRUN, SERVE, Capability, assess_capabilities
from deepseek_triton_tools.doctor.machine.expected import Expected
from deepseek_triton_tools.doctor.machine.machine_finding import LEVELS, Level, Reported, error, note
from deepseek_triton_tools.doctor.machine.real_machine import RealMachine
from deepseek_triton_tools.terminal.output_streams import complain, to_reader
from deepseek_triton_tools.terminal.tables import paragraph, styled
from deepseek_triton_tools.tool_errors import ToolError

SCHEMA = "deepseek-triton/doctor/1"
_CODES: dict[Level, int] = {"ok": 0, "skipped": 0, "note": 0, "warning": 3, "error": 1}
_MARKS: dict[Level, tuple[str, str]] = {
    "ok": ("ok", "32"),
    "skipped": ("-", "2"),
    "note": ("note", "2"),
    "warning": ("warning", "33"),
    "error": ("error", "31"),
}
"""Level -> what is written, and its ANSI style."""
_HIDDEN = ("ok", "skipped")


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    repository: Path | None = None
    model: Path | None = None
    hosts: tuple[str, ...] = ()
    """None: this machine alone."""
    host_file: Path | None = None
    through: str | None = None
    """A command that runs another, in a container say."""
    ssh_port: int | None = None
    ssh_args: str | None = None
    interface: str | None = None
    python: str | None = None
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    verbose: bool = False


def doctor(options: DoctorOptions, *, as_json: bool) -> int:
    """Look at everything, and print it.

    :raises ToolError: when the command line asks for what can't be.
    :raises deepseek_triton_build.BuildError: when `repository` is none.
    """
    ports = (options.http_port, options.grpc_port, options.metrics_port)
    if len(set(ports)) < len(ports):
        raise ToolError(f"HTTP, gRPC and metrics need a port each, got {', '.join(map(str, ports))}", exit_code=2)
    hosts = _hosts(options)
    machine = RealMachine()
    name = machine.hostname
    expected, checked = _expected(replace(options, hosts=hosts), name)
    visits = _visit(options, hosts, machine, expected)
    reports = [visit.report for visit in visits if visit.report]
    findings = [*checked, *(found for visit in visits for found in _of_visit(visit)), *compare(reports, expected)]
    findings = [*_of_hosts(hosts, machine, expected), *findings]
    code = _exit_code(findings)
    can = assess_capabilities(findings, expected)
    with to_reader():
        if as_json:
            facts = {report.host: dict(report.facts) for report in reports}
            print(json.dumps(_document(findings, can, facts, code), indent=2, allow_nan=False))
        else:
            _show(findings, can, verbose=options.verbose, several=len(visits) > 1)
    return code


def _hosts(options: DoctorOptions) -> tuple[str, ...]:
    if options.host_file is None:
        hosts = options.hosts
    else:
        try:
            hosts = tuple(parse_host_file(options.host_file.read_text()))
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise ToolError(f"--host-file {options.host_file}: can't be read: {why}", exit_code=2) from error
        if not hosts:
            raise ToolError(f"--host-file {options.host_file}: expected a host on each line, got none", exit_code=2)
    if not hosts and (options.ssh_port or options.ssh_args):
        raise ToolError("--ssh-port and --ssh-args are for --hosts or --host-file", exit_code=2)
    return hosts


def _expected(options: DoctorOptions, host: str) -> tuple[Expected, Sequence[Reported]]:
    """What is expected, and what `check` says of the repository. Without one, nothing needs to be installed."""
    if options.model is not None and options.repository is None:
        raise ToolError("--model is for a repository: name its folder first", exit_code=2)
    expected, checked = Expected(), list[Reported]()
    if options.repository is not None:
        expected, checked = _read(options.repository, options.model, host)
    return (
        replace(
            expected,
            hosts=options.hosts,
            interface=options.interface,
            http_port=options.http_port,
            grpc_port=options.grpc_port,
            metrics_port=options.metrics_port,
        ),
        checked,
    )


def _read(repository: Path, model: Path | None, host: str) -> tuple[Expected, list[Reported]]:
    from deepseek_triton_build.check import CheckOptions, check_repository
    from deepseek_triton_tools.doctor.expected_of_repository import check_findings, expected_of, known_containers

    # Where it is on this machine; the hosts that it is to run on look for themselves.
    here = model if model is not None and os.path.isdir(model) else None
    report = check_repository(repository, CheckOptions(model_root=here))
    expected = expected_of(repository, report, model)
    return replace(expected, containers=known_containers()), list(check_findings(report, host))


def _visit(
    options: DoctorOptions, hosts: Sequence[str], machine: RealMachine, expected: Expected
) -> Sequence[HostResult]:
    try:
        ssh_args = tuple(shlex.split(options.ssh_args or ""))
        through = shlex.split(options.through or "")
    except ValueError as error:
        raise ToolError(
            f"--ssh-args and --through: expected words as a shell has them: {error}", exit_code=2
        ) from error
    if options.through is not None:
        if not through:
            raise ToolError("--through: expected a command, got nothing: is a variable not set?", exit_code=2)
        return [examine_through(through, expected, python=options.python)]
    if not hosts:
        return [examine_here(machine, expected, host=machine.hostname, python=options.python)]
    complain(f"doctor: asking {', '.join(hosts)}")
    return examine_hosts(hosts, machine, expected, ssh=Ssh(port=options.ssh_port, args=ssh_args), python=options.python)


def _exit_code(findings: Sequence[Reported]) -> int:
    levels: set[Level] = {found.finding.level for found in findings}
    return _CODES[max(levels, key=LEVELS.index)]


def _of_visit(visit: HostResult) -> Iterator[Reported]:
    yield from visit.findings
    yield from visit.report.findings if visit.report else ()


def _of_hosts(hosts: Sequence[str], machine: RealMachine, expected: Expected) -> Iterator[Reported]:
    """Whether they are as many as the repository takes, this one first."""
    name, needs = machine.hostname, (SERVE, MPIRUN)
    if hosts and expected.is_tensorrt_llm and len(hosts) != expected.num_nodes:
        finding = error(
            f"{len(hosts)} of them: {', '.join(hosts)}",
            f"the repository takes {expected.num_nodes}",
            "name as many, or build again with other --gpus",
        )
        yield Reported(check="hosts", title="hosts", host=name, finding=finding, needs=needs)
    if hosts and not is_here(hosts[0], machine):
        finding = note(
            f"this machine ({name}) is not {hosts[0]}, the first of them",
            "start.sh and launch --with mpirun run on the first of the hosts",
            f"run them on {hosts[0]}",
        )
        yield Reported(check="hosts", title="hosts", host=name, finding=finding, needs=needs)


def _show(findings: Sequence[Reported], can: Sequence[Capability], *, verbose: bool, several: bool) -> None:
    shown = [found for found in findings if verbose or found.finding.level not in _HIDDEN]
    for found in shown:
        _show_finding(found, several=several)
    if shown:
        print()
    print(_counted(findings, verbose=verbose))
    print(f"\n{styled('what works here', '1')}")
    for capability in can:
        print(paragraph(_capability(capability, several=several), "  ", "       "))


def _show_finding(found: Reported, *, several: bool) -> None:
    mark, style = _MARKS[found.finding.level]
    where = f"{found.host}: " if several else ""
    line = f"{where}{found.title}: {found.finding.result}"
    first, *rest = paragraph(line, "", "         ").split("\n")
    print("\n".join([f"{styled(f'{mark:<7}', style)}  {first}", *rest]))
    if found.finding.level in _HIDDEN:
        return
    for label, text in (("", found.finding.cause), ("fix: ", found.finding.fix)):
        if text:
            print(paragraph(f"{label}{text}", "         "))


def _counted(findings: Sequence[Reported], *, verbose: bool) -> str:
    counts = Counter(found.finding.level for found in findings)
    said = [f"{counts[level]} {level}{'' if counts[level] == 1 else 's'}" for level in ("error", "warning", "note")]
    said += [f"{counts['ok']} ok", f"{counts['skipped']} skipped"]
    return ", ".join(said) + ("" if verbose else " (-v shows them)")


def _capability(capability: Capability, *, several: bool) -> str:
    mark = styled("yes", "32") if capability.works else styled("no ", "31")
    blocked = [f"{found.host}: {found.title}" if several else found.title for found in capability.blocked_by]
    return f"{mark}  {capability.title}" + (f" (in the way: {', '.join(dict.fromkeys(blocked))})" if blocked else "")


def _document(
    findings: Sequence[Reported], can: Sequence[Capability], facts: dict[str, dict[str, str]], code: int
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "ok": code == 0,
        "exit_code": code,
        "findings": [
            {
                "check": found.check,
                "title": found.title,
                "host": found.host,
                "level": found.finding.level,
                "result": found.finding.result,
                "cause": found.finding.cause,
                "fix": found.finding.fix,
                "blocks": list(found.needs) if found.finding.blocks else [],
            }
            for found in findings
        ],
        "facts": facts,
        "capabilities": [
            {
                "id": each.id,
                "title": each.title,
                "works": each.works,
                "in_the_way": [{"check": found.check, "host": found.host} for found in each.blocked_by],
            }
            for each in can
        ],
    }
