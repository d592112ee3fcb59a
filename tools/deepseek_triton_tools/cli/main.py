"""The `deepseek-triton` command line: the parser, and the one place where errors become a line and an exit code.

Exit codes: 0 done; 1 it failed or was refused (`check`: it found errors); 2 the command line or a name in it was
refused; 130 interrupted. `serve` passes on tritonserver's own; `warm`, `probe` and `doctor` have more (their --help).

Each verb's module is imported when the verb runs, so that `--help` costs nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.cli.client_options import add_client_options, add_server_options
from deepseek_triton_tools.cli.doctor_arguments import add_doctor
from deepseek_triton_tools.cli.launch_arguments import add_launch
from deepseek_triton_tools.cli.parsing import (
    Handler,
    VerbParser,
    Verbs,
    about_option,
    add_json,
    add_plan_options,
    add_tritonserver,
    add_verb,
    duration,
    hold_mode,
    numbers,
    path,
    port_or_auto,
    positive,
    seconds,
    share,
    size,
)
from deepseek_triton_tools.cli.probe_arguments import add_probe
from deepseek_triton_tools.cli.sampling_options import add_sampling_options
from deepseek_triton_tools.terminal import output_streams


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    output_streams.prepare()
    verb = ""
    try:
        with output_streams.to_reader():  # --help and --version print
            args = _parsed(argv)
            verb = f" {args.verb}"
        if not verb:
            return 0  # the reader of --help left
        handler: Handler = args.handler
        code = handler(args)
        with output_streams.to_reader():
            return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # of a verb that works while it prints: whoever wanted it has left
        with output_streams.to_reader():
            return 0
    except Exception as error:
        known = _expected_error(error)
        if known is None:
            raise
        output_streams.complain(f"deepseek-triton{verb}: {error}{_advice(error)}")
        return known


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}{about_option(unknown[0], args.parser, parser)}")
    return args


def _advice(error: Exception) -> str:
    """What to look at when nobody answers at an address, or something is not installed."""
    from deepseek_triton_client import ModelNotReady, ServerUnavailable

    if isinstance(error, ServerUnavailable) and error.code is None and not isinstance(error, ModelNotReady):
        return "; is the server running and ready there (http:// is port 8000, grpc:// 8001)?"
    return "; pip install 'deepseek-triton[tools]'" if _needs_tools(error) else ""


def _expected_error(error: Exception) -> int | None:
    """The exit code for an error that explains itself; None for a bug, whose traceback is wanted."""
    from deepseek_triton_client import DeepseekTritonError
    from deepseek_triton_tools.tool_errors import ToolError

    if isinstance(error, ToolError):
        return error.exit_code
    if isinstance(error, DeepseekTritonError) or _needs_tools(error):
        return 1
    if isinstance(error, ImportError) and "deepseek-triton[" in str(error):
        return 1
    return _code_of_build_error(error)


def _needs_tools(error: Exception) -> bool:
    """What is missing is what the extra `tools` brings."""
    return isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in {"httpx", "rich", "yaml"}


def _code_of_build_error(error: Exception) -> int | None:
    if "deepseek_triton_build" not in sys.modules:  # it needs the extra `tools`
        return None
    from deepseek_triton_build import BuildError, UnknownNameError

    if isinstance(error, UnknownNameError):
        return 2
    return 1 if isinstance(error, BuildError) else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deepseek-triton",
        description="Serve DeepSeek-V3, R1 and V3.2-Exp on NVIDIA Triton Inference Server.",
        epilog="Try it without a GPU: deepseek-triton demo",
    )
    parser.add_argument("--version", action="version", version=f"deepseek-triton {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=VerbParser)
    _add_demo(verbs)
    _add_variants(verbs)
    _add_plan(verbs)
    _add_build(verbs)
    _add_check(verbs)
    _add_warm(verbs)
    _add_serve(verbs)
    add_launch(verbs)
    _add_generate(verbs)
    _add_chat(verbs)
    add_probe(verbs)
    add_doctor(verbs)
    return parser


def _add_demo(verbs: Verbs) -> None:
    verb = add_verb(
        verbs,
        "demo",
        _demo,
        "see it work: makes a tiny DeepSeek, serves it on a real tritonserver, calls it",
        "deepseek-triton demo\n  deepseek-triton demo --engine simulated --preset h200x8-r1-fp8-min-latency",
    )
    verb.add_argument(
        "--engine", choices=("transformers", "simulated"), default="transformers", help="default: %(default)s"
    )
    verb.add_argument("--preset", help="the deployment whose pace the simulated engine keeps; a wrong one lists them")
    verb.add_argument("--max-tokens", type=int, default=32, help="tokens for each prompt (default: %(default)s)")
    add_tritonserver(verb)


def _add_variants(verbs: Verbs) -> None:
    verb = add_verb(
        verbs,
        "variants",
        _variants,
        "list what can be served: models, precisions, GPUs, profiles, releases",
        "deepseek-triton variants\n  deepseek-triton variants --gpu h200",
    )
    verb.add_argument("--gpu", metavar="GPU", help="one GPU only")
    add_json(verb)


def _add_plan(verbs: Verbs) -> None:
    verb = add_verb(
        verbs,
        "plan",
        _plan,
        "show what would be built: every setting with its reason, the memory, the requests at once",
        "deepseek-triton plan deepseek-r1 --gpu h200 --gpus 8\n"
        "  deepseek-triton plan nvidia/DeepSeek-R1-FP4 --gpu b200 --profile throughput --isl 1000 --osl 2000\n"
        "  deepseek-triton plan deepseek-v3 --gpu h100 --gpus 16 --image 26.07 --set max_seq_len=32768 --json",
    )
    add_plan_options(verb)
    add_json(verb)


def _add_build(verbs: Verbs) -> None:
    verb = add_verb(
        verbs,
        "build",
        _build,
        "write a Triton model repository, every line with its reason, or the same plan for trtllm-serve",
        "deepseek-triton build deepseek-r1 --gpu h200 --gpus 8 --model /models/DeepSeek-R1 --output r1\n"
        "  deepseek-triton build deepseek-r1 --gpu b200 --profile latency --format trtllm-serve --output r1-serve\n"
        "  deepseek-triton build tiny --output /tmp/tiny",
    )
    add_plan_options(verb)
    verb.add_argument("--output", type=path, required=True, metavar="DIR", help="the folder to write")
    verb.add_argument(
        "--format",
        default="triton",
        metavar="NAME",
        help="triton (default), trtllm-serve, trtllm-bench, trtllm-eval or quickstart",
    )
    verb.add_argument("--force", action="store_true", help="replace a generated folder that was edited since")
    verb.add_argument(
        "--write-quant-config",
        action="store_true",
        help="make hf_quant_config.json in --model's folder say what the plan does; a backup is kept",
    )


def _add_check(verbs: Verbs) -> None:
    verb = add_verb(
        verbs,
        "check",
        _check,
        "check a model repository, this generator's or any other, and the checkpoint it names",
        "deepseek-triton check model_repository\n  deepseek-triton check repo --trtllm 1.1.0 --gpu h200 --json",
    )
    verb.add_argument("repository", type=path, metavar="DIR", help="the model repository")
    verb.add_argument("--trtllm", metavar="RELEASE", help="the release to check against, if the files don't say")
    verb.add_argument("--gpu", metavar="GPU", help="the GPU it will run on, if the files don't say")
    verb.add_argument("--gpus", type=positive, metavar="N", help="GPUs of one instance, if the files don't say")
    verb.add_argument("--model", type=path, metavar="PATH", help="where the checkpoint it names is on this machine")
    verb.add_argument("--strict", action="store_true", help="a checkpoint that is not on this machine is an error")
    add_json(verb)


def _add_warm(verbs: Verbs) -> None:
    verb = add_verb(
        verbs,
        "warm",
        _warm,
        "bring a checkpoint into the page cache before the engine reads it; warm a server before its first user",
        "deepseek-triton warm /models/DeepSeek-R1 --report\n"
        "  deepseek-triton warm model_repository --then model_repository/start.sh\n"
        "  deepseek-triton warm deepseek-ai/DeepSeek-R1 --share $((SLURM_LOCALID + 1))/$SLURM_NTASKS_PER_NODE\n"
        "  deepseek-triton warm /models/DeepSeek-R1 --hold=lock --ready-file /run/weights-are-warm\n"
        "  deepseek-triton warm --server http://localhost:8000 model_repository\n"
        "  deepseek-triton warm model_repository --form systemd > warm.service\n\n"
        "exit codes: 0 all of it (of --share: its part) is in the page cache; 1 a file is missing, damaged or\n"
        "unreadable, or the server failed; 2 the command line; 3 only a part fits or stayed; 4 the storage stalled;\n"
        "130 and 143 by SIGINT and SIGTERM. docs/warm.md has more.",
    )
    verb.usage = "%(prog)s CHECKPOINT... [options] [--then COMMAND...]"
    verb.add_argument(
        "checkpoints",
        nargs="*",
        metavar="CHECKPOINT",
        help="a folder, a Hugging Face name in the local cache, or a model repository, whose model.yaml is followed",
    )
    verb.add_argument("--json", action="store_true", help="one JSON document instead, at the end (docs/warm.md)")
    verb.add_argument("-v", "--verbose", action="store_true", help="every file, not only those with trouble")
    _add_warm_actions(verb)
    _add_warm_options(verb)
    _add_warm_server(verb)


def _add_warm_actions(verb: VerbParser) -> None:
    actions = verb.add_argument_group("instead of warming files")
    actions.add_argument("--report", action="store_true", help="say what there is, what fits, and how it would be read")
    actions.add_argument("--evict", action="store_true", help="drop the files from the page cache, to measure cold")
    actions.add_argument(
        "--form",
        choices=("init-container", "systemd", "slurm-prolog"),
        help="print a form of deployment with the numbers of the model repository or checkpoint",
    )
    actions.add_argument(
        "--rate", type=size, metavar="SIZE", help="for --form: bytes a second of the storage (default: assumed, slow)"
    )


def _add_warm_options(verb: VerbParser) -> None:
    node = verb.add_argument_group(
        "limits, of the whole node however many processes share the work",
        "SIZE is 64GiB or 64G (2^30 each), 500GB (10^9), 1.5T or a number of bytes.",
    )
    node.add_argument(
        "--share",
        type=share,
        metavar="K/N",
        help="do one of N shares, K from 1, and end when it is done (default: 1/1); not with --then or --ready-file",
    )
    node.add_argument("--jobs", type=positive, metavar="N", help="windows read at once (default: by file system)")
    node.add_argument(
        "--budget",
        type=size,
        metavar="SIZE",
        help="of weights in memory (default: 0.9 of what machine and cgroup leave)",
    )
    node.add_argument("--rate-limit", type=size, metavar="SIZE", help="bytes a second (default: none)")
    files = verb.add_argument_group("warming files")
    files.add_argument("--verify", action="store_true", help="compare checksums, where the checkpoint has them")
    files.add_argument(
        "--hold",
        nargs="?",
        const="auto",
        type=hold_mode,
        metavar="MODE",
        help="keep them there until told to stop: --hold=lock locks them, --hold=watch warms again what was evicted, "
        "--hold locks if allowed, else watches",
    )
    files.add_argument("--stall", type=duration, metavar="S", help="name a file that gave no byte for S (default: 30)")
    files.add_argument("--give-up", type=duration, metavar="S", help="end when no file gave one for S (default: never)")
    files.add_argument(
        "--ready-file", type=path, metavar="FILE", help="is there while they are warm; for probes, also with --server"
    )
    files.add_argument(
        "--then",
        nargs=argparse.REMAINDER,
        metavar="COMMAND",
        help="last: what to run when they are warm, as far as they fit (exit codes 0 and 3)",
    )


def _add_warm_server(verb: VerbParser) -> None:
    server = verb.add_argument_group(
        "warming a server",
        "Waits until it is ready and sends requests until their times are steady; CHECKPOINT is its model repository,\n"
        "which says the shapes.",
    )
    server.add_argument("--server", metavar="URL", help="http://, https://, grpc:// or grpcs:// address")
    add_server_options(server)
    verb.set_defaults(model=None)  # so that one that is given without --server is seen
    server.add_argument("--batch-sizes", type=numbers, metavar="N,N", help="requests at once, instead")
    server.add_argument("--input-lengths", type=numbers, metavar="N,N", help="tokens of a prompt, instead")
    server.add_argument("--max-tokens", type=positive, metavar="N", help="tokens of an answer (default: 16)")
    server.add_argument("--wait", type=duration, metavar="S", help="for the server to be ready (default: 7200)")
    server.add_argument("--limit", type=duration, metavar="S", help="for the requests (default: 600)")
    server.add_argument("--log", type=path, metavar="FILE", help="the server's log, to say how its load goes on")
    server.add_argument("--metrics-url", metavar="URL", help="its metrics (default: port 8002, of one on 8000 or 8001)")


def _add_serve(verbs: Verbs) -> None:
    verb = add_verb(
        verbs,
        "serve",
        _serve,
        "run tritonserver on a model repository, in the foreground",
        "deepseek-triton serve model_repository\n"
        "  deepseek-triton serve model_repository --http-port auto -- --log-verbose 1",
    )
    verb.usage, verb.rest = "%(prog)s DIR [options] [-- ARGS...]", "server_args"
    verb.add_argument("repository", type=path, metavar="DIR", help="the model repository")
    add_tritonserver(verb)
    for name, default in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        help_text = f"number, or auto for a free one (default: {default})"
        verb.add_argument(f"--{name}-port", type=port_or_auto, default=default, metavar="PORT", help=help_text)
    verb.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s; 0.0.0.0 for all)"
    )
    verb.add_argument(
        "--exit-timeout", type=seconds, default=30, metavar="S", help="seconds for open requests on stop (default: 30)"
    )
    verb.add_argument("--log-file", type=path, metavar="FILE", help="keep the server's whole log here")
    verb.add_argument("--verbose", action="store_true", help="show the server's whole log")


def _add_generate(verbs: Verbs) -> None:
    verb = add_verb(
        verbs,
        "generate",
        _generate,
        "send a prompt to a server and show the answer as it comes, or a file of prompts",
        'deepseek-triton generate "The capital of France is" --max-tokens 64\n'
        '  deepseek-triton generate --chat "Why is the sky blue?" --system "One sentence." --usage\n'
        '  deepseek-triton generate "Hello" --url grpc://localhost:8001 --temperature 0.8 --top-p 0.95 --json\n'
        "  deepseek-triton generate --input prompts.jsonl --output answers.jsonl --concurrency 32 --max-tokens 256",
    )
    verb.usage = "%(prog)s [PROMPT] [options]"
    verb.add_argument("prompt", nargs="?", help="the prompt; - or nothing reads it from standard input")
    verb.add_argument("--file", type=path, metavar="FILE", help="read the prompt from a file instead")
    verb.add_argument("--messages", type=path, metavar="FILE", help="a conversation instead: JSON, {role, content}s")
    verb.add_argument("--chat", action="store_true", help="send the prompt as a message, by the model's chat template")
    verb.add_argument("--system", metavar="TEXT", help="what the model is told first; implies --chat")
    verb.add_argument("--no-stream", action="store_true", help="wait for the whole text")
    verb.add_argument("--hide-reasoning", action="store_true", help="show the answer without the thinking")
    verb.add_argument("-v", "--usage", action="store_true", help="tokens and times on standard error")
    verb.add_argument("--json", action="store_true", help="one JSON object with text, usage, times and details")
    _add_batch_options(verb)
    add_client_options(verb)
    add_sampling_options(verb)


def _add_batch_options(verb: VerbParser) -> None:
    batch = verb.add_argument_group(
        "many prompts",
        'A line of the input is a JSON string, or an object with "prompt" or "messages" and, where wanted,\n'
        '"id", "request_id" and sampling fields. A line of the output is an object with the id and the text, or\n'
        'an "error".',
    )
    batch.add_argument("--input", type=path, metavar="FILE", help="JSON Lines; - is standard input")
    batch.add_argument("--output", type=path, metavar="FILE", help="JSON Lines in the same order; - is standard output")
    batch.add_argument("--concurrency", type=positive, metavar="N", help="requests at once (default: 16)")
    batch.add_argument("--resume", action="store_true", help="go on where --output ends")
    batch.add_argument("--overwrite", action="store_true", help="begin --output anew")
    batch.add_argument("--max-failures", type=positive, metavar="N", help="stop when so many rows have failed")


def _add_chat(verbs: Verbs) -> None:
    verb = add_verb(
        verbs,
        "chat",
        _chat,
        "talk to a model at the terminal",
        "deepseek-triton chat --url http://localhost:8000 --temperature 0.6\n"
        '  deepseek-triton chat --system "Answer in French." --load talk.json',
    )
    verb.usage = "%(prog)s [options]"
    verb.add_argument("--system", metavar="TEXT", help="what the model is told first")
    verb.add_argument("--load", type=path, metavar="FILE", help="go on with a conversation that /save wrote")
    verb.add_argument("--hide-reasoning", action="store_true", help="show the answers without the thinking")
    add_client_options(verb)
    add_sampling_options(verb)


def _demo(args: argparse.Namespace) -> int:
    from deepseek_triton_tools.cli.demo import run_demo

    return run_demo(engine=args.engine, preset=args.preset, max_tokens=args.max_tokens, tritonserver=args.tritonserver)


def _variants(args: argparse.Namespace) -> int:
    from deepseek_triton_tools.cli.variants import show_variants

    return show_variants(args.gpu, as_json=args.json)


def _plan(args: argparse.Namespace) -> int:
    from deepseek_triton_tools.cli.plan import plan
    from deepseek_triton_tools.cli.plan_options import plan_request

    return plan(plan_request(args), as_json=args.json)


def _build(args: argparse.Namespace) -> int:
    from deepseek_triton_tools.cli.build import build
    from deepseek_triton_tools.cli.plan_options import plan_request

    return build(
        plan_request(args), args.output, force=args.force, format=args.format, quant_config=args.write_quant_config
    )


def _check(args: argparse.Namespace) -> int:
    from deepseek_triton_build.check import CheckOptions
    from deepseek_triton_tools.cli.check import check

    options = CheckOptions(
        release=args.trtllm, gpu=args.gpu, num_gpus=args.gpus, model_root=args.model, strict=args.strict
    )
    return check(args.repository, options, as_json=args.json)


def _warm(args: argparse.Namespace) -> int:
    from deepseek_triton_tools.cli.warm import run_warm

    return run_warm(args)


def _serve(args: argparse.Namespace) -> int:
    from deepseek_triton_tools.cli.serve import serve
    from deepseek_triton_tools.server.server_process import ServeOptions

    options = ServeOptions(
        repository=args.repository,
        tritonserver=args.tritonserver,
        http_port=args.http_port,
        grpc_port=args.grpc_port,
        metrics_port=args.metrics_port,
        host=args.host,
        exit_timeout_secs=args.exit_timeout,
        log_file=args.log_file,
        verbose=args.verbose,
        server_args=tuple(args.server_args),
    )
    return serve(options)


def _generate(args: argparse.Namespace) -> int:
    from deepseek_triton_tools.cli.generate import generate

    return generate(args)


def _chat(args: argparse.Namespace) -> int:
    from deepseek_triton_tools.cli.chat import chat

    return chat(args)


if __name__ == "__main__":
    sys.exit(main())
