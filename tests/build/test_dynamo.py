"""`build --format dynamo`: the deployments are valid by the fields on record, and say what the plans say."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from deepseek_triton_build import (
    DISAGGREGATED,
    DisaggregatedRequest,
    PlanRequest,
    RefusedPlanError,
    UnknownNameError,
    dynamo_mismatch,
    format_files,
    make_plan,
)
from deepseek_triton_build.arithmetic.gpu_memory import ready_within_s
from deepseek_triton_build.check import check_repository
from deepseek_triton_build.data.own_files import load_yaml
from deepseek_triton_build.data.releases import RELEASES, find_dynamo, version_numbers
from deepseek_triton_build.data.spelling import flattened
from deepseek_triton_tools.cli.main import main
from support.dynamo_forms import ALPHA, PAIRS, R1, REQUESTS, planned, planned_pair, text_of

GOLDEN = Path(__file__).with_name("golden_dynamo")
FIELDS = yaml.safe_load((GOLDEN / "_fields.yaml").read_text("utf-8"))
CASES = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in sorted(GOLDEN.glob("[!_]*.yaml"))}


def documents_of(request):
    return list(yaml.safe_load_all(text_of(request)))


def graph_of(documents):
    return next(document for document in documents if document["kind"] == "DynamoGraphDeployment")


def parts_of(graph):
    """Return name -> a component of either API version, in one form."""
    if graph["apiVersion"].endswith("v1beta1"):
        return {row["name"]: from_beta(row) for row in graph["spec"]["components"]}
    return {name: from_alpha(row) for name, row in graph["spec"]["services"].items()}


def from_beta(row):
    pod = row["podTemplate"]["spec"]
    main = pod["containers"][0]
    return {
        "pod": pod,
        "main": main,
        "kind": row["type"],
        "replicas": row["replicas"],
        "nodes": row.get("multinode", {}).get("nodeCount", 1),
        "gpus": main.get("resources", {}).get("limits", {}).get("nvidia.com/gpu"),
        "shared memory": row.get("sharedMemorySize"),
        "claims": main.get("resources", {}).get("claims"),
    }


def from_alpha(row):
    extra = dict(row["extraPodSpec"])
    main = extra.pop("mainContainer")
    return {
        "pod": {"containers": [{"name": "main", **main}], **extra},
        "main": main,
        "kind": row.get("subComponentType", row["componentType"]),
        "replicas": row["replicas"],
        "nodes": row.get("multinode", {}).get("nodeCount", 1),
        "gpus": row.get("resources", {}).get("limits", {}).get("gpu"),
        "shared memory": row.get("sharedMemory", {}).get("size"),
        "claims": row.get("resources", {}).get("claims"),
    }


def flags_of(part, api):
    """Return flag -> value; a flag that the program doesn't have is a KeyError."""
    known = FIELDS["flags"][api]["frontend" if part["kind"] == "frontend" else "worker"]
    words, flags = list(part["main"]["args"]), {}
    while words:
        flag = words.pop(0)
        flags[flag] = words.pop(0) if known[flag] else True
    return flags


def engines_of(documents):
    """Return name -> engine file."""
    maps = (document for document in documents if document["kind"] == "ConfigMap")
    return {row["metadata"]["name"]: yaml.safe_load(row["data"]["engine.yaml"]) for row in maps}


def engine_of(part, documents):
    name = next(volume["configMap"]["name"] for volume in part["pod"]["volumes"] if "configMap" in volume)
    return engines_of(documents)[name]


def validate(documents):
    for document in documents:
        if document["kind"] == "ConfigMap":
            kubernetes_validate.validate(document, "1.37", strict=True)
    graph = graph_of(documents)
    api = graph["apiVersion"].rpartition("/")[2]
    jsonschema.validate(graph, FIELDS[api], cls=jsonschema.Draft202012Validator)
    for part in parts_of(graph).values():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": part["pod"]}
        kubernetes_validate.validate(pod, "1.37", strict=True)
        flags_of(part, api)


DYNAMOS = [*load_yaml("dynamo_releases.yaml")["releases"]]
FORMS = {**REQUESTS, **PAIRS, **{version: replace(R1, dynamo=version) for version in DYNAMOS}}


def test_check_reads_the_engines_files_of_a_graph(tmp_path):
    for request in (*REQUESTS.values(), *PAIRS.values(), R1):
        (tmp_path / "dynamo.yaml").write_text(text_of(request))
        report = check_repository(tmp_path)
        assert report.models
        assert [finding for finding in report.findings if finding.severity == "error"] == []
    text = (tmp_path / "dynamo.yaml").read_text().replace("max_num_tokens:", "max_nun_tokens:", 1)
    line = text.splitlines().index(next(one for one in text.splitlines() if "max_nun_tokens" in one)) + 1
    for name, checked in (("dynamo.yaml", tmp_path), ("deploy.yaml", tmp_path / "deploy.yaml")):
        (tmp_path / name).write_text(text)
        errors = [finding for finding in check_repository(checked).findings if finding.severity == "error"]
        assert [(one.code, one.file, one.line) for one in errors] == [("S011", name, line)]


@pytest.mark.slow  # the others below validate a form of either API version
@pytest.mark.parametrize("request_", FORMS.values(), ids=FORMS)
def test_every_form_is_valid(request_):
    documents = documents_of(request_)

    validate(documents)
    for name, part in parts_of(graph_of(documents)).items():
        if name == "Frontend":
            continue
        mounts = {mount["name"] for mount in part["main"]["volumeMounts"]}
        assert mounts == {volume["name"] for volume in part["pod"]["volumes"]}
        assert engine_of(part, documents)["tensor_parallel_size"] >= int(part["gpus"])
        names = [variable["name"] for variable in part["main"].get("env", [])]
        assert len(names) == len(set(names))


POD = ["podTemplate", "spec", "containers", 0]
WRONG = [  # of the API version, below spec
    ("v1beta1", ["components", 1, "sharedMemory"], {"size": "8Gi"}),
    ("v1beta1", ["components", 1, "multinode"], {"nodeCount": 1}),
    ("v1beta1", ["components", 1, *POD, "name"], "worker"),
    ("v1beta1", ["components", 1, *POD, "startupProb"], {}),
    ("v1alpha1", ["components"], []),
    ("v1alpha1", ["services", "Worker", "componentType"], "decode"),
]


@pytest.mark.slow
def test_the_validator_sees_a_wrong_field():
    for api, path, value in WRONG:
        documents = documents_of(R1 if api == "v1beta1" else replace(R1, dynamo=ALPHA))
        place = graph_of(documents)["spec"]
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
            validate(documents)


@pytest.mark.parametrize("name", REQUESTS)
def test_the_engine_file_has_the_plans_arguments_and_time_to_load(name):
    plan, documents = planned(REQUESTS[name]), documents_of(REQUESTS[name])
    [engine] = engines_of(documents).values()

    said = flattened(engine)
    said.pop("kv_cache_config.event_buffer_max_size", None)
    ours = {row.key: row.value for row in plan.settings if not row.key.startswith("triton_config.")}
    assert said == {key: value for key, value in ours.items() if key != "model"}
    probe = parts_of(graph_of(documents))["Worker"]["main"]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= max(7200, ready_within_s(plan.checkpoint.weight_bytes))


def test_a_file_that_a_setting_names_lies_beside_the_engine_file():
    documents = documents_of(replace(REQUESTS["wide-ep"], release="1.0.0"))
    content = documents[0]["data"]

    path = yaml.safe_load(content["engine.yaml"])["moe_config"]["load_balancer"]
    assert path.startswith("/config/")
    assert yaml.safe_load(content[Path(path).name])["num_slots"] == 288


def test_any_path_reaches_the_worker():
    model = "/models/a b'c\"d\\$(HOME) #e"
    main_container = parts_of(graph_of(documents_of(replace(R1, model=model))))["Worker"]["main"]

    assert main_container["args"][1] == model.replace("$(", "$$(")
    assert main_container["volumeMounts"][0]["mountPath"] == "/models"


def test_both_api_versions_say_the_same():
    beta = parts_of(graph_of(documents_of(replace(R1, dynamo="1.4.2"))))
    alpha = parts_of(graph_of(documents_of(replace(R1, dynamo="1.3.0"))))

    for name, part in beta.items():
        theirs = alpha[name]
        shared = ("kind", "replicas", "nodes", "gpus", "shared memory", "claims")
        assert {key: part[key] for key in shared} == {key: theirs[key] for key in shared}
        assert [word.replace("--model-path", "--model") for word in theirs["main"]["args"]] == part["main"]["args"]
        assert part["pod"].get("volumes") == theirs["pod"].get("volumes")


@pytest.mark.parametrize("name", ["pair", "pair-alpha"])
def test_a_pair_has_a_worker_of_each_kind(name):
    plan, documents = planned_pair(PAIRS[name]), documents_of(PAIRS[name])
    parts = parts_of(graph_of(documents))

    for kind, side, count in (
        ("prefill", plan.context, plan.num_context),
        ("decode", plan.generation, plan.num_generation),
    ):
        part = parts[kind]
        assert (part["kind"], part["replicas"], part["gpus"]) == (kind, count, str(side.gpus_per_node))
        assert part["main"]["args"][-2:] == ["--disaggregation-mode", kind]
        engine = engine_of(part, documents)
        assert engine["cache_transceiver_config"]["backend"] == "UCX"
        assert engine["disable_overlap_scheduler"] is (kind == "prefill")


@pytest.mark.parametrize(("name", "nodes"), [("wide-ep", 8), ("pair-gb200", 5)])
def test_the_nodes_that_share_nvlink_are_one_compute_domain(name, nodes):
    documents = documents_of(REQUESTS.get(name) or PAIRS[name])
    [domain] = [document for document in documents if document["kind"] == "ComputeDomain"]
    parts = parts_of(graph_of(documents))
    workers = [part for part in parts.values() if part["kind"] != "frontend"]

    assert domain["spec"]["numNodes"] == nodes == sum(part["replicas"] * part["nodes"] for part in workers)
    template = domain["spec"]["channel"]["resourceClaimTemplate"]["name"]
    for part in workers:
        [claim] = part["pod"]["resourceClaims"]
        assert claim["resourceClaimTemplateName"] == template
        assert part["claims"] == [{"name": claim["name"]}]
        assert {"NCCL_MNNVL_ENABLE", "NCCL_CUMEM_ENABLE"} <= {variable["name"] for variable in part["main"]["env"]}
    assert not any(document["kind"] == "ComputeDomain" for document in documents_of(REQUESTS["v3-two-nodes"]))


def test_the_router_is_told_of_the_blocks_of_those_that_read_prompts():
    documents = documents_of(PAIRS["pair-routed"])
    parts = parts_of(graph_of(documents))
    prefill, decode = flags_of(parts["prefill"], "v1alpha1"), flags_of(parts["decode"], "v1alpha1")

    assert flags_of(parts["Frontend"], "v1alpha1")["--router-mode"] == "kv"
    assert prefill["--publish-events-and-metrics"]
    assert "--publish-events-and-metrics" not in decode
    engine = engine_of(parts["prefill"], documents)["kv_cache_config"]
    assert int(prefill["--kv-block-size"]) == engine["tokens_per_block"] == 64
    assert engine["event_buffer_max_size"] > 0
    assert engine["enable_block_reuse"]
    assert "event_buffer_max_size" not in engine_of(parts["decode"], documents)["kv_cache_config"]


@pytest.mark.slow
@pytest.mark.parametrize("version", DYNAMOS)
def test_every_release_is_rendered_with_the_keys_nearest_to_its_build(version):
    dynamo, plan = find_dynamo(version), planned(replace(R1, dynamo=version))

    keys_of = {"1.3.0rc29": "1.3.0rc29", "1.3": RELEASES[0], "1.2": "1.2.0", "1.1": "1.1.0"}
    nearest = (keys for since, keys in keys_of.items() if version_numbers(dynamo.trtllm) >= version_numbers(since))
    assert plan.release.version == next(nearest)
    said = dynamo_mismatch(plan)
    assert said in " ".join(text_of(replace(R1, dynamo=version)).replace("\n# ", " ").split())
    assert f"Dynamo {version} has TensorRT-LLM {dynamo.trtllm}, the keys are those of {plan.release.version}" in said
    assert ("inferred" in said) == (dynamo.trtllm < "1.3")
    unproven = set(said.rpartition("unproven: ")[2].split(", "))
    assert unproven <= {row.key for row in plan.settings} | {"none"}
    if version in (DYNAMOS[0], DYNAMOS[-1]):
        validate(documents_of(replace(R1, dynamo=version)))


def test_a_key_of_only_one_of_the_releases_around_a_candidate_is_unproven():
    request = replace(R1, gpu="b200", dynamo="0.7.1", overrides=(("moe_config.use_low_precision_moe_combine", True),))

    assert "unproven: moe_config.use_low_precision_moe_combine" in dynamo_mismatch(planned(request))


PAIR = PAIRS["pair"]
TINY = DisaggregatedRequest(both=PlanRequest(variant="tiny", engine="simulated", profile=DISAGGREGATED))
V4 = PlanRequest(variant="deepseek-v4-flash", gpu="b200", engine="tensorrt_llm", release="1.3.0rc29")
NO_REUSE = (("kv_cache_config.enable_block_reuse", False),)
REFUSED = [
    (replace(R1, model="./DeepSeek-R1"), r"--model \./DeepSeek-R1: expected an absolute path"),
    (replace(R1, model="DeepSeek-R1"), r"--model DeepSeek-R1: .*or a Hugging Face name \(owner/name\); give one"),
    (replace(R1, kv_routing=True, dynamo="0.7.0"), r"Dynamo 0\.7\.0 publishes no KV events \(ai-dynamo/dynamo#5015\)"),
    (replace(R1, kv_routing=True, overrides=NO_REUSE), r"add --set kv_cache_config\.enable_block_reuse=true"),
    (replace(V4, kv_routing=True), "V4's KV cache reports no events"),
    (replace(R1, overrides=(("moe_config.backend", "DEEPGEMM"),)), "DEEPGEMM"),
    (replace(R1, container="26.07"), r"--image 26\.07: a Triton container"),
    (replace(R1, decoupled=False), "--no-decoupled: only Triton has a use for it"),
    (replace(R1, profile="ctx"), "profile ctx can't be written as dynamo"),
    (replace(V4, engine=None, release=None), "can't be written as dynamo .*use --engine tensorrt_llm$"),
    (replace(V4, release="1.2.1"), "1.2.1 is too old"),
    (replace(PAIR, both=replace(R1, kv_routing=True)), "the context server has block reuse off"),
    (TINY, "is for TensorRT-LLM, not for the simulated engine"),
]


def test_what_is_known_to_fail_is_refused(subtests):
    for request, said in REFUSED:
        with subtests.test(said), pytest.raises(RefusedPlanError, match=said):
            text_of(request)
    for format in ("triton", "trtllm-serve"):
        with pytest.raises(RefusedPlanError, match="--dynamo and --kv-routing: only for --format dynamo"):
            format_files(format, make_plan(replace(R1, dynamo="1.5.0", kv_routing=True)), version="1.0")
    with pytest.raises(UnknownNameError, match=r"did you mean .1\.4\.2.\?"):
        text_of(replace(R1, dynamo="1.4"))


@pytest.mark.parametrize(
    ("words", "release", "sizes"),
    [
        ("h200 --dynamo 1.0.0 --kv-routing", "1.2.1", [8]),
        ("gb200-nvl72 --profile disagg --generation-servers 2 --generation-set num_gpus=16", "1.3.0rc29", [8, 16]),
        ("h200 --trtllm 1.2.1", "1.2.1", [8]),
    ],
)
def test_the_stamps_options_write_the_same_deployment_again(words, release, sizes, tmp_path, capsys):
    given = ["deepseek-r1", "--format", "dynamo", "--gpu", *words.split()]
    assert main(["build", *given, "--output", str(tmp_path / "one")]) == 0
    assert f"kubectl apply -f {tmp_path}/one/dynamo.yaml" in "".join(capsys.readouterr().out.split("\n    "))
    options = json.loads((tmp_path / "one/deepseek-triton.json").read_text())["options"]
    known = [(one.num_gpus, one.release, one.release_from) for one in check_repository(tmp_path / "one").models]
    assert known == [(size, release, "deepseek-triton.json") for size in sizes]

    assert main(["build", *shlex.split(options), "--output", str(tmp_path / "two"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["start"] == "dynamo.yaml"
    one, two = ((tmp_path / name / "dynamo.yaml").read_text() for name in ("one", "two"))
    assert one == two


@pytest.mark.parametrize("name", CASES)
def test_the_plan_says_what_the_recipe_says_but_for_the_listed_differences(name):
    case = CASES[name]
    both = PlanRequest(**case["request"], overrides=tuple(case.get("overrides", {}).items()))
    sides = {key: tuple(case[key].items()) for key in ("context", "generation") if key in case}
    documents = documents_of(DisaggregatedRequest(both=both, **sides) if sides else both)
    graph = graph_of(documents)
    parts = parts_of(graph)

    assert graph["apiVersion"] == f"nvidia.com/{case['api']}"
    for worker, recipe in case["workers"].items():
        part = parts[worker]
        ours = {f"engine.{key}": value for key, value in flattened(engine_of(part, documents)).items()}
        ours |= {f"environment.{row['name']}": row["value"] for row in part["main"].get("env", [])}
        flags = flags_of(part, case["api"])
        ours |= {
            "graph.image": part["main"]["image"],
            "graph.model": flags["--model-path"],
            "graph.served": flags["--served-model-name"],
            "graph.mode": flags.get("--disaggregation-mode"),
            **{f"graph.{key}": part[key] for key in ("gpus", "nodes", "replicas", "shared memory")},
        }
        published = flattened({key: recipe[key] for key in ("graph", "engine", "environment")})
        found = {key: ours.get(key) for key, value in published.items() if ours.get(key) != value}
        listed = {row["key"]: row["planned"] for row in recipe["differences"]}
        assert found == listed
        assert all(row["reason"] for row in recipe["differences"])
