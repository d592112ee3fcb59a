"""Options that say which server to ask, how long to wait and how to sample, and the client that they make."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepseek_triton_tools.cli.parsing import VerbParser, duration, number, option, path, words
from deepseek_triton_tools.tool_errors import TOKEN_VARIABLE, ToolError

if TYPE_CHECKING:  # `warm --help` needs the options only
    from deepseek_triton_client import Client, Retries, SamplingParams

DEFAULT_URL = "http://localhost:8000"
DEFAULT_MODEL = "tensorrt_llm"


def add_client_options(verb: VerbParser) -> None:
    """Add the options that `client_of` reads."""
    server = verb.add_argument_group("server")
    add_server_options(server)
    text = "ask again N times if it is full or unreachable (default: 3); not after the first token"
    option(server, "--retries N", text, number)
    limits = verb.add_argument_group("time limits, in seconds")
    option(limits, "--timeout S", "for the whole answer (default: none)", duration)
    option(limits, "--first-token-timeout S", "for the first token (default: none)", duration)
    option(limits, "--token-timeout S", "for each later token (default: none)", duration)
    option(limits, "--connect-timeout S", "for connecting (default: 10)", duration)


def address(text: str) -> str:
    """Type of a server's address, which may leave out http://."""
    from deepseek_triton_client import InvalidRequest
    from deepseek_triton_client._core.client_settings import Endpoint

    url = text if "://" in words(text) else f"http://{text}"
    try:
        Endpoint.parse(url)
    except InvalidRequest as error:
        raise argparse.ArgumentTypeError(error.message.removeprefix("url: ")) from error
    return url


def add_address(
    verb: VerbParser, several: str = "; several: the first that answers is asked", *, is_positional: bool = True
) -> None:
    """Let `args.urls` be given with and without --url."""
    text = f"HOST:PORT or a URL: http://, https://, grpc:// or grpcs:// (default: {DEFAULT_URL}){several}"
    if is_positional:
        option(verb, "urls URL", text, address, nargs="*", action="extend")
    option(verb, "--url URL", "the same" if is_positional else text, address, action="append", dest="urls")


def add_server_options(server: argparse._ArgumentGroup) -> None:
    """Add the options that `client_settings` reads."""
    text = "model to ask (default: %(default)s; where the address ends in /v1, the first there)"
    option(server, "--model NAME", text, default=DEFAULT_MODEL)
    option(server, "--model-version V", "version of it (default: the server's choice)", default="")
    option(server, "--token-file FILE", f"file with the bearer token (default: the variable {TOKEN_VARIABLE})", path)
    option(server, "--ca FILE", "certificates to trust for the server, as PEM", path)
    option(server, "--cert FILE", "this client's own certificate, as PEM", path)
    option(server, "--key FILE", "the key of --cert, if it is in another file", path)


def client_of(args: argparse.Namespace, retries: Retries | None = None) -> Client:
    """Make the client that the options ask for; `retries` holds without --retries. Raises ToolError when the token
    can't be read."""
    from deepseek_triton_client import Client, Retries, Timeouts

    limits = {
        "total": args.timeout,
        "first_token": args.first_token_timeout,
        "between_tokens": args.token_timeout,
        "connect": args.connect_timeout,
    }
    return Client(
        args.urls or DEFAULT_URL,
        **client_settings(args),
        timeouts=Timeouts(**{name: limit for name, limit in limits.items() if limit is not None}),
        retries=retries if args.retries is None else Retries(attempts=args.retries + 1),
    )


def chat_model(client: Client) -> tuple[str, bool]:
    """Ask for the model's name, and whether it has a chat form."""
    from deepseek_triton_client import InvalidRequest, ModelNotFound

    try:
        facts = client.model_info()
        return facts["name"], bool(facts["chat_template"] or facts["tool_form"])  # V3.2 and V4 chat without a template
    except ModelNotFound:
        raise
    except InvalidRequest:  # a model of others, which doesn't describe itself
        metadata = client.metadata()
        return metadata.name, metadata.platform == "openai"


def client_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return a client's model, certificates and token. Raises ToolError or InvalidRequest for wrong files."""
    from deepseek_triton_client import Tls

    tls = Tls(ca=args.ca, certificate=args.cert, key=args.key)
    if tls != Tls():
        tls.context()  # a file that is no PEM is refused now
    return {"model_name": args.model, "model_version": args.model_version, "tls": tls, "token": _token(args.token_file)}


def _token(path: Path | None) -> str | Callable[[], str] | None:
    """The token, or a function that reads it. It is no option: everybody on the machine can read command lines."""
    if path is None:
        return os.environ.get(TOKEN_VARIABLE) or None

    def read() -> str:  # called for each request, because such files are replaced while programs run
        try:
            return path.read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror or str(error) if isinstance(error, OSError) else "it is not text"
            raise ToolError(f"the token can't be read from {path}: {reason}", exit_code=2) from error

    read()  # a file that can't be read is refused now
    return read


# --- Sampling ---

_COMMON: dict[str, tuple[str, str, dict[str, Any]]] = {
    "max_tokens": ("N", "most tokens to generate, from 1 (default: OWNER's)", {"type": int}),
    "temperature": ("X", "randomness, 0 to 100; 0 always takes the likeliest token (greedy decoding)", {"type": float}),
    "top_p": ("X", "sample from the likeliest tokens whose probabilities add up to X, 0 to 1", {"type": float}),
    "seed": ("N", "make sampling repeatable, -2^63 to 2^64 - 1", {"type": int}),
    "stop": ("TEXT", "a string that ends the text; may be repeated", {"action": "append"}),
    "chat_template_kwargs": ("JSON", 'an object for the chat template, such as {"thinking": true}; in chats', {}),
}
"""Field -> its value's name, help and settings of its option. All other fields are given by --set."""
SET_HELP = "any field of docs/contract.md#sampling-fields, such as top_k=5 or guided_regex=[0-9]+; may be repeated"


@cache
def _metadata() -> dict[str, Mapping[str, Any]]:
    from deepseek_triton_client import SamplingParams

    return {field.name: field.metadata for field in dataclasses.fields(SamplingParams)}


def add_sampling_options(verb: VerbParser, owner: str = "the model") -> None:
    group = verb.add_argument_group("sampling")
    for name, (value, text, settings) in _COMMON.items():
        group.add_argument(f"--{name.replace('_', '-')}", metavar=value, help=text.replace("OWNER", owner), **settings)
    option(group, "--set NAME=VALUE", SET_HELP, words, action="append", default=[])
    for name in _metadata().keys() - _COMMON.keys():  # their own options, which there were up to 1.0
        spelling = name.replace("_", "-")
        refuse = partial(_refuse, name)
        option(group, f"--{spelling} --no-{spelling} V", argparse.SUPPRESS, refuse, nargs="?", const="VALUE")


def _refuse(name: str, value: str) -> None:
    raise argparse.ArgumentTypeError(f"say it as --set {shlex.quote(f'{name}={value}')}")


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Raises InvalidRequest for a field that there is not, or for a value of another kind."""
    from deepseek_triton_client import SamplingParams

    common = {name: value for name in _COMMON if (value := getattr(args, name)) is not None}
    return SamplingParams().merged({**common, **dict(map(assigned, args.set))})


def assigned(text: str) -> tuple[str, Any]:
    """Split `name=value`. What is JSON becomes its value, but for fields of plain text; nothing after the `=` is None.
    Raises ToolError for another form."""
    name, separator, value = (part.strip() for part in text.partition("="))
    if not separator:
        raise ToolError(f"expected name=value, got {text!r}", exit_code=2)
    name = name.lstrip("-").replace("-", "_")
    metadata = _metadata().get(name, {"datatype": "", "json": False, "many": False})
    if metadata["datatype"] != "BYTES" or metadata["json"] or (metadata["many"] and value.startswith("[")):
        with suppress(ValueError):
            return name, json.loads(value)
    return name, value or None
