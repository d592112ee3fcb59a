"""Asks AIConfigurator how long iterations take. It runs by a Python of its own, which has aiconfigurator-core.

Standard input has {"model", "system", "kv", "layouts": [{"tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size",
"nextn"}], "grid": {"batches", "contexts", "prompt_batches", "tokens"}}; standard output gets {"version", "tables"}, one
table for each layout, or {"error"} where AIConfigurator has no data. Batches and tokens are of one rank.
"""

import contextlib
import json
import sys
from importlib.metadata import version
from typing import Any

from aiconfigurator_core.sdk import EngineHandle


def _table(question: dict[str, Any], layout: dict[str, int], engines: list[EngineHandle]) -> dict[str, Any]:
    grid = question["grid"]
    try:
        engine = EngineHandle.compile(
            question["model"],
            question["system"],
            "trtllm",
            # What it infers, fp8, has no data.
            fmha_quant_mode="bfloat16",
            kvcache_quant_mode=question["kv"],
            **layout,
        )
        engines.append(engine)
        prefill = [engine.predict_prefill_latency(1, tokens) for tokens in grid["tokens"]]
        later = [engine.predict_prefill_latency(1, 2 * tokens, tokens) for tokens in grid["tokens"]]
        return {
            **grid,
            "decode": [
                [round(engine.decode_step_latency(batch, context, 2), 2) for context in grid["contexts"]]
                for batch in grid["batches"]
            ],
            "prompt": [
                [
                    round(engine.mixed_step_latency(tokens, batch, tokens, 2) if batch else alone, 2)
                    for tokens, alone in zip(grid["tokens"], prefill, strict=True)
                ]
                for batch in grid["prompt_batches"]
            ],
            "pair_ns": [
                round(max(0.0, (chunk - first) / tokens**2 * 1e6), 3)
                for tokens, first, chunk in zip(grid["tokens"], prefill, later, strict=True)
            ],
        }
    except Exception as error:  # it raises classes of its own, KeyError and ValueError for what it has no data of
        return {"error": f"{type(error).__name__}: {error}"[:200]}


def main() -> None:
    question = json.load(sys.stdin)
    # While one lives, the next takes the loaded data from it; else each loads them again, for a second.
    engines: list[EngineHandle] = []
    with contextlib.redirect_stdout(sys.stderr):  # it prints now and then
        tables = [_table(question, layout, engines) for layout in question["layouts"]]
    print(json.dumps({"version": version("aiconfigurator-core"), "tables": tables}))


if __name__ == "__main__":
    main()
