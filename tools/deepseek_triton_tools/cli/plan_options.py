"""The options of `plan` and `build` that shape a plan; plan_request.py reads them."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from deepseek_triton_tools.cli.parsing import VerbParser, number, path, positive
from deepseek_triton_tools.cli.slo_option import slo


def add_plan_options(verb: VerbParser) -> None:
    verb.usage = "%(prog)s VARIANT --gpu GPU [options]"
    verb.names = known_names
    verb.add_argument("variant", metavar="VARIANT", help="the model: a name listed below, or its Hugging Face name")
    verb.add_argument("--gpu", metavar="GPU", help="the GPU it will run on, such as h200")
    verb.add_argument("--gpus", type=positive, metavar="N", help="how many of them (default: as published)")
    verb.add_argument("--precision", metavar="NAME", help="of the weights (default: fp4 on Blackwell if any, else fp8)")
    verb.add_argument("--profile", metavar="NAME", help="what the server is tuned for (default: balanced)")
    target = verb.add_mutually_exclusive_group()
    target.add_argument("--trtllm", metavar="RELEASE", help="TensorRT-LLM release it is for (default: 1.2.1)")
    target.add_argument(
        "--vllm", metavar="VERSION", help="vLLM version it is for, with --engine vllm (default: 0.24.0)"
    )
    target.add_argument("--image", metavar="TAG", help="either by the tag of the Triton container, such as 26.07")
    work = verb.add_argument_group("workload")
    work.add_argument("--isl", type=positive, metavar="TOKENS", help="the longest input (default: the profile's)")
    work.add_argument("--osl", type=positive, metavar="TOKENS", help="the longest output (default: the profile's)")
    work.add_argument("--concurrency", type=positive, metavar="N", help="requests at once (default: the profile's)")
    help_text = "a result of deepseek-triton bench, which gives profile and workload unless they are given too"
    work.add_argument("--from-bench", type=path, metavar="FILE", help=help_text)
    help_text = "choose the load that keeps these limits, in ms (default: those of the benchmark)"
    work.add_argument("--slo", type=slo, metavar="ttft=500,tpot=20", help=help_text)
    _add_overrides(verb.add_argument_group("instead of what the profile chooses"))
    _add_pair(verb.add_argument_group("context and generation servers (--profile disagg)"))
    engine = verb.add_argument_group("checkpoint and engine")
    engine.add_argument("--model", metavar="PATH", help="the checkpoint's folder (default: its Hugging Face name)")
    engine.add_argument(
        "--engine", metavar="NAME", help="tensorrt_llm, vllm, reference, simulated (default: by VARIANT)"
    )
    engine.add_argument(
        "--no-decoupled",
        dest="decoupled",
        action="store_false",
        help="one response to each request, for ModelInfer and /infer; no streams",
    )
    engine.add_argument(
        "--backend-name",
        choices=("python", "vllm"),
        default="python",
        help="in config.pbtxt; vllm for log-probabilities in Triton's OpenAI front end (default: python)",
    )
    engine.add_argument("--preset", metavar="NAME", help="for --engine simulated: its speed; a wrong name lists all")


def _add_overrides(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--mtp", type=number, metavar="N", help="draft tokens per step, 0 for no multi-token prediction")
    group.add_argument("--relaxed-acceptance", action="store_true", help="accept likely draft tokens while R1 reasons")
    group.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), help="KV cache's type; auto: as in the checkpoint")
    group.add_argument(
        "--parallel", choices=("tp", "dp"), help="of vLLM's attention (default: dp for throughput, else tp)"
    )
    group.add_argument("--pp", type=positive, default=1, metavar="N", help="pipeline stages (default: 1)")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set any argument of the engine, or triton_config.*, to a YAML value; may be repeated",
    )
    group.add_argument("--allow-unpublished", action="store_true", help="plan what fits, even if nobody published it")


def _add_pair(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--context-servers", type=positive, metavar="N", help="servers that read prompts (default: 1)")
    group.add_argument("--generation-servers", type=positive, metavar="N", help="servers that answer (default: 1)")
    for side in ("context", "generation"):
        group.add_argument(
            f"--{side}-set",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help=f"--set for the {side} servers only; also num_gpus; may be repeated",
        )
    help_text = "set any key of disagg_config.yaml, with --format trtllm-serve; may be repeated"
    group.add_argument("--disagg", action="append", default=[], metavar="KEY=VALUE", help=help_text)


def known_names() -> str:
    """The values that the options take, from the catalogue."""
    from deepseek_triton_build.catalog import (
        PRECISION_ALIASES,
        PRECISIONS,
        RELEASES,
        VLLM_VERSIONS,
        containers,
        gpus,
        profiles,
        variants,
    )

    aliases = {name: [alias for alias, of in PRECISION_ALIASES.items() if of == name] for name in PRECISIONS}
    precisions = [f"{name} ({' or '.join(others)})" if others else name for name, others in aliases.items()]
    tags = [tag for tag, container in containers().items() if container.trtllm in RELEASES]
    rows: dict[str, Iterable[str]] = {
        "VARIANT": variants(),
        "--gpu": gpus(),
        "--precision": precisions,
        "--profile": (*profiles(), "disagg"),
        "--trtllm": RELEASES,
        "--vllm": VLLM_VERSIONS,
        "--image": tags,
    }
    return "names:\n" + "".join(f"  {option:<12} {', '.join(names)}\n" for option, names in rows.items())
