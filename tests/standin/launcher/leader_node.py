"""Rank 0 of the MPI world: runs the task's loads on all ranks, until it is told to stop by `--action stop`."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed

from session import connect, listen


def lead():
    sys.path.insert(0, os.environ["STANDIN_MPI4PY"])
    from mpi4py.futures import MPICommExecutor
    from mpi4py.MPI import COMM_WORLD

    with MPICommExecutor(COMM_WORLD) as workers, ThreadPoolExecutor(1) as rank_0, listen() as listener:
        while True:
            with listener.accept() as connection:
                load = connection.recv()
                if load is None:
                    return
                for future in as_completed(_submit(workers, rank_0, COMM_WORLD.size, load, connection)):
                    future.result()


def _submit(workers, rank_0, size, load, task):
    from engine_rank import Load, run

    options = Load(**load)
    others = [workers.submit(run, options, None) for _ in range(size - 1)]
    return [rank_0.submit(run, options, task), *others]


def stop():
    with connect() as connection:
        connection.send(None)


if __name__ == "__main__":
    stop() if sys.argv[1:] == ["--action", "stop"] else lead()
