"""Time limits of requests: the watchdogs of threads and of event loops, behind the same calls."""

import _thread
import asyncio
import functools
import os
import socket
import subprocess
import sys
import threading
import time
import weakref

import pytest

from deepseek_triton_client._asyncio_runtime import LoopWatchdog
from deepseek_triton_client._blocking_runtime import ThreadWatchdog
from deepseek_triton_client._core.interfaces import Deadlines

LONG_S = 1000.0
WAIT_S = 30


class Driver:
    """Makes a watchdog that counts its interrupts, and waits meanwhile."""

    def __init__(self):
        self.num_interrupts = 0
        self._interrupted = threading.Event()

    def watchdog(self, *, first_token=None, end=None, between_tokens_s=None):
        now = time.monotonic()
        moments = [None if each is None else now + each for each in (first_token, end)]
        return self._make(Deadlines(*moments, between_tokens_s))

    def _interrupt(self):
        self.num_interrupts += 1
        self._interrupted.set()

    def _make(self, deadlines):
        return ThreadWatchdog(deadlines, self._interrupt)

    async def interrupted(self):
        assert self._interrupted.wait(WAIT_S)

    async def sleep(self, seconds):
        time.sleep(seconds)


class LoopDriver(Driver):
    def _make(self, deadlines):
        return LoopWatchdog(deadlines, self._interrupt, asyncio.get_running_loop())

    async def interrupted(self):
        async def seen():
            while not self.num_interrupts:
                await asyncio.sleep(0.001)

        await asyncio.wait_for(seen(), WAIT_S)

    async def sleep(self, seconds):
        await asyncio.sleep(seconds)


def both(body):
    """Run the body with a watchdog of a thread and with one of an event loop."""

    @pytest.mark.parametrize("driver", [Driver, LoopDriver])
    @functools.wraps(body)
    def test(driver):
        asyncio.run(body(driver()))

    return test


@both
async def test_the_tightest_limit_interrupts(driver):
    for limits, expired in (
        ({"first_token": 0.01}, "first_token"),
        ({"end": 0.01}, "total"),
        ({"first_token": 0.01, "end": LONG_S}, "first_token"),
        ({"first_token": LONG_S, "end": 0.01}, "total"),
        ({"first_token": -1}, "first_token"),
    ):
        each = type(driver)()
        watchdog = each.watchdog(**limits)
        watchdog.expect(first=True)
        await each.interrupted()
        assert watchdog.expired == expired
        watchdog.stop()


@both
async def test_a_limit_that_comes_nearer_or_moves_on_is_held_to(driver):
    """The watchdog sleeps towards the limit of the first token when that of the second is set."""
    for first_token, between_tokens_s in ((LONG_S, 0.01), (0.3, 0.4)):
        each = type(driver)()
        watchdog = each.watchdog(first_token=first_token, between_tokens_s=between_tokens_s)
        watchdog.expect(first=True)
        watchdog.relax()
        watchdog.expect(first=False)
        await each.interrupted()
        assert watchdog.expired == "between_tokens"
        watchdog.stop()


@pytest.mark.slow
@both
async def test_time_between_waits_is_the_callers_own(driver):
    """The limit of the earlier wait runs out unnoticed, and the next wait is held to its own."""
    watchdog = driver.watchdog(between_tokens_s=0.3)
    watchdog.expect(first=False)
    watchdog.relax()
    await driver.sleep(0.4)
    assert (watchdog.expired, driver.num_interrupts) == (None, 0)
    watchdog.expect(first=False)
    await driver.interrupted()
    watchdog.stop()


@both
async def test_the_end_counts_also_between_waits_and_it_interrupts_once(driver):
    watchdog = driver.watchdog(between_tokens_s=0.3, end=0.02)
    watchdog.expect(first=False)
    watchdog.relax()
    await driver.interrupted()
    assert watchdog.expired == "total"
    watchdog.expect(first=False)
    await driver.sleep(0.05)
    watchdog.stop()
    assert (watchdog.expired, driver.num_interrupts) == ("total", 1)


@both
async def test_no_interrupt_after_stop(driver):
    watchdog = driver.watchdog(first_token=0.3)
    watchdog.expect(first=True)
    watchdog.stop()
    watchdog.stop()
    watchdog.expect(first=True)
    await driver.sleep(0.4)
    assert (watchdog.expired, driver.num_interrupts) == (None, 0)


def test_most_tokens_do_not_touch_the_loops_timers():
    async def body():
        loop = asyncio.get_running_loop()
        num_timers = 0
        call_at = loop.call_at

        def counting(*arguments, **keywords):
            nonlocal num_timers
            num_timers += 1
            return call_at(*arguments, **keywords)

        loop.call_at = counting
        watchdog = LoopWatchdog(Deadlines(None, None, LONG_S), lambda: None, loop)
        for _ in range(1000):
            watchdog.expect(first=False)
            watchdog.relax()
        watchdog.stop()
        assert num_timers == 1

    asyncio.run(body())


def test_a_token_that_came_while_the_loop_was_blocked_came_in_time():
    async def body():
        loop = asyncio.get_running_loop()
        ours, servers = socket.socketpair()
        with ours, servers:
            ours.setblocking(False)
            watchdog = LoopWatchdog(Deadlines(None, None, 0.3), lambda: None, loop)
            watchdog.expect(first=False)
            arrived = asyncio.ensure_future(loop.sock_recv(ours, 10))
            await asyncio.sleep(0)
            servers.send(b"token")
            time.sleep(0.4)
            await arrived
            watchdog.relax()
            await asyncio.sleep(0.05)
            watchdog.stop()
            assert watchdog.expired is None

    asyncio.run(body())


def test_stop_waits_for_an_interrupt_that_is_under_way():
    begun, may_end, order = threading.Event(), threading.Event(), []

    def interrupt():
        begun.set()
        assert may_end.wait(WAIT_S)
        order.append("interrupted")

    def stop():
        watchdog.stop()
        order.append("stopped")

    watchdog = ThreadWatchdog(Deadlines(time.monotonic(), None, None), interrupt)
    watchdog.expect(first=True)
    assert begun.wait(WAIT_S)
    stopping = threading.Thread(target=stop)
    stopping.start()
    stopping.join(0.05)
    may_end.set()
    stopping.join(WAIT_S)
    assert order == ["interrupted", "stopped"]


def test_no_interrupt_after_stop_wherever_the_limit_runs_out():
    late = []
    for number in range(300):
        stopped = threading.Event()
        end = time.monotonic() + number * 1e-6
        watchdog = ThreadWatchdog(Deadlines(None, end, None), lambda stopped=stopped: late.append(stopped.is_set()))
        watchdog.expect(first=True)
        time.sleep(number * 0.5e-6)
        watchdog.stop()
        stopped.set()
    assert not any(late)


def test_one_thread_watches_over_all_requests_and_the_nearest_limit_interrupts():
    drivers = [Driver() for _ in range(102)]
    first = drivers[0].watchdog(first_token=0)
    first.expect(first=True)
    asyncio.run(drivers[0].interrupted())
    num_threads = _thread._count()
    ends = (0.05, *[LONG_S] * 99, 1e300)
    watchdogs = [driver.watchdog(end=end) for driver, end in zip(drivers[1:], ends, strict=True)]
    for watchdog in watchdogs:
        watchdog.expect(first=True)
    assert _thread._count() <= num_threads
    asyncio.run(drivers[1].interrupted())
    for watchdog in [first, *watchdogs]:
        watchdog.stop()
    assert [driver.num_interrupts for driver in drivers] == [1, 1, *[0] * 100]


def test_a_watchdog_nobody_holds_is_gone():
    """Otherwise a stream that was dropped would go on."""
    watchdog = Driver().watchdog(between_tokens_s=LONG_S)
    watchdog.expect(first=True)
    watchdog.relax()
    dropped = weakref.ref(watchdog)
    del watchdog
    end = time.monotonic() + WAIT_S
    while dropped() is not None and time.monotonic() < end:  # the sentry may be looking at it just now
        time.sleep(0.001)
    assert dropped() is None


def test_an_interrupt_that_fails_takes_nobody_elses_watchdog(monkeypatch):
    told = threading.Event()
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: told.set())

    def fail():
        raise OSError("not the contract")

    broken = ThreadWatchdog(Deadlines(time.monotonic(), None, None), fail)
    broken.expect(first=True)
    assert told.wait(WAIT_S)
    driver = Driver()
    watchdog = driver.watchdog(first_token=0.01)
    watchdog.expect(first=True)
    asyncio.run(driver.interrupted())
    watchdog.stop()


FORKED = """
import os, threading, time
from deepseek_triton_client._core.interfaces import Deadlines
from deepseek_triton_client._blocking_runtime import ThreadWatchdog
from support.waiting import PATIENCE_S

def bites():
    bitten = threading.Event()
    watchdog = ThreadWatchdog(Deadlines(time.monotonic(), None, None), bitten.set)
    watchdog.expect(first=True)
    done = bitten.wait(PATIENCE_S)
    watchdog.stop()
    return done

assert bites()
child = os.fork()
if not child:
    os._exit(0 if bites() else 1)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
def test_a_forked_process_has_a_watchdog_too():
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED]
    subprocess.run(command, check=True, timeout=60, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
