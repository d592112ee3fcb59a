"""All servers of one model as if they were one: who gets a request, and who else when that one refuses it."""

import asyncio
import logging
import random
import ssl
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing, suppress
from functools import reduce
from hashlib import blake2b
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from msgspec import structs

from deepseek_triton_client._core.client_settings import Endpoint
from deepseek_triton_tools.gateway.fleet_member import FleetMember, FleetServer
from deepseek_triton_tools.gateway.settings import (
    GatewaySettings,
    ModelSettings,
    ServerAddress,
    ServerSource,
    SharedTable,
    SourceError,
    parse_source,
    url_of,
)
from deepseek_triton_tools.gateway.shared_generation import Role, generate_shared, is_shareable
from deepseek_triton_tools.gateway.triton_call import Call, Load, Part, UpstreamError, estimated_load
from deepseek_triton_tools.gateway.triton_server import TritonServer, within

MOST_SERVERS = 3
"""How many servers are asked for one request, each once."""
MOST_DEATHS = 2
"""How many servers may die with one request, of both roles together. The second tells that the first death was its own,
perhaps."""
MODEL_KEPT_S = 30.0
"""How long the fleet keeps its model while no server is up: a server with another model must not take its place in a
moment in which all the others restart."""
MOST_LOAD = 1.25
"""A request goes to the server of its affinity while that has at most this many times the mean load, as in
"Consistent Hashing with Bounded Loads" (https://arxiv.org/abs/1608.01350)."""
FREE_SEQUENCES = 4
"""A server with fewer sequences counts as idle: it is no slower for one more, so the KV cache decides."""
_START_S = 5.0
"""For the first check of all servers, before the gateway takes requests."""
_VOTE_S = 3.0  # for all servers to tell their models where none is kept; less than _START_S
_LAST_RELEASES_S = 5.0
"""For KV caches that nobody wants to be fetched, when the gateway is stopped."""
_OVERLOADED_S = 1.0
"""Told to clients as Retry-After where no server named a time."""
_WORKER_GONE_S = 10.0  # one that was killed no longer tells of its work
_FORGOTTEN_S = 3600.0  # pods get new addresses all the time, and the table has to end
_log = logging.getLogger(__name__)


class Fleet:
    """The servers of one model.

    sources: where the list of servers comes from. context_sources: the same for context servers, which compute prompts
    of more than local_prefill_tokens for the others; without any, the others do all of each request. connect: makes a
    connection from a URL; connect_metrics: the same for metrics. metrics_port: of servers whose address names none,
    as in the settings. rng: draws servers for requests without affinity. shared_folder: where the gateway's
    workers keep what all must know, of this fleet under its number.
    """

    def __init__(
        self,
        sources: Sequence[ServerSource],
        triton_model: str,
        *,
        connect: Callable[[str], TritonServer],
        connect_metrics: Callable[[str], TritonServer] | None = None,
        metrics_port: int | None = None,
        rng: random.Random | None = None,
        context_sources: Sequence[ServerSource] = (),
        local_prefill_tokens: int = 0,
        shared_folder: Path | None = None,
        number: int = 0,
    ) -> None:
        self._sources = [*sources, *context_sources]
        self._roles: list[Role] = ["context" if source in context_sources else "generation" for source in self._sources]
        self._is_disaggregated = bool(context_sources)
        self._local_prefill_tokens = local_prefill_tokens
        self._model = triton_model
        self._connect = connect
        self._connect_metrics = connect_metrics or connect
        self._metrics_port = metrics_port
        self._rng = rng or random.Random()
        self._shared_lists = SharedTable(shared_folder, "lists")
        with self._shared_lists.changing() as known:  # a source that can't be read now keeps what other workers have
            self._lists = [[ServerAddress(**each) for each in known.get(source.name, ())] for source in self._sources]
        self._problems = [""] * len(self._sources)
        self.members: dict[str, FleetMember] = {}
        self._leaving: list[FleetMember] = []
        # When each was up last, and with which model; what each worker has at each server.
        self._last_up, self._work = (SharedTable(shared_folder, f"{name}-{number}") for name in ("model", "work"))
        self._worker, self._is_alone, self._model_info = uuid4().hex, False, ""
        self._voters: list[FleetMember] = []
        self._vote: asyncio.Task[None]
        self._watches: dict[FleetMember, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._releases: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Find the servers, and check each once; some seconds at most. After that it finds changes by itself."""
        self._take_lists()
        await asyncio.gather(*map(self._read, range(len(self._sources))))
        for index, source in enumerate(self._sources):
            if source.period_s is not None:
                _keep(self._tasks, self._read_again(index, source.period_s))
        with suppress(TimeoutError):
            await within(_START_S, _all([member.checked for member in self.members.values()]))

    async def close(self) -> None:
        """End the checks, and close the connections of all servers. The caller has let the requests end.

        KV caches that nobody wants are fetched before, for some seconds at most.
        """
        members = [*self.members.values(), *self._leaving]
        await _cancel(self._tasks)
        await asyncio.gather(*(member.close() for member in members))  # the last words of requests may begin releases
        if self._releases:
            # Checks go on meanwhile, because a server that is down may come back.
            await asyncio.wait(self._releases, timeout=_LAST_RELEASES_S)
        await _cancel([*self._watches.values(), *self._releases])
        await asyncio.gather(*(member.close() for member in members))

    def servers(self) -> list[FleetServer]:
        """Each server as it is now; those that leave are at the end."""
        return [member.snapshot() for member in [*self.members.values(), *self._leaving]]

    @property
    def model_info(self) -> str:
        """The answer to `describe` (docs/contract.md), of the generation server with the smallest max_seq_len of those
        that are up; "" until a server has been up. Servers that were all down may come back with another."""
        if up := self.up("generation"):  # of equals the former one, so that it stays the same
            least = min(up, key=lambda member: (member.max_seq_len, member.model_info != self._model_info))
            self._model_info = least.model_info
        return self._model_info

    def look(self) -> None:
        """Once a second: tell the other workers the model and this one's work at each server, and learn it of them."""
        if (is_alone := self._is_disaggregated and not self.up("context")) != self._is_alone:
            self._is_alone = is_alone
            _log.warning("generation servers do %s", "all: no context server is up" if is_alone else "their part again")
        members, mine = dict[str, FleetMember](), dict[str, Load]()
        for member in [*self._leaving, *self.members.values()]:  # where it came back, the latter has the others'
            mine[member.url] = mine.get(member.url, Load()).plus(member.own)
            members[member.url], member.elsewhere = member, Load()
        since = time.monotonic() - _WORKER_GONE_S
        with self._work.changing() as table:
            self._model_info = table["model_info"] = self.model_info or table.get("model_info", "")
            work = table["work"] = {name: each for name, each in table.get("work", {}).items() if each[0] > since}
            work[self._worker] = time.monotonic(), mine
        for url, member in members.items():
            loads = [Load(*own.get(url, ())) for _, own in work.values()]
            member.has(member.own, reduce(Load.plus, loads).minus(mine[url]))

    def up(self, role: Role) -> list[FleetMember]:
        return [member for member in self.members.values() if member.state == "up" and member.role == role]

    # Requests.

    def generate(self, call: Call) -> AsyncGenerator[list[Part], None]:
        """The answer of one server, or of two that share the request. Raises UpstreamError."""
        if not (self._is_disaggregated and is_shareable(call, self._local_prefill_tokens)):
            return self._generate(call, "generation")
        if not self.up("generation"):
            raise self.unavailable()  # before a context server computes a prompt that nobody would fetch
        return generate_shared(call, self._generate, lambda release: _keep(self._releases, release))

    async def _generate(self, call: Call, role: Role) -> AsyncGenerator[list[Part], None]:
        """The answer of one server. Another is asked when one fails before its first response, except where the request
        itself is wrong. Raises UpstreamError."""
        errors: list[UpstreamError] = []
        while True:
            member = self._next(call, errors, role)
            call.tried.append(member.url)
            begun = False
            # One that can't send streams gives its whole answer as one part.
            own = call if member.is_decoupled else structs.replace(call, inputs={**call.inputs, "streaming": False})
            with member.working(estimated_load(call)) as server:
                try:
                    # Closed here, not by the garbage collector: only then the server is told to stop at once.
                    async with aclosing(server.generate(own)) as answer:
                        async for parts in answer:
                            # A generation server's first token is the context server's, and so it shows no work.
                            if begun or any(part.finish_reason for part in parts):
                                member.worked()
                            if not begun:
                                begun = True
                                member.answered()
                            yield parts
                    return
                except UpstreamError as error:
                    member.failed(call, error, begun=begun)
                    errors.append(error)
                    if begun or not error.unprocessed:
                        raise
                    call.sent.clear()

    async def ask(self, call: Call) -> dict[str, object]:
        """The outputs of one server, as `generate` chooses it."""
        errors: list[UpstreamError] = []
        while True:
            member = self._next(call, errors, "generation")
            call.tried.append(member.url)
            with member.working(estimated_load(call)) as server:
                try:
                    return await server.ask(call)
                except UpstreamError as error:
                    member.failed(call, error, begun=False)
                    errors.append(error)
                    if not error.unprocessed:
                        raise

    def _next(self, call: Call, errors: Sequence[UpstreamError], role: Role) -> FleetMember:
        """The server to ask after those in `call.tried`, which failed with `errors`. Raises UpstreamError where there
        is none left."""
        left = [member for member in self.up(role) if member.url not in call.tried]
        # Whoever sends what kills an engine would take the whole fleet down, one server after the other.
        if len(call.died) >= MOST_DEATHS:
            raise self.unavailable(errors, role, is_deadly=True)
        if not left or len(errors) >= MOST_SERVERS:
            # A server that is full will have room again, so that is the answer if any of them is.
            full = next((error for error in errors if error.code == "E_OVERLOADED"), None)
            if full is None:
                raise self.unavailable(errors, role)
            retry_after_s = full.retry_after_s or _OVERLOADED_S
            raise UpstreamError(str(full), code=full.code, unprocessed=True, retry_after_s=retry_after_s)
        # When all are avoided they are asked all the same: room comes back at any moment, and refusing costs little.
        return choose([member for member in left if not member.avoided] or left, call, self._rng)

    def unavailable(
        self, errors: Sequence[UpstreamError] = (), role: Role = "generation", *, is_deadly: bool = False
    ) -> UpstreamError:
        """The error while no server takes a request. errors: of the servers that were asked. is_deadly: so many have
        died with it that nobody may be asked, whatever its role."""
        members = [member for member in self.members.values() if member.role == role]
        num_up = sum(member.state == "up" for member in members)
        soonest = min((member.check_in_s for member in members), default=0.0)
        kind = f"{role} server" if self._is_disaggregated else "server"
        text = told = f"no {kind} of this model can take the request now: {num_up} of {len(members)} are up"
        if {member.state for member in members} <= {"new", "down"}:  # Triton opens its ports when the models are loaded
            text = told = f"{told}; one that loads its model can't be reached until it has"
        if is_deadly:
            text += f"; {MOST_DEATHS} have died with it, so no more are asked"
        if errors:
            text += f"; the last that was asked: {errors[-1]}"
        return UpstreamError(
            text, code="E_UNAVAILABLE", unprocessed=not is_deadly, retry_after_s=max(1.0, soonest), told=told
        )

    # The list of servers.

    @property
    def no_servers(self) -> str:
        """Why there are none: what is wrong with their lists; "" where there are some."""
        return "" if self.members else "; ".join(filter(None, self._problems))

    async def _read_again(self, index: int, period_s: float) -> None:
        while True:
            await asyncio.sleep(period_s)
            await self._read(index)

    async def _read(self, index: int) -> None:
        """Take the list of one source, or say once what is wrong with it."""
        problem = ""
        try:
            addresses = [*await self._sources[index].read()]
            if addresses and addresses != self._lists[index]:  # none: a file that changes right now
                self._lists[index] = addresses
                self._take_lists()
                with self._shared_lists.changing() as known:
                    known[self._sources[index].name] = addresses
        except Exception as error:  # a list that nobody reads would stay for ever
            is_told = isinstance(error, SourceError)
            problem = str(error) if is_told else f"{self._sources[index].name} can't be read; the log says more"
            if problem != self._problems[index]:
                left = "the former list of servers stays" if self._lists[index] else "there are no servers yet"
                _log.warning("%s; %s", problem, left, exc_info=not is_told)
        self._problems[index] = problem

    def _take_lists(self) -> None:
        """Begin with servers that are new, and leave those that are no longer in the lists."""
        listed: dict[str, tuple[ServerAddress, Role]] = {}
        for role, addresses in zip(self._roles, self._lists, strict=True):
            for address in addresses:
                listed.setdefault(address.url, (address, role))
        for url in self.members.keys() - listed.keys():
            member = self.members.pop(url)
            member.leaving = True
            self._leaving.append(member)
            _keep(self._tasks, self._leave(member))
        for url, (address, role) in listed.items():
            port = address.metrics_port or self._metrics_port
            usual = "" if port is None else Endpoint.parse(url).metrics_url.removesuffix("/metrics")
            metrics_url = url_of("http", str(urlsplit(url).hostname), port) if port else usual
            known = self.members.get(url)
            if known is not None and metrics_url == (known.metrics.url if known.metrics is not None else ""):
                continue
            metrics = self._connect_metrics(metrics_url) if metrics_url else None
            if known is not None:
                _keep(self._tasks, known.read_from(metrics))
                continue
            self.members[url] = member = FleetMember(
                url,
                self._model,
                server=self._connect(url),
                metrics=metrics,
                accept=self._accept,
                role=role,
                is_shared=self._is_disaggregated,
            )
            member.wants_metrics = self._metrics_port is not None
            self._watches[member] = asyncio.create_task(member.watch())

    async def _leave(self, member: FleetMember) -> None:
        _log.info("%s is no longer in the list of servers; it finishes its requests", member.url)
        await member.idle.wait()
        while member.elsewhere.sequences:  # people want to see when the last worker has finished
            await asyncio.sleep(0.1)
        self._watches.pop(member).cancel()
        self._leaving.remove(member)
        await member.close()

    async def _accept(self, member: FleetMember) -> str:
        """Why a server with its model may not take part; "" if it may, which is noted. The model is that of the others
        that are up, as any worker knows. When none has been for some time, most servers decide."""
        is_open = False
        if member.state != "up":
            with self._last_up.changing() as last_up:
                if last_up.get(member.url, ("", ""))[1] != member.identity:
                    last_up.pop(member.url, None)
                is_open = not self._kept(last_up)
        if is_open:
            if not self._voters:
                for other in self.members.values():
                    other.check_now()
                self._vote = _keep(self._tasks, self._decide())
            self._voters.append(member)
            member.told.set()
            await asyncio.shield(self._vote)
        with self._last_up.changing() as last_up:
            last_up.pop(member.url, None)
            if (kept := self._kept(last_up)) and member.identity not in kept:
                return f"It has {member.identity}, and this fleet has {' and '.join(kept)}"
            last_up[member.url] = time.monotonic(), member.identity
        least = min((other.max_seq_len for other in self.up(member.role)), default=member.max_seq_len)
        if member.max_seq_len != least and member.state != "up":
            text = "%s has max_seq_len %d, and others of its model %d, so what is between both fails at some of them"
            _log.warning(text, member.url, member.max_seq_len, least)
        return ""

    async def _decide(self) -> None:
        """Keep the model of most servers, once each has told its own or failed to; of equals, that of the first."""
        with suppress(TimeoutError):
            await within(_VOTE_S, _all([member.told for member in self.members.values()]))
        voters, self._voters = self._voters, []
        counts = Counter(member.identity for member in self.members.values() if member in voters)  # as they are listed
        with self._last_up.changing() as last_up:
            if not counts or self._kept(last_up):  # another worker was faster
                return
            [(model, _)] = counts.most_common(1)
            last_up.update({member.url: (time.monotonic(), model) for member in voters if member.identity == model})
        if len(counts) > 1:
            _log.warning("servers have different models, and most decide, of equals the first: %s", dict(counts))

    def _kept(self, last_up: dict[str, Any]) -> set[str]:
        """The models of the servers that are up, or were lately."""
        now = time.monotonic()  # the same in all workers
        for url in [url for url, (at, _) in last_up.items() if at < now - _FORGOTTEN_S]:
            del last_up[url]
        return {
            identity
            for url, (at, identity) in last_up.items()
            if (other := self.members.get(url)) and max(at, other.up_until) > now - MODEL_KEPT_S
        }


async def _all(events: Iterable[asyncio.Event]) -> None:
    # No gather: the log would show its cancellation, which nobody reads.
    for event in events:
        await event.wait()


def _keep(tasks: set[asyncio.Task[None]], work: Coroutine[object, object, None]) -> asyncio.Task[None]:
    """Begin the work, as one of `tasks` until it ends."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def _cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    cancelled = [task for task in tasks if task.cancel()]
    await asyncio.gather(*cancelled, return_exceptions=True)


def rendezvous_score(key: bytes, url: str) -> bytes:
    """Servers in the order of their scores are a key's order of servers. A server that comes or goes changes the first
    place of its own share of the keys only."""
    return blake2b(url.encode(), key=key, digest_size=8).digest()


def choose(candidates: Sequence[FleetMember], call: Call, rng: random.Random) -> FleetMember:
    """The server of the call's affinity, unless it has too much to do; without affinity the less loaded of two that
    are drawn. `candidates` has at least one server."""
    if len(candidates) == 1:
        return candidates[0]
    if call.affinity is None:
        return less_loaded(rng.sample(candidates, 2))
    return nearest(candidates, call.affinity, estimated_load(call))


def less_loaded(candidates: Sequence[FleetMember]) -> FleetMember:
    total = _total(candidates)
    return min(candidates, key=lambda candidate: _share(candidate.load, total))


def nearest(candidates: Sequence[FleetMember], affinity: bytes, cost: Load) -> FleetMember:
    """The first in the affinity's order of servers whose load, with `cost` added, is within the bound."""
    total = _total(candidates).plus(cost)
    most = MOST_LOAD / len(candidates)
    order = sorted(candidates, key=lambda candidate: rendezvous_score(affinity, candidate.url))
    for candidate in order:
        load = candidate.load
        if load.sequences < FREE_SEQUENCES or _share(load.plus(cost), total) <= most:
            return candidate
    return less_loaded(order)


def _total(candidates: Sequence[FleetMember]) -> Load:
    loads = [candidate.load for candidate in candidates]
    return Load(sum(load.sequences for load in loads), sum(load.tokens for load in loads))


def _share(load: Load, total: Load) -> float:
    """A server's share of all load, from 0 to 1: the mean of its shares of sequences and of tokens."""
    of_sequences = load.sequences / max(1, total.sequences)
    return (of_sequences + load.tokens / total.tokens) / 2 if total.tokens else of_sequences


def open_fleet(model: ModelSettings, settings: GatewaySettings, number: int) -> Fleet:
    """The fleet of the model with this number in the settings. Raises SourceError, or OSError for `upstream_ca`."""
    tls = ssl.create_default_context(cafile=settings.upstream_ca)
    headers = dict(settings.upstream_headers)

    def connect(url: str) -> TritonServer:
        if url.startswith("grpc"):
            # Here, because it needs the extra grpc.
            from deepseek_triton_tools.gateway.grpc_server import GrpcServer

            return GrpcServer(url, model.triton_model, headers=headers, ca=settings.upstream_ca)
        return TritonServer(url, model.triton_model, headers=headers, tls=tls)

    return Fleet(
        [parse_source(text) for text in model.servers],
        model.triton_model,
        context_sources=[parse_source(text) for text in model.context_servers],
        local_prefill_tokens=model.local_prefill_tokens,
        connect=connect,
        # Without the secrets: metrics are plain HTTP, and Triton restricts nothing there.
        connect_metrics=lambda url: TritonServer(url, model.triton_model),
        metrics_port=settings.metrics_port,
        shared_folder=settings.shared_folder,
        number=number,
    )
