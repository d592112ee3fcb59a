"""Context and generation servers: planned together, and refused where they don't fit each other."""

from dataclasses import replace

import pytest

from deepseek_triton_build import PlanRequest, RefusedPlanError, Workload
from deepseek_triton_build.catalog import RELEASES
from deepseek_triton_build.planning.disaggregated import DisaggregatedRequest, make_disaggregated_plan

V3 = PlanRequest(variant="deepseek-v3", gpu="h200")
TRANSCEIVER = "cache_transceiver_config"


def planned(both=V3, **options):
    return make_disaggregated_plan(DisaggregatedRequest(both=both, **options))


@pytest.mark.parametrize("release", [release for release in RELEASES if release != "0.21.0"])
def test_the_sides_of_a_pair_fit_each_other(release):
    plan = planned(replace(V3, release=release), num_generation=2)
    context, generation = plan.context.canonical, plan.generation.canonical

    assert (plan.num_context, plan.num_generation, plan.num_gpus) == (1, 2, 24)
    assert [plan.profile.name for plan in plan.sides.values()] == ["ctx", "gen"]
    assert context["disable_overlap_scheduler"]
    assert context["cuda_graph_config"] is None
    for key in (f"{TRANSCEIVER}.backend", f"{TRANSCEIVER}.max_tokens_in_buffer", "kv_cache_config.dtype"):
        assert context[key] == generation[key]
    limits = {side.get(f"{TRANSCEIVER}.kv_transfer_timeout_ms") for side in (context, generation)}
    assert limits == ({None} if release in ("1.0.0", "1.1.0") else {600_000})
    assert plan.warnings == ()


def test_the_concurrency_is_divided_among_the_servers_of_a_side():
    workload = Workload(isl=2000, osl=500, concurrency=300)
    plan = planned(replace(V3, workload=workload), num_context=1, num_generation=3)

    assert plan.context.request.workload == workload
    assert plan.generation.request.workload == replace(workload, concurrency=100)


def test_a_side_has_gpus_and_settings_of_its_own():
    plan = planned(
        replace(V3, overrides=(("stream_interval", 4),)),
        context=(("max_batch_size", 16),),
        generation=(("num_gpus", 16), ("stream_interval", 2)),
    )

    assert (plan.context.world_size, plan.generation.world_size, plan.num_gpus) == (8, 16, 24)
    assert plan.context.canonical["max_batch_size"] == 16
    assert (plan.context.canonical["stream_interval"], plan.generation.canonical["stream_interval"]) == (4, 2)


SMALL_BUFFER = (f"{TRANSCEIVER}.max_tokens_in_buffer", 512)
REFUSED = [
    ({"context": (("pipeline_parallel_size", 2),), "generation": (("enable_attention_dp", False),)}, "G005"),
    ({"generation": (("mtp", 1),)}, "G007"),
    ({"context": (SMALL_BUFFER,)}, "G009"),
    ({"num_context": 0, "num_generation": -1}, r"--context-servers 0: .*; --generation-servers -1: "),
    ({"both": replace(V3, engine="vllm")}, "leave --engine vllm out"),
    ({"both": replace(V3, variant="deepseek-v4-flash")}, "leave --profile disagg out"),
    ({"context": (("num_gpus", 4),)}, "context: .*: --context-set num_gpus=8"),
    ({"both": replace(V3, release="0.21.0")}, r"server has TensorRT-LLM 0.21.0.*G001.*use 1.0.0 or newer"),
]


def test_a_pair_that_doesnt_fit_is_refused(subtests):
    for options, said in REFUSED:
        with subtests.test(said), pytest.raises(RefusedPlanError, match=said):
            planned(**options)


def test_an_embedded_engine_makes_a_pair_to_rehearse_with():
    plan = planned(PlanRequest(variant="tiny", engine="simulated"))

    assert plan.num_gpus == 0
    assert {plan.engine for plan in plan.sides.values()} == {"simulated"}


def test_every_server_of_a_pair_has_a_port():
    """The orchestrator's is 8000, and theirs follow."""
    last = planned(num_context=57_534).orchestrator
    urls = {setting.key: setting.value for setting in last}["generation_servers.urls"]

    assert urls == ("localhost:65535",)
    said = "--context-servers 57535 and --generation-servers 1: expected at most 57,535 together.* at 65,535"
    with pytest.raises(RefusedPlanError, match=said):
        planned(num_context=57_535)
