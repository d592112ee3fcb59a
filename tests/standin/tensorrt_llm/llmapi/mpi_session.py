"""The session of a leader in an MPI world that was there before."""


class MpiCommSession:
    def __init__(self, comm=None, n_workers=1):
        if comm is None or comm.Get_rank() != 0:
            raise RuntimeError("only rank 0 can have a session")
        if n_workers != comm.Get_size():
            raise ValueError(f"n_workers must be the size of the world, {comm.Get_size()}, got {n_workers}")
        self.n_workers = n_workers
        self._comm = comm

    def shutdown(self):
        """Let the workers go."""
        self._comm.release_workers()
