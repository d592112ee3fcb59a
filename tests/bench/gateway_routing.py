"""The gateway's routing, simulated: how much of the prompts is in the KV cache, and how evenly servers are loaded.

    python tests/bench/gateway_routing.py [--servers N] [--conversations N] [--rate R]

The gateway's own functions choose the servers. Servers and people are simulated: conversations begin at random, one of
four system prompts is before each, and people think before they ask again. A server keeps the tokens of its last
conversations and drops the oldest. A token that is not there takes prefill time, and the more a server has to do, the
longer each output token takes. In the case "one first message" a third of all conversations begin with the same words,
as when a program asks, so that they have one key.

    affinity        the server of the conversation's key, within the bound (gateway/fleet/routing.py)
    unbounded       the same without the bound
    least of two    the less loaded of two that are drawn
    round robin     each in turn

Prints for each: hit rate (cached tokens / prompt tokens), spread (the busiest server's sequences / the mean, averaged
over the requests' starts), and the mean and 99th percentile of the time to the first token in ms.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from deepseek_triton_tools.gateway.fleet.affinity import affinity_key, rendezvous_score
from deepseek_triton_tools.gateway.fleet.routing import Load, choose, estimated_load
from deepseek_triton_tools.gateway.triton.call import Call

SYSTEM_TOKENS = 2000
QUESTION_TOKENS = 150
ANSWER_TOKENS = 300
MEAN_TURNS = 6
THINKING_S = 30.0
CACHE_TOKENS = 400_000
PREFILL_TOKENS_S = 10_000
TOKEN_S = 0.02
FULL_BATCH = 64
"""Sequences with which each output token takes twice as long as alone."""

Policy = Callable[[Sequence["SimulatedServer"], Call], "SimulatedServer"]


@dataclass
class SimulatedServer:
    url: str
    load: Load = Load()  # noqa: RUF009
    cache: OrderedDict[str, int] = field(default_factory=OrderedDict)
    """Conversation, or system prompt -> its cached tokens; the oldest first."""

    def begin(self, conversation: Conversation) -> tuple[int, float]:
        """The cached tokens of its prompt, and seconds until its first token."""
        cached = self.cache.get(conversation.name) or self.cache.get(conversation.system, 0)
        wait_s = (conversation.tokens - cached) / PREFILL_TOKENS_S * (1 + self.load.sequences / FULL_BATCH)
        self._keep(conversation.system, SYSTEM_TOKENS)
        self._keep(conversation.name, conversation.tokens + ANSWER_TOKENS)
        return cached, wait_s

    def _keep(self, name: str, tokens: int) -> None:
        self.cache[name] = tokens
        self.cache.move_to_end(name)
        while sum(self.cache.values()) > CACHE_TOKENS:
            self.cache.popitem(last=False)


@dataclass
class Conversation:
    name: str
    system: str
    first: str
    turns: int
    tokens: int = SYSTEM_TOKENS + QUESTION_TOKENS

    def call(self) -> Call:
        messages = [{"role": "system", "content": self.system}, {"role": "user", "content": self.first}]
        return Call({"text_input": "x" * 4 * self.tokens}, self.name, affinity_key(messages))


def affinity(seed: int) -> Policy:
    rng = random.Random(seed)
    return lambda servers, call: choose(servers, call, rng)


def unbounded(seed: int) -> Policy:
    return lambda servers, call: min(servers, key=lambda server: rendezvous_score(call.affinity or b"", server.url))


def least_of_two(seed: int) -> Policy:
    rng = random.Random(seed)
    return lambda servers, call: choose(servers, Call(call.inputs, call.request_id), rng)


def round_robin(seed: int) -> Policy:
    numbers = itertools.count()
    return lambda servers, call: servers[next(numbers) % len(servers)]


POLICIES = {"affinity": affinity, "unbounded": unbounded, "least of two": least_of_two, "round robin": round_robin}


def simulate(policy: Policy, args: argparse.Namespace, same_share: float) -> tuple[float, float, float, float]:
    """Hit rate, spread, mean TTFT and its 99th percentile in ms."""
    rng = random.Random(7)
    servers = [SimulatedServer(f"http://server-{number}:8000") for number in range(args.servers)]
    number = itertools.count()
    events: list[tuple[float, int, Callable[[float], None]]] = []
    prompts = hits = 0
    spreads, ttfts = [], []

    def at(moment: float, event: Callable[[float], None]) -> None:
        heapq.heappush(events, (moment, next(number), event))

    def ask(conversation: Conversation, now: float) -> None:
        nonlocal prompts, hits
        call = conversation.call()
        server = policy(servers, call)
        cached, wait_s = server.begin(conversation)
        cost = estimated_load(call)
        server.load = server.load.plus(cost)
        prompts, hits = prompts + conversation.tokens, hits + cached
        loads = [other.load.sequences for other in servers]
        spreads.append(max(loads) / statistics.mean(loads))
        ttfts.append(1000 * wait_s)
        decode_s = ANSWER_TOKENS * TOKEN_S * (1 + server.load.sequences / FULL_BATCH)
        at(now + wait_s + decode_s, lambda moment: end(conversation, server, cost, moment))

    def end(conversation: Conversation, server: SimulatedServer, cost: Load, now: float) -> None:
        server.load = server.load.minus(cost)
        conversation.turns -= 1
        conversation.tokens += ANSWER_TOKENS + QUESTION_TOKENS
        if conversation.turns:
            at(now + rng.expovariate(1 / THINKING_S), lambda moment: ask(conversation, moment))

    start = 0.0
    for index in range(args.conversations):
        start += rng.expovariate(args.rate)
        system = f"system prompt {rng.choices(range(4), (8, 4, 2, 1))[0]}"
        first = "the same" if rng.random() < same_share else f"question {index}"
        turns = 1 + int(rng.expovariate(1 / (MEAN_TURNS - 1)))
        conversation = Conversation(f"conversation {index}", system, first, turns)
        at(start, lambda moment, conversation=conversation: ask(conversation, moment))  # type: ignore[misc]
    while events:
        moment, _, event = heapq.heappop(events)
        event(moment)
    return hits / prompts, statistics.mean(spreads), statistics.mean(ttfts), statistics.quantiles(ttfts, n=100)[98]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=8)
    parser.add_argument("--conversations", type=int, default=4000)
    parser.add_argument("--rate", type=float, default=4.0, help="conversations that begin in a second, all together")
    args = parser.parse_args()
    for title, same_share in (("all different", 0.0), ("one first message", 1 / 3)):
        print(f"{title}: {args.servers} servers, {args.rate:g} conversations/s")
        rows = [("policy", "hit rate", "spread", "TTFT mean", "TTFT p99")]
        for name, policy in POLICIES.items():
            hit_rate, spread, mean_ms, late_ms = simulate(policy(1), args, same_share)
            rows.append((name, f"{hit_rate:.1%}", f"{spread:.2f}", f"{mean_ms:.0f}", f"{late_ms:.0f}"))
        print("\n".join("  ".join(f"{cell:>14}" for cell in row) for row in rows))
        print()


if __name__ == "__main__":
    main()
