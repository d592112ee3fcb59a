"""The `deepseek-triton` program: it runs the verb that is asked for, and turns errors into one line and an exit code.

Exit codes: 0 done; 1 it failed or was refused (`check`: it found errors); 2 the command line, or a name in it, is
wrong; 130 interrupted. `serve` passes on tritonserver's own; `warm`, `probe`, `launch` and `doctor` have more (--help).

A verb's file holds its options and its handler. Only the file of the verb that is asked for is imported. Where a
handler needs the generator (`deepseek_triton_build`), PyYAML or rich, it imports them itself: they come with the extra
`tools`, and importing them takes longer than the rest of --help.
"""

import argparse
import errno
import re
import sys
from collections.abc import Collection, Sequence
from importlib import import_module

from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.cli.parsing import Handler, VerbParser, about_option, add_verb
from deepseek_triton_tools.pages import install_extra, pages_folder
from deepseek_triton_tools.terminal import output_streams
from deepseek_triton_tools.tool_errors import TOKEN_ADVICE, ToolError, in_options, nearest

VERBS = {
    "demo": "see it work: serve a tiny DeepSeek on a real tritonserver, complete texts, chat, call a tool",
    "variants": "list what can be served: models, precisions, GPUs, profiles, releases",
    "plan": "show what would be built: every setting with its reason, the memory, how many requests fit at once",
    "build": "write a Triton model repository, or files for trtllm-serve or vllm serve, with a reason for each line",
    "check": "check a model repository, also one that build did not write, and the checkpoint it names",
    "upgrade": "bring a folder that an older build wrote up to date, or to another release, and keep hand edits",
    "doctor": "find what is wrong with one machine or several before a model is loaded, and what works there",
    "checkpoint": "download and verify a checkpoint, say what is in it, quantize it to W4AFP8, FP8 or bfloat16, cut it",
    "warm": "load a checkpoint into the page cache before the engine reads it; warm a server before its first user",
    "serve": "run tritonserver on a model repository, in the foreground",
    "gateway": "serve OpenAI's API in front of one or many Triton servers that run the model",
    "launch": "start a repository that build wrote and keep it running: here, in docker, over nodes, on a cluster",
    "probe": "ask a server once whether it works: one line and an exit code, for Kubernetes, Slurm and scripts",
    "bench": "measure a server: throughput, latencies and goodput at the loads you name, with tables and charts",
    "generate": "send a prompt, or a file of prompts, to a server and show the answer as it comes",
    "chat": "talk to a model at the terminal",
    "eval": "measure the accuracy of a served model: GSM8K, MMLU, GPQA Diamond, your own questions, with a verdict",
    "completion": "print a script that completes this command line in bash, zsh or tcsh",
}
"""Verb -> what it does. The module of the same name in this folder has `add_options(parser)`."""


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOENT}
"""Errors of a machine that has no more room, or no folder for temporary files. Python names no file in them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code."""
    output_streams.prepare()
    words = list(sys.argv[1:] if argv is None else argv)
    verb = next((word for word in words if not word.startswith("-")), "")
    try:
        args = None
        with output_streams.to_reader():  # --help and --version print
            args = _parsed(words, verb)
        if args is None:
            return 0  # the reader of --help has left
        handler: Handler = args.handler
        code = handler(args)
        with output_streams.to_reader():
            return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # from a verb that prints while it works: its reader has left
        with output_streams.to_reader():
            return 0
    except Exception as error:
        if (known := _expected_error(error)) is None:
            raise
        text = in_options(str(error))
        if isinstance(error, OSError):
            reason = error.strerror or text
            text = reason if error.filename is None else f"{error.filename}: {reason}"
        output_streams.complain(f"{f'deepseek-triton {verb}'.rstrip()}: {text}{_advice(error, verb)}")
        return known


def program_parser(verbs: Collection[str]) -> argparse.ArgumentParser:
    """The parser of the whole command line, with the options of `verbs` only."""
    parser = VerbParser(
        prog="deepseek-triton",
        usage="%(prog)s [-h] [--version] VERB ...",
        description="Serve DeepSeek-V3, R1, V3.1, V3.2 and V4 on NVIDIA Triton Inference Server.\n\n"
        "These six commands are enough: build, check, doctor, launch, generate and gateway.",
        epilog="A verb's usual options: deepseek-triton VERB --help. All of them: deepseek-triton VERB --help-all\n"
        "Try it without a GPU: deepseek-triton demo\n"
        f"The pages that messages name, such as docs/contract.md, are in {pages_folder()}",
    )
    parser.add_argument("--version", action="version", version=f"deepseek-triton {__version__}")
    subparsers = parser.add_subparsers(
        title="verbs", required=True, metavar="VERB", prog=parser.prog, parser_class=VerbParser
    )
    for name, summary in VERBS.items():
        verb = add_verb(subparsers, name, summary)
        if name in verbs:
            import_module(f"{__package__}.{name}").add_options(verb)
    return parser


def _parsed(words: Sequence[str], verb: str) -> argparse.Namespace:
    if verb and verb not in VERBS:
        meant = nearest(verb, VERBS) or "; deepseek-triton --help lists them"
        raise ToolError(f"there is no such verb{meant}", exit_code=2)
    args, unknown = program_parser([verb]).parse_known_args(words)
    if unknown:
        hint = about_option(unknown[0], args.parser, program_parser(VERBS))
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return args


def _advice(error: Exception, verb: str) -> str:
    """Advice for a server that can't be reached, and for a package that is not installed."""
    from deepseek_triton_client import AccessDenied, ModelNotReady, ServerUnavailable

    if isinstance(error, AccessDenied):
        return TOKEN_ADVICE
    has_answered = isinstance(error, ModelNotReady) or re.search("TLS |tls\\.ca|certificate", str(error))
    if isinstance(error, ServerUnavailable) and error.code is None and not has_answered:
        return "; is the server running and ready there (http:// is port 8000, grpc:// 8001)?"
    return f"; {install_extra('demo' if verb == 'demo' else 'tools')}" if _needs_tools(error) else ""


def _expected_error(error: Exception) -> int | None:
    """The exit code for an error that explains itself; None for a bug, whose traceback is wanted."""
    from deepseek_triton_client import DeepseekTritonError, InvalidRequest

    if isinstance(error, ToolError):
        return error.exit_code
    if isinstance(error, InvalidRequest) and error.url is None:  # of the options: no server was asked
        return 2
    if isinstance(error, DeepseekTritonError) or _needs_tools(error):
        return 1
    if isinstance(error, OSError) and (error.filename is not None or error.errno in _FULL):
        return 1
    if "deepseek_triton_build" not in sys.modules:  # importing it needs the extra `tools`
        return None
    from deepseek_triton_build import BuildError, UnknownNameError

    if isinstance(error, UnknownNameError):
        return 2
    return 1 if isinstance(error, BuildError) else None


def _needs_tools(error: Exception) -> bool:
    """Whether a package is missing that the extra `tools` brings."""
    missing = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
    return missing.partition(".")[0] in {"msgspec", "rich", "shtab", "yaml"}


if __name__ == "__main__":
    sys.exit(main())
