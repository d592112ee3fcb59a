"""The input of a batch: JSON Lines. All of it is checked before anything is sent, and it is never all in memory."""

from __future__ import annotations

import hashlib
import json
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from deepseek_triton_client import InvalidRequest, SamplingParams
from deepseek_triton_tools.generating.prompt_sources import Request, as_asked, file_name, problem_of_messages
from deepseek_triton_tools.terminal.output_streams import complain
from deepseek_triton_tools.tool_errors import ToolError


@dataclass(frozen=True)
class BatchRow:
    """One line of the input."""

    number: int
    """Number of the line, from 1."""
    id: Any
    """The line's own "id", else its "request_id", else `number`."""
    digest: str
    """A hash of the line, by which a resumed run knows it again."""
    request: Request


@dataclass(frozen=True)
class BatchRows:
    """The rows of the input. They can be read as often as needed; blank lines don't count."""

    file: IO[bytes]
    name: str
    params: SamplingParams
    """Sampling of every row; the fields of a row win over them."""
    chat: bool = False
    system: str | None = None

    def __iter__(self) -> Iterator[BatchRow]:
        """Raises ToolError for a line that is wrong."""
        for number, line in self._lines():
            try:
                yield self._row(number, line)
            except ToolError as error:
                raise ToolError(f"{self.name} line {number}: {error}") from error

    def check(self) -> int:
        """Count the rows, and name all that are wrong on stderr. Raises ToolError when one is wrong."""
        num_rows = num_wrong = 0
        for number, line in self._lines():
            num_rows += 1
            try:
                self._row(number, line)
            except ToolError as error:
                num_wrong += 1
                complain(f"{self.name} line {number}: {error}")
        if num_wrong:
            raise ToolError(f"{num_wrong} of {num_rows} rows of {self.name} are wrong; nothing was sent")
        return num_rows

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        self.file.seek(0)
        for number, line in enumerate(self.file, start=1):
            if line.strip():
                yield number, line.strip()

    def _row(self, number: int, line: bytes) -> BatchRow:
        request = _parsed(line)
        request_id = request.get("request_id")
        row_id = request.pop("id", number if request_id is None else request_id)
        if not isinstance(row_id, (str, int)) or isinstance(row_id, bool):
            raise ToolError(f"id: expected a text or a whole number, got {row_id!r:.100}")
        _check_request(request, self.params)
        asked = as_asked(request, chat=self.chat, system=self.system)
        return BatchRow(number, row_id, hashlib.sha256(line).hexdigest()[:16], asked)


def open_input(path: Path) -> IO[bytes]:
    """Open the input so that it can be read again and again: a pipe is copied to a temporary file. `-` is standard
    input. Raises ToolError when it can't be read."""
    try:
        source = sys.stdin.buffer if str(path) == "-" else path.open("rb")
        if stat.S_ISREG(path.stat().st_mode if str(path) != "-" else 0):
            return source
        with source:
            copy = tempfile.TemporaryFile()  # noqa: SIM115 - for the caller to close
            shutil.copyfileobj(source, copy)
            return copy
    except OSError as error:
        raise ToolError(f"{file_name(path)} can't be read: {error.strerror}") from error


def _parsed(line: bytes) -> Request:
    try:
        found = json.loads(line, parse_constant=_refuse_constant)
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # half a surrogate pair is valid JSON, but can't be encoded
        raise ToolError(f"not JSON: {error}") from error
    if isinstance(found, str):
        return {"prompt": found}
    if not isinstance(found, dict):
        raise ToolError(f'expected a text or an object with "prompt" or "messages", got {found!r:.100}')
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _check_request(request: Request, params: SamplingParams) -> None:
    """Raise ToolError for what the client would refuse, before anything is sent."""
    kinds = [kind for kind in ("prompt", "messages") if kind in request]
    if len(kinds) != 1:
        raise ToolError(f'expected one of "prompt" and "messages", got {", ".join(map(repr, request)) or "nothing"}')
    problem = problem_of_messages(request["messages"]) if kinds == ["messages"] else _problem_of_prompt(request)
    request_id = request.get("request_id")
    if request_id is not None and not (isinstance(request_id, str) and request_id):
        problem = problem or f"request_id: expected a text that is not empty, got {request_id!r:.100}"
    if problem is not None:
        raise ToolError(problem)
    try:
        params.merged({name: value for name, value in request.items() if name not in (*kinds, "request_id")})
    except InvalidRequest as error:
        raise ToolError(error.message) from error


def _problem_of_prompt(request: Request) -> str | None:
    prompt = request["prompt"]
    is_ids = isinstance(prompt, list) and prompt and all(type(token) is int and -1 < token < 2**31 for token in prompt)
    return None if isinstance(prompt, str) or is_ids else f"prompt: expected a text or token ids, got {prompt!r:.100}"
