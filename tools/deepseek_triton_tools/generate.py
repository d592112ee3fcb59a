"""`deepseek-triton generate`: one prompt, the answer as it comes."""

from __future__ import annotations

import json
import sys
from typing import Any

from deepseek_triton_client import Client, Completion, Timeouts
from deepseek_triton_tools.streams import to_reader


def generate(
    *, prompt: str, url: str, model: str, fields: dict[str, Any], stream: bool, timeout_s: float | None, as_json: bool
) -> int:
    """Send `prompt` and print the text: as it comes, at the end, or in one JSON object.

    :raises deepseek_triton_client.DeepseekTritonError: when it can't be answered.
    """
    with to_reader(), Client(url, model_name=model, timeouts=Timeouts(total=timeout_s)) as client:
        if as_json:
            print(json.dumps(_as_dict(client.generate(prompt, **fields)), ensure_ascii=False))
        elif not stream:
            print(client.generate(prompt, **fields).text)
        else:
            _print_stream(client, prompt, fields)
    return 0


def _print_stream(client: Client, prompt: str, fields: dict[str, Any]) -> None:
    with client.stream(prompt, **fields) as chunks:
        try:
            for chunk in chunks:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
        finally:
            sys.stdout.write("\n")  # also before an error: it gets a line of its own


def _as_dict(completion: Completion) -> dict[str, Any]:
    names = ("text", "finish_reason", "stop_reason", "num_input_tokens", "num_output_tokens", "request_id", "total_s")
    return {name: getattr(completion, name) for name in names}
