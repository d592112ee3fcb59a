"""`deepseek-triton gateway`: OpenAI's API in front of one or many Triton servers."""

from __future__ import annotations

import argparse

from deepseek_triton_tools.cli.parsing import VerbParser, port, words
from deepseek_triton_tools.pages import install_extra
from deepseek_triton_tools.tool_errors import InstallationError


def add_options(verb: VerbParser) -> None:
    verb.runs(
        _gateway,
        "deepseek-triton gateway --server http://localhost:8000",
        "deepseek-triton gateway --server http://node1:8000 --server http://node2:8000 --host 0.0.0.0",
    )
    help_text = "a Triton server that has the model; may be repeated"
    verb.add_argument("--server", action="append", type=words, required=True, metavar="URL", help=help_text)
    verb.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s; all: 0.0.0.0)")
    verb.add_argument("--port", type=port, default=9000, metavar="PORT", help="port to listen on (default: 9000)")


def _gateway(args: argparse.Namespace) -> int:
    try:
        from deepseek_triton_tools.gateway.serving import serve
    except ModuleNotFoundError as error:
        raise InstallationError(f"{error.name} is not installed; {install_extra('gateway')}") from error
    from deepseek_triton_tools.gateway.settings import GatewaySettings, ServedModel

    serve(GatewaySettings((ServedModel(tuple(args.server)),), args.host, args.port))
    return 0
