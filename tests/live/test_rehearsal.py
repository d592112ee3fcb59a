"""The rehearsal of production: what `build tiny --engine tensorrt_llm` writes, under a real tritonserver, on the strict
stand-in for TensorRT-LLM, which takes the checkpoint that lies in the repository and no bare name."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from live.conftest import serving

from deepseek_triton_build import model_repository
from deepseek_triton_client import Client
from support.launched import prepare
from support.servers import build, url, with_standin
from support.supervising import free_ports
from support.waiting import clients_leave

SOURCE = model_repository() / "tensorrt_llm/1/tiny"
pytestmark = pytest.mark.skipif(not SOURCE.is_dir(), reason=f"{SOURCE} is not in this checkout")

PLAN = ("--engine", "tensorrt_llm", "--gpu", "h200", "--gpus")


@pytest.mark.parametrize(("variant", "gpus"), [pytest.param("tiny", 1, marks=pytest.mark.nightly), ("tiny-r1", 8)])
def test_it_is_served_from_the_checkpoint_inside(tmp_path, variant, gpus):
    repository = with_standin(build(tmp_path / "repository", variant, *PLAN, str(gpus)))

    with serving(repository) as server, Client(url(server, "http")) as client:
        assert client.generate("The capital of France is", max_tokens=5, ignore_eos=True).num_output_tokens == 5


def test_without_its_checkpoint_it_does_not_load(tmp_path):
    repository = with_standin(build(tmp_path / "repository", "tiny", *PLAN, "1"))
    shutil.rmtree(repository / "tensorrt_llm/1/tiny")

    with pytest.raises(Exception, match="not a local folder"), serving(repository):
        pass


def test_start_sh_brings_up_two_ranks_of_a_real_mpi_world(launchers: Path, tmp_path: Path):
    launched = prepare(tmp_path, launchers, "tiny", *PLAN, "2")
    http, grpc, metrics = map(str, free_ports(3))
    environment = {**launched.environment, "HTTP_PORT": http, "GRPC_PORT": grpc, "METRICS_PORT": metrics}
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    log = tmp_path / "log"
    with log.open("w") as output:
        started = subprocess.Popen(
            [launched.repository / "start.sh"], env=environment, stdout=output, stderr=output, preexec_fn=os.setsid
        )
    try:
        with Client(f"http://127.0.0.1:{http}") as client:
            client.wait_until_ready(120)
            assert client.generate("x", max_tokens=3, ignore_eos=True).num_output_tokens == 3
        clients_leave()
        started.send_signal(signal.SIGTERM)
        assert started.wait() == 0, log.read_text()
    finally:
        started.kill()
        started.wait()
    assert "[RANK 1]" in log.read_text()
