"""A rank other than 0: it works for the leader until the leader stops the world."""

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.environ["STANDIN_MPI4PY"])
    from mpi4py.futures import MPICommExecutor
    from mpi4py.MPI import COMM_WORLD

    with MPICommExecutor(COMM_WORLD) as executor:
        assert executor is None, "rank 0 is the leader"
