"""Answers the questions with the reference engine: `python -m tiny_checkpoint.answering CHECKPOINT ANSWERS.json`.

The answers are greedy. The file has the form of tests/gpu/tiny_answers.py, so that `tiny_checkpoint.score` and
tests/gpu/compare_answers.py read it beside those of other engines. The backend must be on PYTHONPATH, as `make
tiny-checkpoint` says.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepseek_backend.config import BackendConfig
from deepseek_backend.engines import create_engine
from deepseek_backend.engines.base import Engine, Step
from deepseek_backend.engines.generate_request import GenerateRequest, SamplingParams
from tiny_checkpoint.questions import questions

MAX_TOKENS = 220


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
    return [
        {"prompt": prompt, **_continued(generate(engine, {prompt: prompt}, logprobs=2)[prompt])} for prompt in prompts
    ]


def _continued(steps: Sequence[Step]) -> dict[str, Any]:
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
    return {"text": _text(steps), "token_ids": _token_ids(steps), "choices": choices}


def _text(steps: Sequence[Step]) -> str:
    return "".join(step.text for step in steps)


def _token_ids(steps: Sequence[Step]) -> list[int]:
    return [token_id for step in steps for token_id in step.token_ids]


def main() -> int:
    parser = argparse.ArgumentParser(description="Answer the tiny checkpoint's questions with the reference engine.")
    parser.add_argument("checkpoint", type=Path, help="the checkpoint's folder")
    parser.add_argument("answers", type=Path, help="the JSON file to write")
    parser.add_argument(
        "--demo-of", type=Path, metavar="FILE", help="continue the demo prompts of this file of answers too"
    )
    args = parser.parse_args()
    prompts = []
    if args.demo_of:
        prompts = [answer["prompt"] for answer in json.loads(args.demo_of.read_text(encoding="utf-8"))["demo"]]
    prompts_by_id = {question.id: question.prompt for question in questions()}
    with loaded(args.checkpoint) as engine:
        shown = demo(engine, prompts)
        started = time.monotonic()
        steps_by_id = generate(engine, prompts_by_id)
        seconds = time.monotonic() - started
    answers = [
        {"id": name, "text": _text(steps), "token_ids": _token_ids(steps)} for name, steps in steps_by_id.items()
    ]
    rate = sum(len(answer["token_ids"]) for answer in answers) / seconds
    document = {"engine": "reference", "precision": "float32", "demo": shown, "answers": answers}
    args.answers.write_text(json.dumps(document, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{len(answers)} answers, {rate:.0f} tokens/s: {args.answers}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
