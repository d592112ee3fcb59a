"""Settings of a client: servers, time limits, retries, TLS."""

from __future__ import annotations

import os
import random
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import SplitResult, urlsplit

from deepseek_triton_client._core.exceptions import InvalidRequest

if TYPE_CHECKING:
    import ssl

# Sockets count their time limit in milliseconds, in 32 bits: 24 days.
_LONGEST_S = 2**31 // 1000 - 1

Balance = Literal["failover", "round_robin"]
StreamMode = Literal["delta", "cumulative"]


def _seconds_problems(group: str, limits: Mapping[str, Any]) -> Iterator[str]:
    for name, value in limits.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 < value <= _LONGEST_S:
            yield f"{group}.{name}: expected 0 < seconds <= {_LONGEST_S}, got {value!r}"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


class _Checked(ABC):
    """Settings that raise InvalidRequest, with every problem, where they are wrong."""

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise InvalidRequest("; ".join(problems))

    @abstractmethod
    def _problems(self) -> Iterator[str]: ...


@dataclass(frozen=True, kw_only=True)
class Timeouts(_Checked):
    """Time limits in seconds; None is no limit. One that runs out raises DeadlineExceeded, `connect` ServerUnavailable.

    By default only connecting is limited: a cold server or a long queue can delay the first token for minutes, and a
    long answer takes its time.
    """

    connect: float | None = 10.0
    """Time to reach the server, and for each step of calls that generate nothing: `ready()`, `metadata()`, ..."""
    first_token: float | None = None
    """Time from the call, retries included, to the first chunk. For streams only."""
    between_tokens: float | None = None
    """Time of each wait for a later chunk, without what the caller spends between chunks. For streams only."""
    total: float | None = None
    """Time from the call to the end of the answer, with retries and what the caller spends between chunks."""

    def _problems(self) -> Iterator[str]:
        return _seconds_problems("timeouts", {name: value for name, value in vars(self).items() if value is not None})

    def for_whole_answers(self) -> Timeouts:
        """Return a copy without the limits that only streams have."""
        return replace(self, first_token=None, between_tokens=None)


@dataclass(frozen=True, kw_only=True)
class Retries(_Checked):
    """How often and when a request is sent again that was refused before anything was generated.

    Such refusals are E_OVERLOADED, E_UNAVAILABLE, a model that is not loaded, and a connection that could not be made.
    When all servers have refused, the client sleeps for a random time up to `initial_s`, twice that, up to `max_s`.
    """

    attempts: int = 4
    """Number of times that each server is tried at most; 1 never tries the same server again."""
    attempts_when_full: int | None = None
    """The same of times that a server said it is full, which are counted apart; None: `attempts`."""
    initial_s: float = 0.25
    """Longest first sleep, in seconds."""
    max_s: float = 8.0
    """Longest sleep of all, in seconds, but for what the server asks for (Retry-After, up to 60 s)."""

    def _problems(self) -> Iterator[str]:
        for name, value in {"attempts": self.attempts, "attempts_when_full": self.attempts_when_full}.items():
            if not _is_count(value) and (name, value) != ("attempts_when_full", None):
                yield f"retries.{name}: expected an integer of at least 1, got {value!r}"
        yield from _seconds_problems("retries", {"initial_s": self.initial_s, "max_s": self.max_s})

    def delay_s(self, failures: int, retry_after_s: float) -> float:
        """Seconds to sleep after this number of failures (1 and up), of which the server asked for `retry_after_s`."""
        return retry_after_s + random.uniform(0, min(self.max_s, self.initial_s * 2.0 ** min(failures - 1, 60)))


@dataclass(frozen=True, kw_only=True)
class Tls(_Checked):
    """Certificates, as PEM files. Servers with an ordinary certificate need none for https:// and grpcs:// URLs."""

    ca: str | PathLike[str] | None = None
    """Authorities that may have signed the server's certificate; None: the system's (for gRPC: its own)."""
    certificate: str | PathLike[str] | None = None
    """The client's own certificate with its chain, for servers that ask for one (mTLS)."""
    key: str | PathLike[str] | None = None
    """The private key of `certificate`; None: it is in the same file."""
    verify: bool = True
    """False accepts any certificate: no protection from anyone who can intercept the connection. Not with gRPC."""

    def _problems(self) -> Iterator[str]:
        for name in ("ca", "certificate", "key"):
            path, problem = getattr(self, name), "it is no file"
            try:
                if path is None or stat.S_ISREG(os.stat(os.fspath(path)).st_mode):
                    continue
            except (OSError, ValueError, TypeError) as error:
                problem = getattr(error, "strerror", None) or str(error)
            yield f"tls.{name}: expected a PEM file, found none at {str(path)!r}: {problem}"
        if self.key is not None and self.certificate is None:
            yield "tls.key: expected tls.certificate (--cert) too"
        if not isinstance(self.verify, bool):
            yield f"tls.verify: expected True or False, got {self.verify!r}"

    def context(self) -> ssl.SSLContext:
        """Return the TLS context of these files.

        :raises InvalidRequest: naming the file that can't be used.
        """
        import ssl  # here, because importing it takes longer than all of this package

        if self.ca is not None:
            try:
                context = ssl.create_default_context(cafile=self.ca)
            except OSError as exc:
                raise InvalidRequest(f"tls.ca: expected certificates in PEM, got {str(self.ca)!r}: {exc}") from exc
        else:
            context = ssl.create_default_context()
            system = ssl.get_default_verify_paths()
            if system.cafile is None and not (system.capath is not None and os.listdir(system.capath)):
                import certifi

                context.load_verify_locations(certifi.where())
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.certificate is not None:
            try:
                # With an empty password, because OpenSSL would otherwise ask for one at the terminal.
                context.load_cert_chain(self.certificate, self.key, password="")
            except (OSError, ValueError) as exc:
                files = repr(str(self.certificate)) + ("" if self.key is None else f" and tls.key {str(self.key)!r}")
                raise InvalidRequest(
                    f"tls.certificate: expected a certificate in PEM with its key, not encrypted, got {files}: {exc}"
                ) from exc
        context.set_alpn_protocols(["http/1.1"])
        return context


@dataclass(frozen=True, kw_only=True)
class Connection(_Checked):
    """How long connections last, and how large a response may be."""

    keepalive_s: float = 30.0
    """HTTP: seconds that an idle connection is kept. Choose less than the idle limit of proxies in between."""
    ping_s: float | None = 310.0
    """gRPC: seconds between pings that find a peer which vanished without a word; None sends none. Triton by default
    ends the connection of clients that ping more often than every 300 s without data in between."""
    max_message_bytes: int | None = 256 * 2**20
    """Size of the largest response, and of the largest event of a stream, that is read; None is no limit."""

    def _problems(self) -> Iterator[str]:
        ping = {} if self.ping_s is None else {"ping_s": self.ping_s}
        yield from _seconds_problems("connection", {"keepalive_s": self.keepalive_s, **ping})
        limit = self.max_message_bytes
        if limit is not None and not (_is_count(limit) and limit < 2**31):
            yield f"connection.max_message_bytes: expected a positive integer below 2^31, got {limit!r}"


_DEFAULT_PORTS = {"http": 8000, "https": 443, "grpc": 8001, "grpcs": 443}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of one server."""

    scheme: str
    """http, https, grpc or grpcs."""
    host: str
    port: int
    path: str = ""
    """Path before Triton's own paths, for servers behind a proxy; HTTP only."""

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Parse "host", "host:port" (both are HTTP) or a URL; a missing port is Triton's. Raises InvalidRequest."""
        expected = "url: expected http://host:port or grpc://host:port (https:// and grpcs:// with TLS)"
        if not isinstance(url, str):
            raise InvalidRequest(f"{expected}, got {type(url).__name__}")
        if "@" in url:
            _, _, after = url.rpartition("@")
            raise InvalidRequest(f"{expected} and credentials as token= or headers=, got ***@{after}")
        parts = _split(url if "://" in url else f"http://{url}", _DEFAULT_PORTS)
        path = parts.path.rstrip("/") if parts else ""
        if parts is None or parts.query or parts.fragment or (parts.scheme in ("grpc", "grpcs") and path):
            raise InvalidRequest(f"{expected}, got {url!r}")
        if re.search(r"/v2(/models|/health|/repository|$)", path):
            raise InvalidRequest(f"url: expected the server's own address http://host:port, without /v2, got {url!r}")
        return cls(parts.scheme, str(parts.hostname), parts.port or _DEFAULT_PORTS[parts.scheme], path)

    @classmethod
    def parse_all(cls, urls: str | Iterable[str]) -> tuple[Endpoint, ...]:
        """Parse one URL or several. Raises InvalidRequest."""
        if isinstance(urls, str):
            return (cls.parse(urls),)
        if isinstance(urls, (bytes, Mapping)) or not isinstance(urls, Iterable):
            raise InvalidRequest(f"url: expected a URL or a list of them, got {type(urls).__name__}")
        return tuple(map(cls.parse, urls))

    @property
    def is_grpc(self) -> bool:
        return self.scheme in ("grpc", "grpcs")

    @property
    def is_tls(self) -> bool:
        return self.scheme in ("https", "grpcs")

    @property
    def address(self) -> str:
        """ "host:port", with brackets around an IPv6 address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def metrics_url(self) -> str:
        """Beside /v1, or at 8002 beside Triton's own ports 8000 and 8001; "" for others, of which nobody knows."""
        if self.path.endswith("/v1"):
            return f"{str(self).removesuffix('/v1')}/metrics"
        is_usual = self.port == (8001 if self.is_grpc else 8000)
        return f"http://{replace(self, port=8002).address}/metrics" if is_usual else ""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.address}{self.path}"


_HOST = re.compile(r"(?:[A-Za-z0-9._-]|[^\x00-\x7f])+|[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?")
"""A host name, or an IP address with its zone. IDNA decides which characters beyond ASCII a name may hold."""


def _split(url: str, schemes: Iterable[str]) -> SplitResult | None:
    """The parts of a URL, or None unless it names a host in one of these schemes and no user."""
    try:
        parts = urlsplit(url)
        if parts.scheme not in schemes or parts.port == 0 or not _HOST.fullmatch(parts.hostname or ""):
            return None
    except ValueError:
        return None
    return parts if url.isprintable() and "@" not in url else None  # urlsplit silently drops line breaks


@dataclass(frozen=True, kw_only=True)
class Settings(_Checked):
    """All settings of a client. Raises InvalidRequest, with every problem, for settings that are wrong."""

    endpoints: tuple[Endpoint, ...]
    model_name: str
    model_version: str = ""
    timeouts: Timeouts = Timeouts()
    retries: Retries = Retries()
    balance: Balance = "failover"
    tls: Tls = Tls()
    token: str | Callable[[], str] | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    connection: Connection = Connection()
    stream_mode: StreamMode | None = None
    metrics_url: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "headers", dict(self.headers))  # the caller may change its own mapping later

    def _problems(self) -> Iterator[str]:
        if not self.endpoints:
            yield "url: expected at least one server"
        for name in _EXAMPLES:
            yield from setting_problems(name, getattr(self, name))
        expected = {
            "model_name: expected the model's name on the server": self.model_name and _is_text(self.model_name),
            'model_version: expected a string such as "2", or "" for any': _is_text(self.model_version),
            'balance: expected "failover" or "round_robin"': self.balance in ("failover", "round_robin"),
            'stream_mode: expected "delta", "cumulative", or None for what is usual': (
                self.stream_mode in (None, "delta", "cumulative")
            ),
        }
        for text, is_right in expected.items():
            if not is_right:
                yield f"{text}, got {getattr(self, text.partition(':')[0])!r}"
        if not isinstance(self.headers, Mapping):
            yield f"headers: expected a mapping of names to values, got {type(self.headers).__name__}"
        else:
            for name, value in self.headers.items():
                if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
                    yield f"headers: expected names of letters, digits and -, got {name!r}"
                elif not isinstance(value, str) or not _is_header_value(value):
                    yield f"headers[{name!r}]: expected printable ASCII without spaces around it"
        if self.token is not None and not callable(self.token) and not _is_token(self.token):
            yield _TOKEN_PROBLEM
        is_verified = not isinstance(self.tls, Tls) or self.tls.verify
        if not is_verified and any(each.scheme == "grpcs" for each in self.endpoints):
            yield "tls.verify: expected True, for gRPC always verifies; give the server's certificate as tls.ca"
        url = self.metrics_url
        if url is not None and (not isinstance(url, str) or _split(url, ("http", "https")) is None):
            yield "metrics_url: expected http://host:port/path or https://, without user and password"

    def request_headers(self) -> list[tuple[str, str]]:
        """The user's headers and the current token. Names are in lower case. Must never be logged."""
        headers = [(name.lower(), value) for name, value in self.headers.items()]
        if self.token is not None:
            token = self.token if isinstance(self.token, str) else self.token()
            if not _is_token(token):
                raise InvalidRequest(_TOKEN_PROBLEM)
            headers.append(("authorization", f"Bearer {token}"))
        return headers


_EXAMPLES: dict[str, tuple[type, str]] = {
    "timeouts": (Timeouts, "total=5"),
    "retries": (Retries, "attempts=2"),
    "tls": (Tls, 'ca="ca.pem"'),
    "connection": (Connection, "keepalive_s=5"),
}


def setting_problems(name: str, value: Any) -> Iterator[str]:
    """Yield a problem if `value` is not of the type that the setting `name` needs."""
    kind, example = _EXAMPLES[name]
    if not isinstance(value, kind):
        yield f"{name}: expected {kind.__name__}, such as {kind.__name__}({example}), got {value!r:.100}"


_TOKEN_PROBLEM = "token: expected printable ASCII, not empty and without spaces around it"

_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


def _is_header_value(value: str) -> bool:
    return value.isascii() and value.isprintable() and value == value.strip()


def _is_token(value: Any) -> bool:
    return isinstance(value, str) and value != "" and _is_header_value(value)


def _is_text(value: Any) -> bool:
    """Tell whether `value` is a text that can be sent, which half of a surrogate pair can not."""
    return isinstance(value, str) and value.encode(errors="ignore").decode() == value
