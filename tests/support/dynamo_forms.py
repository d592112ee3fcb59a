"""Deployments for Dynamo of every form: requests, and what is rendered for them."""

from dataclasses import replace

from deepseek_triton_build import (
    DISAGGREGATED,
    DYNAMO,
    DisaggregatedRequest,
    PlanRequest,
    format_files,
    format_request,
    make_disaggregated_plan,
    make_plan,
    pair_files,
)

R1 = PlanRequest(variant="deepseek-r1", gpu="h200", num_gpus=8, model="/models/DeepSeek-R1")
ALPHA = "0.8.1.post3"
REQUESTS = {
    "r1": R1,
    "r1-alpha": replace(R1, dynamo=ALPHA),
    "r1-routed": replace(R1, kv_routing=True),
    "r1-routed-alpha": replace(R1, kv_routing=True, dynamo="1.0.0"),
    "v3-two-nodes": PlanRequest(variant="deepseek-v3", gpu="h100", num_gpus=16),
    "v3-two-nodes-alpha": PlanRequest(variant="deepseek-v3", gpu="h100", num_gpus=16, dynamo=ALPHA),
    "v3.2": PlanRequest(variant="deepseek-v3.2-exp", gpu="b200"),
    "wide-ep": PlanRequest(variant="deepseek-r1-0528", gpu="gb200-nvl72", profile="wide-ep"),
    "wide-ep-alpha": PlanRequest(variant="deepseek-r1-0528", gpu="gb200-nvl72", profile="wide-ep", dynamo=ALPHA),
}
PAIRS = {
    "pair": DisaggregatedRequest(both=replace(R1, profile=DISAGGREGATED), num_generation=2),
    "pair-alpha": DisaggregatedRequest(both=replace(R1, profile=DISAGGREGATED, dynamo=ALPHA), num_context=2),
    "pair-routed": DisaggregatedRequest(
        both=replace(R1, profile=DISAGGREGATED, kv_routing=True, dynamo="0.6.1"),
        context=(("kv_cache_config.enable_block_reuse", True),),
    ),
    "pair-gb200": DisaggregatedRequest(
        both=PlanRequest(variant="deepseek-r1-0528", gpu="gb200-nvl72", profile=DISAGGREGATED),
        context=(("num_gpus", 4),),
        generation=(("num_gpus", 16),),
    ),
}


def planned(request):
    return make_plan(format_request(DYNAMO, request))


def planned_pair(request):
    return make_disaggregated_plan(replace(request, both=format_request(DYNAMO, request.both)))


def text_of(request):
    if isinstance(request, DisaggregatedRequest):
        files = pair_files(planned_pair(request), version="1.0", format=DYNAMO)
    else:
        files = format_files(DYNAMO, planned(request), version="1.0")
    assert {file.path.as_posix() for file in files} == {"dynamo.yaml", "deepseek-triton.json"}
    return next(file.content.decode() for file in files if file.path.suffix == ".yaml")
