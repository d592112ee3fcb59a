"""Questions to a server, many at once, and the file of answers, from which a run that was stopped goes on.

The file has JSON Lines, each written as the answer comes; the first says which server answered. A question is known
again by a hash of what was sent.
"""

import asyncio
import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from deepseek_triton_client import AsyncClient, DeepseekTritonError
from deepseek_triton_tools.generating.batch import BatchProgress, fails_every_request
from deepseek_triton_tools.generating.records import cut_off_error
from deepseek_triton_tools.tool_errors import ToolError


class KeptAnswers:
    """Answers by the hash of their question; `num_before` of them are of an earlier run."""

    def __init__(self, descriptor: int, records: dict[str, dict[str, Any]]) -> None:
        self._descriptor = descriptor
        self._records = records
        self.num_before = len(records)

    def get(self, key: str) -> dict[str, Any] | None:
        return self._records.get(key)

    def add(self, key: str, record: Mapping[str, Any]) -> None:
        self._records[key] = dict(record)
        _append(self._descriptor, {"key": key, **record})


@contextmanager
def open_answers(path: Path, server: Mapping[str, Any], *, overwrite: bool) -> Iterator[KeptAnswers]:
    """Open the file, or begin it. `server` is what the answers depend on beside the question.

    Raises ToolError where another run writes the file, or where it holds answers of another server.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ToolError(f"{path} is being written by another run") from error
        if overwrite:
            os.ftruncate(descriptor, 0)
        if not (lines := _whole_lines(descriptor, path)):
            _append(descriptor, {"server": dict(server)})
        else:  # a former release may have written fewer facts
            before = lines[0].get("server")
            known = before if isinstance(before, dict) else {"name": None}
            changed = "; ".join(
                f"{name} was {known[name]!r} and is {server.get(name)!r}"
                for name in sorted(known)
                if known[name] != server.get(name)
            )
            if changed:
                said = f"{path} holds answers of another server or model ({changed})"
                raise ToolError(f"{said}: give another --output, or --overwrite")
        yield KeptAnswers(descriptor, {line["key"]: line for line in lines[1:]})
    finally:
        os.close(descriptor)


def _append(descriptor: int, record: Mapping[str, Any]) -> None:
    left = memoryview(json.dumps(record, ensure_ascii=False).encode() + b"\n")
    while left:
        left = left[os.write(descriptor, left) :]


def _whole_lines(descriptor: int, path: Path) -> list[dict[str, Any]]:
    """Read the lines, and cut off half a one: the program was killed while it wrote."""
    with open(descriptor, "rb", closefd=False) as file:
        content = file.read()
    end = content.rfind(b"\n") + 1
    try:
        lines = [json.loads(line) for line in content[:end].splitlines()]
        well_formed = all(isinstance(line, dict) for line in lines) and all(
            isinstance(line.get("key"), str) for line in lines[1:]
        )
    except (ValueError, RecursionError):
        well_formed = False
    if not well_formed:
        raise ToolError(f"{path} is no file of answers: give another --output, or --overwrite")
    os.ftruncate(descriptor, end)
    return lines


END_OF_THOUGHT = "</think>"
_BEGIN_OF_THOUGHT = "<think>"

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A text to be continued, or a conversation to be answered."""

    content: str | Messages
    fields: Mapping[str, Any]
    until: Sequence[str] = ()
    """Strings that end the answer."""
    repeat: int = 0
    """Number of the question among equal ones."""

    @property
    def key(self) -> str:
        return _hash(self.content, dict(self.fields), list(self.until), self.repeat)

    async def ask(self, client: AsyncClient) -> dict[str, Any]:
        if isinstance(self.content, str):
            fields = dict(self.fields)
            if self.until:
                fields["stop"] = [*fields.get("stop", ()), *self.until]
            completion = await client.generate(self.content, **fields)
        else:
            # The server would look for the strings in the reasoning, too, and end the answer there.
            completion = await client.chat(self.content, **self.fields)
        if cut_off := cut_off_error(completion):
            raise cut_off
        kept = ("text", "reasoning", "finish_reason", "num_input_tokens", "num_output_tokens")
        return {name: getattr(completion, name) for name in kept}

    def answer_in(self, record: Mapping[str, Any]) -> str:
        """Return what counts as the answer: the text after any thought, up to the first string of `until`."""
        text: str = record["text"]
        if END_OF_THOUGHT in text:
            text = text.rpartition(END_OF_THOUGHT)[2].lstrip("\n")
        elif text.lstrip().startswith(_BEGIN_OF_THOUGHT):
            text = ""  # the answer ended before the thought did
        for stop in filter(None, self.until):
            text = text.partition(stop)[0]
        return text


@dataclass(frozen=True, kw_only=True)
class Likelihood:
    """How likely `continuation` is after `context`. The server's own tokenizer says where it begins."""

    context: str | Messages
    continuation: str
    fields: Mapping[str, Any]

    @property
    def key(self) -> str:
        return _hash(self.context, self.continuation, dict(self.fields))

    async def ask(self, client: AsyncClient) -> dict[str, Any]:
        fields = {name: value for name, value in self.fields.items() if name != "max_tokens"}
        prompt: str | tuple[int, ...]
        if isinstance(self.context, str):
            # Blanks at the end belong to the first token of what follows. Without a context all tokens count.
            context = self.context.rstrip()
            start = len(await client.tokenize(context, **_of_tokenizer(fields))) if context else 0
            prompt = self.context + self.continuation
        else:
            context_ids = await client.tokenize(self.context, **_of_tokenizer(fields, "chat_template_kwargs"))
            start = len(context_ids)
            prompt = context_ids + await client.tokenize(self.continuation, add_special_tokens=False)
            fields.pop("chat_template_kwargs", None)
        completion = await client.generate(prompt, max_tokens=1, prompt_logprobs=1, **fields)
        # The first token of a prompt has no log-probability.
        entries = [entry[0] for entry in completion.answers[0].prompt_logprobs[start:] if entry is not None]
        return {
            "logprob": sum(entry.logprob for entry in entries),
            "is_greedy": all(entry.rank == 1 for entry in entries),
            "num_input_tokens": completion.num_input_tokens,
            "num_output_tokens": completion.num_output_tokens,
        }


Question: TypeAlias = Generation | Likelihood
"""`key` is a hash of what is sent, and `ask` returns the answer as JSON, or raises DeepseekTritonError."""


def _of_tokenizer(fields: Mapping[str, Any], *more: str) -> dict[str, Any]:
    return {name: fields[name] for name in ("add_special_tokens", *more) if name in fields}


def _hash(*parts: Any) -> str:
    text = json.dumps(parts, ensure_ascii=False, sort_keys=True, default=list)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]


async def ask_all(
    questions: Sequence[Question], connect: Callable[[], AsyncClient], kept: KeptAnswers, concurrency: int
) -> dict[str, DeepseekTritonError]:
    """Ask what has no kept answer, and return the error of each question that failed, by its key.

    Raises DeepseekTritonError where the error is not about one question: the server can't be reached, or refuses all.
    """
    missing = {question.key: question for question in questions if kept.get(question.key) is None}
    distinct = len({question.key for question in questions})
    progress = BatchProgress(distinct, distinct - len(missing))
    left = iter(missing.items())
    failed: dict[str, DeepseekTritonError] = {}

    async def work(client: AsyncClient) -> None:
        for key, question in left:
            try:
                record = await question.ask(client)
            except DeepseekTritonError as error:
                if fails_every_request(error):
                    raise
                failed[key] = error
                progress.count(None)
            else:
                kept.add(key, record)
                progress.count(record["num_output_tokens"] or 0)

    try:
        async with connect() as client:
            tasks = [asyncio.create_task(work(client)) for _ in range(min(concurrency, len(missing)))]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        progress.clear()
    return failed


def failures_by_message(failed: Mapping[str, DeepseekTritonError]) -> str:
    """Say how often each error came, the three most frequent ones."""
    counts = Counter(str(error)[:200] for error in failed.values())
    shown = [f"{count} x {message}" for message, count in counts.most_common(3)]
    return "; ".join(shown) + ("; and others" if len(counts) > len(shown) else "")
