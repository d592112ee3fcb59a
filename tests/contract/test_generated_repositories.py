"""What the generator writes is what the backend loads: for every release, on the strict stand-in for TensorRT-LLM."""

import json
import threading
from dataclasses import replace

import numpy as np
import pytest

from deepseek_backend.config import load_config
from deepseek_backend.engines import create_engine
from deepseek_backend.service import Service
from deepseek_triton_build import PlanRequest, make_plan, repository_files, write_repository
from deepseek_triton_build.data.releases import RELEASES
from standin.loading import standin
from support.fakes import ListReply

CASES = [
    pytest.param(release, changes, id=f"{release}-{name}")
    for release in RELEASES
    for name, changes in {
        "balanced": {"gpu": "h200"},
        "throughput": {"gpu": "b200", "precision": "fp4", "profile": "throughput"},
        "latency": {"gpu": "h200", "profile": "latency"},
        "quickstart": {"gpu": "h200", "profile": "quickstart"},
    }.items()
]


@pytest.mark.parametrize(("release", "changes"), CASES)
def test_the_repository_loads_and_answers(release, changes, tmp_path):
    plan = make_plan(PlanRequest(variant="deepseek-r1", release=release, **changes))
    write_repository(repository_files(plan, version="0"), tmp_path / "repository")
    version_dir = tmp_path / "repository/tensorrt_llm/1"
    config = load_config(version_dir / "model.yaml")
    warmup = replace(config.warmup, shapes=config.warmup.shapes[:2])  # all of them take the stand-in a minute
    config = replace(config, warmup=warmup)
    reply = ListReply()

    with standin(version_dir / "release.yaml"):
        service = Service(config, create_engine(config))
        service.start()
        inputs = {"text_input": np.array([b"Hello"], dtype=np.object_)}
        service.accept(inputs, json.dumps({"max_tokens": 5, "ignore_eos": True}), reply)
        assert reply.done.wait(60)
        service.stop()

    assert reply.errors == []
    assert reply.last["num_output_tokens"] == 5
    assert not [thread.name for thread in threading.enumerate() if thread.name in ("sender", "watcher", "tensorrt_llm")]
