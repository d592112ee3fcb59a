"""Every check, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deepseek_triton_tools.doctor.machine import capabilities
from deepseek_triton_tools.doctor.machine.checks import (
    gpu,
    mpi_setup,
    network,
    process_limits,
    running,
    software,
    storage,
)
from deepseek_triton_tools.doctor.machine.machine_finding import MachineCheck

_SERVING = "else an error with a repository for TensorRT-LLM, or a note"

CHECKS: Sequence[MachineCheck] = (
    MachineCheck(
        id="python",
        title="Python",
        about="Python is 3.10 or newer, and 3.12 at most with the nvidia-pytriton wheel's server (else an error)",
        needs=capabilities.NEED_TRITONSERVER,
        run=software.check_python,
    ),
    MachineCheck(
        id="libpython",
        title="libpython",
        about="the shared library of this Python is there: the wheel's Python backend is linked with it (else an "
        "error)",
        needs=capabilities.NEED_TRITONSERVER,
        run=software.check_libpython,
    ),
    MachineCheck(
        id="glibc",
        title="C library",
        about="glibc is 2.35 or newer for the wheel (else an error). The container's tritonserver needs any glibc "
        "(else a note)",
        needs=capabilities.NEED_TRITONSERVER,
        run=software.check_glibc,
    ),
    MachineCheck(
        id="numpy",
        title="numpy",
        about="numpy is installed, and is below 2 with the wheel, whose stub hands over wrong values otherwise "
        "(else an error). Without any tritonserver a note",
        needs=capabilities.NEED_TRITONSERVER,
        run=software.check_numpy,
    ),
    MachineCheck(
        id="tools",
        title="the tools' packages",
        about="httpx, pyyaml and rich of the extra `tools` are installed (else a note)",
        needs=(
            capabilities.GENERATOR,
            capabilities.WARM,
            capabilities.DEMO,
            capabilities.SIMULATED,
            capabilities.LOCAL,
            capabilities.DOCKER,
            capabilities.SLURM,
            capabilities.KUBERNETES,
        ),
        run=software.check_tools,
    ),
    MachineCheck(
        id="client",
        title="the client's packages",
        about="certifi and h11 are installed (else an error); whether tritonclient is there for gRPC",
        needs=(capabilities.CLIENT,),
        run=software.check_client,
    ),
    MachineCheck(
        id="transformers",
        title="the demo's packages",
        about="torch, transformers, safetensors and jinja2 are installed. Otherwise an error with a repository for "
        "the transformers engine, else a note",
        needs=(capabilities.DEMO,),
        run=software.check_transformers,
    ),
    MachineCheck(
        id="tritonserver",
        title="tritonserver",
        about="tritonserver is on PATH, in /opt/tritonserver or in the nvidia-pytriton wheel, and which container "
        "this is. Missing, it is an error with a repository for Triton, else a note. Another container than "
        "the repository's is a warning",
        needs=capabilities.NEED_TRITONSERVER,
        run=software.check_tritonserver,
    ),
    MachineCheck(
        id="python-backend",
        title="Python backend",
        about="the Python backend's stub is there and finds its libraries (ldd), and for which Python it is. A "
        "missing library is an error, a stub in another folder a warning, another Python than this one a note",
        needs=capabilities.NEED_TRITONSERVER,
        run=software.check_python_backend,
    ),
    MachineCheck(
        id="tensorrt-llm",
        title="TensorRT-LLM",
        about=f"TensorRT-LLM is installed, with a tritonserver that is not the wheel's ({_SERVING}). Another release"
        " than the repository's is an error, and so is a missing trtllm-llmapi-launch. It says when another "
        "Python of the machine has TensorRT-LLM",
        needs=(capabilities.SERVE,),
        run=software.check_tensorrt_llm,
    ),
    MachineCheck(
        id="known-bad",
        title="known faults",
        about="no versions are installed that are known not to work together (see below). A note when start.sh "
        "works around it, an error when a repository for TensorRT-LLM can't load, else a warning",
        needs=(capabilities.SERVE,),
        run=software.check_known_bad,
    ),
    MachineCheck(
        id="mpi",
        title="MPI",
        about=f"mpirun is there and is Open MPI's ({_SERVING}), and mpi4py is linked with the same one. Open MPI 5 "
        "is a warning",
        needs=(capabilities.SERVE, capabilities.MPIRUN),
        run=mpi_setup.check_mpi,
    ),
    MachineCheck(
        id="mpi-hello",
        title="MPI, two ranks",
        about=f"`mpirun -n 2` runs a program that prints its rank, within 10 s ({_SERVING}). Known messages get "
        "their own fix",
        needs=(capabilities.SERVE, capabilities.MPIRUN),
        run=mpi_setup.check_hello,
    ),
    MachineCheck(
        id="mpi-spawn",
        title="MPI, spawning",
        about="`MPI.COMM_SELF.Spawn` starts one process within 5 s. Plain tritonserver and trtllm-serve start "
        "workers in this way, so a failure is an error with a repository for TensorRT-LLM that is not ours. "
        "start.sh does not, so else it is a note",
        needs=(capabilities.SERVE,),
        run=mpi_setup.check_spawn,
    ),
    MachineCheck(
        id="gpus",
        title="GPUs",
        about=f"nvidia-smi sees as many GPUs as the repository is for, of the same kind, Hopper or newer ({_SERVING})",
        needs=(capabilities.SERVE,),
        run=gpu.check_gpus,
    ),
    MachineCheck(
        id="gpu-driver",
        title="GPU driver",
        about="the driver is not older than the container's table says (else a warning)",
        needs=(capabilities.SERVE,),
        run=gpu.check_driver,
    ),
    MachineCheck(
        id="gpu-memory",
        title="GPU memory",
        about="nobody holds more than 1 GiB of a GPU; it names the processes and their launch. With a repository "
        "for TensorRT-LLM an error from a tenth of a GPU's memory on, below that a warning; else a note",
        needs=(capabilities.SERVE,),
        run=gpu.check_memory,
    ),
    MachineCheck(
        id="gpu-health",
        title="GPU health",
        about="no GPU has uncorrected ECC errors or rows to remap, and the NVSwitch fabric is ready (CUDA error "
        f"802) ({_SERVING})",
        needs=(capabilities.SERVE,),
        run=gpu.check_health,
    ),
    MachineCheck(
        id="gpu-mig",
        title="MIG",
        about=f"MIG is off ({_SERVING})",
        needs=(capabilities.SERVE,),
        run=gpu.check_mig,
    ),
    MachineCheck(
        id="gpu-links",
        title="GPU links",
        about="every two GPUs are joined by NVLink (nvidia-smi topo -m). Otherwise a warning with a repository for "
        "TensorRT-LLM, else a note",
        needs=(),
        run=gpu.check_links,
    ),
    MachineCheck(
        id="gpu-persistence",
        title="GPU persistence",
        about="the driver's persistence mode is on (else a note)",
        needs=(),
        run=gpu.check_persistence,
    ),
    MachineCheck(
        id="shm",
        title="/dev/shm",
        about="/dev/shm has 1 GiB free (else a warning). Less than 32 MiB is an error, and so are Docker's 64 MiB "
        "for several GPUs",
        needs=capabilities.NEED_TRITONSERVER,
        run=process_limits.check_shm,
    ),
    MachineCheck(
        id="memlock",
        title="locked memory",
        about="locked memory is unlimited, or the process has CAP_IPC_LOCK. Otherwise an error with a repository "
        "for several machines, a warning with one for TensorRT-LLM, else a note",
        needs=(capabilities.SERVE,),
        run=process_limits.check_memlock,
    ),
    MachineCheck(
        id="nofile",
        title="file descriptors",
        about="the soft limit of file descriptors is 4096 or more (else a warning)",
        needs=(),
        run=process_limits.check_nofile,
    ),
    MachineCheck(
        id="stack",
        title="stack",
        about="the stack is 8 MiB or more (else a warning)",
        needs=(),
        run=process_limits.check_stack,
    ),
    MachineCheck(
        id="container",
        title="container",
        about="which kind of container this is, and which of --ipc, --gpus and --ulimit memlock it was started "
        "without. A warning with a repository for TensorRT-LLM, else a note",
        needs=(),
        run=process_limits.check_container,
    ),
    MachineCheck(
        id="seccomp",
        title="system calls",
        about="no system call filter without SYS_NICE forbids placing memory by NUMA node (else a note)",
        needs=(),
        run=process_limits.check_seccomp,
    ),
    MachineCheck(
        id="repository",
        title="repository",
        about="the repository is at its path, on every host (else an error)",
        needs=capabilities.NEED_REPOSITORY,
        run=storage.check_repository,
    ),
    MachineCheck(
        id="checkpoint",
        title="checkpoint",
        about="the checkpoint is there with every file of its index, each as long as its own header says (else an "
        "error). A name that is not in the Hugging Face cache is a warning",
        needs=capabilities.NEED_REPOSITORY,
        run=storage.check_checkpoint,
    ),
    MachineCheck(
        id="host-memory",
        title="host memory",
        about="MemAvailable and the memory cgroups leave room for the checkpoint (else a warning). Less than one "
        "file for each rank is an error",
        needs=(capabilities.SERVE,),
        run=storage.check_host_memory,
    ),
    MachineCheck(
        id="disk",
        title="disk",
        about="10 GiB are free where compiled kernels are kept, 1 GiB in TMPDIR, and the checkpoint's size where it"
        " is still to be downloaded; all of them are writable. Otherwise a warning with a repository for "
        "TensorRT-LLM, else a note",
        needs=(),
        run=storage.check_disk,
    ),
    MachineCheck(
        id="ports",
        title="ports",
        about="the ports of HTTP, gRPC and metrics (HTTP_PORT, GRPC_PORT, METRICS_PORT) are free; it names who has "
        "them. Otherwise an error with a repository, else a note",
        needs=capabilities.NEED_REPOSITORY,
        run=network.check_ports,
    ),
    MachineCheck(
        id="interface",
        title="network interface",
        about="the interface of --interface exists, is up and has an address (else an error). Without the option it"
        " names the one that would be taken, and warns when several machines could choose differently",
        needs=(capabilities.MPIRUN,),
        run=network.check_interface,
    ),
    MachineCheck(
        id="hostname",
        title="host name",
        about="the host name resolves to an address of this machine. Otherwise an error for several machines, a "
        "warning for one. A loopback address is a warning for several",
        needs=(capabilities.MPIRUN,),
        run=network.check_hostname,
    ),
    MachineCheck(
        id="ssh",
        title="ssh",
        about="ssh is there. Otherwise an error for several machines, else a note",
        needs=(capabilities.MPIRUN,),
        run=network.check_ssh,
    ),
    MachineCheck(
        id="leftovers",
        title="leftovers",
        about="no processes of a launch remain whose supervisor is gone, and no stubs whose tritonserver is gone "
        "(else a warning). Shared memory of ended launches is a note",
        needs=(),
        run=running.check_leftovers,
    ),
    MachineCheck(
        id="docker",
        title="Docker",
        about="docker or podman answers, and knows NVIDIA's runtime when there are GPUs (else a note)",
        needs=(capabilities.DOCKER,),
        run=running.check_docker,
    ),
    MachineCheck(
        id="slurm",
        title="Slurm",
        about="sbatch and srun are there, and sinfo answers (else a note)",
        needs=(capabilities.SLURM,),
        run=running.check_slurm,
    ),
    MachineCheck(
        id="kubectl",
        title="Kubernetes",
        about="kubectl is there and has a context (else a note)",
        needs=(capabilities.KUBERNETES,),
        run=running.check_kubectl,
    ),
)


def rows() -> Iterator[str]:
    """Yield the lines of the table in docs/doctor.md."""
    yield "| check | what is checked, and what a failure is |"
    yield "| --- | --- |"
    for check in CHECKS:
        yield f"| `{check.id}` | {check.about} |"
