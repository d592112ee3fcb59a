"""Servers beside the load on them: OpenAI's API over aiohttp, what a server says of its model, and its metrics."""

import asyncio
import json
import math
import ssl
import threading
import urllib.error
import urllib.request
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from statistics import fmean
from typing import Any, Literal
from urllib.parse import urlencode, urlsplit

import aiohttp

from deepseek_triton_client import (
    Client,
    DeepseekTritonError,
    InvalidRequest,
    ModelNotFound,
    ServerUnavailable,
    Timeouts,
    Tls,
)
from deepseek_triton_client._core.client_settings import Endpoint
from deepseek_triton_tools.bench import targets
from deepseek_triton_tools.bench.result import MetricSummary, RequestRecord
from deepseek_triton_tools.tool_errors import TOKEN_ADVICE, ToolError

_LIMIT_S = 10
_LONG_FACTS = ("chat_template", "fields")


def endpoint_of(urls: Sequence[str], kind: str | None) -> targets.Endpoint:
    """Tell what kind of servers these are. Raises ToolError for a mixture."""
    kinds: set[targets.Endpoint] = set()
    for url in urls:
        if kind == "openai" or (kind is None and url.startswith("http") and url.rstrip("/").endswith("/v1")):
            kinds.add("openai")
        else:
            kinds.add("triton-grpc" if url.startswith("grpc") else "triton-http")
    if len(kinds) > 1:
        raise ToolError(f"expected servers of one kind, got {' and '.join(sorted(kinds))}", exit_code=2)
    return kinds.pop()


def first_openai_model(target: targets.TargetSettings) -> str:
    """Return the name of the first model that an OpenAI endpoint lists. Raises ToolError."""
    url = f"{target.urls[0].rstrip('/')}/models"
    try:
        return str(_document(url, target)["data"][0]["id"])
    except urllib.error.HTTPError as error:
        advice = {404: "; an OpenAI API's URL ends in /v1; for Triton, leave /v1 and --endpoint out", 401: TOKEN_ADVICE}
        raise ToolError(f"{url}: {error.code} {error.reason}{advice.get(error.code, '')}") from error
    except OSError as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        is_tls = reason is not error and isinstance(reason, ssl.SSLError)
        hint = "does it speak TLS (https://), and is --ca right?" if is_tls else "is the server running?"
        raise ToolError(f"{url}: no answer ({reason}); {hint}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ToolError(f"{url}: expected a list of models; name one with --model") from error


def _document(url: str, target: targets.TargetSettings) -> Any:
    """Return the JSON at `url`. Raises OSError, of which URLError is one, and ValueError."""
    request = urllib.request.Request(url)
    if target.token:
        request.add_unredirected_header("Authorization", f"Bearer {target.token}")
    tls = tls_of(target)
    try:
        with urllib.request.urlopen(request, timeout=_LIMIT_S, context=None if tls is True else tls) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        error.close()
        raise


def model_facts(target: targets.TargetSettings) -> Mapping[str, Any]:
    """Return what our backend says of the model, or our gateway at `/tokenizer_info`; nothing for other servers.

    :raises DeepseekTritonError: when the server can't be reached.
    :raises ToolError: when it has OpenAI's API only.
    """
    url = target.urls[0].rstrip("/")
    if target.endpoint == "openai":
        facts: Any = {}
        with suppress(OSError, ValueError):  # most servers have no such page
            facts = _document(f"{url.removesuffix('/v1')}/tokenizer_info?{urlencode({'model': target.model})}", target)
        facts = facts if isinstance(facts, dict) else {}
        sizes = {"vocab_size": facts.get("vocab_size"), "max_seq_len": facts.get("model_max_length")}
        return {name: value for name, value in sizes.items() if type(value) is int and value > 0}
    try:
        with Client(target.urls[0], **targets.client_arguments(target)) as client:
            facts = client.model_info()
    except ModelNotFound:
        raise
    except InvalidRequest:
        return {}  # another model of Triton's, which describes nothing
    return {name: value for name, value in facts.items() if name not in _LONG_FACTS}


def token_counts(target: targets.TargetSettings, texts: Sequence[str]) -> list[int]:
    """Let the first server count the tokens of texts. Raises ToolError where it can't."""
    if target.endpoint == "openai":
        raise ToolError("an OpenAI endpoint can't count the tokens of this dataset: give --osl", exit_code=2)
    try:
        with Client(target.urls[0], **targets.client_arguments(target)) as client:
            return [len(client.tokenize(text)) for text in texts]
    except ServerUnavailable:
        raise
    except DeepseekTritonError as error:
        raise ToolError(f"the server can't count the tokens of this dataset, so give --osl: {error}") from error


_INTERVAL_S = 1.0


def usual_metrics_urls(urls: Iterable[str], endpoint: str) -> tuple[str, ...]:
    """Return where servers at `urls` have their metrics, as far as that is known: OpenAI endpoints beside their API."""
    if endpoint != "openai":
        return tuple(dict.fromkeys(filter(None, (Endpoint.parse(url).metrics_url for url in urls))))
    parts = [urlsplit(url if "://" in url else f"http://{url}") for url in urls]
    return tuple(dict.fromkeys(f"{each.scheme}://{each.netloc}/metrics" for each in parts))


class MetricsWatch:
    """Reads the metrics when its block begins, every second, and when it ends.

    It has threads of its own, because the load occupies the caller's. A server that can't be read costs the run
    nothing but a line in `problems`, and is asked again.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        own_urls: Sequence[str] = (),
        token: str | None = None,
        tls: Tls | None = None,
        interval_s: float = _INTERVAL_S,
    ) -> None:
        """:param own_urls: the servers that `token` is for; it is sent to no other host."""
        own_hosts = set(map(_host, own_urls))
        self.problems: dict[str, str] = {}
        """A line for each address that could not be read, of the first time."""
        self._interval_s = interval_s
        self._values: dict[str, array[float]] = {}
        self._stop = threading.Event()
        self._threads = []
        self._began = threading.Barrier(len(urls) + 1)
        for url in urls:
            client = partial(
                Client,
                url,
                metrics_url=url,
                timeouts=Timeouts(connect=5.0),
                tls=tls or Tls(),
                token=token if _host(url) in own_hosts else None,
            )
            labels = {"server": urlsplit(url).netloc} if len(urls) > 1 else {}
            thread = threading.Thread(
                target=self._watch, args=(url, client, labels), name=f"metrics of {url}", daemon=True
            )
            self._threads.append(thread)

    def __enter__(self) -> "MetricsWatch":
        for thread in self._threads:
            thread.start()
        self._began.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def summaries(self) -> dict[str, MetricSummary]:
        """Return each series by its name with labels, in alphabetical order, after the block."""
        return {
            name: MetricSummary(first=values[0], last=values[-1], mean=fmean(values), max=max(values))
            for name, values in sorted(self._values.items())
        }

    def _watch(self, url: str, connect: Callable[[], Client], labels: Mapping[str, str]) -> None:
        client: Client | None = None
        try:
            client = connect()
            self._read(url, client, labels)
        except DeepseekTritonError as error:  # the URL is none
            self.problems[url] = str(error)
        finally:
            self._began.wait()
        if client is not None:
            with client:
                while not self._stop.wait(self._interval_s):
                    self._read(url, client, labels)
                self._read(url, client, labels)

    def _read(self, url: str, client: Client, labels: Mapping[str, str]) -> None:
        try:
            samples = client.metrics().samples
        except DeepseekTritonError as error:
            self.problems.setdefault(url, f"{url}: no metrics: {str(error).removeprefix(f'{url}: ')}")
            return
        if not samples:
            self.problems.setdefault(url, f"{url}: no metrics: the page has none; does its path end in /metrics?")
        for sample in samples:
            # Buckets are many, and only a query over all of them says something.
            if math.isfinite(sample.value) and not sample.name.endswith("_bucket"):
                pairs = sorted({**sample.labels, **labels}.items())
                text = ",".join(f'{name}="{value}"' for name, value in pairs)
                name = f"{sample.name}{{{text}}}" if text else sample.name
                self._values.setdefault(name, array("d")).append(sample.value)


def _host(url: str) -> str | None:
    return urlsplit(url if "://" in url else f"//{url}").hostname


_NOT_OPENAI = (ValueError, TypeError, AttributeError, LookupError)
"""Raised where an event has another form than OpenAI's."""
_FINISHED = b"[DONE]"
_LIMIT_REASONS = {"stop", "length", "tool_calls"}
"""Finish reasons of whole answers."""


class OpenAITarget:
    """See `BenchTarget`. Token ids are sent to /completions; chats to /chat/completions."""

    def __init__(self, settings: targets.TargetSettings, url: str, now: targets.RunClock) -> None:
        """Call it in a running event loop."""
        self._url = f"{url.rstrip('/')}/{'chat/completions' if settings.chat else 'completions'}"
        self._now = now
        self._content = "messages" if settings.chat else "prompt"
        self._body = {"model": settings.model, "stream": True, **settings.fields}
        self._counts_each_chunk: bool | None = None
        """Whether the server takes `continuous_usage_stats`, which is vLLM's; None: nobody has asked yet."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=tls_of(settings)),
            timeout=aiohttp.ClientTimeout(total=settings.timeout_s, sock_connect=10),
            headers={"Authorization": f"Bearer {settings.token}"} if settings.token else {},
        )

    async def ask(
        self, prompt: targets.BenchPrompt, fields: Mapping[str, Any], record: RequestRecord, *, keep_ids: bool
    ) -> targets.BenchAnswer:
        record.url, record.sent_s = self._url, self._now()
        usage = {"include_usage": True} | ({} if self._counts_each_chunk is False else {"continuous_usage_stats": True})
        body = {**self._body, self._content: prompt, **fields, "stream_options": usage}
        answer = _StreamedAnswer(self._now)
        refused = False
        try:
            async with self._session.post(self._url, json=body) as response:
                if response.status == 200:
                    self._counts_each_chunk = "continuous_usage_stats" in usage
                    async for event in _events(response.content):
                        answer.add(event)
                        record.num_output_tokens = answer.num_tokens
                else:
                    record.outcome, record.error = "failed", await _refusal(response)
                    refused = self._counts_each_chunk is None and "continuous_usage" in record.error
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, *_NOT_OPENAI) as error:
            record.outcome, record.error = "failed", targets.one_line(f"{type(error).__name__}: {error}")
        except asyncio.CancelledError:
            record.outcome = "cancelled"
            raise
        finally:
            answer.write(record)
            record.ended_s = self._now()
        if refused:
            self._counts_each_chunk = False
            record.outcome, record.error = "completed", ""
            return await self.ask(prompt, fields, record, keep_ids=keep_ids)
        return targets.BenchAnswer("".join(answer.text))

    async def close(self) -> None:
        await self._session.close()


class _StreamedAnswer:
    """The events of one answer, as they come."""

    def __init__(self, now: targets.RunClock) -> None:
        self._now = now
        self.text: list[str] = []
        self._times: list[float] = []
        self._tokens: list[int] = []
        self._usage: dict[str, Any] = {}
        self._finish_reason: str | None = None
        self._error = ""
        self._ended = False

    def add(self, event: bytes) -> None:
        """Raises one of _NOT_OPENAI for an event of another form."""
        if event == _FINISHED:
            self._ended = True
            return
        document = json.loads(event)
        if error := document.get("error"):
            self._error = error.get("message", str(error)) if isinstance(error, dict) else str(error)
            return
        before = self._usage.get("completion_tokens") or 0
        self._usage = {**self._usage, **(document.get("usage") or {})}
        new = (self._usage.get("completion_tokens") or 0) - before
        for choice in document.get("choices") or ():
            delta = choice.get("delta") or choice
            text = delta.get("content") or delta.get("text") or ""
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            if new > 0 or text or delta.get("reasoning_content") or delta.get("reasoning"):
                self._times.append(self._now())
                self._tokens.append(new)
            self.text.append(text)

    @property
    def num_tokens(self) -> int:
        """Tokens so far, by the server's count; chunks where it gives none."""
        return self._usage.get("completion_tokens") or len(self._times)

    def write(self, record: RequestRecord) -> None:
        record.num_input_tokens = self._usage.get("prompt_tokens") or 0
        record.num_cached_tokens = (self._usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        record.num_output_tokens = self.num_tokens
        record.chunk_s, record.chunk_tokens = targets.counted_chunks(
            self._times, self._tokens, record.num_output_tokens
        )
        record.finish_reason = self._finish_reason
        if record.outcome == "completed" and (self._error or not self._ended):
            record.outcome, record.error = "failed", targets.one_line(self._error or "the stream ended without [DONE]")
        elif record.outcome == "completed" and self._finish_reason not in _LIMIT_REASONS:
            record.outcome, record.error = "failed", f"finish reason {self._finish_reason!r}"


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each server-sent event; every server of this API writes an event as one line."""
    rest = b""
    async for data in content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


async def _refusal(response: aiohttp.ClientResponse) -> str:
    text = (await response.content.read(4096)).decode(errors="replace")
    with suppress(ValueError, LookupError, TypeError):  # not OpenAI's form: the body itself says what is wrong
        error = json.loads(text)["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    return targets.one_line(f"{response.status}: {text}")


def tls_of(settings: targets.TargetSettings) -> ssl.SSLContext | Literal[True]:
    """Return a context for the settings' certificates; True: the usual one. Raises InvalidRequest."""
    return True if settings.tls == Tls() else settings.tls.context()
