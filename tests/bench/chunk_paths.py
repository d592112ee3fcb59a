"""What a token costs on its way to the bytes of its event: in the gateway, beside vLLM's own server.

    .venv-vllm/bin/python tests/bench/chunk_paths.py [--rounds N] [--tokens N] [--output FILE]

Run by hand; `make test-vllm` makes the environment. The gateway reads Triton's event (JSON) and writes OpenAI's; what
the backend spends on the former is not counted. vLLM's `chat_completion_stream_generator` has the engine's objects in
its own process, so it has nothing to read. Both answer the same request with the same text, a token at a time, by
turns; here neither has a socket, a choice of servers, or an engine's queue. `tools`: the request has a
tool, and the text is looked through for calls: by vLLM with its parsers for DeepSeek-V3.1. Prints microseconds of CPU a
token, and how many times more vLLM needs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from statistics import median
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.engine.protocol import RequestResponseMetadata
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.parser import ParserManager

from deepseek_triton_tools.gateway.app.chat_answer import StreamedChatAnswer
from deepseek_triton_tools.gateway.app.generating import generate
from deepseek_triton_tools.gateway.app.handled_request import begin_record
from deepseek_triton_tools.gateway.protocol.chat_request import read_chat_request
from deepseek_triton_tools.gateway.triton.call import Call, Part
from deepseek_triton_tools.gateway.triton.server_events import EventReader

CHECKPOINT = Path(__file__).parents[2] / "model_repository/tensorrt_llm/1/tiny"
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
PROMPT_IDS = list(range(20))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="rounds of each case (default: 7)")
    parser.add_argument("--tokens", type=int, default=5000, metavar="N", help="tokens of an answer (default: 5000)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write every round as JSON")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    tokens = _tokens(tokenizer, args.tokens)
    events = [_event(token_id, text) for token_id, text in tokens]
    results: dict[str, list[dict[str, float]]] = {}
    for case, tools in (("plain", []), ("tools", [TOOL])):
        document = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "Hi"}],
            "stream": True,
            **({"tools": tools} if tools else {}),
        }
        vllm = _VllmChat(tokenizer, with_parsers=bool(tools))
        rounds = [
            {
                "gateway": asyncio.run(_gateway_us(document, events)),
                "vllm": asyncio.run(vllm.us_a_token(document, tokens)),
            }
            for _ in range(args.rounds + 1)
        ][1:]  # the first warms up
        ratios = sorted(run["vllm"] / run["gateway"] for run in rounds)
        medians = {name: median(run[name] for run in rounds) for name in rounds[0]}
        print(
            f"{case}: gateway {medians['gateway']:.1f} us a token, vLLM {medians['vllm']:.1f} us; "
            f"vLLM / gateway {median(ratios):.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f})",
            flush=True,
        )
        results[case] = rounds
    if args.output:
        args.output.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def _tokens(tokenizer: PreTrainedTokenizerBase, count: int) -> list[tuple[int, str]]:
    text = "Triton serves the model, and the gateway translates what it says for the clients of others. "
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [(token_id, tokenizer.decode([token_id])) for token_id in (ids * (count // len(ids) + 1))[:count]]


def _event(token_id: int, text: str) -> bytes:
    """As the model sends it through Triton's generate_stream."""
    outputs = {
        "finish_reason": "None",
        "model_name": "tensorrt_llm",
        "model_version": "1",
        "num_cached_tokens": 0,
        "num_input_tokens": len(PROMPT_IDS),
        "num_output_tokens": 1,
        "num_reasoning_tokens": 0,
        "output_ids": token_id,
        "reasoning_output": "",
        "sequence_index": 0,
        "stop_reason": "None",
        "text_output": text,
    }
    return b"data: " + json.dumps(outputs, separators=(",", ":")).encode() + b"\n\n"


class _EventFleet:
    """In the place of a model's servers: their events, without a connection."""

    def __init__(self, events: list[bytes]) -> None:
        self._events = events

    @property
    def fleet(self) -> _EventFleet:
        return self

    async def generate(self, call: Call) -> AsyncGenerator[list[Part], None]:
        reader = EventReader()
        for event in self._events:
            yield reader.feed(event)


async def _gateway_us(document: dict[str, Any], events: list[bytes]) -> float:
    identity = {"id": "chatcmpl-0", "created": 1, "model": "tiny", "system_fingerprint": "fp_0"}
    answer = StreamedChatAnswer(read_chat_request(document), identity, ("reasoning_content",))
    record = begin_record("/v1/chat/completions", [])
    model: Any = _EventFleet(events)
    began_s = time.process_time()
    sizes = [len(answer.take(parts)) async for parts in generate(model, record, {}, None)]
    took_s = time.process_time() - began_s
    assert sum(sizes) > 100 * len(events), sizes[:3]
    return took_s / len(events) * 1e6


class _VllmChat(OpenAIServingChat):
    """vLLM's handler of chats, with what its stream reads of a server, and no server."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, with_parsers: bool) -> None:
        self.tokenizer = tokenizer
        self.parser_cls = ParserManager.get_parser(
            tool_parser_name="deepseek_v31" if with_parsers else None,
            reasoning_parser_name="deepseek_v3" if with_parsers else None,
            enable_auto_tools=with_parsers,
            model_name="tiny",
            is_harmony=False,
        )
        self.model_config = None
        self.response_role = "assistant"
        self.request_logger = None
        self.system_fingerprint = None
        self.enable_force_include_usage = False
        self.enable_log_outputs = False
        self.enable_per_request_metrics = False
        self.enable_prompt_tokens_details = False

    async def us_a_token(self, document: dict[str, Any], tokens: list[tuple[int, str]]) -> float:
        request = ChatCompletionRequest(**document)
        outputs = [_output(token_id, text) for token_id, text in tokens]

        async def results() -> AsyncIterator[RequestOutput]:
            for output in outputs:
                yield output

        metadata = RequestResponseMetadata(request_id="chatcmpl-0")
        began_s = time.process_time()
        chunks = self.chat_completion_stream_generator(
            request, results(), "chatcmpl-0", "tiny", document["messages"], self.tokenizer, metadata
        )
        sizes = [len(chunk) async for chunk in chunks]
        took_s = time.process_time() - began_s
        assert len(sizes) > len(tokens), f"{len(sizes)} chunks"
        return took_s / len(tokens) * 1e6


def _output(token_id: int, text: str) -> RequestOutput:
    completion = CompletionOutput(0, text, [token_id], None, None)
    return RequestOutput("chatcmpl-0", None, PROMPT_IDS, None, [completion], finished=False)


if __name__ == "__main__":
    sys.exit(main())
