"""The release records are consistent, and the stand-in for tensorrt_llm agrees with them."""

import dataclasses
import inspect

import pytest
import yaml

from deepseek_backend.contract import SAMPLING_FIELDS
from deepseek_backend.engines.tensorrt_llm.loading import APPLIED_OUTSIDE
from deepseek_backend.release import EngineRelease
from deepseek_triton_build import RefusedPlanError, UnknownNameError
from deepseek_triton_build.catalog import READABLE_RELEASES, RELEASES, containers, load_release, release_for_container
from deepseek_triton_build.data import releases
from deepseek_triton_build.data.releases.spelling import spell
from standin.harness import guided_llm_args
from standin.loading import standin


@pytest.fixture(params=RELEASES)
def release(request):
    return load_release(request.param)


def test_the_text_is_the_record(release):
    assert yaml.safe_load(release.text) == release.record
    assert release.record["release"] == release.version


def _number(version):
    return [int(part) for part in version.split(".")]


def test_releases_are_listed_newest_first():
    assert list(READABLE_RELEASES) == sorted(READABLE_RELEASES, key=_number, reverse=True)


@pytest.mark.parametrize("version", READABLE_RELEASES)
def test_every_field_says_its_type_default_and_status(version):
    release = load_release(version)
    for llm_class in release.record["classes"].values():
        for name, row in llm_class["fields"].items():
            assert {"type", "default", "status"} <= row.keys(), name
            assert row["status"] in ("proven", "interpolated"), name
    for name, row in release.record.get("sampling_params", {}).items():
        assert row.keys() == {"type", "default", "status"}, name


@pytest.mark.parametrize("version", READABLE_RELEASES)
def test_only_a_class_read_whole_may_prove_that_a_key_is_absent(version):
    for name, llm_class in load_release(version).record["classes"].items():
        if llm_class["complete"]:
            assert {row["status"] for row in llm_class["fields"].values()} == {"proven"}, name


def test_every_section_named_is_recorded(release):
    for llm_class in release.classes.values():
        for entry in llm_class.fields.values():
            assert set(entry.sections) <= release.classes.keys()
            assert not entry.discriminator or entry.sections


def test_every_key_can_be_looked_up(release):
    keys = release.keys()
    assert len(keys) == len(set(keys))
    assert all(release.find_key(key) for key in keys)


@pytest.mark.parametrize("version", READABLE_RELEASES)
@pytest.mark.parametrize(
    "key",
    [
        "model",
        "tensor_parallel_size",
        "moe_expert_parallel_size",
        "enable_attention_dp",
        "max_seq_len",
        "cuda_graph_config.enable_padding",
        "kv_cache_config.dtype",
        "kv_cache_config.free_gpu_memory_fraction",
        "moe_config.backend",
        "speculative_config.decoding_type",
        "speculative_config.num_nextn_predict_layers",
    ],
)
def test_every_release_knows_the_keys_of_a_deepseek_repository(version, key):
    release = load_release(version)
    assert all(release.require_key(theirs).status for theirs in spell({key: 1}, version))


@pytest.mark.parametrize(
    ("version", "key", "message"),
    [
        ("1.2.1", "use_cuda_graph", "is not an LLM argument.*cuda_graph_config"),
        ("1.2.1", "kv_cache_config.dtyp", r"kv_cache_config\.dtype"),
        ("1.2.1", "moe_config.max_num_tokens.deeper", "is not an LLM argument"),
        ("1.2.1", "speculative_config.max_draft_length", "max_draft_len"),
        ("1.1.0", "sparse_attention_config", "not known to be"),
        ("1.0.0", "sampler_type", "is not an LLM argument"),
        ("0.21.0", "stream_interval", "is not an LLM argument"),
        ("0.21.0", "kv_cache_config.dtype", "is not an LLM argument"),
        ("0.19.0", "enable_lora", "not known to be"),
    ],
)
def test_a_key_that_is_not_known_is_refused(version, key, message):
    with pytest.raises(RefusedPlanError, match=message):
        load_release(version).require_key(key)


def test_v32_needs_1_2():
    known = {version: load_release(version).find_key("sparse_attention_config.algorithm") for version in RELEASES}
    assert [version for version, entry in known.items() if entry] == ["1.2.1", "1.2.0"]


def test_releases_are_older_by_number():
    release = load_release("1.2.0")
    assert release.is_before("1.10")
    assert release.is_before("1.2.1")
    assert not release.is_before("1.2")
    assert not release.is_before("0.21.0")


def test_an_unknown_release_names_the_known_ones():
    with pytest.raises(UnknownNameError, match=r"known so far: 1\.2\.1, "):
        load_release("1.2.2")


def test_a_release_that_can_not_have_a_record_says_why():
    with pytest.raises(
        RefusedPlanError, match=r"^TensorRT-LLM 0\.20\.0 .*nested.*flat.*use 0\.21\.0 \(container 25\.08\)$"
    ):
        load_release("0.20.0")


def test_every_record_answers_for_the_same_features():
    names = load_release("1.2.1").features.keys()
    for version in READABLE_RELEASES:
        features = load_release(version).features
        assert features.keys() == names
        assert all(feature.source for feature in features.values())


@pytest.mark.parametrize(
    ("feature", "since"),
    [
        ("mtp", "0.19.0"),
        ("fp8_kv_mla_hopper", "0.19.0"),
        ("block_reuse_mla", "0.21.0"),
        ("w4afp8_hopper", "0.21.0"),
        ("wide_ep", "0.21.0"),
        ("fp8_blackwell", "1.0.0"),
        ("chunked_prefill_mla_blackwell", "1.0.0"),
        ("chunked_prefill_mla_hopper", "1.1.0"),
        ("guided_decoding_with_mtp", "1.2.0"),
        ("deepseek_v32", "1.2.0"),
        ("v32_mtp_above_1", "1.2.0"),
        ("pdl_default", "1.2.0"),
    ],
)
def test_a_feature_is_there_from_its_release_on(feature, since):
    for version in READABLE_RELEASES:
        expected = _number(version) >= _number(since)
        assert load_release(version).features[feature].supported is expected, version


def test_an_unsettled_feature_is_neither_yes_nor_no():
    release = load_release("0.21.0")
    assert release.features["online_eplb"].supported is None
    assert [release.supports(name) for name in ("online_eplb", "wide_ep", "deepseek_v32")] == [None, True, False]
    assert release.supports("no_such_feature") is None


def test_before_1_0_the_default_is_not_pytorch():
    backends = {version: load_release(version).default_backend for version in READABLE_RELEASES}
    assert [version for version, backend in backends.items() if backend == "tensorrt"] == ["0.21.0", "0.19.0"]


@pytest.mark.parametrize(
    ("tag", "version"),
    [
        ("26.07", "1.2.1"),
        ("26.03", "1.2.0"),
        ("25.12-trtllm-python-py3", "1.1.0"),
        ("nvcr.io/nvidia/tritonserver:25.09-trtllm-python-py3", "1.0.0"),
        ("25.08", "0.21.0"),
    ],
)
def test_a_container_tag_names_its_release(tag, version):
    assert release_for_container(tag).version == version


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ("25.07", r"^container 25\.07 carries TensorRT-LLM 0\.20\.0: it is not established .* use 0\.21\.0"),
        ("25.05", r"^container 25\.05 carries TensorRT-LLM 0\.19\.0: no repository is made for it; use 26\.07"),
        ("25.11-trtllm-python-py3", r"^container 25\.11 carries TensorRT-LLM 1\.0\.3\.2510: no repository"),
    ],
)
def test_a_container_of_another_release_is_refused(tag, message):
    with pytest.raises(RefusedPlanError, match=message):
        release_for_container(tag)


def test_an_unknown_container_names_those_that_work():
    with pytest.raises(UnknownNameError, match=r"'27\.01'.*26\.07"):
        release_for_container("27.01")


@pytest.mark.parametrize("version", READABLE_RELEASES)
def test_the_containers_of_a_release_are_those_in_the_table(version):
    tags = [tag for tag, container in containers().items() if container.trtllm == version]
    assert list(load_release(version).containers) == tags


def test_a_container_is_looked_up_without_reading_every_record(monkeypatch):
    read = []
    monkeypatch.setattr(releases, "_load", lambda version: read.append(version))
    release_for_container("26.03")
    assert read == ["1.2.0"]


def test_quirks_name_containers_of_their_release(release):
    for quirk in release.record["quirks"]:
        assert set(quirk["applies_to_containers"]) <= set(release.containers)
        assert quirk["source"]


def test_every_sampler_accounts_for_every_field_of_the_contract(release):
    """A field is honoured, ignored or fatal for a reason, or unknown, but never two of these."""
    section = release.record["sampler"]
    assert section["choose"][-1]["when"] == {}
    assert {rule["sampler"] for rule in section["choose"]} == section["samplers"].keys()
    applied = APPLIED_OUTSIDE | {"best_of", "logit_bias"}
    ours = {"guided_decoding" if field.guided else field.name for field in SAMPLING_FIELDS} - applied
    for name, sampler in section["samplers"].items():
        entries = (*sampler["ignores"], *sampler.get("fails", ()), *section["lacks"])
        refused = [field for entry in entries for field in entry["fields"] if field not in ("priority", "logit_bias")]
        listed = [*section["always"], *sampler["honours"]["fields"], *refused]
        assert len(listed) == len(set(listed)), name
        assert any("logit_bias" in entry["fields"] for entry in entries), name
        assert set(listed) <= release.record["sampling_params"].keys(), name
        if sampler["honours"]["status"] != "unknown":
            assert ours <= set(listed), name
        assert ("logprobs" in sampler["honours"]["fields"]) == ("logprobs" in sampler), name


def test_what_is_refused_says_why_and_who_says_so(release):
    section = release.record["sampler"]
    samplers = section["samplers"].values()
    entries = [*section["needs"], *section["conflicts"], *section["lacks"]]
    entries += [entry for sampler in samplers for entry in (*sampler["ignores"], *sampler.get("fails", ()))]
    assert all(entry["why"] and entry["source"] for entry in entries)
    assert section["greedy"]["rule"] in ("any", "all")
    for sampler in samplers:
        if "logprobs" in sampler:
            assert sampler["logprobs"]["of"] in ("sampled", "likeliest")
            assert {"most", "status", "source"} <= sampler["logprobs"].keys()


def test_an_argument_that_a_field_needs_is_one_of_the_llms(release):
    for entry in release.record["sampler"]["needs"]:
        assert release.require_key(entry["llm_arg"])
    assert release.record["mpi"]["leader"]["llm_arg"].lstrip("_") in release.classes["BaseLlmArgs"].fields


def test_the_backend_reads_the_same_sampler_out_of_it(release):
    engine = EngineRelease(release.record)
    mtp = engine.sampler_support({"speculative_config": {"decoding_type": "MTP"}})
    assert mtp.sampler == "MTPSampler"
    assert "temperature" in mtp.unsupported
    assert engine.sampler_support({}).sampler == "TorchSampler"


def test_guided_decoding_needs_its_arguments(release):
    engine, needed = EngineRelease(release.record), guided_llm_args(release.version)
    assert "guided_json" in engine.sampler_support(needed).fields
    for name in needed:
        support = engine.sampler_support({**needed, name: None})
        assert "guided_json" not in support.fields
        assert name in support.unsupported["guided_json"]


def test_no_release_has_priorities(release):
    unsupported = EngineRelease(release.record).sampler_support({}).unsupported
    assert unsupported["priority"] == f"TensorRT-LLM {release.version}: it has no request priority"


@pytest.fixture
def package(release, tmp_path):
    path = tmp_path / "release.yaml"
    path.write_text(release.text)
    with standin(path) as package:
        yield package


def test_the_standin_has_the_recorded_sampling_fields(release, package):
    fields = {field.name: field.default for field in dataclasses.fields(package.SamplingParams)}
    assert fields == {name: row["default"] for name, row in release.record["sampling_params"].items()}
    with pytest.raises(TypeError):
        package.SamplingParams(5)
    with pytest.raises(TypeError):
        package.SamplingParams(repetition_penality=1.0)


def test_the_standin_has_the_recorded_signature(release, package):
    parameters = list(inspect.signature(package.LLM.generate_async).parameters)[1:]
    assert parameters == release.record["generate_async"]["parameters"]


def test_the_standin_has_the_recorded_outputs(release, package):
    output_class, completion_class = package.llmapi.RequestOutput, package.llmapi.CompletionOutput
    assert all(hasattr(output_class, name) for name in release.record["request_output"]["methods"])
    public = [field.name for field in dataclasses.fields(completion_class) if not field.name.startswith("_")]
    assert public == release.record["completion_output"]["fields"]
    properties = inspect.getmembers(completion_class, lambda member: isinstance(member, property))
    assert {name for name, _ in properties} == set(release.record["completion_output"]["properties"])


def test_the_standin_needs_a_running_event_loop(package):
    llm = package.LLM(model="owner/m", backend="pytorch")
    try:
        with pytest.raises(RuntimeError, match="event loop"):
            llm.generate_async(inputs=[3, 4, 5])
        with pytest.raises(TypeError):
            llm.generate_async(inputs=[3, 4, 5], max_tokens=5)
    finally:
        llm.shutdown()
    with pytest.raises(RuntimeError, match="shutting down"):
        llm.generate_async(inputs=[3, 4, 5])


@pytest.mark.parametrize(
    "arguments",
    [
        {"no_such_key": 1},
        {"kv_cache_config": {"no_such_key": 1}},
        {"tensor_parallel_size": "8"},
        {"stream_interval": 0},  # out of range, or, in 0.21.0, no key at all
    ],
    ids=str,
)
def test_the_standin_refuses_what_the_release_would(package, arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        package.LLM(model="owner/m", backend="pytorch", **arguments)


@pytest.mark.slow
def test_the_standin_runs_nothing_but_pytorch(release, package):
    if release.default_backend == "pytorch":
        package.LLM(model="owner/m").shutdown()
    else:
        with pytest.raises(ValueError, match="expected backend 'pytorch', got None"):
            package.LLM(model="owner/m")


@pytest.mark.slow
def test_the_standin_takes_a_speculative_config_only_from_upstreams_parser(package):
    from tensorrt_llm.llmapi.llm_utils import update_llm_args_with_extra_dict

    section = {"decoding_type": "MTP", "num_nextn_predict_layers": 1}
    mapping = {"model": "owner/m", "backend": "pytorch", "speculative_config": section}
    with pytest.raises(ValueError, match="speculative_config"):
        package.LLM(**mapping)
    package.LLM(**update_llm_args_with_extra_dict({}, mapping)).shutdown()


def test_the_standins_result_can_be_waited_for_without_a_loop(package):
    import asyncio

    async def submit():
        return llm.generate_async(inputs="Why?", sampling_params=package.SamplingParams(max_tokens=5))

    llm = package.LLM(model="owner/m", backend="pytorch")
    try:
        output = asyncio.run(submit())
        assert len(output.result(timeout=60).outputs[0].token_ids) == 5
        assert output.finished
    finally:
        llm.shutdown()


GREEDY = [
    pytest.param({}, True, True, id="nothing given"),
    pytest.param({"temperature": 0.0}, True, True, id="temperature 0"),
    pytest.param({"temperature": 0.6}, True, False, id="temperature alone"),
    pytest.param({"top_k": 1}, True, True, id="top_k 1"),
    pytest.param({"top_k": 1, "top_p": 0.9}, False, True, id="top_k 1 with a top_p"),
    pytest.param({"temperature": 0.6, "top_p": 1.0}, False, False, id="top_p 1"),
    pytest.param({"top_k": 20}, False, False, id="top_k"),
]


@pytest.mark.parametrize(("fields", "up_to_1_1", "from_1_2"), GREEDY)
def test_the_standin_tells_greedy_decoding_as_the_release_does(release, package, fields, up_to_1_1, from_1_2):
    expected = from_1_2 if release.version.startswith("1.2.") else up_to_1_1
    assert package.SamplingParams(**fields)._greedy_decoding is expected


def test_the_standin_refuses_several_greedy_answers(package):
    with pytest.raises(ValueError, match="Greedy decoding"):
        package.SamplingParams(best_of=2)
    package.SamplingParams(best_of=2, top_k=20)


def test_the_standin_counts_cached_tokens_where_the_release_does(release, package):
    import asyncio

    async def submit():
        return await llm.generate_async(inputs="x" * 99, sampling_params=package.SamplingParams(max_tokens=2)).aresult()

    llm = package.LLM(model="owner/m", backend="pytorch")
    try:
        output = asyncio.run(submit())
        assert hasattr(output, "cached_tokens") is release.version.startswith("1.2.")
    finally:
        llm.shutdown()


def test_a_null_max_num_tokens_has_a_recorded_effect(release):
    assert EngineRelease(release.record).default("max_num_tokens") == 8192
