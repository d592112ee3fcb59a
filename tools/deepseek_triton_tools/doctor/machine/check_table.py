"""Every check, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deepseek_triton_tools.doctor.machine import capabilities as can
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

_SERVING = "an error with a repository for TensorRT-LLM, else a note"

CHECKS: Sequence[MachineCheck] = (
    MachineCheck(
        id="python",
        title="Python",
        about="the version: 3.10 or newer; 3.12 at most with the nvidia-pytriton wheel's server. Error",
        needs=can.TRITON,
        run=software.check_python,
    ),
    MachineCheck(
        id="libpython",
        title="libpython",
        about="the shared library of this Python, which the wheel's Python backend is linked with. Error",
        needs=can.TRITON,
        run=software.check_libpython,
    ),
    MachineCheck(
        id="glibc",
        title="C library",
        about="glibc 2.35 or newer for the wheel (error), any glibc for the container's (note)",
        needs=can.TRITON,
        run=software.check_glibc,
    ),
    MachineCheck(
        id="numpy",
        title="numpy",
        about="there, and below 2 with the wheel, whose stub hands over wrong values otherwise. Error; a note without "
        "any tritonserver",
        needs=can.TRITON,
        run=software.check_numpy,
    ),
    MachineCheck(
        id="tools",
        title="the tools' packages",
        about="pyyaml, rich of the extra `tools`. Note",
        needs=(can.GENERATOR, can.WARM, can.DEMO, can.SIMULATED, can.LOCAL, can.DOCKER, can.SLURM, can.KUBERNETES),
        run=software.check_tools,
    ),
    MachineCheck(
        id="client",
        title="the client's packages",
        about="certifi and h11 (error), tritonclient for gRPC",
        needs=(can.CLIENT,),
        run=software.check_client,
    ),
    MachineCheck(
        id="transformers",
        title="the demo's packages",
        about="torch, transformers, safetensors, jinja2. An error with a repository for the transformers engine, "
        "else a "
        "note",
        needs=(can.DEMO,),
        run=software.check_transformers,
    ),
    MachineCheck(
        id="tritonserver",
        title="tritonserver",
        about="on PATH, in /opt/tritonserver, or of the nvidia-pytriton wheel; which container it is. An error with a "
        "repository for Triton, else a note; a warning in another container than the repository's",
        needs=can.TRITON,
        run=software.check_tritonserver,
    ),
    MachineCheck(
        id="python-backend",
        title="Python backend",
        about="its stub is there, has its libraries (ldd), and which Python it is for. Error; a warning where the "
        "folder "
        "is another, a note where it is for another Python than this",
        needs=can.TRITON,
        run=software.check_python_backend,
    ),
    MachineCheck(
        id="tensorrt-llm",
        title="TensorRT-LLM",
        about=f"installed, with a tritonserver that is not the wheel's ({_SERVING}), the repository's release (error), "
        "trtllm-llmapi-launch on PATH (error). Where another Python of the machine has it, that is said",
        needs=(can.SERVE,),
        run=software.check_tensorrt_llm,
    ),
    MachineCheck(
        id="known-bad",
        title="known faults",
        about="versions that are known not to work together (below). A note where start.sh works around it, an error "
        "where a repository for TensorRT-LLM could not load, else a warning",
        needs=(can.SERVE,),
        run=software.check_known_bad,
    ),
    MachineCheck(
        id="mpi",
        title="MPI",
        about=f"mpirun, Open MPI's ({_SERVING}); mpi4py linked with the same one; Open MPI 5 is a warning",
        needs=(can.SERVE, can.MPIRUN),
        run=mpi_setup.check_mpi,
    ),
    MachineCheck(
        id="mpi-hello",
        title="MPI, two ranks",
        about=f"`mpirun -n 2` of a program that says its rank, 10 s at most ({_SERVING}); the message is mapped to a "
        "fix",
        needs=(can.SERVE, can.MPIRUN),
        run=mpi_setup.check_hello,
    ),
    MachineCheck(
        id="mpi-spawn",
        title="MPI, spawning",
        about="`MPI.COMM_SELF.Spawn` of one process, 5 s at most. Plain tritonserver and trtllm-serve start workers "
        "so: "
        "an error with somebody else's repository for TensorRT-LLM; start.sh doesn't, so else a note",
        needs=(can.SERVE,),
        run=mpi_setup.check_spawn,
    ),
    MachineCheck(
        id="gpus",
        title="GPUs",
        about=f"nvidia-smi sees them, as many and of the kind that the repository is for, Hopper or newer ({_SERVING})",
        needs=(can.SERVE,),
        run=gpu.check_gpus,
    ),
    MachineCheck(
        id="gpu-driver",
        title="GPU driver",
        about="not older than the container's table says. Warning",
        needs=(can.SERVE,),
        run=gpu.check_driver,
    ),
    MachineCheck(
        id="gpu-memory",
        title="GPU memory",
        about="who holds more than 1 GiB of a GPU, and which launch that is of. With a repository for TensorRT-LLM an "
        "error from a tenth of a GPU on, below that a warning; else a note",
        needs=(can.SERVE,),
        run=gpu.check_memory,
    ),
    MachineCheck(
        id="gpu-health",
        title="GPU health",
        about=f"uncorrected ECC errors, rows to remap, the NVSwitch fabric's state (CUDA error 802) ({_SERVING})",
        needs=(can.SERVE,),
        run=gpu.check_health,
    ),
    MachineCheck(
        id="gpu-mig",
        title="MIG",
        about=f"off ({_SERVING})",
        needs=(can.SERVE,),
        run=gpu.check_mig,
    ),
    MachineCheck(
        id="gpu-links",
        title="GPU links",
        about="every two GPUs are joined by NVLink (nvidia-smi topo -m). A warning with a repository for TensorRT-LLM, "
        "else a note",
        needs=(),
        run=gpu.check_links,
    ),
    MachineCheck(
        id="gpu-persistence",
        title="GPU persistence",
        about="on. Note",
        needs=(),
        run=gpu.check_persistence,
    ),
    MachineCheck(
        id="shm",
        title="/dev/shm",
        about="less than 1 GiB free is a warning; less than 32 MiB, or Docker's 64 MiB for several GPUs, an error",
        needs=can.TRITON,
        run=process_limits.check_shm,
    ),
    MachineCheck(
        id="memlock",
        title="locked memory",
        about="unlimited, or CAP_IPC_LOCK. An error with a repository for several machines, a warning with one for "
        "TensorRT-LLM, else a note",
        needs=(can.SERVE,),
        run=process_limits.check_memlock,
    ),
    MachineCheck(
        id="nofile",
        title="file descriptors",
        about="a soft limit below 4096 is a warning",
        needs=(),
        run=process_limits.check_nofile,
    ),
    MachineCheck(id="stack", title="stack", about="below 8 MiB is a warning", needs=(), run=process_limits.check_stack),
    MachineCheck(
        id="container",
        title="container",
        about="which kind, and which of --ipc, --gpus and --ulimit memlock it lacks. A warning with a repository for "
        "TensorRT-LLM, else a note",
        needs=(),
        run=process_limits.check_container,
    ),
    MachineCheck(
        id="seccomp",
        title="system calls",
        about="a filter without SYS_NICE, which forbids placing memory by NUMA node. Note",
        needs=(),
        run=process_limits.check_seccomp,
    ),
    MachineCheck(
        id="repository",
        title="repository",
        about="is at its path. Error; on other hosts too",
        needs=can.OF_REPOSITORY,
        run=storage.check_repository,
    ),
    MachineCheck(
        id="checkpoint",
        title="checkpoint",
        about="is there, every file of its index, each as long as its own header says. Error; a name that is not in "
        "the "
        "Hugging Face cache is a warning",
        needs=can.OF_REPOSITORY,
        run=storage.check_checkpoint,
    ),
    MachineCheck(
        id="host-memory",
        title="host memory",
        about="what MemAvailable and the memory cgroups leave, against the checkpoint: less is a warning; less than "
        "one "
        "file for each rank an error",
        needs=(can.SERVE,),
        run=storage.check_host_memory,
    ),
    MachineCheck(
        id="disk",
        title="disk",
        about="10 GiB where compiled kernels are kept, 1 GiB in TMPDIR, the checkpoint's size where it is yet to be "
        "downloaded; writable. A warning with a repository for TensorRT-LLM, else a note",
        needs=(),
        run=storage.check_disk,
    ),
    MachineCheck(
        id="ports",
        title="ports",
        about="HTTP, gRPC and metrics (HTTP_PORT, GRPC_PORT, METRICS_PORT) are free, and who has them. An error with a "
        "repository, else a note",
        needs=can.OF_REPOSITORY,
        run=network.check_ports,
    ),
    MachineCheck(
        id="interface",
        title="network interface",
        about="--interface is there, up, with an address (error); without it, which one would be taken, and a warning "
        "where several machines could choose differently",
        needs=(can.MPIRUN,),
        run=network.check_interface,
    ),
    MachineCheck(
        id="hostname",
        title="host name",
        about="resolves, to an address of this machine. For several machines an error, and a warning where it is a "
        "loopback address; for one a warning",
        needs=(can.MPIRUN,),
        run=network.check_hostname,
    ),
    MachineCheck(
        id="ssh",
        title="ssh",
        about="there. For several machines an error, else a note",
        needs=(can.MPIRUN,),
        run=network.check_ssh,
    ),
    MachineCheck(
        id="leftovers",
        title="leftovers",
        about="processes of a launch whose supervisor is gone, stubs whose tritonserver is gone (warning), shared "
        "memory "
        "of launches that have ended (note)",
        needs=(),
        run=running.check_leftovers,
    ),
    MachineCheck(
        id="docker",
        title="Docker",
        about="docker or podman answers, and knows NVIDIA's runtime where there are GPUs. Note",
        needs=(can.DOCKER,),
        run=running.check_docker,
    ),
    MachineCheck(
        id="slurm",
        title="Slurm",
        about="sbatch and srun, and sinfo answers. Note",
        needs=(can.SLURM,),
        run=running.check_slurm,
    ),
    MachineCheck(
        id="kubectl",
        title="Kubernetes",
        about="kubectl with a context. Note",
        needs=(can.KUBERNETES,),
        run=running.check_kubectl,
    ),
)


def rows() -> Iterator[str]:
    """Of the table in docs/doctor.md."""
    yield "| check | looks at, and says |"
    yield "| --- | --- |"
    for check in CHECKS:
        yield f"| `{check.id}` | {check.about} |"
