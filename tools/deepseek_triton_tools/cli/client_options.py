"""Options that say which server to ask and how long to wait, and the client they make."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepseek_triton_tools.cli.parsing import VerbParser, duration, number, path
from deepseek_triton_tools.tool_errors import ToolError

if TYPE_CHECKING:  # `warm --help` needs the options only
    from deepseek_triton_client import Client

URL_HELP = "address that begins with http://, https://, grpc:// or grpcs://"
_DEFAULT_URL = "http://localhost:8000"
DEFAULT_MODEL = "tensorrt_llm"
_TOKEN_VARIABLE = "DEEPSEEK_TRITON_TOKEN"


def add_client_options(verb: VerbParser) -> None:
    """Add the options that `client_of` reads."""
    server = verb.add_argument_group("server")
    help_text = f"{URL_HELP} (default: {_DEFAULT_URL}); may be repeated: the first server that answers is used"
    server.add_argument("--url", action="append", metavar="URL", help=help_text)
    help_text = "context server, which computes the prompt; --url generates the answer then; may be repeated"
    server.add_argument("--context-url", action="append", default=[], metavar="URL", help=help_text)
    add_server_options(server)
    help_text = "ask again N times if it is full or unreachable (default: 3); not after the first token"
    server.add_argument("--retries", type=number, metavar="N", help=help_text)
    limits = verb.add_argument_group("time limits, in seconds")
    limits.add_argument("--timeout", type=duration, metavar="S", help="for the whole answer (default: none)")
    limits.add_argument("--first-token-timeout", type=duration, metavar="S", help="for the first token (default: none)")
    limits.add_argument("--token-timeout", type=duration, metavar="S", help="for each later token (default: none)")
    limits.add_argument("--connect-timeout", type=duration, metavar="S", help="for connecting (default: 10)")


def add_server_options(server: argparse._ArgumentGroup) -> None:
    """Add the options that `client_settings` reads."""
    server.add_argument("--model", default=DEFAULT_MODEL, metavar="NAME", help="model to ask (default: %(default)s)")
    server.add_argument("--model-version", default="", metavar="V", help="version of it (default: the server's choice)")
    help_text = f"file with the bearer token (default: the variable {_TOKEN_VARIABLE})"
    server.add_argument("--token-file", type=path, metavar="FILE", help=help_text)
    server.add_argument("--ca", type=path, metavar="FILE", help="certificates to trust for the server, as PEM")
    server.add_argument("--cert", type=path, metavar="FILE", help="this client's own certificate, as PEM")
    server.add_argument("--key", type=path, metavar="FILE", help="the key of --cert, if it is in another file")


def client_of(args: argparse.Namespace) -> Client:
    """Make the client that the options ask for. Raises ToolError when the token can't be read."""
    from deepseek_triton_client import Client, Retries, Timeouts

    limits = {
        "total": args.timeout,
        "first_token": args.first_token_timeout,
        "between_tokens": args.token_timeout,
        "connect": args.connect_timeout,
    }
    return Client(
        args.url or _DEFAULT_URL,
        context_urls=args.context_url,
        **client_settings(args),
        timeouts=Timeouts(**{name: limit for name, limit in limits.items() if limit is not None}),
        retries=Retries() if args.retries is None else Retries(attempts=args.retries + 1),
    )


def client_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return a client's model, certificates and token. Raises ToolError for a token that can't be read."""
    from deepseek_triton_client import Tls

    return {
        "model_name": args.model,
        "model_version": args.model_version,
        "tls": Tls(ca=args.ca, certificate=args.cert, key=args.key),
        "token": _token(args.token_file),
    }


def _token(path: Path | None) -> str | Callable[[], str] | None:
    """The token, or a function that reads it. It is no option: everybody on the machine can read command lines."""
    if path is None:
        return os.environ.get(_TOKEN_VARIABLE) or None

    def read() -> str:  # called for each request, because such files are replaced while programs run
        try:
            return path.read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ToolError(f"the token can't be read from {path}: {_reason(error)}") from error

    read()  # a file that can't be read is refused now
    return read


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else "it is not text"
