"""`deepseek-triton warm`: the weights in the page cache before the engine reads them, and a server before its users."""

import argparse

from deepseek_triton_tools.cli.client_options import add_server_options, address, client_settings
from deepseek_triton_tools.cli.parsing import (
    VerbParser,
    Verbs,
    add_json,
    add_verb,
    duration,
    option,
    path,
    positive,
    several,
    share,
    size,
    words,
)
from deepseek_triton_tools.terminal.output_streams import to_reader

_numbers = several("whole numbers from 1, separated by commas", positive)
_EXIT_CODES = """\
exit codes: 0 all of it (with --share: this share) is in the page cache; 1 a file is missing, damaged or unreadable,
or can't be held; 2 wrong command line; 3 only a part fits or stayed; 4 the storage stalled and was given up; 130 and
143 by SIGINT and SIGTERM, which end a hold with 0. With --then: those of the command; 126 or 127: it can't be run."""


def add_options(verb: VerbParser) -> None:
    forms = verb.add_forms(
        "FORM",
        "deepseek-triton warm files r1 --then deepseek-triton launch docker r1",
        "deepseek-triton warm server http://localhost:8000 r1",
        notes="docs/warm.md has more.",
    )
    _add_files(forms)
    report = _add_verb_on_files(
        forms,
        "report",
        "show what is in the page cache, what fits, and how the files would be read",
        "deepseek-triton warm report /models/DeepSeek-R1",
        "deepseek-triton warm report r1 --json --verbose",
    )
    _add_limits(report)
    _add_verb_on_files(
        forms,
        "evict",
        "drop a checkpoint's files from the page cache, to measure a cold start",
        "deepseek-triton warm evict /models/DeepSeek-R1",
        "deepseek-triton warm evict r1 --json",
    )
    _add_server(forms)
    _add_form(forms)


def _add_files(forms: Verbs) -> None:
    verb = _add_verb_on_files(
        forms,
        "files",
        "load a checkpoint's files into the page cache, and keep them there if asked",
        "deepseek-triton warm files r1 --then deepseek-triton launch docker r1",
        "deepseek-triton warm files /models/DeepSeek-R1 --hold=lock --ready-file /run/weights-are-warm",
        notes=_EXIT_CODES,
        common="--json --verbose --jobs --budget --verify --hold --ready-file --then",
    )
    verb.usage = "%(prog)s CHECKPOINT... [options] [--then COMMAND...]"
    node = _add_limits(verb)
    option(node, "--rate-limit SIZE", "most bytes to read a second (default: no limit)", size)
    files = verb.add_argument_group("reading and keeping; S is in seconds")
    option(files, "--verify", "compare checksums, if the checkpoint has them")
    option(
        files,
        "--hold MODE",
        "keep them there until told to stop: --hold=lock locks them, --hold=watch warms again what was evicted, "
        "--hold locks if allowed, else watches",
        _hold_mode,
        nargs="?",
        const="auto",
    )
    option(files, "--stall S", "name a file that gave no byte for S (default: 30)", duration)
    option(files, "--give-up S", "end if none gave a byte for S (default: never)", duration)
    option(files, "--ready-file FILE", "exists while they are warm; not with --share", path)
    option(
        files,
        "--then COMMAND",
        "the last option, not with --share: run COMMAND when what fits is warm (exit codes 0 and 3)",
        nargs=argparse.REMAINDER,
    )


def _add_server(forms: Verbs) -> None:
    verb = add_verb(forms, "server", "wait for a server, and send it requests until their times no longer change")
    verb.runs(
        _warm_server,
        "deepseek-triton warm server http://localhost:8000 model_repository",
        "deepseek-triton warm server grpc://node1:8001 --batch-sizes 1,8 --input-lengths 1000",
        common="--batch-sizes --input-lengths --max-tokens --wait --ready-file --model --json",
    )
    verb.usage = "%(prog)s URL [DIR] [options]"
    option(verb, "url URL", "HOST:PORT or a URL: http://, https://, grpc:// or grpcs://", address)
    option(verb, "repository DIR", "its repository: gives sizes of requests", path, nargs="?")
    add_json(verb, "docs/warm.md")
    requests = verb.add_argument_group("requests, by default as in DIR, else 1,4,8 at once of 128,1024 tokens")
    option(requests, "--batch-sizes N,N", "numbers of requests at once", _numbers)
    option(requests, "--input-lengths N,N", "tokens of a prompt", _numbers)
    option(requests, "--max-tokens N", "tokens of an answer (default: 16)", positive)
    option(requests, "--limit S", "seconds for all requests (default: 600)", duration)
    server = verb.add_argument_group("server")
    option(server, "--wait S", "seconds to wait until it is ready (default: 7200)", duration)
    option(server, "--log FILE", "the server's log, to show how far it has loaded", path)
    option(server, "--metrics-url URL", "its metrics (default: 8002 beside 8000 and 8001; beside /v1)")
    option(server, "--ready-file FILE", "file that exists when it is warm, for probes", path)
    add_server_options(server)


def _add_form(forms: Verbs) -> None:
    verb = add_verb(forms, "form", "print an init container, systemd unit or Slurm prolog that warms, with its numbers")
    verb.runs(
        _print_form,
        "deepseek-triton warm form systemd model_repository > warm.service",
        "deepseek-triton warm form init-container /models/DeepSeek-R1 --rate 2GB",
    )
    option(verb, "form", "the kind of file to print", choices=("init-container", "systemd", "slurm-prolog"))
    option(verb, "source SOURCE", "a model repository or a checkpoint", words)
    option(verb, "--rate SIZE", "bytes the storage reads a second (default: 200MB)", size)


def _add_verb_on_files(forms: Verbs, name: str, summary: str, *examples: str, **end: str) -> VerbParser:
    verb = add_verb(forms, name, summary)
    verb.set_defaults(action=name)
    verb.runs(_run_on_files, *examples, **end)
    verb.usage = "%(prog)s CHECKPOINT... [options]"
    option(
        verb,
        "checkpoints CHECKPOINT",
        "a folder, a Hugging Face name in the local cache, or a model repository, whose model.yaml names it",
        words,
        nargs="+",
    )
    add_json(verb, "docs/warm.md")
    option(verb, "-v --verbose", "name every file, not only those with trouble")
    return verb


def _add_limits(verb: VerbParser) -> argparse._ArgumentGroup:
    node = verb.add_argument_group(
        "limits of the whole node, however many processes share the work",
        "SIZE is 64GiB or 64G (2^30 each), 500GB (10^9), 1.5T or a number of bytes.",
    )
    option(node, "--share K/N", "do only part K of N, K from 1 (default: 1/1)", share, default=(1, 1))
    option(node, "--jobs N", "file parts read at once (default: by file system)", positive)
    option(node, "--budget SIZE", "most memory to fill (default: 0.9 of what is free)", size)
    return node


def _hold_mode(text: str) -> str:
    if text in ("auto", "lock", "watch"):
        return text
    raise argparse.ArgumentTypeError(
        f"expected --hold by itself, or =auto, =lock or =watch right after it, got {text!r}"
    )


# --- What runs ---


def _run_on_files(args: argparse.Namespace) -> int:
    from deepseek_triton_tools.cli.warm_files import evict_files, report_files, warm_files

    return {"files": warm_files, "report": report_files, "evict": evict_files}[args.action](args)


def _warm_server(args: argparse.Namespace) -> int:
    from functools import partial

    from deepseek_triton_client import AsyncClient
    from deepseek_triton_tools.warming.server import ServerWarmOptions, warm_server

    numbers = {"max_tokens": args.max_tokens, "wait_s": args.wait, "limit_s": args.limit}
    options = ServerWarmOptions(
        client=partial(AsyncClient, args.url, **client_settings(args)),
        repository=args.repository,
        batch_sizes=args.batch_sizes,
        input_lengths=args.input_lengths,
        log=args.log,
        metrics_url=args.metrics_url,
        ready_file=args.ready_file,
        as_json=args.json,
        **{name: value for name, value in numbers.items() if value is not None},
    )
    return warm_server(options)


def _print_form(args: argparse.Namespace) -> int:
    from deepseek_triton_tools.repository.launch_facts import serving_of
    from deepseek_triton_tools.warming.forms import render

    text = render(args.form, serving_of(args.source), rate=args.rate)
    with to_reader():
        print(text, end="")
    return 0
