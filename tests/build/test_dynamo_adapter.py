"""AIConfigurator's reader of Dynamo deployments, as an outside check of what is rendered.

It needs `aiconfigurator` (aiconfigurator-core alone has no reader) in an environment of its own:
`.venv-aiconfigurator`, or the Python that DEEPSEEK_TRITON_AICONFIGURATOR names. Elsewhere the test is skipped.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from support.dynamo_forms import PAIRS, REQUESTS, planned, planned_pair, text_of

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("DEEPSEEK_TRITON_AICONFIGURATOR") or str(ROOT / ".venv-aiconfigurator/bin/python")
READ = """
import json, sys
from aiconfigurator.sdk.config_adapter.api import adapt_config
from aiconfigurator.sdk.config_adapter.dynamo import DynamoRecipeSource
from aiconfigurator.sdk.config_adapter.schema import AdapterOverrides

overrides = AdapterOverrides(
    model_path="deepseek-ai/DeepSeek-V3", system_name="h200_sxm", isl=1000, osl=1000, concurrency=64, nextn_accepted=0.5
)
plain = AdapterOverrides(**overrides.model_dump(exclude_unset=True, exclude={"nextn_accepted"}))
for name, text in json.load(sys.stdin).items():
    chosen = overrides if "speculative_config" in text else plain
    report = adapt_config(DynamoRecipeSource(deployment=text), chosen)
    print(json.dumps([name, json.loads(report.model_dump_json())["outcomes"]]))
"""


def has_reader():
    asked = "import aiconfigurator.sdk.config_adapter.api"
    return Path(PYTHON).exists() and subprocess.run([PYTHON, "-c", asked], capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def outcomes():
    if not has_reader():
        pytest.skip(f"{PYTHON} has no aiconfigurator")
    texts = json.dumps({name: text_of(request) for name, request in {**REQUESTS, **PAIRS}.items()})
    done = subprocess.run([PYTHON, "-c", READ], input=texts, capture_output=True, text=True, check=True)
    return {name: rows[0] for name, rows in map(json.loads, done.stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*REQUESTS, *PAIRS])
def test_it_reads_the_layout_of_the_plan(outcomes, name):
    outcome = outcomes[name]
    assert outcome["status"] == "adapted", outcome["diagnostics"]
    topology, runtime = outcome["request"]["topology"], outcome["request"]["runtime"]
    if name in REQUESTS:
        expected = [("worker", "", planned(REQUESTS[name]), 1)]
    else:
        pair = planned_pair(PAIRS[name])
        expected = [
            ("prefill", "prefill_", pair.context, pair.num_context),
            ("decode", "decode_", pair.generation, pair.num_generation),
        ]

    for worker, prefix, plan, replicas in expected:
        read = topology[worker]
        assert (read["replicas"], read["gpus_per_replica"]) == (replicas, plan.world_size)
        assert read["moe_ep_size"] == plan.layout.expert_parallel_size
        # It has no notion of attention data parallelism, and takes the ranks for tensor parallelism.
        assert (read["tp_size"], read["pp_size"]) == (plan.layout.tensor_parallel_size, 1)
        assert runtime[f"{prefix}max_seq_len"] == plan.canonical["max_seq_len"]
        fraction = plan.canonical["kv_cache_config.free_gpu_memory_fraction"]
        assert runtime[f"{prefix}free_gpu_memory_fraction"] == fraction
