"""A GPU, a release, a sampling field, a metric and a rule are added where CONTRIBUTING says, and all of it works.

The edits are made in a copy of the project, and these are all of them.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deepseek_triton_build.catalog import RELEASES, load_release

ROOT = Path(__file__).parents[2]
BUILD, BACKEND = "build/deepseek_triton_build", "model_repository/tensorrt_llm/1/deepseek_backend"
NEWEST, TAG = RELEASES[0], load_release(RELEASES[0]).containers[0]
RECORD = f"{BUILD}/data/records/trtllm-{{}}.yaml"
CLIENT_FIELDS = "client/deepseek_triton_client/_core/sampling_params.py"
# File -> what comes before which text of it.
EDITS = {
    f"{BUILD}/data/gpus.yaml": (
        "h200:\n",
        "h999:\n  title: NVIDIA H999\n  architecture: hopper\n  sm: 90\n  sm_count: 132\n  memory_mib: 150000\n"
        "  memory_source: a test\n  gpus_per_node: 8\n  nvlink_domain: 8\n"
        "  published_min_gpus: {fp8: 8}\n  published_source: a test\n\n",
    ),
    f"{BUILD}/data/moe_backends.yaml": (
        "- gpus: [",
        "- gpus: [h999]\n  precision: fp8\n  ep: any\n  backends: [CUTLASS]\n  default: CUTLASS\n  source: a test\n\n",
    ),
    "tools/deepseek_triton_tools/doctor/gpu.py": ('    r"B200": ("b200",),\n', '    r"H999": ("h999",),\n'),
    f"{BUILD}/data/releases.py": (f'"{NEWEST}", ', '"9.9.9", '),
    f"{BUILD}/data/spelling.yaml": (f'"{NEWEST}"]', '"9.9.9", '),
    f"{BUILD}/data/trtllm_containers.yaml": (
        f'"{TAG}": {{',
        '"99.01": {trtllm: "9.9.9", cuda: "13.1.0.036", driver: "590.44.01"}\n',
    ),
    f"{BACKEND}/contract.py": (
        '    _text("bad", "Strings',
        '    _number("charm", "How charming the text is.", low=0, high=1),\n',
    ),
    f"{BACKEND}/engines/generate_request.py": ("    bad: tuple[str, ...] = ()\n", "    charm: float | None = None\n"),
    f"{BACKEND}/engines/base.py": ('    *("temperature", "top_k"', '    "charm",\n'),
    CLIENT_FIELDS: ("    bad: Sequence[str]", '    charm: float | None = _field("FP32")\n'),
    "tools/deepseek_triton_tools/gateway/openai_fields.py": ('    "min_p": number,\n', '    "charm": number,\n'),
    f"{BACKEND}/backend_metrics.py": ("FIRST_TOKEN = _histogram(", 'SMILES = _counter("smiles_total", "Smiles.")\n'),
    f"{BUILD}/rules/size_limits.py": (
        '@RULES.note("L007")\n',
        '@RULES.note("L999")\ndef _always(d: Deployment) -> Iterator[Violation]:\n'
        '    yield Violation("max_seq_len", "it is there", "leave it out")\n\n\n',
    ),
    f"{BUILD}/data/rules.yaml": ("L007:\n", "L999:\n  title: There is none\n  why: A test.\n  source: a test\n"),
}
# Prints what the engine gets of a request that asks for charm.
SERVED = """
from support.fakes import ScriptedEngine, send, serving
from support.waiting import wait_for
engine = ScriptedEngine()
with serving(engine) as service:
    send(service, sampling_param_charm=0.5)
    wait_for(lambda: engine.requests)
    print(engine.requests[0].sampling.charm)
"""
SENT = """
from deepseek_triton_client import Client, SamplingParams
from deepseek_triton_client.testing import FakeServer
with FakeServer("Hi") as server, Client(server.url) as client:
    client.generate("Hello", charm=0.5)
    print(server.requests[-1].body)
"""
SEEN = """
from deepseek_triton_tools.doctor.gpu import InstalledGpu, catalogue_names
facts = {"memory_mib": 150000, "used_mib": 0, "compute_capability": "9.0", "driver": "590", "is_persistent": True}
print(catalogue_names(InstalledGpu(index=0, name="NVIDIA H999", is_mig=False, **facts)))
"""
COUNTED = """
from deepseek_backend.backend_metrics import FAMILIES
print([family.name for family in FAMILIES])
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs Python in the copy; the result is what it prints."""
    copy = tmp_path_factory.mktemp("additions")
    for part in ("build", "client", "tools", "model_repository"):
        shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
    record = (copy / RECORD.format(NEWEST)).read_text("utf-8")
    record = record.replace(f'"{NEWEST}"', '"9.9.9"').replace(f'"{TAG}"', '"99.01"')
    (copy / RECORD.format("9.9.9")).write_text(record, "utf-8")
    for file, (place, addition) in EDITS.items():
        text = (copy / file).read_text("utf-8")
        assert place in text, f"{file} has no {place!r} any more: EDITS needs another place"
        (copy / file).write_text(text.replace(place, addition + place, 1), "utf-8")
    parts = ("build", "client", "tools", "model_repository/tensorrt_llm/1")
    paths = [*(str(copy / part) for part in parts), str(ROOT / "tests")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def run(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        result = subprocess.run(command, env=environment, cwd=copy, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    return run


def command(run, *arguments):
    return run("-m", "deepseek_triton_tools.cli.main", *arguments)


def test_a_gpu_is_planned_and_known_to_doctor(run):
    assert "h999" in command(run, "variants")
    assert "NVIDIA H999" in command(run, "plan", "deepseek-r1", "--gpu", "h999", "--gpus", "8")
    assert "h999" in run("-c", SEEN)


def test_a_release_is_planned_and_its_container_named(run):
    assert ":99.01-trtllm" in command(run, "plan", "deepseek-r1", "--gpu", "h200", "--gpus", "8", "--trtllm", "9.9.9")


def test_a_sampling_field_goes_from_the_client_to_the_engine_and_is_declared(run):
    assert "0.5" in run("-c", SENT)
    assert run("-c", SERVED).split() == ["0.5"]
    command(run, "build", "tiny", "--output", "served")
    assert "sampling_param_charm" in run("-c", "print(open('served/tensorrt_llm/config.pbtxt').read())")
    command(run, "check", "served")


def test_a_metric_is_in_the_table(run):
    assert "deepseek_triton_smiles_total" in run("-c", COUNTED)


def test_a_rule_speaks_in_plans_and_is_explained(run):
    assert "L999" in command(run, "plan", "deepseek-r1", "--gpu", "h200", "--gpus", "8")
    assert "There is none" in command(run, "check", "--explain", "L999")
