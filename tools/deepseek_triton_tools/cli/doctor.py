"""`deepseek-triton doctor`: what is wrong before a load of twenty minutes, and what works here."""

import argparse
import os
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from deepseek_triton_tools.cli.parsing import VerbParser, add_json, option, path, port, take_start_variables, words
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
    is_for,
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
from deepseek_triton_tools.doctor.tuning import SettingState
from deepseek_triton_tools.host.units import sized
from deepseek_triton_tools.terminal.output_streams import complain, print_json, to_reader
from deepseek_triton_tools.terminal.tables import paragraph, styled
from deepseek_triton_tools.tool_errors import ToolError

_PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}


def add_options(verb: VerbParser) -> None:
    verb.runs(
        _doctor,
        "deepseek-triton doctor r1 --hosts node1,node2 --ssh-port 2233 --interface eth0",
        "deepseek-triton doctor r1 --through 'docker exec -i triton'",
        notes="exit codes: 0 nothing worse than a note; 1 errors; 2 wrong command line; 3 warnings.\n"
        "docs/doctor.md lists every check.",
        common="--model --tune --hosts --host-file --through --verbose --json",
    )
    verb.usage = "%(prog)s [DIR] [options]"
    option(verb, "repository DIR", "the model repository to be served", path, nargs="?")
    option(verb, "--model PATH", "the checkpoint's folder on these machines", path)
    option(verb, "--tune", "show clocks, power, NUMA and so on, as found and as advised, and commands")
    option(verb, "-v --verbose", "show what is in order and what was skipped, too")
    add_json(verb, "docs/doctor.md")
    where = verb.add_argument_group("where", "The other machines need only python3; nothing is installed on them.")
    which = where.add_mutually_exclusive_group()
    option(which, "--hosts A,B", "check the machines it will run on, by ssh", _host_names)
    option(which, "--host-file FILE", "the same, one host on each line", path)
    option(which, "--through COMMAND", "check where COMMAND runs programs: 'docker exec -i NAME'")
    option(where, "--ssh-port PORT", "port of sshd on them (default: ssh's own)", port)
    option(where, "--ssh-args TEXT", "more arguments of ssh, as in --ssh-args='-i key'")
    option(where, "--interface NAME", "network interface between them, such as eth0", words)
    option(where, "--python PROGRAM", "server's Python (default: python3 on hosts)", words)
    ports = verb.add_argument_group(
        "ports of the server", "HTTP_PORT, GRPC_PORT and METRICS_PORT, if set, are the defaults."
    )
    for name, default in _PORTS.items():
        option(ports, f"--{name}-port PORT", f"{name} port (default: {default})", port)


def _host_names(text: str) -> list[str]:
    hosts = list(dict.fromkeys(host.strip() for host in text.split(",")))
    if all(hosts) and not any(host.startswith("-") for host in hosts):
        return hosts
    raise argparse.ArgumentTypeError(f"expected names separated by commas, as node1,node2, got {text!r}")


def _doctor(args: argparse.Namespace) -> int:
    """Look at everything, and print it.

    :raises ToolError: for a command line that asks for what can't be.
    :raises BuildError: when the folder is not a repository.
    """
    hosts = _hosts(args)
    machine = Machine()
    expected, of_check = _expected(args, machine.hostname)
    expected = replace(expected, hosts=hosts, interface=args.interface, tune=args.tune, **_ports(args, expected))
    ssh = Ssh(port=args.ssh_port, args=tuple(_shell_words("--ssh-args", args.ssh_args)))
    results = _examine(args, machine, expected, ssh)
    if args.tune:
        with to_reader():
            if args.json:
                print_json(tuning_document(results))
            else:
                show_tuning(results, verbose=args.verbose)
        return tuning_exit_code(results)
    reports = [result.report for result in results if result.report]
    findings = [*_host_findings(hosts, machine, expected), *of_check]
    for result in results:
        findings += [*result.findings, *(result.report.findings if result.report else ())]
    findings += compare(reports, expected)
    findings += exchange_findings(results, machine, expected, ssh=ssh, python=args.python)
    capabilities = assess_capabilities(findings, expected)
    with to_reader():
        if args.json:
            facts = {each.host: each.facts for each in reports}
            print_json(findings_document(findings, capabilities, facts))
        else:
            own = [each for each in capabilities if is_for(each.id, expected)]
            show_findings(findings, own, verbose=args.verbose, several=len(results) > 1)
            show_rehearsal(expected)
    return exit_code(findings)


def _ports(args: argparse.Namespace, expected: Expected) -> dict[str, Any]:
    """Fields of Expected: the ports that start.sh would take, because doctor speaks of the ones that will be used.

    :raises ToolError: when two are the same, or a variable of start.sh is no port.
    """
    take_start_variables(args, [f"{name}_port" for name in _PORTS])
    ports = {f"{name}_port": getattr(args, f"{name}_port") or getattr(expected, f"{name}_port") for name in _PORTS}
    if expected.by_triton and len({*ports.values()}) < len(ports):
        numbers = ", ".join(map(str, ports.values()))
        raise ToolError(f"HTTP, gRPC and metrics need a port each, got {numbers}", exit_code=2)
    return ports


def _hosts(args: argparse.Namespace) -> tuple[str, ...]:
    hosts = tuple(args.hosts or ())
    if args.host_file is not None:
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
    from deepseek_triton_tools.doctor.expected_of_repository import check_findings, expected_of

    # The checkpoint may be on this machine; the hosts that it is to run on look for themselves.
    here = args.model if args.model is not None and os.path.isdir(args.model) else None
    checked = check_repository(args.repository, CheckOptions(model_root=here))
    return expected_of(args.repository, checked, args.model), list(check_findings(checked, host))


def _shell_words(option: str, text: str | None) -> Sequence[str]:
    try:
        return shlex.split(text or "")
    except ValueError as error:
        raise ToolError(f"{option}: expected words as a shell has them: {error}", exit_code=2) from error


def _examine(args: argparse.Namespace, machine: Machine, expected: Expected, ssh: Ssh) -> Sequence[HostResult]:
    if args.through is not None:
        if not (through := _shell_words("--through", args.through)):
            raise ToolError("--through: expected a command, got nothing: is a variable not set?", exit_code=2)
        return [examine_through(through, expected, python=args.python)]
    if not expected.hosts:
        return [examine_here(machine, expected, host=machine.hostname, python=args.python)]
    complain(f"doctor: asking {', '.join(expected.hosts)}")
    return examine_hosts(expected.hosts, machine, expected, ssh=ssh, python=args.python)


def _host_findings(hosts: Sequence[str], machine: Machine, expected: Expected) -> Iterator[Reported]:
    """Check that there are as many hosts as the repository takes, and that this machine is the first."""
    name, findings = machine.hostname, []
    if hosts and expected.uses_gpus and len(hosts) != expected.num_nodes:
        cause, fix = f"the repository takes {expected.num_nodes}", "name as many, or build again with other --gpus"
        findings.append(error(f"{len(hosts)} of them: {', '.join(hosts)}", cause, fix))
    if hosts and not is_here(hosts[0], machine):
        cause, fix = "start.sh and launch mpirun run on the first of the hosts", f"run them on {hosts[0]}"
        findings.append(note(f"this machine ({name}) is not {hosts[0]}, the first of them", cause, fix))
    for finding in findings:
        yield Reported(check="hosts", title="hosts", host=name, finding=finding, needs=(SERVE, MPIRUN))


SCHEMA = "deepseek-triton/doctor/1"
TUNING_SCHEMA = "deepseek-triton/tune/1"
# Level -> exit code. The worst finding decides.
_CODES: Mapping[Level, int] = {"ok": 0, "skipped": 0, "note": 0, "warning": 3, "error": 1}
# Level -> (the word in front of a finding, its ANSI style).
_WORDS: Mapping[Level, tuple[str, str]] = {
    "ok": ("ok     ", "32"),
    "skipped": ("-      ", "2"),
    "note": ("note   ", "2"),
    "warning": ("warning", "33"),
    "error": ("error  ", "31"),
}
# Whether something works -> (the word in front of it, its ANSI style).
_ANSWERS = {True: ("yes", "32"), False: ("no ", "31")}
# State of a setting -> ANSI style, in the order in which the states are shown.
_STATES: Mapping[SettingState, str] = {"differs": "33", "as advised": "32", "unknown": "2"}
# Levels that only --verbose shows.
_HIDDEN = ("ok", "skipped")
# Bytes of weights from which a rehearsal is worth its minute.
_LARGE = 10**10


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
    # The most that can share the tiny model: vLLM also divides its 8 heads.
    gpus = min(expected.world_size or 1, 16 if expected.is_tensorrt_llm else 8)
    versions = {"--trtllm": expected.release, "--vllm": expected.vllm}
    release = "".join(f" {option} {version}" for option, version in versions.items() if version)
    mpi = ", MPI" if expected.is_tensorrt_llm else ""
    text = (
        f"rehearse it, because these are {sized(expected.checkpoint_bytes or 0)} of weights: the tiny model should "
        f"take about a minute, on the same container, driver, NCCL{mpi} and kernels: "
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
