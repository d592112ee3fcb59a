"""`deepseek-triton probe`: ask a server once how it is; the answer is an exit code and one line."""

import argparse
import json
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from deepseek_triton_client import (
    AccessDenied,
    Client,
    DeadlineExceeded,
    DeepseekTritonError,
    InvalidRequest,
    ModelNotReady,
    Overloaded,
    Retries,
    ServerUnavailable,
    Timeouts,
)
from deepseek_triton_client._core.client_settings import Endpoint
from deepseek_triton_tools.cli.client_options import DEFAULT_URL, add_address, add_server_options, client_settings
from deepseek_triton_tools.cli.parsing import VerbParser, add_json, add_verb, duration, option
from deepseek_triton_tools.terminal.output_streams import complain, to_reader
from deepseek_triton_tools.tool_errors import ToolError, in_options

YES, NO, UNREACHABLE, TOO_LATE = 0, 1, 3, 4
_ANSWERS = {YES: "yes", NO: "no", UNREACHABLE: "unreachable", TOO_LATE: "too late"}
SCHEMA = "deepseek-triton/probe/1"

_QUESTIONS = {
    "live": (5.0, "ask whether the server answers"),
    "ready": (5.0, "ask whether the model can be called"),
    "generate": (30.0, "ask for one token; a full server passes unless its metrics show none"),
}
"""Question -> (seconds for the whole of it, unless --deadline is given; its summary)."""
_GENERATED_TOKENS = "_generated_tokens_total"  # of a server and, behind other words, of a gateway
_METRICS_LOOK_S = 0.5
"""Seconds between two looks at the metrics."""
# Seconds by which connecting may outlast the deadline: a silent server is told from one that can't be reached.
_SPARE_S = 0.5


_EXIT_CODES = """\
exit codes: 0 yes; 1 it answers, and the answer is no; 2 wrong command line; 3 nobody answers there; 4 no answer within
the deadline."""


def add_options(verb: VerbParser) -> None:
    questions = verb.add_forms(
        "FORM",
        "deepseek-triton probe ready http://localhost:8000",
        "until deepseek-triton probe ready http://node1:8000; do sleep 10; done",
        notes=_EXIT_CODES,
    )
    for name, (deadline_s, summary) in _QUESTIONS.items():
        question = add_verb(questions, name, summary)
        question.runs(
            _probe,
            f"deepseek-triton probe {name} http://localhost:8000",
            f"deepseek-triton probe {name} grpc://node1:8001 --deadline 60",
            notes=_EXIT_CODES,
        )
        question.usage = "%(prog)s [URL] [options]"
        question.set_defaults(question=name, metrics_url=None)
        add_address(question, several="")
        text = f"seconds for the whole probe (default: {deadline_s:g})"
        option(question, "--deadline S", text, duration, default=deadline_s)
        printed = question.add_mutually_exclusive_group()
        option(printed, "-q --quiet", "print nothing: the exit code is the answer")
        add_json(printed, "docs/client.md")
        server = question.add_argument_group("server")
        add_server_options(server)
        if name == "generate":
            option(server, "--metrics-url URL", "its metrics (default: 8002 beside 8000 and 8001; beside /v1)")


class Verdict(NamedTuple):
    code: int
    line: str


def _probe(args: argparse.Namespace) -> int:
    """Ask, print the answer, and return YES, NO, UNREACHABLE or TOO_LATE. Raises ToolError when the token or a
    certificate can't be read, or the URL is wrong: no server was asked then."""
    deadline_s: float = args.deadline
    url, *more = args.urls or [DEFAULT_URL]
    if more:
        raise ToolError(f"expected one URL, got {len(args.urls)}", exit_code=2)
    try:
        at = args.metrics_url or Endpoint.parse(url).metrics_url
        client = Client(
            url,
            **client_settings(args),
            metrics_url=at or None,
            timeouts=Timeouts(connect=deadline_s + _SPARE_S, total=deadline_s),
            retries=Retries(attempts=1),
        )
    except (InvalidRequest, ToolError) as error:
        raise ToolError(str(error), exit_code=2) from error
    began = time.monotonic()

    def ask() -> Verdict:
        with client:
            return _generates(client, deadline_s, at) if args.question == "generate" else _health(client, args.question)

    verdict = _within(deadline_s, ask)
    line = in_options(verdict.line)
    if args.json:
        document = {
            "schema": SCHEMA,
            "url": url,
            "question": args.question,
            "answer": _ANSWERS[verdict.code],
            "exit_code": verdict.code,
            "detail": line,
            "seconds": round(time.monotonic() - began, 3),
        }
        _say(json.dumps(document), YES)
    elif not args.quiet:
        _say(f"{url}: {line}", verdict.code)
    return verdict.code


def _say(line: str, code: int) -> None:
    """Print `line`. Where it can't be written, the exit code is still the answer."""
    if code != YES:
        complain(line)
        return
    try:
        with to_reader():
            print(line)
    except ToolError as error:
        complain(str(error))


def _within(deadline_s: float, ask: Callable[[], Verdict]) -> Verdict:
    """Return what `ask` says in time. It runs in a thread: some steps, such as looking up a name, have no limit.

    :raises ToolError: when the token can't be read: no server was asked then.
    """
    outcome: list[Verdict | BaseException] = []

    def run() -> None:
        try:
            outcome.append(ask())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(deadline_s)
    if not outcome or isinstance(outcome[0], DeadlineExceeded):
        return Verdict(TOO_LATE, f"no answer within {deadline_s:g} s")
    result = outcome[0]
    if isinstance(result, Verdict):
        return result
    if isinstance(result, DeepseekTritonError):
        return _verdict_of(result)
    if isinstance(result, ToolError):  # the token is read for each request
        raise ToolError(" ".join(str(result).split()), exit_code=2) from result
    raise result


def _verdict_of(error: DeepseekTritonError) -> Verdict:
    if isinstance(error, ModelNotReady):
        return Verdict(NO, f"not ready: {_text(error)}")
    if isinstance(error, ServerUnavailable) and not error.code:
        return _unreachable(_text(error), error.url)
    return Verdict(NO, f"refused: {_text(error)}" if isinstance(error, AccessDenied) else _text(error))


def _text(error: DeepseekTritonError) -> str:
    """The message on one line, without the server's address, which stands in front of every line."""
    return " ".join(error.message.split()).removeprefix(f"{error.url}: ")


def _unreachable(text: str, url: str | None) -> Verdict:
    return Verdict(UNREACHABLE, f"nobody answers: {text.removeprefix(f'{url}: ')}")


def _health(client: Client, question: str) -> Verdict:
    readiness = client.readiness()[0]
    if readiness.state == "unreachable":
        return _unreachable(readiness.detail, readiness.url)
    if question == "live" or readiness.state == "ready":
        return Verdict(YES, question)
    if readiness.state == "missing":
        return Verdict(NO, readiness.detail)
    what = "Triton is not ready" if readiness.state == "starting" else "the model is not ready"
    return Verdict(NO, f"not ready: {readiness.detail or f'{what}; it loads, stops, or its engine has failed'}")


def _generates(client: Client, deadline_s: float, metrics_url: str) -> Verdict:
    began = time.monotonic()
    try:
        completion = client.generate("1", max_tokens=1)
    except Overloaded as error:
        return _busy(client, error, began + deadline_s, metrics_url)
    if not completion.num_output_tokens:
        return Verdict(NO, f"answered without a token, finish_reason {completion.finish_reason}")
    return Verdict(YES, f"generates: a token in {time.monotonic() - began:.2f} s")


def _busy(client: Client, refusal: Overloaded, end: float, metrics_url: str) -> Verdict:
    """Judge a full server: a restart would lose what it makes for others, so it fails only if its metrics show that it
    makes nothing."""
    try:
        metrics = client.metrics()
        name = next((each.name for each in metrics.samples if each.name.endswith(_GENERATED_TOKENS)), _GENERATED_TOKENS)
        before = metrics.value(name)
        while time.monotonic() < end - 2 * _METRICS_LOOK_S:
            time.sleep(_METRICS_LOOK_S)
            if client.metrics().value(name) > before:
                return Verdict(YES, f"generates for others, and is full: {_text(refusal)}")
    except (DeepseekTritonError, KeyError) as error:
        why = f"{metrics_url}: {error.args[0]}" if isinstance(error, KeyError) else in_options(str(error))
        return Verdict(YES, f"full ({_text(refusal)}), and its metrics don't say whether it generates: {why}")
    return Verdict(NO, f"full ({_text(refusal)}), and no token was made within the deadline, as {metrics_url} says")
