"""Answers the questions with the reference engine, and scores answers by kind of question.

`python -m tiny_checkpoint.answering answer CHECKPOINT ANSWERS.json` writes greedy answers in the form of
tests/gpu/tiny_answers.py, which does it for vLLM and transformers: `engine`, `precision` and `answers`, a list of `id`
and `text`. `... score ANSWERS.json ...` prints a table in Markdown. The backend must be on PYTHONPATH, as `make
tiny-checkpoint` says.
"""

import argparse
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepseek_backend.config import BackendConfig
from deepseek_backend.engines import create_engine
from deepseek_backend.engines.base import Engine, Step
from deepseek_backend.engines.generate_request import GenerateRequest, SamplingParams
from tiny_checkpoint.questions import is_right, questions

MAX_TOKENS = 220
SPLITS = ("taught", "held_out")
"""The order of the two numbers in a cell."""


class JoinedSteps:
    """A sink that keeps the steps of each request until all requests have ended."""

    def __init__(self, count: int) -> None:
        self.steps: dict[str, list[Step]] = {}
        self._left = count
        self._done = threading.Event()
        if not count:
            self._done.set()

    def on_steps(self, steps: Sequence[tuple[GenerateRequest, Step]]) -> None:
        for request, step in steps:
            self.steps.setdefault(request.request_id, []).append(step)
            self._left -= step.finish_reason is not None or step.error is not None
        if not self._left:
            self._done.set()

    def wait(self) -> dict[str, list[Step]]:
        """Return the steps of each request by its id; raise the error of one that failed."""
        self._done.wait()
        for steps in self.steps.values():
            if steps[-1].error is not None:
                raise steps[-1].error
        return self.steps


@contextmanager
def loaded(checkpoint: Path) -> Iterator[Engine]:
    model = str(checkpoint.resolve())
    engine = create_engine(
        BackendConfig(engine="reference", llm_args={"model": model}, engine_options={"max_num_seqs": 64})
    )
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def generate(engine: Engine, prompts: dict[str, str], *, logprobs: int | None = None) -> dict[str, list[Step]]:
    """Continue all prompts at once, greedily; a prompt begins with its begin-of-sentence token."""
    sink = JoinedSteps(len(prompts))
    sampling = SamplingParams(max_tokens=MAX_TOKENS, add_special_tokens=False, logprobs=logprobs)
    for name, prompt in prompts.items():
        request = GenerateRequest(request_id=name, prompt=prompt, sampling=sampling, max_tokens=MAX_TOKENS)
        engine.submit(request, sink)
    return sink.wait()


def demo(engine: Engine, prompts: Sequence[str]) -> list[dict[str, Any]]:
    """Continue each prompt by itself, with the runner-up of each token."""
    answers = []
    for prompt in prompts:
        steps = generate(engine, {prompt: prompt}, logprobs=2)[prompt]
        choices = [
            {
                "token_id": own.token_id,
                "logprob": own.logprob,
                "other_id": other.token_id,
                "other_logprob": other.logprob,
            }
            for step in steps
            for own, other, *_ in step.logprobs
        ]
        answers.append({"prompt": prompt, **_joined(steps), "choices": choices})
    return answers


def _joined(steps: Sequence[Step]) -> dict[str, Any]:
    return {
        "text": "".join(step.text for step in steps),
        "token_ids": [token_id for step in steps for token_id in step.token_ids],
    }


def answer(checkpoint: Path, file: Path, prompts: Sequence[str]) -> None:
    """Write the answers to all questions, and the texts that continue the demo's `prompts`."""
    with loaded(checkpoint) as engine:
        shown = demo(engine, prompts)
        started = time.monotonic()
        steps_by_id = generate(engine, {question.id: question.prompt for question in questions()})
        seconds = time.monotonic() - started
    answers = [{"id": name, **_joined(steps)} for name, steps in steps_by_id.items()]
    rate = sum(len(one["token_ids"]) for one in answers) / seconds
    document = {"engine": "reference", "precision": "float32", "demo": shown, "answers": answers}
    file.write_text(json.dumps(document, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{len(answers)} answers, {rate:.0f} tokens/s: {file}")


def scores(answers: dict[str, str]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return (right answers, questions) by kind and split. A question without an answer counts as wrong."""
    right: Counter[tuple[str, str]] = Counter()
    total: Counter[tuple[str, str]] = Counter()
    for question in questions():
        for kind in (question.kind, "all"):
            total[kind, question.split] += 1
            right[kind, question.split] += is_right(question, answers.get(question.id, ""))
    return {key: (right[key], total[key]) for key in total}


def table(columns: Sequence[tuple[str, dict[str, str]]]) -> str:
    """Return the scores in Markdown: a row for each kind, a column for each engine; `all` comes last."""
    by_engine = [(name, scores(answers)) for name, answers in columns]
    lines = [
        "| kind | questions | " + " | ".join(f"{name}, %" for name, _ in by_engine) + " |",
        "| --- | ---: |" + " ---: |" * len(by_engine),
    ]
    kinds = {kind for _, result in by_engine for kind, _ in result}
    for kind in sorted(kinds, key=lambda kind: (kind == "all", kind)):
        counts = " / ".join(str(by_engine[0][1][kind, split][1]) for split in SPLITS)
        cells = [" / ".join(_percent(*result[kind, split]) for split in SPLITS) for _, result in by_engine]
        lines.append(f"| {kind} | {counts} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _percent(right: int, total: int) -> str:
    return f"{100 * right / total:.1f}".removesuffix(".0")


def score(files: Sequence[Path], *, with_wrong: bool) -> None:
    columns = []
    for file in files:
        document = json.loads(file.read_text(encoding="utf-8"))
        texts = {one["id"]: one["text"] for one in document["answers"]}
        columns.append((f"{document['engine']} {document['precision']}", texts))
    print(table(columns))
    for name, texts in columns if with_wrong else ():
        for question in questions():
            text = texts.get(question.id, "")
            if not is_right(question, text):
                print(f"\n{name}: {question.kind}, {question.split}\n  asked    {question.prompt!r}")
                print(f"  expected {question.accepted[0]!r}\n  answered {text!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Answer the tiny checkpoint's questions, and score answers.")
    commands = parser.add_subparsers(dest="command", required=True)
    answer_parser = commands.add_parser("answer", help="answer with the reference engine")
    answer_parser.add_argument("checkpoint", type=Path, help="the checkpoint's folder")
    answer_parser.add_argument("answers", type=Path, help="the JSON file to write")
    answer_parser.add_argument(
        "--demo-of", type=Path, metavar="FILE", help="continue the demo prompts of this file of answers too"
    )
    score_parser = commands.add_parser("score", help="score the answers of engines")
    score_parser.add_argument("answers", type=Path, nargs="+", help="a file of answers of each engine")
    score_parser.add_argument("--wrong", action="store_true", help="list the wrong answers too")
    args = parser.parse_args()
    if args.command == "score":
        score(args.answers, with_wrong=args.wrong)
    else:
        shown = json.loads(args.demo_of.read_text(encoding="utf-8"))["demo"] if args.demo_of else []
        answer(args.checkpoint, args.answers, [one["prompt"] for one in shown])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
