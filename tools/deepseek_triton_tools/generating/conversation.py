"""The messages of a chat, and the file they are saved in."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from deepseek_triton_client import InvalidRequest, SamplingParams
from deepseek_triton_tools.generating.completion_records import as_json
from deepseek_triton_tools.generating.prompt_sources import problem_of_messages, read_text
from deepseek_triton_tools.tool_errors import ToolError

Message = dict[str, Any]

_INTERRUPTED = "interrupted"
"""Key beside role and content on an answer that was stopped. It is not sent to the server."""
_SAVED = ("model", "params", "messages")
"""Keys of a saved conversation."""


class Conversation:
    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.messages: list[Message] = []
        self.unanswered: str | None = None
        """The user's last text, when it got no answer. It is not among `messages`."""

    @property
    def system(self) -> str | None:
        first = self.messages[:1]
        return first[0]["content"] if first and first[0]["role"] == "system" else None

    def set_system(self, text: str | None) -> None:
        rest = self.messages if self.system is None else self.messages[1:]
        self.messages = ([{"role": "system", "content": text}] if text else []) + rest

    def clear(self) -> None:
        """Drop all messages but the system message."""
        self.messages = [] if self.system is None else self.messages[:1]
        self.unanswered = None

    def undo(self) -> bool:
        """Take back the user's last text and its answer. Returns False when there is none."""
        if self.unanswered is not None:
            self.unanswered = None
            return True
        last = self._last_user_message()
        if last is None:
            return False
        del self.messages[last:]
        return True

    def to_retry(self) -> tuple[str, int] | None:
        """Return the text to ask again, and how many messages stand before it; None when there is no text."""
        if self.unanswered is not None:
            return self.unanswered, len(self.messages)
        last = self._last_user_message()
        return None if last is None else (self.messages[last]["content"], last)

    def messages_for(self, text: str, after: int) -> list[Message]:
        """Return the messages to send, so that `text` is answered after the first `after` messages."""
        sent = [*self.messages[:after], {"role": "user", "content": text}]
        return [{name: value for name, value in message.items() if name != _INTERRUPTED} for message in sent]

    def add_answer(self, text: str, after: int, answer: str, *, interrupted: bool = False) -> None:
        """Add `text` and its answer after the first `after` messages, in place of what stood there."""
        reply: Message = {"role": "assistant", "content": answer}
        if interrupted:
            reply[_INTERRUPTED] = True
        self.messages[after:] = [{"role": "user", "content": text}, reply]
        self.unanswered = None

    def save(self, path: Path, *, model: str) -> None:
        """Write {messages, params, model} as JSON. Only a file that this wrote is replaced. When it raises ToolError,
        the file that was there is as it was."""
        if os.path.lexists(path) and not _was_saved(path):
            raise ToolError(f"{path} is there already, and /save did not write it; choose another name")
        params = {field.name: value for field, value in self.params.given()}
        document = dict(zip(_SAVED, (model, params, self.messages), strict=True))
        try:
            handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(as_json(document) + "\n")
                os.replace(scratch, path)
            except BaseException:
                os.unlink(scratch)
                raise
        except OSError as error:
            raise ToolError(f"{path} can't be written: {error.strerror}") from error

    @classmethod
    def loaded(cls, path: Path) -> Conversation:
        """Read a conversation that `save` wrote. Raises ToolError when the file is none."""
        try:
            document = json.loads(read_text(path))
        except (ValueError, RecursionError) as error:
            raise ToolError(f"{path} is not JSON: {error}") from error
        if not isinstance(document, dict) or not isinstance(document.get("messages"), list):
            raise ToolError(f'{path}: expected an object with "messages", as /save writes it')
        messages, params = document["messages"], document.get("params", {})
        problem = problem_of_messages(messages) if messages else None
        if problem is None and not all(isinstance(message.get("content"), str) for message in messages):
            problem = "messages: expected a text as each one's content"
        if problem is None and not isinstance(params, dict):
            problem = f"params: expected an object, got {params!r:.100}"
        if problem is not None:
            raise ToolError(f"{path}: {problem}")
        try:
            conversation = cls(SamplingParams().merged(params))
        except InvalidRequest as error:
            raise ToolError(f"{path}: params: {error.message}") from error
        conversation.messages = messages
        return conversation

    def _last_user_message(self) -> int | None:
        """Position of the user's last message."""
        positions = [position for position, message in enumerate(self.messages) if message["role"] == "user"]
        return positions[-1] if positions else None


def _was_saved(path: Path) -> bool:
    """Whether the file holds what `save` writes: a conversation, and nothing beside its keys."""
    if not path.is_file():
        return False  # reading a pipe would wait for ever
    try:
        Conversation.loaded(path)
        return list(json.loads(read_text(path))) == list(_SAVED)
    except ToolError:
        return False
