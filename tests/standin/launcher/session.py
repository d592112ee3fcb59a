"""Where the leader is and what it takes to speak to it, by the variables that the launcher sets.

The real ones speak ZeroMQ, on which a peer that is gone looks like one that is silent.
"""

from __future__ import annotations

import os
from multiprocessing.connection import Client, Connection, Listener


def listen() -> Listener:
    return Listener(_address(), authkey=_key())


def connect() -> Connection:
    """:raises ConnectionRefusedError: while no leader listens."""
    return Client(_address(), authkey=_key())


def _address() -> tuple[str, int]:
    host, _, port = os.environ["TLLM_SPAWN_PROXY_PROCESS_IPC_ADDR"].removeprefix("tcp://").rpartition(":")
    return host, int(port)


def _key() -> bytes:
    return os.environ["TLLM_SPAWN_PROXY_PROCESS_IPC_HMAC_KEY"].encode()
