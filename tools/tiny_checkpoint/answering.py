"""Answers the questions with the reference engine: `python -m tiny_checkpoint.answering CHECKPOINT ANSWERS.json`.

The answers are greedy, and `tiny_checkpoint.score` scores them. The backend must be on PYTHONPATH, as `make
tiny-checkpoint` says.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from deepseek_backend.config import BackendConfig
from deepseek_backend.engines import create_engine
from deepseek_backend.engines.base import Step
from deepseek_backend.engines.generate_request import GenerateRequest, SamplingParams
from tiny_checkpoint.questions import questions

MAX_TOKENS = 220


class CollectedAnswers:
    """A sink that joins the text of each request."""

    def __init__(self, count: int) -> None:
        self.texts: dict[str, str] = {}
        self.num_tokens = 0
        self._left = count
        self._done = threading.Event()

    def on_steps(self, steps: Sequence[tuple[GenerateRequest, Step]]) -> None:
        for request, step in steps:
            if step.error is not None:
                raise step.error
            self.texts[request.request_id] = self.texts.get(request.request_id, "") + step.text
            self.num_tokens += len(step.token_ids)
            self._left -= step.finish_reason is not None
        if not self._left:
            self._done.set()

    def wait(self) -> dict[str, str]:
        self._done.wait()
        return self.texts


def answer(checkpoint: Path, prompts: dict[str, str]) -> tuple[dict[str, str], float]:
    """Return the greedy text of each prompt by its id, and the generated tokens per second."""
    config = BackendConfig(
        engine="reference",
        llm_args={"model": str(checkpoint.resolve())},
        engine_options={"max_num_seqs": 64},
    )
    engine = create_engine(config)
    engine.start()
    try:
        sink = CollectedAnswers(len(prompts))
        sampling = SamplingParams(max_tokens=MAX_TOKENS, add_special_tokens=False)
        started = time.monotonic()
        for name, prompt in prompts.items():
            engine.submit(
                GenerateRequest(request_id=name, prompt=prompt, sampling=sampling, max_tokens=MAX_TOKENS), sink
            )
        texts = sink.wait()
        return texts, sink.num_tokens / (time.monotonic() - started)
    finally:
        engine.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description="Answer the tiny checkpoint's questions with the reference engine.")
    parser.add_argument("checkpoint", type=Path, help="the checkpoint's folder")
    parser.add_argument("answers", type=Path, help="the JSON file to write")
    args = parser.parse_args()
    asked = questions()
    texts, rate = answer(args.checkpoint, {question.id: question.prompt for question in asked})
    answers = [{"id": name, "text": text} for name, text in texts.items()]
    document = {"engine": "reference, float32", "tokens_per_s": round(rate), "answers": answers}
    args.answers.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(f"{len(answers)} answers, {rate:.0f} tokens/s: {args.answers}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
