"""Questions to a server: many at once, each answer kept as soon as it has come."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from deepseek_triton_client import AsyncClient, Cancelled, DeepseekTritonError
from deepseek_triton_tools.evaluation.kept_answers import KeptAnswers
from deepseek_triton_tools.generating.batch import BatchProgress, fails_every_request

END_OF_THOUGHT = "</think>"
_BEGIN_OF_THOUGHT = "<think>"

Messages = Sequence[Mapping[str, Any]]


class Question(Protocol):
    @property
    def key(self) -> str:
        """A hash of what is sent."""

    async def ask(self, client: AsyncClient) -> dict[str, Any]:
        """Return the answer as JSON, with the number of its tokens as `num_output_tokens`. Raises
        DeepseekTritonError."""


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
        if completion.finish_reason in ("cancelled", "timeout"):
            raise Cancelled(f"the answer is not complete: {completion.finish_reason}")
        return {
            "text": completion.text,
            "reasoning": completion.reasoning,
            "finish_reason": completion.finish_reason,
            "num_input_tokens": completion.num_input_tokens,
            "num_output_tokens": completion.num_output_tokens,
        }

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
                progress.count_failed()
            else:
                kept.add(key, record)
                progress.count_answered(record["num_output_tokens"])

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
