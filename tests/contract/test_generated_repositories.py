"""The backend loads generated repositories: for every release, on the strict stand-in for TensorRT-LLM."""

import itertools
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from deepseek_backend import engines
from deepseek_backend.config import load_config
from deepseek_backend.engines import ENGINES, create_engine
from deepseek_backend.service import Service
from deepseek_triton_build import PlanRequest, make_plan, repository_files, write_repository
from deepseek_triton_build.catalog import RELEASES
from standin.loading import standin
from support.fakes import send, wait

pytestmark = pytest.mark.slow

CHANGES = {
    "balanced": {"gpu": "h200"},
    "throughput": {"gpu": "b200", "precision": "fp4", "profile": "throughput"},
    "latency": {"gpu": "h200", "profile": "latency"},
    "quickstart": {"gpu": "h200", "profile": "quickstart"},
    "rehearsal": {"variant": "tiny", "engine": "tensorrt_llm", "gpu": "h200"},
}
DIAGONAL = list(zip(RELEASES, itertools.cycle(CHANGES), strict=False))
"""Each release once, with one of the changes; the other pairs are for the night."""

REQUESTS = {
    "tensorrt_llm": PlanRequest(variant="deepseek-r1", gpu="h200"),
    "reference": PlanRequest(variant="tiny"),
    "simulated": PlanRequest(variant="tiny", engine="simulated"),
}
LOAD = """
import sys, types
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, sys.argv[1])
sys.modules["triton_python_backend_utils"] = types.ModuleType("triton_python_backend_utils")
import model
from deepseek_backend.config import load_config
from deepseek_backend.engines import create_engine
from deepseek_backend.errors import ConfigError
config = load_config(Path(sys.argv[1], "model.yaml"))
print(type(create_engine(config)).__name__)
for other in sys.argv[2:]:
    try:
        create_engine(replace(config, engine=other, engine_options={}))
    except ConfigError as error:
        print(error)
"""


@pytest.mark.parametrize("engine", REQUESTS)
def test_a_repository_holds_loads_and_names_its_own_engine_only(engine, tmp_path):
    write_repository(repository_files(make_plan(REQUESTS[engine]), version="0"), tmp_path / "repository")
    version_dir = tmp_path / "repository/tensorrt_llm/1"
    backend = version_dir / "deepseek_backend"
    others = [name for name in ENGINES if name != engine]

    assert {path.parent.name for path in backend.glob("engines/*/__init__.py")} == {engine}
    assert (backend / "process/overlay").exists() == (engine == "tensorrt_llm")

    loaded = subprocess.run(
        [sys.executable, "-c", LOAD, str(version_dir), *others], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.splitlines() == [
        ENGINES[engine],
        *(
            f"triton_config.engine: expected {engine}, which this repository holds, got {other}: "
            f"write engine: {engine}, or build it again with --engine {other}"
            for other in others
        ),
    ]


def test_no_engine_imports_another():
    folder = Path(engines.__file__).parent
    for engine in ENGINES:
        others = "|".join(name for name in ENGINES if name != engine)
        imports = re.compile(rf"deepseek_backend\.engines(?:\.| import )({others})\b")
        assert not [path.name for path in (folder / engine).glob("*.py") if imports.search(path.read_text())]


@pytest.mark.parametrize(
    ("release", "name"),
    [
        pytest.param(*pair, marks=[] if pair in DIAGONAL else pytest.mark.nightly)
        for pair in itertools.product(RELEASES, CHANGES)
    ],
)
def test_the_repository_loads_and_answers(release, name, tmp_path):
    plan = make_plan(PlanRequest(**{"variant": "deepseek-r1", "release": release, **CHANGES[name]}))
    write_repository(repository_files(plan, version="0"), tmp_path / "repository")
    version_dir = tmp_path / "repository/tensorrt_llm/1"
    config = load_config(version_dir / "model.yaml")
    warmup = replace(config.warmup, shapes=config.warmup.shapes[:2])  # all of them take the stand-in a minute
    config = replace(config, warmup=warmup)

    with standin(version_dir / "release.yaml"):
        service = Service(config, create_engine(config))
        service.start()
        reply = wait(send(service, max_tokens=5, ignore_eos=True))
        service.stop()

    assert reply.errors == []
    assert reply.last["num_output_tokens"] == 5
    assert not [thread.name for thread in threading.enumerate() if thread.name in ("sender", "watcher", "tensorrt_llm")]
