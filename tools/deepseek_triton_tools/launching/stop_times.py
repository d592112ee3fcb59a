"""How long each part waits for the one inside it when a server is told to stop: none kills what still drains.

From the inside to the outside: tritonserver, the supervisor, mpirun, the container's runtime or the kubelet.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepseek_triton_build.render import start_sh

EXIT_TIMEOUT_S = start_sh.EXIT_TIMEOUT_S
SUPERVISOR_AFTER_S = 15
"""What tritonserver may take to end after its timeout: its stubs and the engine's workers are ended then."""
MPIRUN_AFTER_S = start_sh.MPIRUN_SPARE_S
"""5 s more than the supervisor, which is to kill first: it knows what it started."""
SPARE_S = 10
"""For the kernel to take down what mpirun has killed, with its GPU memory. An assumption."""
PRE_STOP_S = 10
"""Until no load balancer sends new requests to a pod that ends: it is ended and removed from the endpoints at the same
time (kubernetes.io, Pod Lifecycle, Pod termination). An assumption for how long the news takes."""
GROUP_S = 30
"""Until the LeaderWorkerSet's controller ends the leader of a worker that was told to end. An assumption."""


@dataclass(frozen=True, kw_only=True)
class StopTimes:
    """In seconds, counted from SIGTERM unless said."""

    exit_timeout_s: int = EXIT_TIMEOUT_S
    """What tritonserver gives open requests: start.sh's EXIT_TIMEOUT."""

    @property
    def supervisor_kill_s(self) -> int:
        return self.exit_timeout_s + SUPERVISOR_AFTER_S

    @property
    def mpirun_kill_s(self) -> int:
        """odls_base_sigkill_timeout of Open MPI: from its SIGTERM to the ranks until its SIGKILL."""
        return self.exit_timeout_s + MPIRUN_AFTER_S

    @property
    def docker_stop_timeout_s(self) -> int:
        """`docker run --stop-timeout`."""
        return self.mpirun_kill_s + SPARE_S

    @property
    def pre_stop_s(self) -> int:
        """Before SIGTERM."""
        return PRE_STOP_S

    @property
    def grace_period_s(self) -> int:
        """terminationGracePeriodSeconds of the pod with tritonserver: it counts from before preStop."""
        return self.pre_stop_s + self.docker_stop_timeout_s

    @property
    def worker_grace_period_s(self) -> int:
        """That of a pod with ranks only: they end with the leader, which may be told later."""
        return self.grace_period_s + GROUP_S
