"""Pytest's plugin that runs the tests once for each mutant, in a fork that stops at the first failure.

The tests are collected once. A fork replaces the code of the mutant's function, and runs the tests that came through
this line in an earlier run (`--record`); so a mutant takes seconds. Faults in what runs at import can't be put in this
way: `run.py` writes those to disk.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import CodeType, FunctionType

import pytest
from hypothesis import settings

from mutants.sites import ROOT, Mutant


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mutants")
    group.addoption("--record", type=Path, help="write which tests come through which line to this file")
    group.addoption("--mutants", type=Path, help="run each mutant of this file of JSON")
    group.addoption("--lines", type=Path, help="what --record wrote")
    group.addoption("--verdicts", type=Path, help="where to write a line of JSON for each mutant")
    group.addoption("--limit-s", type=float, default=120, help="the longest time for a mutant; one over it is killed")


def pytest_configure(config: pytest.Config) -> None:
    settings.register_profile("mutants", settings.default, database=None, derandomize=True)
    settings.load_profile("mutants")
    if config.getoption("--record"):
        config.pluginmanager.register(Recorder(config.getoption("--record")))
    elif config.getoption("--mutants"):
        config.pluginmanager.register(Runner(config))


class Recorder:
    """Writes {path: {line: [test]}}, without the tests that fail anyway, and the seconds of each test."""

    def __init__(self, path: Path) -> None:
        import coverage

        self._path = path
        self._coverage = coverage.Coverage(
            data_file=None, source=[str(ROOT / name) for name in ("model_repository", "build", "client", "tools")]
        )
        self._seconds: dict[str, float] = {}
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)

    def pytest_sessionstart(self) -> None:
        self._coverage.start()
        self._coverage.switch_context("")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        self._coverage.switch_context(item.nodeid)
        start = time.monotonic()
        try:
            return (yield)
        finally:
            self._seconds[item.nodeid] = time.monotonic() - start
            self._coverage.switch_context("")

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        data = self._coverage.get_data()
        lines = {}
        for name in data.measured_files():
            contexts = data.contexts_by_lineno(name)
            lines[str(Path(name).relative_to(ROOT))] = {
                line: sorted({*tests} - {""} - self._failed) for line, tests in contexts.items()
            }
        self._path.write_text(json.dumps({"lines": lines, "seconds": self._seconds}))


class Runner:
    def __init__(self, config: pytest.Config) -> None:
        recorded = json.loads(config.getoption("--lines").read_text())
        self._lines, self._seconds = recorded["lines"], recorded["seconds"]
        self._mutants = [Mutant(**fields) for fields in json.loads(config.getoption("--mutants").read_text())]
        self._limit_s = config.getoption("--limit-s")
        self._verdicts = config.getoption("--verdicts")
        config.option.maxfail = 1

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        by_id = {item.nodeid: item for item in session.items}
        functions = _functions()
        with self._verdicts.open("a") as out:
            for mutant in self._mutants:
                start = time.monotonic()
                tests = [name for name in self._tests(mutant) if name in by_id]
                items = [by_id[name] for name in tests]
                killed, how = _verdict(session, mutant, items, functions, self._limit_s)
                row = {"mutant": str(mutant), "killed": killed, "how": how, "tests": len(tests)}
                row["seconds"] = round(time.monotonic() - start, 1)
                print(json.dumps(row), file=out, flush=True)
        return True

    def _tests(self, mutant: Mutant) -> list[str]:
        """Return the tests that come through the lines of the mutant, the quickest first."""
        lines = self._lines.get(mutant.path, {})
        names: dict[str, None] = {}
        for line in range(mutant.line, mutant.line + mutant.old.count("\n") + 1):
            names |= dict.fromkeys(lines.get(str(line), ()))
        return sorted(names, key=lambda name: self._seconds.get(name, 0))


def _functions() -> dict[tuple[str, str], list[FunctionType]]:
    """Return the functions of the product by file and qualified name."""
    found = defaultdict(list)
    for one in gc.get_objects():
        if type(one) is FunctionType and one.__code__.co_filename.startswith(str(ROOT)):
            found[one.__code__.co_filename, one.__code__.co_qualname].append(one)
    return found


def _code(code: CodeType, name: str) -> CodeType | None:
    """Return the function of that qualified name in the code of a module."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_qualname == name:
                return constant
            if name.startswith(f"{constant.co_qualname}.") and (inner := _code(constant, name)):
                return inner
    return None


def _verdict(session, mutant, items, functions, limit_s) -> tuple[bool | None, str]:
    """Return whether a test fails, and how; None where the fault can't be put in in this process."""
    path = ROOT / mutant.path
    old = functions.get((str(path), mutant.function), [])
    new = _code(compile(mutant.source(ROOT), str(path), "exec"), mutant.function) if mutant.function else None
    old = [one for one in old if new and len(one.__code__.co_freevars) == len(new.co_freevars)]
    if not items:
        return None, "no test comes through this line in pytest's process"
    if not old or not new:
        return None, "runs at import"
    pid = os.fork()
    if not pid:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        for one in old:
            one.__code__ = new
        code = 3
        try:
            session.items[:] = items
            session.shouldfail = session.shouldstop = False
            code = _run(session)
        finally:
            os._exit(code)
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return code != 0, "a test fails" if code == 1 else f"pytest ends with {code}" if code else "survives"
        time.sleep(0.01)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return True, "takes too long"


def _run(session: pytest.Session) -> int:
    for index, item in enumerate(session.items):
        following = session.items[index + 1] if index + 1 < len(session.items) else None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail or session.testsfailed:
            return 1
    return 0


if sys.version_info < (3, 11):
    raise SystemExit("co_qualname is Python 3.11's")
