"""A stand-in for mpi4py: this process is one rank of a world as large as the launcher's variables say.

The stand-in's leader ends the workers by `MPI.COMM_WORLD.release_workers`, which mpi4py does not have.
"""
