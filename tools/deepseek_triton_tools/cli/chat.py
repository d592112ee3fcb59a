"""`deepseek-triton chat`: a conversation at the terminal, or one turn for each line of a pipe."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from deepseek_triton_client import Client, Completion, DeepseekTritonError, SamplingParams, Stream
from deepseek_triton_tools.cli.client_options import add_client_options, client_of
from deepseek_triton_tools.cli.parsing import VerbParser, option, path
from deepseek_triton_tools.cli.sampling_options import add_sampling_options, assigned, sampling_fields
from deepseek_triton_tools.generating.completion_records import as_json, tokens_per_s
from deepseek_triton_tools.generating.conversation import Conversation
from deepseek_triton_tools.terminal.output_streams import columns, complain, wrapped
from deepseek_triton_tools.terminal.tables import AnswerPrinter, styled, visible
from deepseek_triton_tools.tool_errors import ToolError, nearest

_COMMANDS = """\
/system TEXT       what the model is told first; /system - takes it back, /system alone shows it
/thinking on|off   have the model reason first, where its chat template can do both
/params NAME=VALUE set a sampling field; NAME= takes it back, /params alone shows them
/retry             ask the last thing again
/undo              take back the last thing said and its answer
/clear             begin anew; what /system says stays
/save FILE         write the conversation as JSON
/load FILE         go on with a saved one
/help, /quit
A line that ends in \\ goes on in the next one. //text sends "/text". Ctrl-C stops an answer, Ctrl-D ends the chat."""

_HISTORY_LINES = 1000

ReadLine = Callable[[str], str]
"""Shows its argument as a prompt if there is a terminal, and returns a line. Raises EOFError at the end."""


def add_options(verb: VerbParser) -> None:
    verb.runs(
        _chat,
        "deepseek-triton chat --url http://localhost:8000 --temperature 0.6",
        'deepseek-triton chat --system "Answer in French." --load talk.json',
    )
    verb.usage = "%(prog)s [options]"
    option(verb, "--system TEXT", "system message, what the model is told first")
    option(verb, "--load FILE", "continue a conversation that /save wrote", path)
    option(verb, "--hide-reasoning", "show the answers without the reasoning")
    add_client_options(verb)
    add_sampling_options(verb)


def _chat(args: argparse.Namespace) -> int:
    """Talk until the input ends. Return 1 when a turn failed in a pipe. Raises ToolError for wrong options."""
    conversation = Conversation(SamplingParams()) if args.load is None else Conversation.loaded(args.load)
    conversation.params = _checked(conversation.params.merged(sampling_fields(args)))
    if args.system is not None:
        conversation.set_system(args.system)
    with client_of(args) as client:
        if not is_interactive():
            return _talk(Chat(client, conversation, args, interactive=False), piped)
        greeting = f"{args.model} on {client.url}; /help says what there is, Ctrl-D ends it"
        print(styled(wrapped(greeting, columns(sys.stdout)), "2"))
        with edited() as read:
            _talk(Chat(client, conversation, args, interactive=True), read)
        print()
        return 0


def _talk(chat: Chat, read: Callable[[str], str]) -> int:
    failed = 0
    for text in turns(read):
        try:
            chat.say(text)
        except (DeepseekTritonError, ToolError) as error:
            failed += 1
            complain(f"deepseek-triton chat: {error}")
        except KeyboardInterrupt:
            if not is_interactive():
                raise
            print()  # Ctrl-C came just after the answer had ended: it was not meant for the chat
        if chat.is_over:
            break
    return 1 if failed else 0


class Chat:
    """One conversation with one model."""

    def __init__(
        self, client: Client, conversation: Conversation, args: argparse.Namespace, *, interactive: bool
    ) -> None:
        self._client = client
        self._conversation = conversation
        self._model: str = args.model
        self._with_reasoning: bool = not args.hide_reasoning
        self._interactive = interactive
        self.is_over = False
        self._commands: dict[str, Callable[[str], None]] = {
            "system": self._system,
            "thinking": self._thinking,
            "params": self._params,
            "retry": self._retry,
            "undo": self._undo,
            "clear": self._clear,
            "save": self._save,
            "load": self._load,
            "help": self._help,
            "quit": self._quit,
        }

    def say(self, text: str) -> None:
        """Do one turn, or one command. When it raises, the conversation is as before."""
        if text.startswith("//"):
            self._ask(text[1:], len(self._conversation.messages))
        elif text.startswith("/"):
            name, _, argument = text[1:].partition(" ")
            if name not in self._commands:
                hint = nearest(f"/{name}", [f"/{command}" for command in self._commands])
                raise ToolError(f"no command /{name}{hint or '; see /help'}")
            self._commands[name](argument.strip())
        elif text.strip():
            self._ask(text, len(self._conversation.messages))

    def _ask(self, text: str, after: int) -> None:
        """Have `text` answered after the first `after` messages. Ctrl-C keeps the part of the answer that has come."""
        conversation = self._conversation
        if after == len(conversation.messages):
            conversation.unanswered = text  # a retry that fails leaves the old answer, so it is not set for one
        pieces: list[str] = []
        try:
            with self._client.stream_chat(conversation.messages_for(text, after), conversation.params) as stream:
                self._show(stream, pieces)
                completion = stream.completion()
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            print(styled("[stopped]", "2"))
            if any(pieces):
                conversation.add_answer(text, after, "".join(pieces), interrupted=True)
            return
        conversation.add_answer(text, after, "".join(pieces))
        if self._interactive:
            print(styled(_status(completion), "2"))

    def _show(self, stream: Stream, pieces: list[str]) -> None:
        """Show the answer. Its chunks are added to `pieces` first, so that Ctrl-C loses nothing that was seen."""
        printer = AnswerPrinter(with_reasoning=self._with_reasoning)
        try:
            for chunk in stream:
                pieces.append(chunk.text)
                printer.show(chunk.text, chunk.reasoning)
        finally:
            printer.end()

    def _retry(self, _: str) -> None:
        found = self._conversation.to_retry()
        if found is None:
            raise ToolError("there is nothing to ask again")
        self._ask(*found)

    def _undo(self, _: str) -> None:
        if not self._conversation.undo():
            raise ToolError("there is nothing to take back")
        self._tell("taken back")

    def _clear(self, _: str) -> None:
        self._conversation.clear()
        self._tell("begun anew")

    def _system(self, text: str) -> None:
        if text:
            self._conversation.set_system(None if text == "-" else text)
        self._tell(f"system: {self._conversation.system or 'nothing'}")

    def _thinking(self, text: str) -> None:
        if text not in ("on", "off"):
            raise ToolError("expected /thinking on or /thinking off")
        given = json.loads(str(self._conversation.params.chat_template_kwargs or "{}"))
        self._set({"chat_template_kwargs": {**given, "thinking": text == "on"}})
        self._tell(f"thinking: {text}")

    def _params(self, text: str) -> None:
        self._set(dict([assigned(text)]) if text else {})
        given = {field.name: value for field, value in self._conversation.params.given()}
        self._tell(f"params: {as_json(given)}")

    def _set(self, fields: dict[str, object]) -> None:
        self._conversation.params = _checked(self._conversation.params.merged(fields))

    def _save(self, name: str) -> None:
        path = _path(name, "/save")
        self._conversation.save(path, model=self._model)
        self._tell(f"saved to {path}")

    def _load(self, name: str) -> None:
        path = _path(name, "/load")
        conversation = Conversation.loaded(path)
        _checked(conversation.params)
        self._conversation = conversation
        self._tell(f"{len(self._conversation.messages)} messages loaded from {path}")

    def _help(self, _: str) -> None:
        for line in _COMMANDS.splitlines():
            print(wrapped(line, columns(sys.stdout), hanging=" " * 19))

    def _quit(self, _: str) -> None:
        self.is_over = True

    def _tell(self, text: str) -> None:
        """Print what a command says, at a terminal only: a pipe gets nothing but answers."""
        if self._interactive:
            print(styled(visible(text), "2"))


def _checked(params: SamplingParams) -> SamplingParams:
    """Raises ToolError when they ask for several answers."""
    if (params.n or 1) > 1 or (params.best_of or 1) > 1:
        raise ToolError("a chat has one answer to each turn: leave out n and best_of")
    return params


def _status(completion: Completion) -> str:
    rate = tokens_per_s(completion)
    ended = {None: "", "stop": "", "length": "cut off by max_tokens (/params) or a full context"}
    parts = [
        f"{completion.num_output_tokens} tokens" if completion.num_output_tokens is not None else "",
        f"{rate:.1f} tokens/s" if rate is not None else "",
        f"first after {completion.time_to_first_token_s:.2f} s" if completion.time_to_first_token_s else "",
        ended.get(completion.finish_reason, f"ended by {completion.finish_reason}"),
    ]
    return f"[{', '.join(filter(None, parts))}]"


def _path(name: str, command: str) -> Path:
    if not name:
        raise ToolError(f"expected {command} FILE")
    return Path(name).expanduser()


def is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def turns(read: ReadLine) -> Iterator[str]:
    """Yield what the user says, one turn after the other. A line that ends in a backslash goes on in the next one."""
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
def edited() -> Iterator[ReadLine]:
    """Yield `input`, with line editing and a history that is kept for the next chat."""
    try:
        import readline
    except ImportError:  # a Python built without it
        yield input
        return
    readline.parse_and_bind("set enable-bracketed-paste on")  # makes a paste one turn; Python switches it off
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    path = Path(state) / "deepseek-triton" / "chat_history"
    with contextlib.suppress(OSError):  # a history that can't be read is an empty one
        readline.read_history_file(path)
    readline.set_history_length(_HISTORY_LINES)
    try:
        yield input
    finally:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
            path.chmod(0o600)
            readline.write_history_file(path)
        except OSError as error:
            complain(f"the history can't be kept in {path}: {error.strerror}")
