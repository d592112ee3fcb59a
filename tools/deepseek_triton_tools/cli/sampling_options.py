"""The fields of SamplingParams as options of the command line, and as `name=value` in a chat."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from deepseek_triton_client import SamplingParams
from deepseek_triton_tools.cli.parsing import VerbParser
from deepseek_triton_tools.tool_errors import ToolError

_GROUPS: Mapping[str, Mapping[str, str]] = {
    "length and end": {
        "max_tokens": "most tokens to generate, from 1 (default: the model's)",
        "min_tokens": "fewest tokens to generate, from 0",
        "ignore_eos": "continue after the end token, up to --max-tokens",
        "stop": "a string that ends the text; may be repeated",
        "stop_token_ids": "the id of a token that ends the text, from 0; may be repeated",
        "include_stop_str_in_output": "keep the stop string, or the stop token's text, at the end of the text",
        "truncate_prompt_tokens": "keep only the last N tokens of the prompt, from 1",
    },
    "sampling": {
        "temperature": "randomness, 0 to 100; 0 always takes the likeliest token (greedy decoding)",
        "top_p": "sample from the likeliest tokens whose probabilities add up to X, 0 to 1; 0: only the likeliest",
        "top_k": "sample from the N likeliest tokens, from 0; 0: all",
        "min_p": "sample no token below X times the probability of the likeliest one, 0 to 1",
        "seed": "make sampling repeatable, -2^63 to 2^64 - 1",
        "repetition_penalty": "divide the logits of tokens seen already, 0.01 to 10; 1 changes nothing",
        "presence_penalty": "subtract X from the logit of each token generated already, -2 to 2",
        "frequency_penalty": "subtract X once for each time the token was generated, -2 to 2",
        "bad": "a string that must not be generated; may be repeated",
        "logit_bias": 'an object of token id and number, -100 to 100, added to its logit, such as {"5": -100}',
        "n": "number of answers, 1 to 64; more than one needs sampling (--temperature)",
        "best_of": "generate N answers, 1 to 64, and return the --n likeliest",
    },
    "prompt and text": {
        "add_special_tokens": "let the tokenizer put its special tokens before the prompt (default: yes)",
        "exclude_input_from_output": "leave the prompt out of the text (default: yes)",
        "skip_special_tokens": "leave special tokens out of the text (default: yes)",
        "separate_reasoning": "keep the reasoning apart from the answer (default: in chats, where the model has it)",
        "chat_template_kwargs": 'an object for the chat template, such as {"thinking": true}; in chats',
        "tools": "a list of functions that the model may call, in OpenAI's form; in chats",
        "tool_choice": "auto, none, required, or an object that names the function to call",
    },
    "guided decoding (at most one of these)": {
        "guided_json": "a JSON schema that the text follows",
        "guided_json_object": "the text is a JSON object of any kind",
        "guided_regex": "a regular expression that the text matches",
        "guided_grammar": "a grammar of the text, in EBNF",
        "guided_structural_tag": "a structural tag, in TensorRT-LLM's JSON format",
    },
    "details, in JSON output": {
        "logprobs": "log-probabilities of each token and of the N likeliest ones, 0 to 20",
        "prompt_logprobs": "the same for the prompt, 0 to 20",
        "return_logprobs": "log-probabilities of the generated tokens",
        "return_cumulative_logprob": "sum of the log-probabilities of the generated tokens",
        "return_output_ids": "the ids of the generated tokens",
        "return_perf_metrics": "times and counts that the engine measured",
        "return_num_input_tokens": "send the number of the prompt's tokens with every chunk",
        "return_num_output_tokens": "send the number of generated tokens with every chunk",
    },
    "on the server": {
        "timeout_ms": "the server's own time limit in ms, from 1; the text so far is then the answer",
        "priority": "a higher N goes first, on engines that support it; 0: no priority",
        "stream_interval": "send the text every N tokens, from 1",
        "stream_interval_ms": "send the text after at most N ms, 1 to 60,000",
    },
}
"""Group -> field -> help. The server checks the ranges; here they are only for the reader."""


_METADATA: Mapping[str, Mapping[str, Any]] = {
    field.name: field.metadata for field in dataclasses.fields(SamplingParams)
}


def add_sampling_options(verb: VerbParser) -> None:
    """Add one option for each field of SamplingParams."""
    groups = {title: verb.add_argument_group(title) for title in _GROUPS}
    placed = {name: (groups[title], text) for title, texts in _GROUPS.items() for name, text in texts.items()}
    kinds: dict[str, dict[str, Any]] = {
        "BOOL": {"action": argparse.BooleanOptionalAction},
        "FP32": {"type": float, "metavar": "X"},
        "INT32": {"type": int, "metavar": "N"},
        "UINT64": {"type": int, "metavar": "N"},
    }
    for name, metadata in _METADATA.items():
        group, text = placed[name]
        settings = kinds.get(metadata["datatype"], {"metavar": "JSON" if metadata["json"] else "TEXT"})
        repeated: dict[str, Any] = {"action": "append"} if metadata["many"] else {}
        group.add_argument(f"--{name.replace('_', '-')}", help=text, **settings, **repeated)


def sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields that were given."""
    return {name: value for name in _METADATA if (value := getattr(args, name)) is not None}


def assigned(text: str) -> tuple[str, Any]:
    """Split `name=value` into the field and its value, which is None when nothing follows the `=`. Raises ToolError
    when the text has another form. SamplingParams checks that the field exists and takes the value."""
    name, separator, given = (part.strip() for part in text.partition("="))
    if not separator:
        raise ToolError(f"expected name=value, got {text!r}")
    name = name.lstrip("-").replace("-", "_")
    metadata = _METADATA.get(name)
    is_text = metadata is None or (metadata["datatype"] == "BYTES" and not (metadata["many"] and given[:1] == "["))
    if not given or is_text:
        return name, given or None
    try:
        return name, json.loads({"on": "true", "off": "false"}.get(given, given))
    except ValueError as error:
        raise ToolError(f"{name}: expected a number, true, false or a JSON list, got {given!r}") from error


def assigned_json(text: str) -> tuple[str, Any]:
    """Split `name=value` as `assigned` does, for a server with other fields too: what is JSON becomes its value, but
    for fields of plain text. Raises ToolError."""
    name, value = assigned(text)
    metadata = _METADATA.get(name)
    if isinstance(value, str) and (metadata is None or metadata["json"]):
        with suppress(ValueError):
            return name, json.loads(value)
    return name, value
