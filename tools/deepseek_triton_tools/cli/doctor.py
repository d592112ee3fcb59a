"""`deepseek-triton doctor`: what is wrong before a load of twenty minutes, and what works here."""

from __future__ import annotations

import argparse
import os
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from deepseek_triton_tools.cli.parsing import VerbParser, add_json, path, port, words
from deepseek_triton_tools.cli.start_variables import take_start_variables
from deepseek_triton_tools.doctor.findings import (
    LEVELS,
    MPIRUN,
    SERVE,
    Capability,
    Expected,
    Level,
    Reported,
    assess_capabilities,
    error,
    note,
)
from deepseek_triton_tools.doctor.hosts import (
    HostResult,
    Ssh,
    compare,
    examine_here,
    examine_hosts,
    examine_through,
    is_here,
    parse_host_file,
)
from deepseek_triton_tools.doctor.machine import Machine
from deepseek_triton_tools.doctor.mpi_exchange import exchange_findings
from deepseek_triton_tools.doctor.tuning_report import show_tuning, tuning_document, tuning_exit_code
from deepseek_triton_tools.terminal.output_streams import complain, print_json, to_reader
from deepseek_triton_tools.terminal.tables import paragraph, styled
from deepseek_triton_tools.tool_errors import ToolError

SCHEMA = "deepseek-triton/doctor/1"
_CODES: dict[Level, int] = {"ok": 0, "skipped": 0, "note": 0, "warning": 3, "error": 1}
"""Level -> exit code. The worst finding decides."""
_WORDS: dict[Level, tuple[str, str]] = {
    "ok": ("ok", "32"),
    "skipped": ("-", "2"),
    "note": ("note", "2"),
    "warning": ("warning", "33"),
    "error": ("error", "31"),
}
"""Level -> (the word in front of a finding, its ANSI style)."""
_ANSWERS = {True: ("yes", "32"), False: ("no ", "31")}
"""Whether something works -> (the word in front of it, its ANSI style)."""
_HIDDEN = ("ok", "skipped")
"""Levels that only --verbose shows."""
_PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}


def add_options(verb: VerbParser) -> None:
    verb.runs(
        _doctor,
        "deepseek-triton doctor r1 --hosts node1,node2 --ssh-port 2233 --interface eth0",
        "deepseek-triton doctor r1 --through 'docker exec -i triton'",
        notes="exit codes: 0 nothing worse than a note; 1 errors; 2 wrong command line; 3 warnings.\n"
        "docs/doctor.md lists every check.",
    )
    verb.usage = "%(prog)s [DIR] [options]"
    verb.add_argument("repository", nargs="?", type=path, metavar="DIR", help="the model repository to be served")
    verb.add_argument("--model", type=path, metavar="PATH", help="the checkpoint's folder on these machines")
    verb.add_argument(
        "--tune", action="store_true", help="show clocks, power, NUMA and so on, as found and as advised, and commands"
    )
    verb.add_argument("-v", "--verbose", action="store_true", help="show what is in order and what was skipped, too")
    add_json(verb, "docs/doctor.md")
    where = verb.add_argument_group("where", "The other machines need only python3; nothing is installed on them.")
    which = where.add_mutually_exclusive_group()
    which.add_argument("--hosts", type=_host_names, metavar="A,B", help="check the machines it will run on, by ssh")
    which.add_argument("--host-file", type=path, metavar="FILE", help="the same, one host on each line")
    which.add_argument("--through", metavar="COMMAND", help="check where COMMAND runs programs: 'docker exec -i NAME'")
    where.add_argument("--ssh-port", type=port, metavar="PORT", help="port of sshd on them (default: ssh's own)")
    where.add_argument("--ssh-args", metavar="TEXT", help="more arguments of ssh, as in --ssh-args='-i key'")
    where.add_argument("--interface", type=words, metavar="NAME", help="network interface between them, such as eth0")
    where.add_argument("--python", type=words, metavar="PROGRAM", help="server's Python (default: python3 on hosts)")
    ports = verb.add_argument_group(
        "ports of the server", "HTTP_PORT, GRPC_PORT and METRICS_PORT, if set, are the defaults."
    )
    for name, default in _PORTS.items():
        ports.add_argument(f"--{name}-port", type=port, metavar="PORT", help=f"{name} port (default: {default})")


def _host_names(text: str) -> list[str]:
    hosts = list(dict.fromkeys(host.strip() for host in text.split(",")))
    if all(hosts) and not any(host.startswith("-") for host in hosts):
        return hosts
    raise argparse.ArgumentTypeError(f"expected names separated by commas, as node1,node2, got {text!r}")


def _doctor(args: argparse.Namespace) -> int:
    """Look at everything, and print it. Raises ToolError for a command line that asks for what can't be, and BuildError
    when the folder is not a repository."""
    http_port, grpc_port, metrics_port = _ports(args)
    hosts = _hosts(args)
    machine = Machine()
    name = machine.hostname
    expected, checked = _expected(args, name)
    expected = replace(
        expected,
        hosts=hosts,
        interface=args.interface,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        tune=args.tune,
    )
    ssh = _ssh(args)
    visits = _visit(args, hosts, machine, expected, ssh)
    if args.tune:
        with to_reader():
            print_json(tuning_document(visits)) if args.json else show_tuning(visits, verbose=args.verbose)
        return tuning_exit_code(visits)
    reports = [visit.report for visit in visits if visit.report]
    findings = [*checked, *(found for visit in visits for found in _findings(visit)), *compare(reports, expected)]
    findings += exchange_findings(visits, machine, expected, ssh=ssh, python=args.python)
    findings = [*_host_findings(hosts, machine, expected), *findings]
    code = _exit_code(findings)
    can = assess_capabilities(findings, expected)
    with to_reader():
        if args.json:
            facts = {report.host: dict(report.facts) for report in reports}
            print_json(_document(findings, can, facts, code))
        else:
            _show(findings, can, verbose=args.verbose, several=len(visits) > 1)
            if rehearsal := _rehearsal(expected):
                print(f"\n{styled('first', '1')}\n{paragraph(rehearsal, '  ')}")
    return code


def _ports(args: argparse.Namespace) -> tuple[int, int, int]:
    """The ports of HTTP, gRPC and metrics that start.sh would take: doctor speaks of the ones that will be used. Raises
    ToolError when two are the same, or a variable of start.sh is no port."""
    take_start_variables(args, [f"{name}_port" for name in _PORTS])
    http, grpc, metrics = (getattr(args, f"{name}_port") or default for name, default in _PORTS.items())
    if len({http, grpc, metrics}) < len(_PORTS):
        raise ToolError(f"HTTP, gRPC and metrics need a port each, got {http}, {grpc}, {metrics}", exit_code=2)
    return http, grpc, metrics


def _hosts(args: argparse.Namespace) -> tuple[str, ...]:
    if args.host_file is None:
        hosts = tuple(args.hosts or ())
    else:
        try:
            hosts = tuple(parse_host_file(args.host_file.read_text()))
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise ToolError(f"--host-file {args.host_file}: can't be read: {why}", exit_code=2) from error
        if not hosts:
            raise ToolError(f"--host-file {args.host_file}: expected a host on each line, got none", exit_code=2)
    if not hosts and (args.ssh_port or args.ssh_args):
        raise ToolError("--ssh-port and --ssh-args are for --hosts or --host-file", exit_code=2)
    return hosts


def _expected(args: argparse.Namespace, host: str) -> tuple[Expected, Sequence[Reported]]:
    """Return what is expected, and what `check` says of the repository. Without a repository nothing is expected."""
    if args.repository is None:
        if args.model is not None:
            raise ToolError("--model is for a repository: name its folder first", exit_code=2)
        return Expected(), []
    from deepseek_triton_build.check import CheckOptions, check_repository
    from deepseek_triton_tools.doctor.expected_of_repository import check_findings, expected_of, known_containers

    # The checkpoint may be on this machine; the hosts that it is to run on look for themselves.
    here = args.model if args.model is not None and os.path.isdir(args.model) else None
    report = check_repository(args.repository, CheckOptions(model_root=here))
    expected = expected_of(args.repository, report, args.model)
    return replace(expected, containers=known_containers()), list(check_findings(report, host))


def _ssh(args: argparse.Namespace) -> Ssh:
    return Ssh(port=args.ssh_port, args=tuple(_shell_words(args.ssh_args)))


def _shell_words(text: str | None) -> Sequence[str]:
    try:
        return shlex.split(text or "")
    except ValueError as error:
        raise ToolError(
            f"--ssh-args and --through: expected words as a shell has them: {error}", exit_code=2
        ) from error


def _visit(
    args: argparse.Namespace, hosts: Sequence[str], machine: Machine, expected: Expected, ssh: Ssh
) -> Sequence[HostResult]:
    if args.through is not None:
        through = _shell_words(args.through)
        if not through:
            raise ToolError("--through: expected a command, got nothing: is a variable not set?", exit_code=2)
        return [examine_through(through, expected, python=args.python)]
    if not hosts:
        return [examine_here(machine, expected, host=machine.hostname, python=args.python)]
    complain(f"doctor: asking {', '.join(hosts)}")
    return examine_hosts(hosts, machine, expected, ssh=ssh, python=args.python)


def _exit_code(findings: Sequence[Reported]) -> int:
    levels: set[Level] = {found.finding.level for found in findings}
    return _CODES[max(levels, key=LEVELS.index)]


def _findings(result: HostResult) -> Iterator[Reported]:
    yield from result.findings
    yield from result.report.findings if result.report else ()


def _host_findings(hosts: Sequence[str], machine: Machine, expected: Expected) -> Iterator[Reported]:
    """Check that there are as many hosts as the repository takes, and that this machine is the first."""
    name, needs = machine.hostname, (SERVE, MPIRUN)
    if hosts and expected.uses_gpus and len(hosts) != expected.num_nodes:
        finding = error(
            f"{len(hosts)} of them: {', '.join(hosts)}",
            f"the repository takes {expected.num_nodes}",
            "name as many, or build again with other --gpus",
        )
        yield Reported(check="hosts", title="hosts", host=name, finding=finding, needs=needs)
    if hosts and not is_here(hosts[0], machine):
        finding = note(
            f"this machine ({name}) is not {hosts[0]}, the first of them",
            "start.sh and launch mpirun run on the first of the hosts",
            f"run them on {hosts[0]}",
        )
        yield Reported(check="hosts", title="hosts", host=name, finding=finding, needs=needs)


def _show(findings: Sequence[Reported], can: Sequence[Capability], *, verbose: bool, several: bool) -> None:
    shown = [found for found in findings if verbose or found.finding.level not in _HIDDEN]
    for found in shown:
        _show_finding(found, several=several)
    if shown:
        print()
    print(_counts(findings, verbose=verbose))
    print(f"\n{styled('what works here', '1')}")
    for capability in can:
        _print_marked(_ANSWERS[capability.works], _capability(capability, several=several), "  ")


def _show_finding(found: Reported, *, several: bool) -> None:
    word, style = _WORDS[found.finding.level]
    where = f"{found.host}: " if several else ""
    _print_marked((f"{word:<7}", style), f"{where}{found.title}: {found.finding.result}")
    if found.finding.level in _HIDDEN:
        return
    for label, text in (("", found.finding.cause), ("fix: ", found.finding.fix)):
        if text:
            print(paragraph(f"{label}{text}", "         "))


def _rehearsal(expected: Expected) -> str:
    """Return how to try this machine before the weights are loaded; an empty string where they are small or unknown."""
    if not expected.uses_gpus or not expected.gpu or (expected.checkpoint_bytes or 0) < _LARGE:
        return ""
    gpus = min(expected.world_size or 1, _MOST_GPUS_OF_TINY)
    versions = {"--trtllm": expected.release, "--vllm": expected.vllm}
    release = "".join(f" {option} {version}" for option, version in versions.items() if version)
    mpi = ", MPI" if expected.is_tensorrt_llm else ""
    return (
        f"rehearse it, because these are {expected.checkpoint_bytes or 0:,} bytes of weights: the tiny model "
        f"should take about a minute, on the same container, driver, NCCL{mpi} and kernels: "
        f"deepseek-triton build tiny --engine {expected.engine} --gpu {expected.gpu} --gpus {gpus}{release} "
        "--output rehearsal"
    )


_LARGE = 10**10
"""Bytes of weights from which a rehearsal is worth its minute."""
_MOST_GPUS_OF_TINY = 16
"""The most GPUs that can share the tiny model's 8 experts."""


def _print_marked(mark: tuple[str, str], text: str, indent: str = "") -> None:
    """Print a word in its style, and `text` behind it in a column of its own."""
    word, style = mark
    column = f"{indent}{' ' * len(word)}  "
    print(f"{indent}{styled(word, style)}  {paragraph(text, column, '').removeprefix(column)}")


def _counts(findings: Sequence[Reported], *, verbose: bool) -> str:
    counts = Counter(found.finding.level for found in findings)
    shown = [f"{counts[level]} {level}{'' if counts[level] == 1 else 's'}" for level in ("error", "warning", "note")]
    shown += [f"{counts['ok']} ok", f"{counts['skipped']} skipped"]
    return ", ".join(shown) + ("" if verbose else " (-v shows them)")


def _capability(capability: Capability, *, several: bool) -> str:
    blocked = [f"{found.host}: {found.title}" if several else found.title for found in capability.blocked_by]
    return capability.title + (f" (in the way: {', '.join(dict.fromkeys(blocked))})" if blocked else "")


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
