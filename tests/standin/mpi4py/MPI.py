"""COMM_WORLD, read from the launcher's variables."""

from __future__ import annotations

import os
import threading


class Comm:
    def __init__(self) -> None:
        self.released = threading.Event()

    def Get_rank(self) -> int:
        return int(os.environ["OMPI_COMM_WORLD_RANK"])

    def Get_size(self) -> int:
        return int(os.environ["OMPI_COMM_WORLD_SIZE"])

    def release_workers(self) -> None:
        self.released.set()


COMM_WORLD = Comm()
