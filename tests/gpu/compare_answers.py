"""Compares the answers of two engines: where their texts part, and how sure the first engine was there.

`python compare_answers.py FIRST SECOND` takes two files of tiny_answers.py. A small margin, the log-probability of the
token that was taken less that of the next one, means that rounding decided.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Return the index of the first token that differs or that only one has; None when there is none."""
    if first == second:
        return None
    pairs = zip(first, second, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


def compare_demo(first: dict[str, Any], second: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each demo prompt of the first report."""
    others = {demo["prompt"]: demo for demo in second["demo"]}
    for demo in first["demo"]:
        index = first_difference(demo["token_ids"], others[demo["prompt"]]["token_ids"])
        if index is None:
            yield f"same, {len(demo['token_ids'])} tokens: {demo['prompt']!r}"
            continue
        at = f"differs at token {index}"
        if index < len(demo["choices"]):
            choice = demo["choices"][index]
            at += f", margin {choice['logprob'] - choice['other_logprob']:.4f}"
        yield f"{at}: {demo['prompt']!r}"


def compare_questions(first: dict[str, Any], second: dict[str, Any]) -> str:
    others = {answer["id"]: answer["token_ids"] for answer in second["answers"]}
    same = sum(answer["token_ids"] == others[answer["id"]] for answer in first["answers"])
    return f"{same} of {len(first['answers'])} questions have the same tokens"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare two files of answers.")
    parser.add_argument("files", type=Path, nargs=2, metavar="FILE")
    first, second = (json.loads(path.read_text(encoding="utf-8")) for path in parser.parse_args(argv).files)
    for line in compare_demo(first, second):
        print(line)
    print(compare_questions(first, second))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
