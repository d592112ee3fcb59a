"""Keys, and their limits over several processes."""

import multiprocessing
import os
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_triton_tools.gateway import guard as guard_module
from deepseek_triton_tools.gateway.guard import Guard, KeysFileError, RateTable, new_key, parse_keys
from deepseek_triton_tools.gateway.openai_fields import OpenAIError
from deepseek_triton_tools.gateway.settings import GatewaySettings, ModelSettings

HASH = "sha256:" + "a" * 64


def refusal_of(ask, *arguments):
    with pytest.raises(OpenAIError) as refused:
        ask(*arguments)
    return refused.value


def bearer(key):
    return [(b"host", b"gateway"), (b"authorization", f"Bearer {key}".encode())]


@pytest.fixture
def clock(monkeypatch):
    """Seconds of time.monotonic(), which only the test moves."""
    now = [1000.0]
    monkeypatch.setattr(guard_module.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def open_guard(tmp_path):
    guards = []

    def make(words="", *models):
        key, line = new_key("ann")
        (tmp_path / "keys").write_text(f"# who\n\n{line} {words}  # her laptop\n")
        named = tuple(ModelSettings((), name) for name in models or [""])
        guards.append(Guard(tmp_path / "keys", GatewaySettings(named, shared_folder=tmp_path)))
        return guards[-1], key

    yield make
    for guard in guards:
        guard.close()


def test_a_new_key_is_let_in_by_its_line(open_guard, caplog):
    guard, key = open_guard("requests_per_minute=3 models=r1,v3")
    caller = guard.check(bearer(key))
    assert (caller.name, caller.requests_per_minute, caller.tokens_per_minute) == ("ann", 3, None)
    guard.check_model(caller, "v3")
    error = refusal_of(guard.check_model, caller, "v2")
    assert (error.status, error.code) == (403, "model_not_found")
    assert "'v2'; it may use r1, v3" in error.message
    guard, key = open_guard()
    unlimited = guard.reserve(guard.check(bearer(key)), 10**9, 10**9)
    assert (unlimited.num_tokens, unlimited.headers) == (0, ())
    open_guard("models=r1,v2", "r1", "v3")
    assert [record.args[1:3] for record in caplog.records] == [("ann", "v2")]


def test_others_get_401_as_openai_writes_it(open_guard):
    guard, _ = open_guard()
    table = [
        ([], None),
        ([(b"authorization", b"")], None),
        ([(b"authorization", b"Basic YTpi")], None),
        ([(b"authorization", b"Bearer  ")], None),
        (bearer("sk-wrong"), "invalid_api_key"),
        ([(b"authorization", b"Bearer \xff\xfe")], "invalid_api_key"),
    ]
    for headers, code in table:
        error = refusal_of(guard.check, headers)
        assert (error.status, error.kind, error.code) == (401, "invalid_request_error", code)
        assert dict(error.headers)[b"www-authenticate"] == b"Bearer"


WRONG_FILES = [
    ("", "it is empty"),
    ("sk-abc name=ann", "line 1: expected sha256: and 64"),
    (f"{HASH}", "line 1: expected name="),
    (f"{HASH} name=a/b", "line 1: expected name="),
    (f"{HASH} name=a nmae=b", "line 1: field 3: expected one of"),
    (f"{HASH} name=a name=b", "line 1: field 3: .* at most once"),
    (f"{HASH} name=a models=", "line 1: field 3: .* as in WORD=VALUE"),
    (f"{HASH} name=a sk-abc", "line 1: field 3: "),
    (f"{HASH} name=a admin=sk-abc", "line 1: admin: expected yes, or no such word"),
    (f"{HASH} name=a requests_per_minute=0", "a whole number from 1 to 1000000000000"),
    (f"{HASH} name=a tokens_per_minute=sk-abc", "tokens_per_minute: expected a whole number"),
    (f"{HASH} name=a\n{HASH} name=b", "line 2: the key of a stands here again"),
    (f"{HASH}\n#\n{HASH.upper()} name=a", "line 1: .*; line 3: "),
]


def test_a_wrong_file_is_refused_line_by_line_and_without_its_keys(subtests):
    for text, message in WRONG_FILES:
        with subtests.test(text=text):
            with pytest.raises(KeysFileError, match=message) as refused:
                parse_keys(text)
            assert "sk-abc" not in str(refused.value)
    assert parse_keys("# nobody\n") == {}


def test_the_file_is_read_again_and_a_wrong_one_changes_nothing(open_guard, tmp_path, caplog):
    guard, key = open_guard("", "r1")
    other, line = new_key("bob")
    (tmp_path / "keys").write_text("rubbish")
    guard.look()
    assert guard.check(bearer(key)).name == "ann"
    assert "line 1: expected sha256:" in caplog.text
    (tmp_path / "keys").unlink()
    for _ in range(3):
        guard.look()
    assert guard.check(bearer(key)).name == "ann"
    assert len(caplog.records) == 2  # each wrong file is told once
    (tmp_path / "new").write_text(f"{line} models=v2")
    os.replace(tmp_path / "new", tmp_path / "keys")
    guard.look()
    assert caplog.records[2].args[1:3] == ("bob", "v2")
    assert guard.check(bearer(other)).name == "bob"
    assert refusal_of(guard.check, bearer(key)).code == "invalid_api_key"


def test_requests_are_limited_and_come_back_steadily(open_guard, clock):
    guard, key = open_guard("requests_per_minute=3")
    caller = guard.check(bearer(key))
    left = [dict(guard.reserve(caller, 400, None).headers)[b"x-ratelimit-remaining-requests"] for _ in range(3)]
    assert left == [b"2", b"1", b"0"]
    error = refusal_of(guard.reserve, caller, 400, None)
    assert (error.status, error.kind, error.code) == (429, "requests", "rate_limit_exceeded")
    assert "3 requests per minute: 0 left, 1 needed; try again in 20s" in error.message
    assert not re.search(r"sk-|[0-9a-f]{16}", error.message)
    assert error.retry_after_s == pytest.approx(20)
    assert dict(error.headers) == {
        b"x-ratelimit-limit-requests": b"3",
        b"x-ratelimit-remaining-requests": b"0",
        b"x-ratelimit-reset-requests": b"1m0s",
    }
    clock[0] += error.retry_after_s
    guard.reserve(caller, 400, None)
    refusal_of(guard.reserve, caller, 400, None)


def test_tokens_are_counted_as_they_were_used(open_guard, clock):
    guard, key = open_guard("requests_per_minute=100 tokens_per_minute=1000")
    caller = guard.check(bearer(key))
    first = guard.reserve(caller, 400, 800)
    error = refusal_of(guard.reserve, caller, 600, None)
    assert error.kind == "tokens"
    assert "1000 tokens per minute: 100 left, 150 needed" in error.message
    guard.settle(caller, first, 300)
    assert dict(guard.reserve(caller, 600, None).headers)[b"x-ratelimit-remaining-tokens"] == b"550"
    guard.settle(caller, first, 900 + 1550)  # a debt of 1,000
    error = refusal_of(guard.reserve, caller, 4, None)
    assert "0 left" in error.message
    assert error.retry_after_s == pytest.approx(60 + 0.06)
    assert dict(error.headers)[b"x-ratelimit-remaining-requests"] == b"98"  # refused requests are not counted
    # A request above the limit needs a full budget.
    guard, key = open_guard("tokens_per_minute=1000")
    caller = guard.check(bearer(key))
    guard.settle(caller, guard.reserve(caller, 0, 100_000), 10)
    refusal_of(guard.reserve, caller, 0, 100_000)
    clock[0] += 0.6
    guard.reserve(caller, 0, 100_000)


@pytest.mark.slow
@given(steps=st.lists(st.tuples(st.floats(0, 30), st.integers(1, 40)), max_size=40), limit=st.integers(1, 100))
def test_no_minute_gives_more_than_two_budgets(steps, limit):
    """A bucket that is full at first gives a budget at once, and another one over the minute."""
    table = RateTable(None)
    taken = []
    now = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard_module.time, "monotonic", lambda: now[0])
        for pause, amount in steps:
            now[0] += pause
            budget, _ = table.charge(b"k" * 32, (limit, None), (amount, 0))
            assert budget is not None
            if budget.missing_for_s == 0:
                taken.append((now[0], min(amount, limit)))
            assert 0 <= budget.remaining <= limit
    table.close()
    for begin, _ in taken:
        assert sum(amount for at, amount in taken if begin <= at < begin + 60) <= 2 * limit


def _charge_many(path, passed):
    table = RateTable(path)
    budgets = [table.charge(b"k" * 32, (6000, None), (1, 0))[0] for _ in range(4000)]
    passed.put(sum(budget.missing_for_s == 0 for budget in budgets))


@pytest.mark.slow
def test_charges_of_all_processes_count(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    passed = spawn.Queue()
    processes = [spawn.Process(target=_charge_many, args=(tmp_path / "table", passed)) for _ in range(2)]
    began = time.monotonic()
    for process in processes:
        process.start()
    num_passed = sum(passed.get() for _ in processes)
    refilled = (time.monotonic() - began) * 6000 / 60
    for process in processes:
        process.join()

    assert 6000 <= num_passed <= 6000 + refilled


def test_keys_that_share_rows_are_kept_apart(tmp_path, clock):
    table = RateTable(tmp_path / "table")
    digests = [bytes([n]) * 16 + b"\0" * 16 for n in range(16)]
    for digest in digests:
        table.charge(digest, (10, 10), (10, 1))

    assert [table.charge(digest, (10, 10), (1, 1))[0].missing_for_s > 0 for digest in digests] == [True] * 16
    clock[0] += 61
    [budget, _] = table.charge(b"z" * 16 + b"\0" * 16, (10, 10), (1, 1))  # it takes the row of another
    assert budget.remaining == 9
    assert [table.charge(digest, (10, 10), (1, 1))[0].remaining for digest in digests][1:] == [9] * 15
