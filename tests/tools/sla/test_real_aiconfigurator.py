"""AIConfigurator itself, where `make test-sla` has installed it."""

from pathlib import Path

import pytest

from deepseek_triton_build import PlanRequest, Workload
from deepseek_triton_tools.bench.result import Slo
from deepseek_triton_tools.sla.paces import GRID, HOW_TO_INSTALL, PacedModel, ServerLayout, SiliconPaces
from deepseek_triton_tools.sla.sla_plan import plan_to_sla

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-aiconfigurator/bin/python"
H200 = PacedModel(architecture="deepseek-v3", precision="fp8", gpu="h200", kv_dtype="fp8")
TP8 = ServerLayout(num_gpus=8, expert_parallel_size=8)
DP8 = ServerLayout(num_gpus=8, expert_parallel_size=8, attention_dp=True)

installed = pytest.mark.skipif(not PYTHON.exists(), reason="`make test-sla` installs it")


@pytest.fixture
def paces(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return SiliconPaces(PYTHON)


def test_the_advice_and_the_tests_name_one_version():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["dependency-groups"]

    (pin,) = (pin for pin in groups["aiconfigurator"] if pin.startswith("aiconfigurator-core"))
    assert f"pip install {pin} " in HOW_TO_INSTALL


@installed
@pytest.mark.slow
def test_paces_of_the_real_one(paces, tmp_path):
    tables = paces.tables(H200, [TP8, DP8])

    decode = {layout: table["decode"][GRID["batches"].index(16)] for layout, table in tables.items()}
    # What 0.12.0 says of 16 rows with 1,024 and 4,096 tokens each.
    assert decode[TP8][:2] == pytest.approx([16.68, 17.32], rel=0.01)
    assert decode[DP8][:2] == pytest.approx([31.54, 32.6], rel=0.01)
    # Of prompts of 4,096 tokens: under attention data parallelism one for each rank.
    prompt = {layout: table["prompt"][0][GRID["tokens"].index(4096)] for layout, table in tables.items()}
    assert prompt == pytest.approx({TP8: 164.6, DP8: 849.62}, rel=0.01)
    assert all(place.stat().st_size < 1500 for place in tmp_path.rglob("*.json"))


@installed
@pytest.mark.slow
def test_a_model_without_data_is_said(paces):
    model = PacedModel(architecture="deepseek-v3", precision="fp4", gpu="h200", kv_dtype="fp8")

    assert isinstance(paces.tables(model, [TP8])[TP8], str)


@installed
@pytest.mark.slow
def test_the_gpus_for_a_rate(paces):
    request = PlanRequest(variant="deepseek-r1", gpu="h200", workload=Workload(isl=4000, osl=1000))
    plan = plan_to_sla(request, Slo(ttft_ms=2000, tpot_ms=30), PYTHON, rate=20)

    assert plan.num_gpus == pytest.approx(176, abs=8)  # what 0.12.0 gives: 5 context and 17 generation servers
    assert plan.requests_per_s(plan.fleets[0]) >= 20
