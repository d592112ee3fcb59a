"""`deepseek-triton gateway`: OpenAI's API in front of one or many Triton servers."""

from __future__ import annotations

import argparse
import binascii
import dataclasses
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepseek_triton_tools.cli.parsing import (
    VerbParser,
    duration,
    option,
    path,
    port,
    require_tools,
    seconds,
    size,
    whole_number,
    words,
)
from deepseek_triton_tools.pages import install_extra
from deepseek_triton_tools.terminal.output_streams import complain
from deepseek_triton_tools.tool_errors import InstallationError, PortError, ToolError, nearest

if TYPE_CHECKING:
    from deepseek_triton_tools.gateway.settings import GatewaySettings, ModelSettings

_REASONING_FIELDS = ("reasoning_content", "reasoning")
_NOT_IN_FILE = ("--help", "--help-all", "--config", "--new-key")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_SET_BY_HTTP = {"connection", "content-length", "content-type", "host", "transfer-encoding"}
_LOOPBACK = re.compile(r"localhost|127(\.\d+){3}|::1")
_ORIGIN = re.compile(r"\*|https?://[^/\s?#@]+")
_COLLECTOR = re.compile(r"https?://[^/\s?#@]+(/[^\s?#]*)?")
_local_prefill = whole_number("a number of tokens, 0 or more", least=0)
_num_workers = whole_number("a number from 1 to 256, about that of the cores", least=1, most=256)
_port_or_none = whole_number("a number from 1 to 65535, or none", least=1, most=65535)


def add_options(verb: VerbParser) -> None:
    verb.usage = "%(prog)s URL... [options]"
    verb.runs(
        _gateway,
        "deepseek-triton gateway http://localhost:8000",
        "deepseek-triton gateway --model deepseek-r1=http://node1:8000,http://node2:8000 --host 0.0.0.0 --keys keys",
        notes="Clients then use http://localhost:9000/v1, and people a chat page at http://localhost:9000/.\n"
        "URL may also be grpc://HOST:PORT, dns+http://HOST:PORT for all addresses of a name, or file:PATH for a list\n"
        "that is read again when it changes. docs/gateway.md is for users, docs/gateway-operations.md for owners.",
        common="--server --model --config --host --port --keys --new-key --tls-certificate --tls-key --access-log",
    )
    group = verb.add_argument_group("models")
    several: dict[str, Any] = {"action": "append"}
    text = "a server: HOST:PORT or a URL. Its model is called what the server says"
    option(group, "server URL", text, words, nargs="*", action="extend")
    option(group, "--server URL", "the same; may be repeated", words, **several)
    text = "a model by the name for clients, and its servers; may be repeated"
    option(group, "--model NAME=URL[,URL...]", text, words, **several)
    text = "a server that computes prompts for the others; may be repeated; with --model: NAME=URL[,URL...]"
    option(group, "--context-server URL", text, words, **several)
    text = "with it, let the others compute prompts of at most N tokens themselves (default: 0)"
    option(group, "--local-prefill N", text, _local_prefill)
    option(group, "--triton-model NAME", "the models' name on the servers (default: tensorrt_llm)", words)
    option(group, "--config FILE", "YAML with these options, without their dashes; the command line wins", path)
    group = verb.add_argument_group("clients")
    option(group, "--host HOST", "address to listen on (default: 127.0.0.1; all: 0.0.0.0)", words)
    option(group, "--port PORT", "port to listen on (default: 9000)", port)
    option(group, "--workers N", "processes that share the port (default: 1)", _num_workers)
    text = "file of API keys, read again when it changes (default: anyone may ask)"
    option(group, "--keys FILE", text, path, dest="keys_file")
    text = "print a line for the file of --keys (>> keys), on stderr the new API key that it is for, and end"
    option(group, "--new-key NAME", text, words)
    text = "let pages of this origin ask, such as https://chat.example.com, or *; may be repeated"
    option(group, "--cors-origin ORIGIN", text, words, dest="cors_origins", **several)
    text = "serve neither the chat page at / nor the one at /dashboard"
    option(group, "--no-page", text, action="store_false", dest="page", default=None)
    option(group, "--tls-certificate FILE", "serve HTTPS with this certificate, as PEM", path)
    option(group, "--tls-key FILE", "its key (default: in the certificate's file)", path)
    option(group, "--max-body SIZE", "largest request (default: 64MiB)", size, dest="max_body_bytes")
    text = "for a request's body to come whole (default: 60)"
    option(group, "--body-seconds S", text, duration, dest="body_timeout_s")
    text = "the answers' name for reasoning: reasoning_content (default) or reasoning; may be repeated"
    option(group, "--reasoning-field NAME", text, dest="reasoning_fields", choices=_REASONING_FIELDS, **several)
    text = "how long running requests may go on after SIGTERM or Ctrl-C (default: 30)"
    option(group, "--drain-seconds S", text, seconds, dest="drain_s")
    group = verb.add_argument_group("Triton servers")
    text = "header of each request to them, such as a token; NAME=@FILE reads the value; may be repeated"
    option(group, "--upstream-header NAME=VALUE", text, words, **several)
    option(group, "--upstream-ca FILE", "certificates to trust for https://, as PEM (default: the system's)", path)
    text = "of their metrics, by which load is compared (default: 8002 beside 8000 and 8001); none for no metrics"
    option(group, "--metrics-port PORT", text, lambda port: 0 if port == "none" else _port_or_none(port))
    group = verb.add_argument_group("watching it")
    option(group, "--access-log FILE", "a line of JSON for each request, to FILE or to stdout (-)", words)
    text = "send OpenTelemetry traces there by OTLP over HTTP, such as http://localhost:4318"
    option(group, "--traces URL", text, words, dest="traces_url")
    text = "ask for an API key on /metrics too"
    option(group, "--metrics-need-key", text, action="store_true", default=None)


def _gateway(args: argparse.Namespace) -> int:
    if args.new_key is not None:
        from deepseek_triton_tools.gateway.guard import new_key

        given = [each.dest for each in args.parser._actions if getattr(args, each.dest, None) not in (None, [])]
        if given != ["new_key"]:
            raise ToolError("--new-key: expected NAME alone; limits stand behind it in the file of keys", exit_code=2)
        try:
            key, line = new_key(args.new_key)
        except ValueError as error:
            raise ToolError(f"--new-key: {error}", exit_code=2) from error
        # The key goes to stderr, so that `>> keys` catches the line alone and no file keeps a key.
        complain(f"the key of {args.new_key}, which is kept nowhere: {key}")
        print(line)
        return 0
    try:
        from deepseek_triton_tools.gateway.serving import serve
    except ModuleNotFoundError as error:
        raise InstallationError(f"{error.name} is not installed; {install_extra('gateway')}") from error
    settings = settings_of(args)
    _require_port(settings.host, settings.port)
    print(_announcement(settings), flush=True)
    if settings.keys_file is None and not _LOOPBACK.fullmatch(settings.host):
        complain(f"warning: {settings.host} can be reached from other machines, and without --keys anyone may ask")
    serve(settings, lambda renews: _told(args, _problems(settings, renews=renews)))
    return 0


def settings_of(args: argparse.Namespace) -> GatewaySettings:
    """The settings of the command line and of the file that it names. Raises ToolError with all problems."""
    from deepseek_triton_tools.gateway.settings import GatewaySettings

    problems: list[str] = []
    args.of_file = set()
    if args.config is not None:
        _take_file(args, problems)
    names = {field.name for field in dataclasses.fields(GatewaySettings)}
    options: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(args).items()
        if name in names and value is not None
    }
    options["upstream_headers"] = _upstream_headers(args.upstream_header or (), problems)
    # Left out: 0, where Triton has them usually. `none`, which is 0 on the command line: None.
    port = options.get("metrics_port")
    options["metrics_port"] = 0 if port is None else port or None
    settings = GatewaySettings(_models(args, problems), **options)
    problems.extend(_problems(settings))
    if problems:
        raise ToolError("; ".join(_told(args, problems)), exit_code=2)
    for problem in _told(args, _problems(settings, renews=True)):
        complain(f"warning: {problem}")
    return settings


def _told(args: argparse.Namespace, problems: Iterable[str]) -> Iterable[str]:
    """The problems, each of an option that the file set with the file's name instead of the dashes."""
    for problem in problems:
        option = problem.removeprefix("--").split()[0].rstrip(":")
        yield f"{args.config}: {problem[2:]}" if option in args.of_file else problem


def _take_file(args: argparse.Namespace, problems: list[str]) -> None:
    """Set those options that the command line left out to the values of the file."""
    require_tools()
    import yaml

    from deepseek_triton_build.text import UNREADABLE_YAML

    file: Path = args.config
    try:
        with file.open(encoding="utf-8") as stream:  # PyYAML's errors have the name of a file, or a copy of a text
            loader = yaml.SafeLoader(stream)
            root = loader.get_single_node()
            # Before the values are made, of which the last one of a name would count.
            names = [key.value for key, _ in root.value] if isinstance(root, yaml.MappingNode) else []
            document = root and loader.construct_document(root)
    except (OSError, yaml.YAMLError, *UNREADABLE_YAML) as error:
        problems.append(f"{file}: {_reason(error)}")
        return
    if not isinstance(document, dict):
        problems.append(f"{file}: expected lines of OPTION: VALUE, such as port: 9000")
        return
    options: dict[str, Any] = {
        option.removeprefix("--"): action
        for action in args.parser._actions
        for option in action.option_strings
        if option.startswith("--") and option not in _NOT_IN_FILE
    }
    for name, value in document.items():
        if (action := options.get(name)) is None:
            problems.append(f"{file}: there is no option {name!r}{nearest(str(name), options)}")
            continue
        if names.count(name) > 1:
            a_list = "; it takes a list" if isinstance(action, argparse._AppendAction) else ""
            problems.append(f"{file}: {name} stands here {names.count(name)} times{a_list}")
        try:
            taken = _value_of(action, value)
        except argparse.ArgumentTypeError as error:
            problems.append(f"{file}: {name}: {error}")
            continue
        # The value is read even where the command line wins: a mistake in the file is said at once, not when it counts.
        if getattr(args, action.dest) in (None, []):
            setattr(args, action.dest, taken)
            args.of_file.add(name)


_KINDS = {dict: "a mapping", list: "a list", bool: "true or false", type(None): "nothing"}


def _value_of(action: argparse.Action, value: object) -> Any:
    if action.nargs == 0:
        if isinstance(value, bool):
            return action.const if value else None
        raise argparse.ArgumentTypeError(f"expected true or false, got {value!r:.80}")
    if isinstance(action, argparse._AppendAction):
        return [_parsed(action, one) for one in (value if isinstance(value, list) else [value])]
    return _parsed(action, value)


def _parsed(action: argparse.Action, value: object) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        # The value itself is not shown: it may be the secret of --upstream-header.
        raise argparse.ArgumentTypeError(f"expected text or a number, got {_KINDS.get(type(value), 'something else')}")
    if action.choices is not None and value not in action.choices:
        raise argparse.ArgumentTypeError(f"expected {' or '.join(action.choices)}, got {value!r:.80}")
    return action.type(str(value)) if callable(action.type) else value


def _models(args: argparse.Namespace, problems: list[str]) -> tuple[ModelSettings, ...]:
    from deepseek_triton_tools.gateway.settings import ModelSettings, SourceError, parse_source

    named: dict[str, list[str]] = {"": args.server} if args.server else {}
    for text in args.model or ():
        name, _, urls = text.partition("=")
        if name and urls and "://" not in name:
            named.setdefault(name, []).extend(urls.split(","))
        else:
            problems.append(f"--model: expected NAME=URL, as in deepseek-r1=http://node1:8000, got {text!r:.200}")
    if not (args.server or args.model or (args.config and problems)):
        problems.append("expected a URL or --model NAME=URL: which servers have the model?")
    context = _context_servers(args, named, problems)
    asked = [("--model" if name else "--server", server) for name, servers in named.items() for server in servers]
    asked += [("--context-server", server) for servers in context.values() for server in servers]
    for word, server in asked:
        try:
            parse_source(server)
        except SourceError as error:
            problems.append(f"{word}: {error}")
    triton_model = args.triton_model or "tensorrt_llm"
    return tuple(
        ModelSettings(tuple(servers), name, triton_model, tuple(context.get(name, ())), args.local_prefill or 0)
        for name, servers in named.items()
    )


def _context_servers(
    args: argparse.Namespace, named: Mapping[str, Sequence[str]], problems: list[str]
) -> dict[str, list[str]]:
    """The context servers of each model in `named`."""
    context: dict[str, list[str]] = {}
    for text in args.context_server or ():
        name, equals, urls = text.partition("=")
        if not equals or "://" in name:
            name, urls = "", text
        if not name and "" not in named and len(named) == 1:
            (name,) = named
        if name not in named:
            known = " or ".join(f"{model}=URL" for model in named if model) or "a URL"
            if named:  # else it is said already that they are missing
                problems.append(f"--context-server: expected {known}, got {text!r:.200}")
            continue
        context.setdefault(name, []).extend(urls.split(","))
    for name, servers in context.items():
        problems.extend(
            f"--context-server: {server} has both parts; expected each server in one of the lists"
            for server in servers
            if server in named[name]
        )
    if args.local_prefill and not context:
        problems.append("--local-prefill: expected --context-server too; without one, all prompts are computed so")
    return context


def _upstream_headers(texts: Iterable[str], problems: list[str]) -> tuple[tuple[str, str], ...]:
    """Name and value of each header. The problems don't show the values, which are secrets."""
    headers = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not _HEADER.fullmatch(name):
            problems.append("--upstream-header: expected NAME=VALUE or NAME=@FILE; the name is letters, digits and -")
            continue
        if name.lower() in _SET_BY_HTTP:
            problems.append(f"--upstream-header: {name} is the gateway's own to set")
            continue
        if name.lower().endswith("-bin"):
            problems.append(f"--upstream-header: {name} ends in -bin, where gRPC takes no text: name it otherwise")
            continue
        if value.startswith("@"):
            try:
                value = Path(value[1:]).read_text("utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                problems.append(f"--upstream-header {name}: {value[1:]}: {_reason(error)}")
                continue
        if not value or not value.isascii() or not value.isprintable():
            problems.append(f"--upstream-header {name}: expected a value of printable ASCII on one line")
            continue
        headers.append((name, value))
    return tuple(headers)


def _problems(settings: GatewaySettings, *, renews: bool = False) -> Iterable[str]:
    """Those that can be tried now. With `renews`, workers are well meanwhile: a certificate out of date is one, too."""
    import ssl
    from importlib.util import find_spec

    from deepseek_triton_tools.gateway.guard import KeysFileError, read_keys

    if settings.keys_file is not None:
        try:
            read_keys(settings.keys_file)
        except (OSError, KeysFileError) as error:
            yield f"--keys {settings.keys_file}: {_reason(error)}"
    elif settings.metrics_need_key:
        yield "--metrics-need-key: expected --keys too; without it, everybody may ask"
    for origin in settings.cors_origins:
        if not _ORIGIN.fullmatch(origin):
            yield f"--cors-origin: expected https://HOST, without a path, or *, got {origin!r:.200}"
    if settings.tls_certificate is not None:
        context, at = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), f"--tls-certificate {settings.tls_certificate}"
        try:
            context.load_verify_locations(settings.tls_certificate)  # tells which of the two files is wrong
            times = _validity(settings.tls_certificate)
            if renews and times and not times[0] <= time.strftime("%Y%m%d%H%M%S", time.gmtime()) <= times[1]:
                yield f"{at}: expected a certificate that is valid now, got one from {times[0]}Z to {times[1]}Z"
            at = at if settings.tls_key is None else f"--tls-key {settings.tls_key}"
            # With an empty password, because OpenSSL would otherwise ask for one at the terminal.
            context.load_cert_chain(settings.tls_certificate, settings.tls_key, password="")
        except OSError as error:  # ssl.SSLError is one; OpenSSL gives no reason where it finds no key
            reason = _reason(error) if getattr(error, "reason", error) else "no private key, or an encrypted one"
            yield f"{at}: {reason}; expected PEM, and the certificate's own key"
    elif settings.tls_key is not None:
        yield "--tls-key: expected --tls-certificate too"
    if settings.upstream_ca is not None:
        try:
            ssl.create_default_context(cafile=settings.upstream_ca)
        except OSError as error:
            yield f"--upstream-ca {settings.upstream_ca}: {_reason(error)}; expected certificates as PEM"
    if settings.access_log not in (None, "-"):
        try:
            with open(settings.access_log, "a"):
                pass
        except OSError as error:
            yield f"--access-log {settings.access_log}: {_reason(error)}"
    if settings.traces_url is not None:
        if not _COLLECTOR.fullmatch(settings.traces_url):
            yield f"--traces: expected a URL such as http://localhost:4318, got {settings.traces_url!r:.200}"
        if find_spec("opentelemetry") is None:
            yield f"--traces: opentelemetry is not installed; {install_extra('tracing')}"


def _validity(certificate: Path) -> list[str]:
    """Its first and last second, as YYYYMMDDhhmmss, in UTC: Python's ssl tells only those of a peer's."""
    pem = re.search(rb"-----BEGIN CERTIFICATE-----(.+?)-----END", certificate.read_bytes(), re.DOTALL)
    times = re.findall(rb"\x17\r(\d{12})Z|\x18\x0f(\d{14})Z", binascii.a2b_base64(pem[1]) if pem else b"")[:2]
    return [(long or (b"19" if short >= b"5" else b"20") + short).decode() for short, long in times]  # from 1950 on


def _reason(error: Exception) -> str:
    """On one line."""
    return " ".join(str(error.strerror if isinstance(error, OSError) and error.strerror else error).split())


def _require_port(host: str, port: int) -> None:
    """Raises PortError where it can't be listened on, because uvicorn says less."""
    import socket

    from deepseek_triton_tools.host.processes import holder_of

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        by = holder_of(port)
        held = f"; {by} has it" if by else ""
        reason = _reason(error).partition(" (while")[0]
        raise PortError(f"can't listen on port {port} of {host}: {reason}{held}", exit_code=2) from error


def _announcement(settings: GatewaySettings) -> str:
    """The first lines of a gateway: the models and their servers, the address, and who may ask."""
    scheme = "http" if settings.tls_certificate is None else "https"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    many = f" ({settings.workers} workers)" if settings.workers > 1 else ""
    address = f"{scheme}://{host}:{settings.port}"
    lines = [f"starting OpenAI's API at {address}/v1{many}"]
    if settings.page:
        lines += [f"  chat page  {address}/", f"  dashboard  {address}/dashboard"]
    for model in settings.models:
        lines.append(f"  model      {model.name or 'as its servers call it'}, at {', '.join(model.servers)}")
        if model.context_servers:
            lines.append(f"  context    {', '.join(model.context_servers)}")
    lines.append(f"  API keys   {settings.keys_file or 'none are asked for'}")
    if settings.upstream_headers:
        lines.append(f"  headers    {', '.join(name for name, _ in settings.upstream_headers)}, to the servers")
    return "\n".join(lines)
