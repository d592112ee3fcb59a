"""The served model as lm-evaluation-harness sees it: requests become questions to the server."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deepseek_triton_client import AsyncClient, DeepseekTritonError
from deepseek_triton_tools.evaluation.conversation_text import as_text, conversation_in
from deepseek_triton_tools.evaluation.kept_answers import KeptAnswers
from deepseek_triton_tools.evaluation.questions_asked import (
    Generation,
    Likelihood,
    Question,
    ask_all,
    failures_by_message,
)
from deepseek_triton_tools.tool_errors import ToolError

_OF_LM_EVAL = {"max_gen_toks": "max_tokens", "max_new_tokens": "max_tokens", "max_tokens": "max_tokens"}
"""Its names of our sampling fields; the others are called alike."""
_DEFAULT_MAX_TOKENS = 256
"""lm-eval's own, for tasks that name none."""


class HarnessModel:
    """The methods of lm-eval's class LM. `as_lm` makes it one, where lm-eval is installed."""

    def __init__(
        self,
        connect: Callable[[], AsyncClient],
        kept: KeptAnswers,
        info: Mapping[str, Any],
        *,
        fields: Mapping[str, Any],
        concurrency: int,
        allow_failed: int,
    ) -> None:
        """:param info: what the server says of its model; empty where it can't.

        :param fields: sampling fields that win over those of the task.
        """
        super().__init__()
        self._connect = connect
        self._kept = kept
        self._info = info
        self._fields = dict(fields)
        self._concurrency = concurrency
        self._allow_failed = allow_failed
        self.num_asked = 0
        self.num_kept = 0
        self.num_output_tokens = 0
        self.truncated = 0
        """Answers that ended because they had as many tokens as they may have."""
        self.thought = 0
        """Answers that began with reasoning, which is not scored."""
        self.failed: dict[str, DeepseekTritonError] = {}

    # --- lm-eval's interface ---

    @property
    def tokenizer_name(self) -> str:
        return str(self._info.get("name", ""))

    def chat_template(self, chat_template: bool | str = False) -> str:
        return str(self._info.get("chat_template") or "")

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """Keep the conversation as it is: the server applies its own template."""
        *before, last = map(dict, chat_history)
        if (own := conversation_in(str(last["content"]))) is not None:
            return as_text([*before, *own])
        if not add_generation_prompt:
            last["prefix"] = True
        return as_text([*before, last])

    def get_model_info(self) -> dict[str, Any]:
        """Return what lm-eval writes into its results."""
        return {name: value for name, value in self._info.items() if name not in ("chat_template", "fields")}

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        repeats: Counter[str] = Counter()
        questions = []
        for request in requests:
            question = self._generation(*request.args)
            repeats[question.key] += 1
            questions.append(self._generation(*request.args, repeat=repeats[question.key] - 1))
        records = self._answers(questions)
        for record in records:
            if record is not None:
                self.truncated += record["finish_reason"] == "length"
                self.thought += bool(record["reasoning"]) or "</think>" in record["text"]
        return [
            "" if record is None else question.answer_in(record)
            for question, record in zip(questions, records, strict=True)
        ]

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        return self._likelihoods([request.args for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Each text is one prompt: the server refuses those that are longer than its limit."""
        return [logprob for logprob, _ in self._likelihoods([("", request.args[0]) for request in requests])]

    # --- what they share ---

    def _generation(self, context: str, settings: Mapping[str, Any], *, repeat: int = 0) -> Generation:
        given = dict(settings)
        until = given.pop("until", None) or []
        is_sampled = given.pop("do_sample", None)
        fields = {_OF_LM_EVAL.get(name, name): value for name, value in given.items()}
        if is_sampled is False:
            fields["temperature"] = 0.0
        messages = conversation_in(context)
        return Generation(
            content=context if messages is None else messages,
            fields={"max_tokens": _DEFAULT_MAX_TOKENS, **fields, **self._fields},
            until=[until] if isinstance(until, str) else until,
            repeat=repeat,
        )

    def _likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        self._require_prompt_logprobs()
        questions = []
        for context, continuation in pairs:
            messages = conversation_in(context)
            content = context if messages is None else messages
            questions.append(Likelihood(context=content, continuation=continuation, fields=self._fields))
        return [
            (float("-inf"), False) if record is None else (record["logprob"], record["is_greedy"])
            for record in self._answers(questions)
        ]

    def _require_prompt_logprobs(self) -> None:
        reason = self._info.get("fields", {}).get("prompt_logprobs", "the server doesn't say that it has them")
        if reason:
            engine = self._info.get("engine", "this server")
            raise ToolError(
                f"the task compares the log-probabilities of texts, which {engine} does not give: prompt_logprobs: "
                f"{reason}. Take a task whose answers are generated, or the engine vllm or reference"
            )

    def _answers(self, questions: Sequence[Question]) -> list[dict[str, Any] | None]:
        """Return a record for each question; None for one that failed, where that is allowed."""
        keys = [question.key for question in questions]
        self.num_asked += len(keys)
        self.num_kept += sum(self._kept.get(key) is not None for key in keys)
        failed = asyncio.run(ask_all(questions, self._connect, self._kept, self._concurrency))
        self.failed |= failed
        if len(self.failed) > self._allow_failed:
            raise ToolError(
                f"{len(self.failed)} of {self.num_asked} questions failed, so nothing was scored: "
                f"{failures_by_message(self.failed)}. The same command asks only these again; "
                f"--allow-failed {len(self.failed)} counts them as wrong"
            )
        records = [self._kept.get(key) for key in keys]
        self.num_output_tokens += sum(record["num_output_tokens"] or 0 for record in records if record is not None)
        return records


def as_lm(model: type[HarnessModel], base: type) -> type[HarnessModel]:
    """Return the class that is a subclass of lm-eval's LM, too: lm-eval takes no other."""
    return type(model.__name__, (model, base), {})
