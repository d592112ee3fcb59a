"""What `build deepseek-r1` writes, started as its own start.sh does, on the strict stand-in for TensorRT-LLM."""

import os
import subprocess
from pathlib import Path

from deepseek_triton_client import Client
from deepseek_triton_tools.host.tritonserver import find_tritonserver
from support.supervising import free_ports
from support.waiting import clients_leave, wait_for


def test_start_sh_serves_the_folder_as_a_container_would(trtllm_repository, tmp_path):
    """start.sh itself, with the container's programs stood in for: mpirun runs rank 0 of what follows, and
    trtllm-llmapi-launch splits its words as the real one does."""
    commands = tmp_path / "bin"
    commands.mkdir()
    rank_0 = "export OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=8"
    words = 'while [ "$1" != -n ]; do shift; done; shift 2'
    _program(commands / "mpirun", f'echo "$@" > "$MPIRUN_LOG"; {rank_0}; {words}; exec "$@"')
    _program(commands / "trtllm-llmapi-launch", "unset OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE; task=$*; $task")
    installation = find_tritonserver()
    extra = " ".join(f'"{argument}"' for argument in installation.extra_args)
    _program(commands / "tritonserver", f'exec "{installation.binary}" {extra} "$@"')
    ready = tmp_path / "ready"
    environment = os.environ | dict(installation.environment)
    environment |= {"MPIRUN_LOG": str(tmp_path / "mpirun.log"), "READY_FILE": str(ready)}
    environment |= {"DEEPSEEK_TRITON_LAUNCH": "5ca1ab1e", "PATH": f"{commands}:{environment['PATH']}"}
    ports = free_ports(3)
    environment |= dict(zip(("HTTP_PORT", "GRPC_PORT", "METRICS_PORT"), map(str, ports), strict=True))
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen([trtllm_repository / "start.sh"], env=environment, stdout=log, stderr=log)
    try:
        with Client(f"http://127.0.0.1:{ports[0]}") as client:
            client.wait_until_ready(60)
            assert client.generate("x", max_tokens=3).num_output_tokens == 3
        wait_for(ready.exists)
        clients_leave()
        assert list(Path("/dev/shm").glob("deepseek_triton_5ca1ab1e_*"))
    finally:
        process.terminate()
        process.wait()
    said = (tmp_path / "log").read_text()
    assert process.returncode == 0, said
    assert 'deepseek-triton rank {"rank":0,"event":"started","size":8' in said
    assert not ready.exists()
    assert not list(Path("/dev/shm").glob("deepseek_triton_5ca1ab1e_*"))
    command = (tmp_path / "mpirun.log").read_text()
    assert f"-n 8 python3 {trtllm_repository}/tensorrt_llm/1/supervise.py rank -- trtllm-llmapi-launch" in command


def _program(path, body):
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)
