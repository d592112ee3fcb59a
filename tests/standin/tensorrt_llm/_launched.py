"""Loads a model on the ranks of trtllm-llmapi-launch's MPI world. tests/standin/launcher is the other end."""

import os
import time
from multiprocessing.connection import Client

_ADDRESS = "TLLM_SPAWN_PROXY_PROCESS_IPC_ADDR"
_POLL_S = 0.1


class LaunchedRanks:
    """The loaded ranks. The load takes STANDIN_LOAD_S seconds; STANDIN_HANGING_RANK never loads."""

    def __init__(self, world_size):
        size = int(os.environ["tllm_mpi_size"])  # noqa: SIM112 - the launcher calls it that
        if size != world_size:
            raise ValueError(f"External MPI session has {size} workers but the model needs world_size={world_size}.")
        self._leader = _connect()
        hanging = os.environ.get("STANDIN_HANGING_RANK")
        seconds = float(os.environ.get("STANDIN_LOAD_S", "0"))
        self._leader.send({"seconds": seconds, "hangs": None if hanging is None else int(hanging)})
        self._leader.recv()

    def shutdown(self):
        self._leader.send("shutdown")
        self._leader.close()


def launched_ranks(world_size):
    """Load the ranks; return None where this process was started without the launcher."""
    return LaunchedRanks(world_size) if _ADDRESS in os.environ else None


def _connect():
    """Connect to the leader, and wait for it: its MPI world has to form first."""
    host, _, port = os.environ[_ADDRESS].removeprefix("tcp://").rpartition(":")
    key = os.environ["TLLM_SPAWN_PROXY_PROCESS_IPC_HMAC_KEY"].encode()
    while True:
        try:
            return Client((host, int(port)), authkey=key)
        except ConnectionRefusedError:
            time.sleep(_POLL_S)
