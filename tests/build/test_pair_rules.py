"""Each rule about context and generation servers finds its own case, and nothing in a pair that works."""

from dataclasses import replace

from deepseek_triton_build.catalog import find_gpu, find_variant, load_release
from deepseek_triton_build.rules import PAIR_RULES, disaggregation_violations, orchestrator_violations
from deepseek_triton_build.rules.disaggregation import ServerPair
from deepseek_triton_build.rules.orchestrator import Orchestrator
from deepseek_triton_build.rules.rule import Deployment

TRANSCEIVER = "cache_transceiver_config"
REUSE = "kv_cache_config.enable_block_reuse"
SERVER = {
    "tensor_parallel_size": 8,
    f"{TRANSCEIVER}.backend": "UCX",
    f"{TRANSCEIVER}.max_tokens_in_buffer": 1216,
    "max_num_tokens": 1160,
    "max_seq_len": 4096,
}
CONTEXT = SERVER | {"disable_overlap_scheduler": True, "cuda_graph_config": None, REUSE: False}
V3 = find_variant("deepseek-v3")
KV_AWARE = {"router": {"type": "kv_cache_aware", "tokens_per_block": 64}}
CONFIG = {
    "hostname": "localhost",
    "backend": "pytorch",
    "context_servers": {"num_instances": 1, "urls": ["localhost:8001"]},
    "generation_servers": {"num_instances": 2, "urls": ["localhost:8002", "10.0.0.2:8003"]},
}


def server(settings, release="1.2.1", **more):
    return Deployment(
        settings=settings,
        release=load_release(release),
        variant=V3,
        architecture=V3.architecture,
        checkpoint=V3.checkpoints["fp8"],
        gpu=find_gpu("h200"),
        **more,
    )


def pair(context=(), generation=(), release="1.2.1"):
    return ServerPair(
        context=server({**CONTEXT, **dict(context)}, release),
        generation=server({**SERVER, **dict(generation)}, release),
    )


def joined(changes=(), **more):
    known = {"release": load_release("1.2.1"), "start_timeout_s": 5280, "request_timeout_s": 1200, "load_s": 5280}
    return Orchestrator(config={**CONFIG, **dict(changes)}, **known | {"pair": pair(), **more})


def servers(side, **changes):
    return {f"{side}_servers": CONFIG[f"{side}_servers"] | changes}


CLUSTER = {"disagg_cluster": {"cluster_uri": "http://localhost:8000"}, "context_servers": {}, "generation_servers": {}}
EVENTS = {"kv_cache_config.event_buffer_max_size": 1024, REUSE: True}
LENGTHS = ("max_num_tokens", "max_seq_len", f"{TRANSCEIVER}.max_tokens_in_buffer")
LONG = {"enable_chunked_prefill": False, **dict.fromkeys(LENGTHS, 65536)}
STAGES = {"pipeline_parallel_size": 2}
TIMEOUT = f"{TRANSCEIVER}.kv_transfer_timeout_ms"

PAIRS = {
    "G001": (pair(release="0.21.0"), pair(release="1.0.0")),
    "G002": (pair(generation={f"{TRANSCEIVER}.backend": None}), pair(*[{f"{TRANSCEIVER}.backend": "NIXL"}] * 2)),
    "G003": (pair({"disable_overlap_scheduler": False}), pair(generation={"disable_overlap_scheduler": False})),
    "G004": (pair({"cuda_graph_config": {}}), pair(generation={"cuda_graph_config": {}})),
    "G005": (pair(STAGES), pair(STAGES, release="1.1.0")),
    "G006": (pair({"kv_cache_config.dtype": "fp8"}), pair(*[{"kv_cache_config.dtype": "fp8"}] * 2)),
    "G007": (
        pair({"speculative_config.decoding_type": "MTP", "speculative_config.num_nextn_predict_layers": 1}),
        pair(*[{"speculative_config.decoding_type": "MTP", "speculative_config.num_nextn_predict_layers": 1}] * 2),
    ),
    "G008": (pair(generation={"max_beam_width": 4}), pair(generation={"max_beam_width": 1})),
    "G009": (
        pair({f"{TRANSCEIVER}.max_tokens_in_buffer": 512}),
        pair({"max_num_tokens": 8192, "max_seq_len": 1216}),  # two prompts an iteration
    ),
    "G010": (pair({REUSE: True}), pair({REUSE: True}, release="1.1.0")),
    "G011": (pair(generation={"max_seq_len": 2048}), pair(generation={"max_seq_len": 8192})),
    "G012": (pair(*[LONG | {TIMEOUT: 60_000}] * 2), pair(*[LONG | {TIMEOUT: 600_000}] * 2)),
    "G014": (
        replace(pair(), generation=replace(pair().generation, release=load_release("1.2.0"))),
        pair(release="1.2.0"),
    ),
    "G013": (pair(generation={f"{TRANSCEIVER}.backend": "DEFAULT"}), pair(*[{f"{TRANSCEIVER}.backend": "NIXL"}] * 2)),
    "G015": (pair(STAGES, {"enable_attention_dp": True}), pair(STAGES, {"enable_attention_dp": True}, "1.1.0")),
}
"""Rule -> a pair that breaks it, and one that is near and does not."""

JOINED = {
    "G020": (
        joined(servers("context", urls=["http://localhost:8001"])),
        joined(servers("context", urls=["ctx.example.org:8001"])),
    ),
    "G021": (joined(servers("generation", num_instances=3)), joined(CLUSTER)),
    "G022": (
        joined({"conditional_disagg_config": {"max_local_prefill_length": 256}}),
        joined(
            {"conditional_disagg_config": {"max_local_prefill_length": 256}, **servers("generation", **KV_AWARE)},
            pair=pair(generation=EVENTS),
        ),
    ),
    "G023": (joined(servers("context", router={"type": "conversation"})), joined(servers("context", router={}))),
    "G024": (
        joined(servers("generation", **KV_AWARE)),
        joined(servers("generation", **KV_AWARE), pair=pair(generation=EVENTS)),
    ),
    "G025": (
        joined(servers("generation", router={"type": "kv_cache_aware"}), pair=pair(generation=EVENTS)),
        joined(servers("generation", router={"type": "load_balancing"})),
    ),
    "G026": (joined(CLUSTER | {"disagg_cluster": {"cluster_uri": "x", "inactive_interval_sec": 5}}), joined(CLUSTER)),
    "G027": (joined(CLUSTER, has_metadata_server=True), joined(has_metadata_server=True)),
    "G028": (joined(servers("context", backend="_autodeploy")), joined(servers("context", backend="pytorch"))),
    "G029": (joined(start_timeout_s=180), joined(start_timeout_s=None)),
    "G031": (
        joined(servers("context", router={"type": "load_balancing", "use_token": True})),
        joined(servers("context", router={"type": "load_balancing", "use_tokens": True})),
    ),
    "G032": (joined(servers("context", urls=["10.0.0.2:8003"])), joined(servers("context", urls=["10.0.0.2:8001"]))),
    "G033": (joined({"port": 8001}), joined({"hostname": "10.0.0.1", "port": 8001})),
    "G034": (joined(ports={"context": "8003"}), joined(ports={"context": "8001", "generation": "9001"})),
    "G030": (joined(request_timeout_s=180), joined(request_timeout_s=None)),
}
"""Rule -> an orchestrator that breaks it, and one that is near and does not."""


def test_every_rule_has_a_case():
    assert sorted({*PAIRS, *JOINED}) == sorted(rule.code for rule in PAIR_RULES)


def test_a_rule_finds_its_case():
    for code, pairs in PAIRS.items():
        broken, fine = ({rule.code for rule, _ in disaggregation_violations(each)} for each in pairs)
        assert code in broken
        assert fine == set()
    for code, orchestrators in JOINED.items():
        broken, fine = ({rule.code for rule, _ in orchestrator_violations(each)} for each in orchestrators)
        assert (broken, fine) == ({code}, set())


def test_a_cluster_is_unknown_before_1_2():
    older = replace(joined(CLUSTER), release=load_release("1.1.0"))
    [(rule, violation)] = list(orchestrator_violations(older))
    assert (rule.code, violation.message) == ("G026", "TensorRT-LLM 1.1.0 has no disagg_cluster")


def test_nothing_in_a_file_makes_a_rule_fail():
    for key in ("context_servers", "disagg_cluster", "conditional_disagg_config"):
        for value in (None, 7, "x", [], ["x"], {"urls": 7}, {"router": 7, "urls": [{}]}):
            list(orchestrator_violations(joined({key: value})))


CLUSTER_OF_7 = {"cluster_uri": 7, "minimal_instances": {"servers": 1}}
WRONG = [
    ({"port": 99999}, ["G031"]),
    ({"port": "8000", "hostname": 7}, ["G031", "G031"]),
    (servers("generation", router=7), ["G031"]),
    (servers("context", urls=["localhost:99999"]), ["G020"]),
    (servers("generation", urls=["[::1]:8002", "localhost"]), ["G020", "G020"]),
    (CLUSTER | {"disagg_cluster": CLUSTER_OF_7}, ["G031", "G031"]),
    ({"conditional_disagg_config": {"length": 1}, **servers("generation", **KV_AWARE)}, ["G031"]),
]


def test_wrong_values_of_the_orchestrator_are_all_named():
    events = pair(generation=EVENTS)
    found = [[rule.code for rule, _ in orchestrator_violations(joined(one, pair=events))] for one, _ in WRONG]
    assert found == [codes for _, codes in WRONG]
