"""How long each part waits for the part inside it when a server is stopped: no part kills one that still drains.

From the inside to the outside, the parts are tritonserver, the supervisor, mpirun, and the container's runtime or the
kubelet.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepseek_triton_build import EXIT_TIMEOUT_S, MPIRUN_SPARE_S

SUPERVISOR_AFTER_S = 15
"""Seconds that tritonserver may take to end after its timeout, in which its stubs and the engine's workers end."""
SPARE_S = 10
"""Seconds for the kernel to end what mpirun has killed, and to free its GPU memory. An assumption."""
PRE_STOP_S = 10
"""Seconds that preStop sleeps before SIGTERM is sent, until no load balancer sends new requests to the pod. A pod is
told to end and is removed from the endpoints at the same time (kubernetes.io, Pod Lifecycle, Pod termination); how long
the removal takes is an assumption."""
GROUP_S = 30
"""Seconds until the LeaderWorkerSet's controller ends the leader of a worker that was told to end. An assumption."""


@dataclass(frozen=True, kw_only=True)
class StopTimes:
    """Times in seconds, counted from SIGTERM unless their docstring says otherwise."""

    exit_timeout_s: int = EXIT_TIMEOUT_S
    """Time that tritonserver gives open requests: start.sh's EXIT_TIMEOUT."""

    @property
    def supervisor_kill_s(self) -> int:
        """When the supervisor kills what is left."""
        return self.exit_timeout_s + SUPERVISOR_AFTER_S

    @property
    def mpirun_kill_s(self) -> int:
        """Open MPI's odls_base_sigkill_timeout: the time between its SIGTERM to the ranks and its SIGKILL. It is 5 s
        more than the supervisor's, which should kill first because it knows what it started."""
        return self.exit_timeout_s + MPIRUN_SPARE_S

    @property
    def docker_stop_timeout_s(self) -> int:
        """Value of `docker run --stop-timeout`."""
        return self.mpirun_kill_s + SPARE_S

    @property
    def grace_period_s(self) -> int:
        """terminationGracePeriodSeconds of the pod with tritonserver, counted from the beginning of preStop."""
        return PRE_STOP_S + self.docker_stop_timeout_s

    @property
    def worker_grace_period_s(self) -> int:
        """terminationGracePeriodSeconds of a pod with ranks only. They end with the leader, which may be told later."""
        return self.grace_period_s + GROUP_S
