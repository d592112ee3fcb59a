"""The connection to the leader, by the variables that the launcher sets.

TensorRT-LLM uses ZeroMQ, where a peer that has gone looks like a silent one.
"""

import os
from multiprocessing.connection import Client, Listener


def listen():
    return Listener(_address(), authkey=_key())


def connect():
    """Connect to the leader.

    :raises ConnectionRefusedError: while no leader listens.
    """
    return Client(_address(), authkey=_key())


def _address():
    host, _, port = os.environ["TLLM_SPAWN_PROXY_PROCESS_IPC_ADDR"].removeprefix("tcp://").rpartition(":")
    return host, int(port)


def _key():
    return os.environ["TLLM_SPAWN_PROXY_PROCESS_IPC_HMAC_KEY"].encode()
