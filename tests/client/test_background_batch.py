"""Batches of the blocking client: how their threads cope with trouble."""

import gc
import queue
import subprocess
import sys
import threading

import pytest

from deepseek_triton_client import Client
from deepseek_triton_client._batches import _background_loop
from deepseek_triton_client.testing import FakeServer
from support.waiting import PATIENCE_S


@pytest.fixture
def client():
    with FakeServer("a") as server, Client(server.url) as client:
        yield client


def threads(name):
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_leaving_does_not_wait_for_an_iterable_that_blocks(client):
    prompts = queue.Queue()
    prompts.put("a")

    for completion in client.generate_many(iter(prompts.get, None)):
        assert completion.text == "a"
        break

    prompts.put(None)
    for thread in threads("deepseek-triton-requests"):
        thread.join(PATIENCE_S)
    assert threads("deepseek-triton-requests") == []


def test_an_iterable_that_fails_fails_the_batch(client):
    def prompts():
        yield "a"
        raise LookupError("the table is gone")

    answers = client.generate_many(prompts(), concurrency=1)
    with pytest.raises(LookupError, match="the table is gone"):
        list(answers)


def test_one_thread_serves_all_batches(client):
    for _ in range(3):
        assert [each.text for each in client.generate_many(["x"])] == ["a"]
    assert len(threads("deepseek-triton-batches")) == 1


@pytest.mark.slow
def test_the_collector_may_end_a_batch_on_the_batches_own_thread(client):
    answers = client.generate_many(["x", "y"], concurrency=1)
    next(answers)
    ring = [answers]
    ring.append(ring)
    collected = threading.Event()

    def collect():
        gc.collect()
        collected.set()

    gc.disable()
    try:
        del answers, ring
        _background_loop().call_soon_threadsafe(collect)
        assert collected.wait(PATIENCE_S)
    finally:
        gc.enable()


FORKED = """
import os
from deepseek_triton_client import Client
from deepseek_triton_client.testing import FakeServer

def texts():
    return [each.text for each in client.generate_many(["x"])]

with FakeServer("a") as server, Client(server.url) as client:
    assert texts() == ["a"]
    child = os.fork()
    if not child:
        os._exit(0 if texts() == ["a"] else 1)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
def test_a_forked_process_has_a_loop_of_its_own():
    """In a program of its own: a fork of this one would copy the locks of other tests' threads, held for ever."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED]
    subprocess.run(command, check=True, timeout=PATIENCE_S)
