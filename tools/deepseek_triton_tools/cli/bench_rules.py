"""Options of `bench` that need others, or don't go with others: all such mistakes of a command line at once."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from deepseek_triton_tools.tool_errors import ToolError

_NEEDS = {
    "burstiness": "rate",
    "cancel_after": "cancel",
    "full": "preset",
    "later_isl": "turns",
    "think_time": "turns",
    "num_prefixes": "prefix_len",
}
_REFUSES = {
    "preset": (
        *("concurrency", "rate", "burstiness", "num_prompts", "rounds", "duration", "warmup", "cancel", "cancel_after"),
        *("isl", "osl", "input_stdev", "output_stdev", "range_ratio", "prefix_len", "num_prefixes", "turns"),
        *("later_isl", "think_time"),
    ),
    "json": ("table", "picture", "against"),
    "rounds": ("num_prompts",),
}
_SENT_OTHERWISE = {
    "max_tokens": "--osl",
    "max_completion_tokens": "--osl",
    "model": "--model",
    "prompt": "--dataset",
    "messages": "--dataset and --chat",
}


def check_options(args: argparse.Namespace, *, is_openai: bool) -> None:
    """Raises ToolError, which names every mistake."""
    problems = list(_problems(args, is_openai))
    if problems:
        raise ToolError("; ".join(problems), exit_code=2)


def _problems(args: argparse.Namespace, is_openai: bool) -> Iterator[str]:
    given = {name for name, value in vars(args).items() if value not in (None, False, 0, "")}
    for name, needed in _NEEDS.items():
        if name in given and needed not in given and not ("preset" in given and name in _REFUSES["preset"]):
            yield f"{_option(name)}: only with {_option(needed)}"
    if {"rounds", "rate"} <= given and "concurrency" not in given:
        yield "--rounds: with --rate only if there is --concurrency"
    for name, refused in _REFUSES.items():
        misplaced = ", ".join(_option(other) for other in refused if other in given)
        if name in given and misplaced:
            yield f"{misplaced}: not with {_option(name)}"
    if is_openai and (args.turns or 1) > 1:
        yield "--turns: an OpenAI endpoint gives no token ids of its answers, which later turns need; ask Triton itself"
    if is_openai and args.model_version:
        yield "--model-version: an OpenAI endpoint has none"
    if is_openai and args.context_url:
        yield "--context-url: an OpenAI endpoint finds its context servers itself; give the addresses of Triton servers"
    if args.chat and args.dataset is None:
        yield "--chat: random prompts are token ids, and a chat needs text; give --dataset"
    for text in args.set:
        name = text.partition("=")[0].strip().lstrip("-").replace("-", "_")
        if name in _SENT_OTHERWISE:
            yield f"--set {name}: say it with {_SENT_OTHERWISE[name]}"
        elif is_openai and name in ("stream", "stream_options"):
            yield f"--set {name}: bench always streams"


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
