"""The options of `plan` and `build` that shape a plan; plan_request.py reads them."""

import argparse
import math
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepseek_triton_tools.cli.parsing import VerbParser, number, option, path, positive, words
from deepseek_triton_tools.pages import install_extra
from deepseek_triton_tools.tool_errors import ToolError

if TYPE_CHECKING:
    from deepseek_triton_tools.bench.result import Slo

SLO_NAMES = ("ttft", "tpot", "itl", "e2el")
COMMON = "--gpu --gpus --precision --profile --trtllm --model --engine --isl --osl --concurrency"


_BRIEF = 200
"""Most characters of a typed text that a message repeats."""


class OptionError(ToolError):
    """An option has a value without a meaning. The exit code is 2."""

    def __init__(self, message: str) -> None:
        super().__init__(message, exit_code=2)


def slo(text: str) -> "Slo":
    """Limits in milliseconds, such as "ttft=500,tpot=30"."""
    from deepseek_triton_tools.bench.result import Slo  # as slow to import as a tenth of a plan, which few need

    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, given = part.strip().partition("=")
        try:
            limit = float(given)
        except ValueError:
            limit = 0.0
        if name not in SLO_NAMES or not 0 < limit < math.inf:
            raise argparse.ArgumentTypeError(
                f"expected limits in ms of {', '.join(SLO_NAMES)}, such as ttft=500,tpot=30, got {text!r:.100}"
            )
        if f"{name}_ms" in limits:
            raise argparse.ArgumentTypeError(f"expected one limit of {name}, got several: {text!r:.100}")
        limits[f"{name}_ms"] = limit
    return Slo(**limits)


def preset_or_file(given: str | None, side: str = "server") -> str | None:
    """Return a name as it is, and of a folder the file of `side`: server, context or generation.

    :raises ToolError: for a file that the simulated engine does not take; it says why.
    """
    if given is None or not (given.endswith(".json") or Path(given).is_dir()):
        return given
    from deepseek_triton_tools.sla.paces import check_pace

    place = Path(given, f"{side}.json") if Path(given).is_dir() else Path(given)
    if Path(given).is_dir() and not place.exists():
        _refuse_other_kind(given, side)
    try:
        check_pace(place)
    except ValueError as error:
        said = f"--preset: {error}; `plan --sla --write-pace DIR` writes what it takes"
        raise ToolError(said, exit_code=2) from error
    return str(place)


def _refuse_other_kind(folder: str, side: str) -> None:
    """Raise ToolError where the folder has the paces of a pair, and one server is built, or the other way round."""
    is_pair = Path(folder, "generation.json").exists()
    if side == "server" and is_pair:
        said = f"has the paces of a pair: add --profile disagg, or name {Path(folder, 'generation.json')}"
    elif side != "server" and not is_pair and Path(folder, "server.json").exists():
        said = "has the pace of one server: leave --profile disagg out"
    else:
        return
    raise ToolError(f"--preset {folder}: {said}", exit_code=2)


_REPEATED: dict[str, Any] = {"action": "append", "default": [], "metavar": "KEY=VALUE"}


def add_plan_options(verb: VerbParser) -> None:
    verb.usage = "%(prog)s VARIANT --gpu GPU [options]"
    verb.names = known_names
    option(verb, "variant VARIANT", "the model: a name listed below, or its Hugging Face name", nargs="?")
    option(verb, "--gpu GPU", "the GPU it will run on, such as h200")
    option(verb, "--gpus N", "how many of them (default: as published)", positive)
    option(verb, "--precision NAME", "of the weights (default: fp4 on Blackwell if any, else fp8)")
    option(verb, "--profile NAME", "what the server is tuned for (default: balanced)")
    target = verb.add_mutually_exclusive_group()
    option(target, "--trtllm RELEASE", "TensorRT-LLM release it is for (default: 1.2.1)")
    option(target, "--vllm VERSION", "vLLM version, with --engine vllm (default: 0.27.1, or the next with the model)")
    option(target, "--image TAG", "in place of a version, the tag of the Triton container that has it, such as 26.07")

    work = verb.add_argument_group("workload")
    option(work, "--isl TOKENS", "the longest input (default: the profile's)", positive)
    option(work, "--osl TOKENS", "the longest output (default: the profile's)", positive)
    option(work, "--concurrency N", "requests at once (default: the profile's)", positive)
    result = "a result of deepseek-triton bench, which gives profile and workload unless they are given too"
    option(work, "--from-bench FILE", result, path)
    limits = "choose the load that keeps these limits, in ms (default: those of the benchmark)"
    option(work, "--slo ttft=500,tpot=20", limits, slo)

    own = verb.add_argument_group("instead of what the profile chooses")
    option(own, "--mtp N", "draft tokens per step, by the checkpoint's own draft (MTP or DSpark); 0 for none", number)
    option(own, "--relaxed-acceptance", "accept likely draft tokens while R1 reasons")
    option(own, "--kv-cache-dtype", "KV cache's type; auto: as in the checkpoint", choices=("auto", "fp8"))
    option(own, "--parallel", "of vLLM's attention (default: dp for throughput, else tp)", choices=("tp", "dp"))
    option(own, "--pp N", "pipeline stages (default: 1)", positive)
    any_key = "set any argument of the engine, or triton_config.*, to a YAML value; may be repeated"
    recipe = (
        "an engine configuration of TensorRT-LLM, or a vLLM recipe, by path or https address: its values, as --set's"
    )
    option(own, "--from-recipe FILE", recipe, words)
    own.add_argument("--set", help=any_key, **_REPEATED)
    option(own, "--allow-unpublished", "plan what fits, even if nobody published it")

    pair = verb.add_argument_group("context and generation servers (--profile disagg)")
    option(pair, "--context-servers N", "servers that read prompts (default: 1)", positive)
    option(pair, "--generation-servers N", "servers that answer (default: 1)", positive)
    for side in ("context", "generation"):
        of_side = f"--set for the {side} servers only; also num_gpus; may be repeated"
        pair.add_argument(f"--{side}-set", help=of_side, **_REPEATED)
    any_key = "set any key of disagg_config.yaml, with --format trtllm-serve; may be repeated"
    pair.add_argument("--disagg", help=any_key, **_REPEATED)

    engine = verb.add_argument_group("checkpoint and engine")
    option(engine, "--model PATH", "the checkpoint's folder (default: its Hugging Face name)")
    option(engine, "--engine NAME", "tensorrt_llm, vllm, reference, simulated (default: by VARIANT)")
    one_response = "one response to each request, for ModelInfer and /infer; no streams"
    option(engine, "--no-decoupled", one_response, dest="decoupled", action="store_false")
    backends = "in config.pbtxt; vllm for log-probabilities in Triton's OpenAI front end (default: python)"
    option(engine, "--backend-name", backends, choices=("python", "vllm"), default="python")
    option(engine, "--preset NAME", "for --engine simulated: its speed, or what plan --write-pace wrote")


def known_names() -> str:
    """The values that the options take, from the catalogue, whose YAML the extra `tools` reads."""
    if find_spec("yaml") is None:
        return f"names: {install_extra('tools')} to see them\n"
    from deepseek_triton_build.catalog import (
        CANDIDATES,
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
        "--trtllm": (*CANDIDATES, *RELEASES),
        "--vllm": VLLM_VERSIONS,
        "--image": tags,
    }
    return "names:\n" + "".join(f"  {option:<12} {', '.join(names)}\n" for option, names in rows.items())


def brief(text: str) -> str:
    return text if len(text) <= _BRIEF else f"{text[:_BRIEF]}..."
