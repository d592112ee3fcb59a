"""`deepseek-triton chat`: a conversation at the terminal, or one turn for each line of a pipe."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepseek_triton_client import AccessDenied, Client, Completion, DeepseekTritonError, InvalidRequest, SamplingParams
from deepseek_triton_tools.cli.client_options import (
    add_address,
    add_client_options,
    add_sampling_options,
    assigned,
    chat_model,
    client_of,
    sampling_params,
)
from deepseek_triton_tools.cli.parsing import VerbParser, option, path
from deepseek_triton_tools.generating.records import (
    as_json,
    complain_of_cut,
    problem_of_messages,
    read_text,
    tokens_per_s,
)
from deepseek_triton_tools.terminal.output_streams import columns, complain, wrapped
from deepseek_triton_tools.terminal.tables import AnswerPrinter, styled, visible
from deepseek_triton_tools.tool_errors import TOKEN_ADVICE, ToolError, in_options, nearest

_COMMANDS = """\
/system TEXT       what the model is told first; /system - takes it back, /system alone shows it
/thinking on|off   have the model reason first, where it can do both; so does an effort, such as max, which V4 heeds
/params NAME=VALUE set a sampling field; NAME= takes it back, /params alone shows them
/retry             ask the last thing again
/undo              take back the last thing said and its answer
/clear             begin anew; what /system says stays
/save FILE         write the conversation as JSON
/load FILE         go on with a saved one
/help
/quit
A line that ends in \\ goes on in the next one. //text sends "/text". Ctrl-C stops an answer, Ctrl-D ends the chat."""
_NAMES = [line.split()[0] for line in _COMMANDS.splitlines() if line.startswith("/")]

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra")
_HISTORY_LINES = 1000


def add_options(verb: VerbParser) -> None:
    verb.runs(
        _chat,
        "deepseek-triton chat http://localhost:8000 --temperature 0.6",
        'deepseek-triton chat --system "Answer in French." --load talk.json',
        common="--url --model --system --load --hide-reasoning --max-tokens --temperature --top-p --timeout",
    )
    verb.usage = "%(prog)s [URL...] [options]"
    add_address(verb)
    option(verb, "--system TEXT", "system message, what the model is told first")
    option(verb, "--load FILE", "continue a conversation that /save wrote", path)
    option(verb, "--hide-reasoning", "show the answers without the reasoning, as a pipe or a file does")
    add_client_options(verb)
    add_sampling_options(verb)


def _chat(args: argparse.Namespace) -> int:
    """Talk until the input ends. Return 1 if a turn failed or was cut in a pipe. Raises ToolError for wrong options."""
    conversation = Conversation(SamplingParams()) if args.load is None else Conversation.loaded(args.load)
    given = {field.name: value for field, value in sampling_params(args).given()}
    conversation.params = _checked(conversation.params.merged(given))
    if args.system is not None:
        conversation.set_system(args.system)
    with client_of(args) as client:
        chat = Chat(client, conversation, args)
        if not is_interactive():
            return chat.talk(piped)
        name, chats = chat_model(client)
        if not chats:
            raise ToolError(f"{name} has no chat form: deepseek-triton generate --raw has it complete texts")
        greeting = f"{name} on {client.url}; /help says what there is, Ctrl-D ends it"
        print(styled(wrapped(greeting, columns(sys.stdout)), "2"))
        with edited() as read:
            chat.talk(read)
        print()
        return 0


class Chat:
    """One conversation with one model."""

    def __init__(self, client: Client, conversation: Conversation, args: argparse.Namespace) -> None:
        self._client = client
        self._conversation = conversation
        self._args = args
        self._failed = 0

    def talk(self, read: Callable[[str], str]) -> int:
        """Do what the user says, until the input ends. Returns 1 when something failed, or a pipe's answer was cut."""
        for text in turns(read):
            if text.partition(" ")[0] == "/quit":
                break
            try:
                self.say(text)
            except (DeepseekTritonError, ToolError) as error:
                self._failed = 1
                advice = TOKEN_ADVICE if isinstance(error, AccessDenied) else ""
                complain(f"deepseek-triton chat: {in_options(str(error))}{advice}")
            except KeyboardInterrupt:
                if not is_interactive():
                    raise
                print()  # Ctrl-C came just after the answer had ended: it was not meant for the chat
        return self._failed

    def say(self, text: str) -> None:
        """Do one turn, or one command. When it raises, the conversation is as before."""
        if text.startswith("/") and not text.startswith("//"):
            name, _, argument = text.partition(" ")
            report = self._obey(name, argument.strip())
            if report and is_interactive():  # a pipe gets nothing but answers
                print(styled(visible(report), "2"))
        elif text.strip():
            self._ask(text.removeprefix("/"), len(self._conversation.messages))

    def _obey(self, command: str, argument: str) -> str:
        """Obey a command. Returns what it says to the user."""
        conversation = self._conversation
        match command:
            case "/system":
                if argument:
                    conversation.set_system(None if argument == "-" else argument)
                return f"system: {conversation.system or 'nothing'}"
            case "/thinking":
                if argument not in ("on", "off", *_EFFORTS, *map(str, range(1, 101))):
                    raise ToolError(f"expected /thinking on, off or an effort: {', '.join(_EFFORTS)}, or 1 to 100")
                kwargs = json.loads(str(conversation.params.chat_template_kwargs or "{}"))
                kwargs["thinking"] = argument not in ("off", "none")  # all that a model without efforts looks at
                if argument not in ("on", "off"):
                    kwargs["reasoning_effort"] = int(argument) if argument.isdecimal() else argument
                conversation.params = conversation.params.merged({"chat_template_kwargs": kwargs})
                return f"thinking: {argument}"
            case "/params":
                given = dict([assigned(argument)] if argument else [])
                conversation.params = _checked(conversation.params.merged(given))
                return f"params: {as_json({field.name: value for field, value in conversation.params.given()})}"
            case "/retry":
                last = conversation.to_retry()
                if last is None:
                    raise ToolError("there is nothing to ask again")
                self._ask(*last)
                return ""
            case "/undo":
                if not conversation.undo():
                    raise ToolError("there is nothing to take back")
                return "taken back"
            case "/clear":
                conversation.clear()
                return "begun anew"
            case "/save" | "/load" if not argument:
                raise ToolError(f"expected {command} FILE")
            case "/save":
                conversation.save(file := Path(argument).expanduser(), model=self._args.model)
                return f"saved to {file}"
            case "/load":
                loaded = Conversation.loaded(file := Path(argument).expanduser())
                _checked(loaded.params)
                self._conversation = loaded
                return f"{len(loaded.messages)} messages loaded from {file}"
            case "/help":
                for line in _COMMANDS.splitlines():
                    print(wrapped(line, columns(sys.stdout), hanging=" " * 19))
                return ""
        raise ToolError(f"no command {command}{nearest(command, _NAMES) or '; see /help'}")

    def _ask(self, text: str, after: int) -> None:
        """Have `text` answered after the first `after` messages. Ctrl-C keeps the part of the answer that has come."""
        conversation = self._conversation
        if after == len(conversation.messages):
            conversation.unanswered = text  # a retry that fails leaves the old answer, so it is not set for one
        printer = AnswerPrinter(with_reasoning=not self._args.hide_reasoning)
        pieces: list[str] = []
        try:
            with self._client.stream_chat(conversation.messages_for(text, after), conversation.params) as stream:
                try:
                    for chunk in stream:
                        pieces.append(chunk.text)  # first, so that Ctrl-C loses nothing that was seen
                        printer.show(chunk.text, chunk.reasoning)
                finally:
                    printer.end()
                completion = stream.completion()
        except KeyboardInterrupt:
            if not is_interactive():
                raise
            if any(pieces):
                conversation.add_answer(text, after, "".join(pieces), interrupted=True)
            lost = "" if any(pieces) else " before an answer: nothing of it is kept, /retry asks again"
            print(styled(f"[stopped{lost}]", "2"))
            return
        conversation.add_answer(text, after, "".join(pieces))
        if is_interactive():
            print(styled(_status(completion), "2"))
        else:
            self._failed |= complain_of_cut(completion, "chat")


def _checked(params: SamplingParams) -> SamplingParams:
    """Raises ToolError when they ask for several answers, or give the template something else than arguments."""
    if (params.n or 1) > 1 or (params.best_of or 1) > 1:
        raise ToolError("a chat has one answer to each turn: leave out n and best_of", exit_code=2)
    with contextlib.suppress(ValueError):
        if isinstance(json.loads(str(params.chat_template_kwargs or "{}")), dict):
            return params
    raise ToolError('chat_template_kwargs: expected a JSON object, such as {"thinking": true}', exit_code=2)


def _status(completion: Completion) -> str:
    rate = tokens_per_s(completion)
    cut = "cut off in its reasoning" if completion.reasoning and not completion.text else "cut off"
    endings = {None: "", "stop": "", "length": f"{cut} by max_tokens (/params) or a full context"}
    parts = [
        f"{completion.num_output_tokens} tokens" if completion.num_output_tokens is not None else "",
        f"{rate:.1f} tokens/s" if rate is not None else "",
        f"first after {completion.time_to_first_token_s:.2f} s" if completion.time_to_first_token_s else "",
        endings.get(completion.finish_reason, f"ended by {completion.finish_reason}"),
    ]
    return f"[{', '.join(filter(None, parts))}]"


def is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def turns(read: Callable[[str], str]) -> Iterator[str]:
    """Yield what the user says, one turn after the other. A line that ends in a backslash goes on in the next one.

    :param read: shows its argument as a prompt if there is a terminal, and returns a line; raises EOFError at the end.
    """
    while True:
        try:
            lines = [read("> ")]
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1][:-1]
                lines.append(read("  "))
        except EOFError:
            return
        except KeyboardInterrupt:
            if not is_interactive():
                raise
            print()  # the line is dropped
            continue
        yield "\n".join(lines)


def piped(_: str) -> str:
    """Read a line from a pipe. Raises ToolError when it is not UTF-8."""
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    try:
        return line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ToolError(f"standard input is not UTF-8: {error.reason}") from error


@contextmanager
def edited() -> Iterator[Callable[[str], str]]:
    """Yield `input`, with line editing and a history that is kept for the next chat."""
    try:
        import readline
    except ImportError:  # a Python built without it
        yield input
        return
    readline.parse_and_bind("set enable-bracketed-paste on")  # makes a paste one turn; Python switches it off
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    file = Path(state) / "deepseek-triton" / "chat_history"
    with contextlib.suppress(OSError):  # a history that can't be read is an empty one
        readline.read_history_file(file)
    readline.set_history_length(_HISTORY_LINES)
    try:
        yield input
    finally:
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file.touch(mode=0o600)
            file.chmod(0o600)
            readline.write_history_file(file)
        except OSError as error:
            complain(f"the history can't be kept in {file}: {error.strerror}")


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
