"""Settings have one canonical name, and each release's own names translate to it and back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_triton_build import RefusedPlanError, UnknownNameError
from deepseek_triton_build.catalog import READABLE_RELEASES, RELEASES, load_release
from deepseek_triton_build.data.own_files import load_yaml
from deepseek_triton_build.data.spelling import MIXED, canonical, flag_name, moved, spell
from support.flags import from_flags

TABLE = load_yaml("spelling.yaml")
OURS = load_release("1.2.1")
NEST = "pytorch_backend_config."

GRAPHS = {"cuda_graph_config.max_batch_size": 128, "cuda_graph_config.enable_padding": True}
FLAT_GRAPHS = {"use_cuda_graph": True, "cuda_graph_max_batch_size": 128, "cuda_graph_padding_enabled": True}
CPP, MIXED_SAMPLER, AUTO = ({"sampler_type": name} for name in ("TRTLLMSampler", "TorchSampler", "auto"))
OVERLAP, FP8 = {"disable_overlap_scheduler": False}, {"kv_cache_config.dtype": "fp8"}
MOE = {"moe_config.backend": "TRTLLM"}


def below(settings):
    return {f"{NEST}{key}": value for key, value in settings.items()}


def switched(value):
    return {"use_cuda_graph": value}


# What we call it, and what 0.19.0, 0.21.0 and 1.0.0 do.
SPELLINGS = [
    (FP8, below({"kv_cache_dtype": "fp8"}), {"kv_cache_dtype": "fp8"}, FP8),
    (GRAPHS, below(FLAT_GRAPHS), FLAT_GRAPHS, GRAPHS),
    ({"cuda_graph_config": None}, below(switched(False)), switched(False), {"cuda_graph_config": None}),
    ({"cuda_graph_config": {}}, below(switched(True)), switched(True), {"cuda_graph_config": {}}),
    (OVERLAP, below({"enable_overlap_scheduler": True}), OVERLAP, OVERLAP),
    (MOE, below({"moe_backend": "TRTLLM"}), {"moe_backend": "TRTLLM"}, MOE),
    (CPP, CPP, {"enable_trtllm_sampler": True}, {"enable_trtllm_sampler": True}),
    (MIXED_SAMPLER, MIXED_SAMPLER, {"mixed_sampler": True}, {"enable_mixed_sampler": True}),
    (AUTO, AUTO, {"enable_trtllm_sampler": False}, {"enable_trtllm_sampler": False}),
    ({"enable_autotuner": False},) * 2 + ({"autotuner_enabled": False}, {"enable_autotuner": False}),
    ({"tensor_parallel_size": 8},) * 4,
    ({"no_such_key": 8},) * 4,
]


def test_each_release_has_its_own_names(subtests):
    for ours, *others in SPELLINGS:
        for release, theirs in zip(("1.2.1", "0.19.0", "0.21.0", "1.0.0"), (ours, *others), strict=True):
            with subtests.test(f"{ours} in {release}"):
                assert spell(ours, release) == theirs
                assert canonical(theirs, release) == ours
                assert canonical(theirs, MIXED) == ours


def test_an_era_stands_for_its_releases():
    assert spell({"moe_config.backend": "WIDEEP"}, "0.21") == spell({"moe_config.backend": "WIDEEP"}, "0.21.0")
    assert set(READABLE_RELEASES) == {version for versions in TABLE["eras"].values() for version in versions}


def test_a_file_of_several_eras_is_understood():
    settings = {
        "cuda_graph_config.max_batch_size": 8,
        "kv_cache_dtype": "fp8",
        "pytorch_backend_config.enable_overlap_scheduler": False,
        "pytorch_backend_config.moe_max_num_tokens": 4096,
        "kv_cache_free_gpu_memory_fraction": 0.8,
        "build_config.max_seq_len": 2048,
        "enable_chunked_context": True,
        "cuda_graph_config.padding_enabled": True,
    }
    assert canonical(settings, MIXED) == {
        "cuda_graph_config.max_batch_size": 8,
        "kv_cache_config.dtype": "fp8",
        "disable_overlap_scheduler": True,
        "moe_config.max_num_tokens": 4096,
        "kv_cache_config.free_gpu_memory_fraction": 0.8,
        "max_seq_len": 2048,
        "enable_chunked_prefill": True,
        "cuda_graph_config.enable_padding": True,
    }


CONTRADICTING = [
    ({"kv_cache_dtype": "auto", "kv_cache_config.dtype": "fp8"}, {"kv_cache_config.dtype": "fp8"}),
    ({"use_cuda_graph": True, "cuda_graph_batch_sizes": [1]}, {"cuda_graph_config.batch_sizes": [1]}),
    ({"use_cuda_graph": False, "cuda_graph_batch_sizes": [1]}, {"cuda_graph_config": None}),
    ({"use_cuda_graph": True, "cuda_graph_config": None}, {"cuda_graph_config": None}),
    ({"mixed_sampler": True, "enable_trtllm_sampler": True}, {"sampler_type": "TRTLLMSampler"}),
    ({"mixed_sampler": True, "enable_trtllm_sampler": False}, {"sampler_type": "TorchSampler"}),
    ({"mixed_sampler": False}, {"sampler_type": "auto"}),
]


def test_contradicting_keys_have_one_meaning():
    assert [(settings, canonical(settings, MIXED)) for settings, _ in CONTRADICTING] == CONTRADICTING


VALUES = {
    "sampler_type": st.sampled_from(["TRTLLMSampler", "TorchSampler", "auto"]),
    "disable_overlap_scheduler": st.booleans(),
}
ANYTHING = st.integers(1, 9) | st.booleans() | st.sampled_from(["fp8", "x"]) | st.lists(st.integers(1, 9), min_size=1)


@st.composite
def settings_of(draw, release):
    """Return canonical keys that the release has under any name: leaves only, as a section excludes its keys."""
    record, ours = load_release(release), OURS.keys()
    leaves = [key for key in ours if not OURS.require_key(key).sections]
    known = [key for key in leaves if any(record.find_key(theirs) for theirs in spell({key: "auto"}, release))]
    keys = draw(st.lists(st.sampled_from(known), unique=True))
    settings = {key: draw(VALUES.get(key, ANYTHING)) for key in keys}
    if draw(st.booleans()) and not any(key.startswith("cuda_graph_config.") for key in keys):
        settings["cuda_graph_config"] = draw(st.sampled_from([None, {}]))
    return settings


@pytest.mark.slow
@pytest.mark.parametrize("release", READABLE_RELEASES)
@settings(max_examples=40)
@given(data=st.data())
def test_translating_there_and_back_gives_the_same_settings(release, data):
    ours = data.draw(settings_of(release))
    theirs = spell(ours, release)
    assert canonical(theirs, release) == ours
    assert all(load_release(release).find_key(key) for key in theirs)


@pytest.mark.parametrize("release", RELEASES)
def test_every_name_in_the_table_is_one_of_the_release(release):
    record = load_release(release)
    era = next(era for era, versions in TABLE["eras"].items() if release in versions)
    rows = [*TABLE["keys"].values(), *TABLE["switches"].values()]
    assert all(record.find_key(row[era]) for row in rows if era in row)
    choices = [choice for row in TABLE["choices"].values() for choice in row.get(era, {}).values()]
    assert all(record.find_key(key) for choice in choices for key in choice)
    assert not [alias for alias in TABLE["aliases"] if record.find_key(alias)]


MOVED = [  # a key, a release, and its name there
    ("pytorch_backend_config.use_cuda_graph", "1.2.1", "cuda_graph_config"),
    ("pytorch_backend_config.moe_max_num_tokens", "1.2.1", "moe_config.max_num_tokens"),
    ("pytorch_backend_config.enable_overlap_scheduler", "1.0.0", "disable_overlap_scheduler"),
    ("use_cuda_graph", "1.2.1", "cuda_graph_config"),
    ("kv_cache_dtype", "1.2.1", "kv_cache_config.dtype"),
    ("moe_backend", "1.0.0", "moe_config.backend"),
    ("mixed_sampler", "1.2.1", "sampler_type"),
    ("mixed_sampler", "1.0.0", "enable_mixed_sampler"),
    ("enable_trtllm_sampler", "1.1.0", "sampler_type"),
    ("autotuner_enabled", "1.2.1", "enable_autotuner"),
    ("enable_chunked_context", "1.2.1", "enable_chunked_prefill"),
    ("build_config.max_batch_size", "1.2.1", "max_batch_size"),
    ("kv_cache_free_gpu_memory_fraction", "1.2.1", "kv_cache_config.free_gpu_memory_fraction"),
    ("tp_size", "1.2.1", "tensor_parallel_size"),
    ("cuda_graph_config", "0.21.0", "use_cuda_graph"),
    ("cuda_graph_config.batch_sizes", "0.21.0", "cuda_graph_batch_sizes"),
    ("kv_cache_config.dtype", "0.21.0", "kv_cache_dtype"),
    ("moe_config.backend", "0.19.0", "pytorch_backend_config.moe_backend"),
    ("sampler_type", "1.0.0", "enable_trtllm_sampler"),
    ("enable_mixed_sampler", "0.21.0", "mixed_sampler"),
    ("stream_interval", "0.21.0", None),
    ("sampler_type", "0.19.0", None),
    ("kv_cache_config.dtype", "1.2.1", None),
    ("nonsense", "1.2.1", None),
]


def test_a_renamed_key_is_found():
    assert [(key, release, moved(key, release)) for key, release, _ in MOVED] == MOVED


def test_flags_are_settings_too():
    given = {"--tp_size": 8, "ep": 8, "--kv-cache-free-gpu-memory-fraction": 0.9, "--port": 8000}
    assert from_flags("trtllm-serve", given) == {
        "tensor_parallel_size": 8,
        "moe_expert_parallel_size": 8,
        "kv_cache_config.free_gpu_memory_fraction": 0.9,
        "--port": 8000,
    }
    assert flag_name("trtllm-bench", "kv_cache_config.free_gpu_memory_fraction") == "--kv_cache_free_gpu_mem_fraction"
    assert flag_name("trtllm-serve", "tensor_parallel_size") == "--tp_size"
    assert flag_name("trtllm-serve", "moe_config.backend") is None


@pytest.mark.parametrize("program", TABLE["flags"])
def test_every_flag_stands_for_one_key_of_ours(program):
    rows = TABLE["flags"][program]
    flags = [flag for names in rows.values() for flag in names]
    assert len(flags) == len(set(flags))
    assert all(OURS.find_key(key) for key in rows)


def test_unknown_names_are_errors():
    with pytest.raises(UnknownNameError, match="trtllm-serve"):
        flag_name("trtllm-serv", "backend")
    with pytest.raises(UnknownNameError, match=r"1\.2\.9"):
        spell({}, "1.2.9")
    with pytest.raises(RefusedPlanError, match=r"25\.08"):
        canonical({}, "0.20.0")
