"""The release records are consistent, and the stand-in for tensorrt_llm agrees with them."""

import asyncio
import dataclasses
import inspect

import pytest
import yaml

from deepseek_backend.contract import SAMPLING_FIELDS
from deepseek_backend.engines.tensorrt_llm.loading import APPLIED_OUTSIDE
from deepseek_backend.release import EngineRelease
from deepseek_triton_build import RefusedPlanError, UnknownNameError
from deepseek_triton_build.catalog import (
    CANDIDATES,
    READABLE_RELEASES,
    RELEASES,
    containers,
    load_release,
    release_for_container,
    version_numbers,
)
from deepseek_triton_build.data import releases, spelling
from deepseek_triton_build.data.spelling import spell
from standin.harness import guided_llm_args
from standin.loading import standin


@pytest.fixture(scope="module", params=RELEASES)
def release(request):
    return load_release(request.param)


def test_releases_are_listed_newest_first():
    assert list(READABLE_RELEASES) == sorted(READABLE_RELEASES, key=version_numbers, reverse=True)
    release = load_release("1.2.0")
    assert [release.is_before(other) for other in ("1.10", "1.2.1", "1.2", "0.21.0")] == [True, True, False, False]
    candidate = load_release(CANDIDATES[0])
    assert [candidate.is_before(other) for other in ("1.4", "1.3", "1.3.0", "1.2.1")] == [True, False, False, False]


@pytest.mark.parametrize("version", READABLE_RELEASES)
def test_every_field_says_its_type_default_and_status(version):
    """Only a class read whole may prove that a key is absent."""
    release = load_release(version)
    assert yaml.load(release.text, yaml.CSafeLoader) == release.record
    for llm_class in release.record["classes"].values():
        statuses = {row["status"] for row in llm_class["fields"].values()}
        assert statuses <= ({"proven"} if llm_class["complete"] else {"proven", "interpolated"})
        assert all({"type", "default"} <= row.keys() for row in llm_class["fields"].values())
    rows = release.record.get("sampling_params", {}).values()
    assert all(row.keys() == {"type", "default", "status"} for row in rows)
    assert list(release.containers) == [tag for tag, each in containers().items() if each.trtllm == version]
    assert release.features.keys() == load_release("1.2.1").features.keys()
    assert all(row["source"] for row in release.record["features"].values())


@pytest.mark.slow
def test_every_section_and_every_key_is_recorded(release):
    for llm_class in release.classes.values():
        for entry in llm_class.fields.values():
            assert set(entry.sections) <= release.classes.keys()
            assert not entry.discriminator or entry.sections
    keys = release.keys()
    assert len(keys) == len(set(keys))
    assert all(release.find_key(key) for key in keys)
    for quirk in release.record["quirks"]:
        assert set(quirk["applies_to_containers"]) <= set(release.containers)
        assert quirk["source"]


OF_A_REPOSITORY = """
model tensor_parallel_size moe_expert_parallel_size enable_attention_dp max_seq_len cuda_graph_config.enable_padding
kv_cache_config.dtype kv_cache_config.free_gpu_memory_fraction moe_config.backend speculative_config.decoding_type
speculative_config.num_nextn_predict_layers
"""


def test_every_release_knows_the_keys_of_a_deepseek_repository():
    for version in READABLE_RELEASES:
        release = load_release(version)
        for key in OF_A_REPOSITORY.split():
            assert all(release.require_key(theirs).status for theirs in spell({key: 1}, version)), (version, key)


UNKNOWN_KEYS = [
    ("1.2.1", "use_cuda_graph", "is not an LLM argument"),
    ("1.2.1", "kv_cache_config.dtyp", r"kv_cache_config\.dtype"),
    ("1.2.1", "moe_config.max_num_tokens.deeper", "is not an LLM argument"),
    ("1.2.1", "speculative_config.max_draft_length", "max_draft_len"),
    ("1.1.0", "sparse_attention_config", "not known to be"),
    ("1.0.0", "sampler_type", "is not an LLM argument"),
    ("0.21.0", "stream_interval", "is not an LLM argument"),
    ("0.21.0", "kv_cache_config.dtype", "is not an LLM argument"),
    ("0.19.0", "enable_lora", "not known to be"),
]


def test_a_key_that_is_not_known_is_refused(subtests):
    for version, key, message in UNKNOWN_KEYS:
        with subtests.test(f"{version} {key}"), pytest.raises(RefusedPlanError, match=message):
            load_release(version).require_key(key)


def test_a_release_without_a_record_is_refused(monkeypatch):
    with pytest.raises(UnknownNameError, match=f"known so far: {', '.join(READABLE_RELEASES)}"):
        load_release("1.2.9")
    with pytest.raises(RefusedPlanError, match=r"0\.20\.0 .*nested.*flat.*use 0\.21\.0 \(container 25\.08\)$"):
        load_release("0.20.0")
    monkeypatch.setattr(spelling, "load_release", str)
    with pytest.raises(LookupError, match=r"^1\.2\.9 has no era"):
        spell({}, "1.2.9")


SINCE = {
    "mtp": "0.19.0",
    "fp8_kv_mla_hopper": "0.19.0",
    "block_reuse_mla": "0.21.0",
    "w4afp8_hopper": "0.21.0",
    "wide_ep": "0.21.0",
    "fp8_blackwell": "1.0.0",
    "chunked_prefill_mla_blackwell": "1.0.0",
    "chunked_prefill_mla_hopper": "1.1.0",
    "guided_decoding_with_mtp": "1.2.0",
    "deepseek_v32": "1.2.0",
    "v32_mtp_above_1": "1.2.0",
    "pdl_default": "1.2.0",
}


def test_a_feature_is_there_from_its_release_on():
    for version in READABLE_RELEASES:
        features = load_release(version).features
        expected = {name: version_numbers(version) >= version_numbers(since) for name, since in SINCE.items()}
        assert {name: features[name] for name in SINCE} == expected, version
        sparse = load_release(version).find_key("sparse_attention_config.algorithm")
        assert version not in RELEASES or bool(sparse) == expected["deepseek_v32"]
        default = "pytorch" if version_numbers(version) >= (1, 0, 0) else "tensorrt"
        assert load_release(version).default_backend == default


def test_an_unsettled_feature_is_neither_yes_nor_no():
    release = load_release("0.21.0")
    names = ("online_eplb", "wide_ep", "deepseek_v32", "no_such_feature")
    assert [release.supports(name) for name in names] == [None, True, False, None]


def test_a_container_tag_names_its_release(monkeypatch):
    named = {
        "26.07": "1.2.1",
        "26.03": "1.2.0",
        "25.12-trtllm-python-py3": "1.1.0",
        "nvcr.io/nvidia/tritonserver:25.09-trtllm-python-py3": "1.0.0",
        "25.08": "0.21.0",
    }
    assert {tag: release_for_container(tag).version for tag in named} == named
    refused = {
        "25.07": r"^container 25\.07 carries TensorRT-LLM 0\.20\.0: it is not established .* use 0\.21\.0",
        "25.05": r"^container 25\.05 carries TensorRT-LLM 0\.19\.0: no repository is made for it; use 26\.07",
        "25.11-trtllm-python-py3": r"^container 25\.11 carries TensorRT-LLM 1\.0\.3\.2510: no repository",
    }
    for tag, message in refused.items():
        with pytest.raises(RefusedPlanError, match=message):
            release_for_container(tag)
    with pytest.raises(UnknownNameError, match=r"'27\.01'.*26\.07"):
        release_for_container("27.01")

    read = []
    monkeypatch.setattr(releases, "_load", lambda version: read.append(version))
    release_for_container("26.03")
    assert read == ["1.2.0"]  # and no other record


def test_every_sampler_accounts_for_every_field_of_the_contract(release):
    """A field is honoured, ignored or fatal for a reason, or unknown, but never two of these."""
    section = release.record["sampler"]
    assert section["choose"][-1]["when"] == {}
    assert {rule["sampler"] for rule in section["choose"]} == section["samplers"].keys()
    applied = APPLIED_OUTSIDE | {"best_of"}
    ours = {"guided_decoding" if field.guided else field.name for field in SAMPLING_FIELDS} - applied
    lacks = [field for entry in section["lacks"] for field in entry["fields"]]
    assert set(lacks) <= ours | {"priority"}
    for name, sampler in section["samplers"].items():
        entries = (*sampler["ignores"], *sampler.get("fails", ()))
        refused = [field for entry in entries for field in entry["fields"]]
        listed = [*section["always"], *sampler["honours"]["fields"], *refused, *lacks]
        assert len(listed) == len(set(listed)), name
        assert set(listed) - set(lacks) <= release.record["sampling_params"].keys(), name
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
    for entry in section["needs"]:
        assert release.require_key(entry["llm_arg"])
    assert release.record["mpi"]["leader"]["llm_arg"].lstrip("_") in release.classes["BaseLlmArgs"].fields


def test_the_backend_reads_the_same_sampler_out_of_it(release):
    engine, needed = EngineRelease(release.record), guided_llm_args(release.version)
    mtp, usual = engine.sampler_support({"speculative_config": {"decoding_type": "MTP"}}), engine.sampler_support({})
    assert (mtp.sampler, usual.sampler) == ("MTPSampler", "TorchSampler")
    assert "temperature" in mtp.unsupported
    assert usual.unsupported["priority"] == f"TensorRT-LLM {release.version}: it has no request priority"
    assert engine.default("max_num_tokens") == 8192  # of a null, too
    assert "guided_json" in engine.sampler_support(needed).fields
    for name in needed:
        support = engine.sampler_support({**needed, name: None})
        assert "guided_json" not in support.fields
        assert name in support.unsupported["guided_json"]


@pytest.fixture(scope="module")
def package(release, tmp_path_factory):
    path = tmp_path_factory.mktemp("standin") / "release.yaml"
    path.write_text(release.text)
    with standin(path) as package:
        yield package


def test_the_standin_has_the_recorded_fields_signature_and_outputs(release, package):
    fields = {field.name: field.default for field in dataclasses.fields(package.SamplingParams)}
    assert fields == {name: row["default"] for name, row in release.record["sampling_params"].items()}
    with pytest.raises(TypeError):
        package.SamplingParams(5)
    with pytest.raises(TypeError):
        package.SamplingParams(repetition_penality=1.0)
    with pytest.raises(ValueError, match="Greedy decoding"):
        package.SamplingParams(best_of=2)
    package.SamplingParams(best_of=2, top_k=20)

    parameters = list(inspect.signature(package.LLM.generate_async).parameters)[1:]
    assert parameters == release.record["generate_async"]["parameters"]
    output_class, completion_class = package.llmapi.RequestOutput, package.llmapi.CompletionOutput
    assert all(hasattr(output_class, name) for name in release.record["request_output"]["methods"])
    public = [field.name for field in dataclasses.fields(completion_class) if not field.name.startswith("_")]
    assert public == release.record["completion_output"]["fields"]
    properties = inspect.getmembers(completion_class, lambda member: isinstance(member, property))
    assert {name for name, _ in properties} == set(release.record["completion_output"]["properties"])


def test_the_standin_answers_within_a_loop_until_it_is_shut_down(release, package):
    async def submit(wait, tokens):
        given = package.SamplingParams(max_tokens=tokens)
        answer = llm.generate_async(inputs="x" * 99, sampling_params=given)
        return await answer.aresult() if wait else answer

    llm = package.LLM(model="owner/m", backend="pytorch")
    try:
        with pytest.raises(RuntimeError, match="event loop"):
            llm.generate_async(inputs=[3, 4, 5])
        with pytest.raises(TypeError):
            llm.generate_async(inputs=[3, 4, 5], max_tokens=5)
        output = asyncio.run(submit(False, 5))
        assert len(output.result(timeout=60).outputs[0].token_ids) == 5
        assert output.finished
        assert hasattr(asyncio.run(submit(True, 2)), "cached_tokens") is release.version.startswith("1.2.")
    finally:
        llm.shutdown()
    with pytest.raises(RuntimeError, match="shutting down"):
        llm.generate_async(inputs=[3, 4, 5])


def test_the_standin_refuses_what_the_release_would(package):
    """The last one is out of range, or, in 0.21.0, no key at all."""
    wrong = [{"no_such_key": 1}, {"kv_cache_config": {"no_such_key": 1}}]
    for arguments in (*wrong, {"tensor_parallel_size": "8"}, {"stream_interval": 0}):
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


GREEDY = [  # sampling fields, and whether up to 1.1 and from 1.2 on they are greedy
    ({}, True, True),
    ({"temperature": 0.0}, True, True),
    ({"temperature": 0.6}, True, False),
    ({"top_k": 1}, True, True),
    ({"top_k": 1, "top_p": 0.9}, False, True),
    ({"temperature": 0.6, "top_p": 1.0}, False, False),
    ({"top_k": 20}, False, False),
]


def test_the_standin_tells_greedy_decoding_as_the_release_does(release, package):
    is_newer = release.version.startswith("1.2.")
    found = [package.SamplingParams(**fields)._greedy_decoding for fields, _, _ in GREEDY]
    assert found == [row[2 if is_newer else 1] for row in GREEDY]
