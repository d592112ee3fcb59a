"""tritonserver's log: its lines in parts, and the reason why a server ended."""

import builtins
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class LogLine:
    """One line of the server's output."""

    level: str
    """I, W, E or F. Empty for lines that the server's logger didn't write: prints, tables, native libraries."""
    source: str
    """`file:line` of the code that logged it. It ends in `.py:N` if a model logged it through pb_utils."""
    message: str

    @property
    def is_from_model(self) -> bool:
        """Whether a model's Python logged or printed it, as far as the line shows."""
        return ".py:" in self.source or (not self.level and not self.is_table)

    @property
    def is_table(self) -> bool:
        return not self.level and self.message[:1] in ("", "|", "+")


_LOGGED = re.compile(
    r"(?:(?P<level>[IWEF])\d{4} [\d:.]+|\d{4}-\d\d-\d\dT\S+ (?P<iso_level>[IWEF])) +\d+ "
    r"(?P<source>\S+?:\d+)\] *(?P<message>.*)"
)


def parse_log_line(text: str) -> LogLine:
    """Split `text` into its parts. The message is as it was before the logger quoted it."""
    if not (match := _LOGGED.match(text)):
        return LogLine("", "", text.rstrip())
    message = match["message"].rstrip()
    if len(message) > 1 and message[0] == message[-1] == '"':
        try:
            # strict=False, because the server leaves some control characters unescaped.
            message = str(json.loads(message, strict=False))
        except ValueError:
            message = message[1:-1]
    return LogLine(match["level"] or match["iso_level"], match["source"], message)


HOPELESS = "Failed to preinitialize Python stub: "
"""After a stub has said this, because model.py is missing for instance, tritonserver waits for ever."""

_PROTOBUF = re.compile(r"Error parsing text-format inference\.ModelConfig: (\d+):(\d+): (.*)")
_MODEL_CAUSES = (
    re.compile(r"failed to load '(?P<model>.+?)' version \d+: (?:[A-Z][a-z ]+: )?(?P<cause>.+)", re.DOTALL),
    re.compile(r"failed to load model '(?P<model>.+?)': (?P<cause>.+)", re.DOTALL),
    re.compile(r"Poll failed for model directory '(?P<model>.+?)': (?P<cause>.+)", re.DOTALL),
)
_SERVER_CAUSES = (
    re.compile(re.escape(HOPELESS) + "(?P<cause>.+)", re.DOTALL),
    re.compile(r"failed to start \S+ service: (?:\w+ - )?(?P<cause>.+)"),
    re.compile(r".*(?P<cause>error while loading shared libraries: .+)"),
    re.compile(r".*(?P<cause>unrecognized option .+)"),
    re.compile(r"error: creating server: (?:[A-Z][a-z ]+ - )?(?P<cause>.+)"),
)


def failure_cause(lines: Iterable[str]) -> str:
    """Say in one line why the server ended, by its own log. Where no line is a known cause, it is the last error that a
    model logged, or else the last line."""
    parsed = [parse_log_line(line) for line in lines]
    if causes := _model_causes(parsed):
        model, cause = next(iter(causes.items()))
        more = f" (and {len(causes) - 1} more: {', '.join(list(causes)[1:])})" if len(causes) > 1 else ""
        return f"model {model!r} failed to load: {cause}{more}"
    for pattern in _SERVER_CAUSES:
        for line in parsed:
            if match := pattern.match(line.message):
                return _plain(match["cause"])
    errors = [line.message for line in parsed if line.level in ("E", "F") and line.is_from_model]
    words = errors or [line.message for line in parsed if line.message and not line.is_table]
    return _plain(words[-1]) if words else "tritonserver ended without a word"


_DEAD_ENGINE = re.compile(r"deepseek_backend CRITICAL: the engine is dead: (?P<reason>.+)")


def dead_engine(lines: Iterable[str]) -> str:
    """Say why the backend ended the server itself (on_fatal: exit); empty where it didn't."""
    return next((match["reason"] for line in lines if (match := _DEAD_ENGINE.search(line))), "")


def _model_causes(lines: list[LogLine]) -> dict[str, str]:
    """Find the cause for each model that failed, in the order of the log."""
    causes: dict[str, str] = {}
    before = printed = ""
    for line in lines:
        match = next(filter(None, (pattern.match(line.message) for pattern in _MODEL_CAUSES)), None)
        if match:
            causes.setdefault(match["model"], _model_cause(match["cause"], before, printed))
        elif line.is_from_model:
            printed = line.message
        before = line.message
    return causes


def _model_cause(cause: str, before: str, printed: str) -> str:
    """Make `cause` readable. `before` is the line before it, `printed` the last line of the model's own process."""
    syntax = _PROTOBUF.search(before)
    if syntax and "failed to read text proto" in cause:
        return f"config.pbtxt line {syntax[1]}, column {syntax[2]}: {syntax[3]}"
    if "is not healthy" in cause:
        words = f"; its last words: {_plain(printed)}" if printed else ""
        return f"its Python process died while loading (a crash, or killed for want of memory){words}"
    return _plain(cause)


_EXCEPTION = re.compile(r"(?P<name>[A-Za-z_][\w.]*(?:Error|Exception|Exit)): (?P<message>\S.*)", re.DOTALL)


def _plain(cause: str) -> str:
    """Return an exception's message on one line, without the traceback, and without a name that says little. KeyError
    and ModuleNotFoundError say something; ValueError, RuntimeError and names of a library hardly do."""
    text = cause.partition("\n\nAt:\n")[0].strip()
    match = _EXCEPTION.match(text)
    if match and (match["name"] in ("ValueError", "RuntimeError") or not hasattr(builtins, match["name"])):
        text = match["message"]
    return " ".join(text.split())
