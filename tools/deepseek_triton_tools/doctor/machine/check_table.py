"""Every check, in the order in which they are shown. docs/doctor.md describes them."""

from __future__ import annotations

from collections.abc import Sequence

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

CHECKS: Sequence[MachineCheck] = (
    MachineCheck(id="python", title="Python", needs=capabilities.NEED_TRITONSERVER, run=software.check_python),
    MachineCheck(id="libpython", title="libpython", needs=capabilities.NEED_TRITONSERVER, run=software.check_libpython),
    MachineCheck(id="glibc", title="C library", needs=capabilities.NEED_TRITONSERVER, run=software.check_glibc),
    MachineCheck(id="numpy", title="numpy", needs=capabilities.NEED_TRITONSERVER, run=software.check_numpy),
    MachineCheck(id="yaml", title="PyYAML", needs=capabilities.NEED_TRITONSERVER, run=software.check_yaml),
    MachineCheck(id="tools", title="the tools' packages", needs=capabilities.NEED_TOOLS, run=software.check_tools),
    MachineCheck(id="client", title="the client's packages", needs=(capabilities.CLIENT,), run=software.check_client),
    MachineCheck(id="reference", title="the demo's packages", needs=(capabilities.DEMO,), run=software.check_reference),
    MachineCheck(
        id="tritonserver", title="tritonserver", needs=capabilities.NEED_TRITONSERVER, run=software.check_tritonserver
    ),
    MachineCheck(
        id="python-backend",
        title="Python backend",
        needs=capabilities.NEED_TRITONSERVER,
        run=software.check_python_backend,
    ),
    MachineCheck(id="tensorrt-llm", title="TensorRT-LLM", needs=(capabilities.SERVE,), run=software.check_tensorrt_llm),
    MachineCheck(id="vllm", title="vLLM", needs=(capabilities.SERVE_VLLM,), run=software.check_vllm),
    MachineCheck(id="torch", title="PyTorch", needs=(capabilities.SERVE_VLLM,), run=software.check_torch),
    MachineCheck(id="locale", title="locale", needs=(capabilities.SERVE_VLLM,), run=software.check_locale),
    MachineCheck(id="nvcc", title="NVCC", needs=(capabilities.SERVE,), run=software.check_nvcc),
    MachineCheck(id="known-bad", title="known faults", needs=capabilities.NEED_GPUS, run=software.check_known_bad),
    MachineCheck(id="mpi", title="MPI", needs=(capabilities.SERVE, capabilities.MPIRUN), run=mpi_setup.check_mpi),
    MachineCheck(
        id="mpi-hello",
        title="MPI, two ranks",
        needs=(capabilities.SERVE, capabilities.MPIRUN),
        run=mpi_setup.check_hello,
    ),
    MachineCheck(id="mpi-spawn", title="MPI, spawning", needs=(capabilities.SERVE,), run=mpi_setup.check_spawn),
    MachineCheck(id="gpus", title="GPUs", needs=capabilities.NEED_GPUS, run=gpu.check_gpus),
    MachineCheck(id="gpu-driver", title="GPU driver", needs=capabilities.NEED_GPUS, run=gpu.check_driver),
    MachineCheck(id="gpu-memory", title="GPU memory", needs=capabilities.NEED_GPUS, run=gpu.check_memory),
    MachineCheck(id="gpu-health", title="GPU health", needs=capabilities.NEED_GPUS, run=gpu.check_health),
    MachineCheck(id="gpu-mig", title="MIG", needs=capabilities.NEED_GPUS, run=gpu.check_mig),
    MachineCheck(id="gpu-links", title="GPU links", run=gpu.check_links),
    MachineCheck(id="gpu-persistence", title="GPU persistence", run=gpu.check_persistence),
    MachineCheck(id="shm", title="/dev/shm", needs=capabilities.NEED_TRITONSERVER, run=process_limits.check_shm),
    MachineCheck(id="memlock", title="locked memory", needs=capabilities.NEED_GPUS, run=process_limits.check_memlock),
    MachineCheck(id="nofile", title="file descriptors", run=process_limits.check_nofile),
    MachineCheck(id="stack", title="stack", run=process_limits.check_stack),
    MachineCheck(id="container", title="container", run=process_limits.check_container),
    MachineCheck(id="seccomp", title="system calls", run=process_limits.check_seccomp),
    MachineCheck(id="repository", title="repository", needs=capabilities.NEED_REPOSITORY, run=storage.check_repository),
    MachineCheck(id="checkpoint", title="checkpoint", needs=capabilities.NEED_REPOSITORY, run=storage.check_checkpoint),
    MachineCheck(id="host-memory", title="host memory", needs=capabilities.NEED_GPUS, run=storage.check_host_memory),
    MachineCheck(id="disk", title="disk", run=storage.check_disk),
    MachineCheck(id="ports", title="ports", needs=capabilities.NEED_REPOSITORY, run=network.check_ports),
    MachineCheck(id="send-buffer", title="send buffer", run=network.check_send_buffer),
    MachineCheck(id="interface", title="network interface", needs=(capabilities.MPIRUN,), run=network.check_interface),
    MachineCheck(id="hostname", title="host name", needs=(capabilities.MPIRUN,), run=network.check_hostname),
    MachineCheck(id="ssh", title="ssh", needs=(capabilities.MPIRUN,), run=network.check_ssh),
    MachineCheck(id="leftovers", title="leftovers", run=running.check_leftovers),
    MachineCheck(id="docker", title="Docker", needs=(capabilities.DOCKER,), run=running.check_docker),
    MachineCheck(id="slurm", title="Slurm", needs=(capabilities.SLURM,), run=running.check_slurm),
    MachineCheck(id="kubectl", title="Kubernetes", needs=(capabilities.KUBERNETES,), run=running.check_kubectl),
)
