"""The table of published faults: where an entry is a warning, where a note, and how one is added."""

import json
from dataclasses import replace

import pytest

from deepseek_triton_build import PlanRequest, Workload, make_plan
from deepseek_triton_build.catalog import VLLM_VERSIONS, find_gpu, find_variant, load_release, load_vllm
from deepseek_triton_build.check import rules_page
from deepseek_triton_build.rules.known_issues import KnownIssue, issues_of, known_issues
from deepseek_triton_build.rules.rule import CANONICAL_RELEASE, Deployment, VllmDeployment
from support.checked import MODEL_YAML, check

TP, EP, PP, DP = "tensor_parallel_size", "moe_expert_parallel_size", "pipeline_parallel_size", "enable_attention_dp"
TOKENS, REUSE, HOST = "max_num_tokens", "kv_cache_config.enable_block_reuse", "kv_cache_config.host_cache_size"
MTP = {"speculative_config.decoding_type": "MTP", "speculative_config.num_nextn_predict_layers": 1}
PAIR, COMPILED = {"cache_transceiver_config.backend": "UCX"}, {"torch_compile_config.max_num_streams": 2}
GRAPHS, NO_GRAPHS = {"cuda_graph_config.max_batch_size": 8}, {"cuda_graph_config": None}
DRAFTS = {"speculative_config.method": "mtp", PP: 2}


def on(*settings, release="1.2.1", variant="deepseek-r1", precision="fp8", gpu="h200", engine=Deployment):
    """Return 8 GPUs with DeepSeek-R1, with any fact replaced."""
    model, given = find_variant(variant), {TP: 8}
    for mapping in settings:
        given |= mapping
    facts = {"release": load_release(release)} if engine is Deployment else {"vllm": load_vllm(release)}
    return engine(
        settings=given,
        variant=model,
        architecture=model.architecture,
        checkpoint=replace(next(iter(model.checkpoints.values())), precision=precision),
        gpu=find_gpu(gpu),
        **facts,
    )


def on_vllm(*settings, release="0.24.0", **facts):
    return on(*settings, release=release, engine=VllmDeployment, **facts)


ADAPTIVE, RTX = {"speculative_config.enable_adaptive_verification": True}, {"gpu": "rtx-pro-6000"}
V32, V4, FP4 = {"variant": "deepseek-v3.2"}, {"variant": "deepseek-v4-flash"}, {"precision": "fp4"}
RANKS = {TP: 1, "data_parallel_size": 4}
CHUNKED = {REUSE: True, "enable_chunked_prefill": True}
V4_ON_1_3 = {"variant": "deepseek-v4-flash", "release": "1.3.0rc29"}
OLD, OLDER = {"release": "1.0.0"}, {"release": "0.21.0"}
CASES = {  # what shows it, its severity, and a neighbour that doesn't
    "trtllm-kv-corruption": (on(CHUNKED, release="1.2.0"), "warning", on(CHUNKED)),
    "trtllm-host-cache-corruption": (on({HOST: 1}, release="1.1.0"), "note", on({HOST: 1}, release="1.2.0")),
    "trtllm-v32-host-offload": (on({HOST: 1}, **V32), "note", on({HOST: 1})),
    "trtllm-v32-nvfp4-accuracy": (on(gpu="b300", **V32, **FP4), "note", on(gpu="b200", **V32, **FP4)),
    "trtllm-v32-fp8-memory": (on(**V32), "note", on(gpu="h20-141", **V32)),
    "trtllm-r1-fp4-disaggregated": (on(PAIR, gpu="b300", **FP4), "note", on(PAIR, NO_GRAPHS, gpu="b300", **FP4)),
    "trtllm-mtp-pipeline-attention-dp": (on(MTP, {PP: 2, DP: True}), "note", on(MTP, {PP: 2})),
    "trtllm-mtp-sm120": (on(MTP, COMPILED, gpu="rtx-pro-6000"), "note", on(MTP, gpu="rtx-pro-6000")),
    "trtllm-nvfp4-sm120-memory": (on(gpu="rtx-pro-6000", **FP4), "note", on(gpu="rtx-pro-6000")),
    "trtllm-v4-nvfp4-sm120": (on(gpu="rtx-pro-6000", **V4_ON_1_3, **FP4), "note", on(gpu="b200", **V4_ON_1_3, **FP4)),
    "trtllm-torch-compile": (on(COMPILED), "note", on(COMPILED, {TP: 1})),
    "trtllm-disaggregated-pipeline-reuse": (on(PAIR, {PP: 2, REUSE: True}, **OLD), "warning", on({PP: 2}, **OLD)),
    "trtllm-one-gpu-nodes": (on({"gpus_per_node": 1}, **OLD), "warning", on({"gpus_per_node": 8}, **OLD)),
    "trtllm-mtp-long-iterations": (on(MTP, {TOKENS: 65536}, gpu="b200", **OLDER), "note", on(MTP, {TOKENS: 65536})),
    "trtllm-mtp-nvfp4-graphs": (on(MTP, GRAPHS, **FP4, **OLDER), "note", on(MTP, GRAPHS, **FP4, **OLD)),
    "trtllm-h200-fp8-memory": (
        on({TOKENS: 5000, "kv_cache_config.free_gpu_memory_fraction": 0.7}, **OLDER),
        "note",
        on({TOKENS: 5000, "kv_cache_config.free_gpu_memory_fraction": 0.69}, **OLDER),
    ),
    "vllm-mtp-pipeline": (on_vllm(DRAFTS), "note", on_vllm(DRAFTS, {PP: 1})),
    "vllm-v4-hopper-graphs": (on_vllm(release="0.27.1", **V4), "warning", on_vllm(release="0.31.0", **V4)),
    "vllm-v4-h20-multicast": (on_vllm(gpu="h20-96", **V4), "note", on_vllm(**V4)),
    "vllm-v4-adaptive-verification": (on_vllm(ADAPTIVE, **V4), "note", on_vllm(ADAPTIVE, gpu="b200", **V4)),
    "vllm-v4-two-nodes": (on_vllm({TP: 16}, release="0.27.1", gpu="h100", **V4), "note", on_vllm({TP: 16}, **V4)),
    "vllm-v4-sm120": (on_vllm(release="0.27.1", **RTX, **V4), "note", on_vllm(release="0.25.1", **RTX, **V4)),
    "vllm-v41-sm120": (on_vllm(variant="deepseek-v4.1-flash", **RTX), "note", on_vllm(**RTX, **V4)),
    "vllm-v4-fp8-data-parallel": (on_vllm(RANKS, **V4), "note", on_vllm(RANKS, precision="mxfp4", **V4)),
    "vllm-v32-context-parallel": (
        on_vllm({"decode_context_parallel_size": 2}, **V32),
        "note",
        on_vllm({"decode_context_parallel_size": 2}),
    ),
    "vllm-sparse-context-parallel-workspace": (
        on_vllm({"decode_context_parallel_size": 2}, gpu="b200", **V32),
        "note",
        on_vllm({"decode_context_parallel_size": 2}, **V32),
    ),
    "vllm-fp8-sm120": (on_vllm(gpu="rtx-pro-6000"), "warning", on_vllm(gpu="rtx-pro-6000", release="0.33.0")),
}


def shown(deployment):
    return {code.issue: code.severity for code, _ in issues_of(deployment)}


def test_an_entry_shows_for_its_case_and_not_for_the_neighbour():
    entries = {name for issues in known_issues().values() for name in issues}
    assert CASES.keys() == entries
    found = {name: (shown(case).get(name), shown(other).get(name)) for name, (case, _, other) in CASES.items()}
    assert found == {name: (severity, None) for name, (_, severity, _) in CASES.items()}
    case, _, _ = CASES["vllm-fp8-sm120"]
    assert shown(replace(case, environment={"VLLM_USE_DEEP_GEMM": "0"})) == {}


def test_an_entry_names_what_a_deployment_has():
    records = {"tensorrt_llm": [load_release(CANONICAL_RELEASE)], "vllm": map(load_vllm, VLLM_VERSIONS)}
    sample = {"tensorrt_llm": on(), "vllm": on_vllm()}
    for engine, issues in known_issues().items():
        keys = set().union(*(record.keys() for record in records[engine]))
        for name, issue in issues.items():
            paths = {path for path in issue.when if path not in keys}
            assert [path for path in paths if not hasattr(sample[engine], path.partition(".")[0])] == [], name
            for text in (issue.fault, issue.do, issue.source):
                assert (len(text.splitlines()), text[-1] == ".", "|" in text) == (1, False, False), name
            assert name in rules_page()


def test_nothing_is_said_about_what_is_not_known():
    for name, (case, _, _) in CASES.items():
        for fact in ("gpu", "variant", "checkpoint", "release"):
            if hasattr(case, fact):
                assert shown(replace(case, **{fact: None})).keys() <= shown(case).keys(), (name, fact)
    pipeline = on({REUSE: True, PP: 2}, PAIR, **OLD)
    unknown = replace(pipeline, settings={REUSE: True} | PAIR, unknown=frozenset({PP}))
    assert (bool(shown(pipeline)), shown(unknown)) == (True, {})


@pytest.mark.parametrize(("seen", "severity"), [(load_release(None).version, "warning"), ("1.3.0rc21", "note")])
def test_the_next_fault_is_one_entry(monkeypatch, seen, severity):
    row = {"when": {"gpu.name": "h200", "max_num_tokens": ">=8192"}, "fault": "it hangs", "do": "wait", "source": "#1"}
    monkeypatch.setitem(known_issues()["tensorrt_llm"], "added", KnownIssue(seen=[seen], **row))
    plan = make_plan(
        PlanRequest(variant="deepseek-r1", gpu="h200", num_gpus=8, workload=Workload(isl=1023, osl=len(severity)))
    )
    [warned] = [warned for warned in plan.warnings if warned.rule.issue == "added"]
    assert (warned.rule.code, warned.rule.severity, warned.rule.source) == ("B001", severity, "#1")
    assert (warned.violation.key, warned.violation.fix, seen in warned.violation.message) == (TOKENS, "wait", True)

    [found] = [found for found in json.loads(json.dumps(check().findings_json())) if found["issue"] == "added"]
    line = 1 + MODEL_YAML.splitlines().index("max_num_tokens: 8192")
    assert (found["code"], found["severity"], found["line"], found["key"]) == ("B001", severity, line, TOKENS)
