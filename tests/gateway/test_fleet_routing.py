"""Which server gets a request: by load, and by the conversation's affinity."""

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_triton_tools.gateway.fleet import FREE_SEQUENCES, MOST_LOAD, choose, less_loaded
from deepseek_triton_tools.gateway.triton_call import Call, Load, affinity_key, estimated_load


@dataclass
class Server:
    url: str
    load: Load


def fleet(*loads):
    return [
        Server(f"http://server-{number}:8000", load if isinstance(load, Load) else Load(load, 100 * load))
        for number, load in enumerate(loads)
    ]


def call(affinity=None, **inputs):
    return Call(inputs or {"text_input": "x" * 400}, "job", affinity)


def message(role, content, **fields):
    return {"role": role, "content": content, **fields}


# --- Keys ---

SYSTEM = message("system", "Be brief.")
FIRST = message("user", "Why is the sky blue?")


def test_every_turn_of_a_conversation_has_one_key_and_other_conversations_have_others():
    later = [SYSTEM, FIRST, message("assistant", "Because.", tool_calls=None), message("user", "And the sea?")]
    assert affinity_key([SYSTEM, FIRST]) == affinity_key(later) == affinity_key([*later, later[-1]])
    others = [
        [FIRST],
        [SYSTEM, message("user", "Why is the sky dark?")],
        [message("system", "Be long."), FIRST],
        [SYSTEM, message("user", [{"type": "text", "text": "Why is the sky blue?"}])],
        *([SYSTEM], [], "Why is the sky blue?", [1, 2, 3]),
    ]
    assert affinity_key([SYSTEM, FIRST]) not in [affinity_key(other) for other in others]


def test_long_prompts_that_begin_alike_have_one_key_and_a_hint_is_all_that_counts():
    assert affinity_key("x" * 2000 + "a") == affinity_key("x" * 3000 + "b")
    assert affinity_key([7] * 300) == affinity_key([7] * 400)
    assert affinity_key("xa") != affinity_key("xb")
    assert affinity_key("a", hint="job") == affinity_key([SYSTEM], hint="job") != affinity_key("a", hint="other")


# --- Affinity ---


def nearest(servers, number):
    return choose(servers, call(str(number).encode()), random.Random(0)).url


def test_keys_are_spread_and_stay_where_they_are_when_a_server_goes_or_the_order_changes():
    servers = fleet(0, 0, 0, 0)
    numbers = range(50)
    assert [nearest(servers, each) for each in numbers] == [nearest(servers[::-1], each) for each in numbers]
    before = {number: nearest(servers, number) for number in range(2000)}
    assert min(Counter(before.values()).values()) > 400

    gone = servers.pop(1).url
    after = {number: nearest(servers, number) for number in range(2000)}
    assert all(after[number] == url for number, url in before.items() if url != gone)
    assert len({url for number, url in after.items() if before[number] == gone}) == 3


def test_a_server_with_too_much_to_do_passes_its_requests_on():
    servers = fleet(10, 10, 10)
    own = [number for number in range(300) if nearest(servers, number) == servers[0].url]
    servers[0].load = Load(20, 2000)
    assert {nearest(servers, number) for number in own} == {servers[1].url, servers[2].url}


def test_affinity_counts_more_than_balance_while_servers_are_idle():
    servers = fleet(FREE_SEQUENCES - 1, 0, 0)
    assert {nearest(servers, number) for number in range(50)} == {server.url for server in servers}


@pytest.mark.slow
@given(
    st.lists(st.builds(Load, st.integers(0, 500), st.integers(0, 10**6)), min_size=1, max_size=8),
    st.binary(min_size=1, max_size=8),
    st.integers(0, 100_000),
)
def test_nobody_gets_more_than_the_bound(loads, affinity, characters):
    servers = fleet(*loads)
    asked = call(affinity, text_input="x" * characters)
    chosen = choose(servers, asked, random.Random(0))

    after = chosen.load.plus(estimated_load(asked))
    total = sum(load.sequences for load in loads) + 1, sum(load.tokens for load in loads) + characters // 4
    share = after.sequences / total[0]
    share = (share + after.tokens / total[1]) / 2 if total[1] else share
    is_least_loaded = chosen is less_loaded(servers) or chosen.load == less_loaded(servers).load
    assert chosen.load.sequences < FREE_SEQUENCES or share <= MOST_LOAD / len(loads) + 1e-9 or is_least_loaded


# --- Load ---


def test_without_affinity_the_less_loaded_of_two_gets_it():
    servers, rng = fleet(0, 5, 9), random.Random(0)
    chosen = Counter(choose(servers, call(), rng).url for _ in range(300))
    assert servers[2].url not in chosen
    assert chosen[servers[0].url] > chosen[servers[1].url] > 50


def test_sequences_and_tokens_both_count():
    table = [
        (Load(3, 300), Load(2, 200), 1),
        (Load(2, 9000), Load(2, 200), 1),
        (Load(2, 100), Load(3, 100_000), 0),
        (Load(0, 0), Load(0, 0), 0),
        (Load(4, 0), Load(3, 0), 1),
    ]
    for first, second, less in table:
        servers = fleet(first, second)
        assert less_loaded(servers) is servers[less], (first, second)


def test_the_load_of_a_request():
    table = [
        ({"text_input": "x" * 400}, (1, 107)),
        ({"messages": "x" * 400, "tools": "x" * 40, "sampling_parameters": '{"max_tokens": 5, "top_p": 1}'}, (1, 115)),
        ({"input_ids": [1, 2, 3], "sampling_parameters": '{"n": 2, "best_of": 3}'}, (3, 30)),
        ({"text_input": "x" * 400, "sampling_parameters": '{"max_tokens": "many"}'}, (1, 107)),
        ({"text_input": "x" * 400, "sampling_parameters": "no JSON"}, (1, 107)),
        ({}, (1, 7)),
    ]
    calls = [Call(inputs, "job", default_max_tokens=7) for inputs, _ in table]
    assert list(map(estimated_load, calls)) == [load for _, load in table]
