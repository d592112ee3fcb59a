"""The checkpoint that the benches read: DeepSeek-V3's layout, whole by our checks and by the safetensors library's."""

import json
import zlib
from unittest import mock

import pytest
from bench import synthetic_checkpoint
from bench.synthetic_checkpoint import CONFIG, config_of, deal, make_checkpoint, tensors_of

from deepseek_triton_build.check import INDEX, check_weights, read_facts

SIZE = 8_000_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("synthetic") / "weights"
    with mock.patch.object(synthetic_checkpoint, "NOISE_BYTES", 2**18):
        make_checkpoint(path, size=SIZE)
    return path


def shards(folder):
    return sorted(folder.glob("*.safetensors"))


@pytest.mark.slow
def test_the_published_checkpoints_figures():
    """91,991 tensors of 688,574,839,360 bytes, lm_head in shard 160 and the draft layer's own in the last of 163."""
    tensors = list(tensors_of(CONFIG))
    files = deal(tensors, 163)
    of = {tensor.name: file for file, dealt in files.items() for tensor in dealt}

    assert len(of) == 91_991
    assert sum(tensor.size for tensor in tensors) == 688_574_839_360
    assert next(iter(files)) == "model-00001-of-000163.safetensors" == of["model.embed_tokens.weight"]
    assert of["lm_head.weight"] == "model-00160-of-000163.safetensors"
    assert of["model.layers.61.eh_proj.weight"] == list(files)[-1] == "model-00163-of-000163.safetensors"


def test_our_checks_find_nothing_and_the_safetensors_library_reads_all_of_it(folder):
    assert list(check_weights(folder, "weights")) == []
    facts, findings = read_facts(folder, "weights")
    assert findings == []
    assert (facts.class_name, facts.precision) == ("DeepseekV3ForCausalLM", "fp8")
    # The content does not compress, and differs between shards.
    ends = [path.read_bytes()[-(2**16) :] for path in shards(folder)]
    assert len(set(ends)) == len(ends) == 4
    assert all(len(zlib.compress(end, 1)) > 0.99 * len(end) for end in ends)

    torch, safetensors = pytest.importorskip("torch"), pytest.importorskip("safetensors")
    index = json.loads((folder / INDEX).read_text())
    sizes = {}
    for path in shards(folder):
        with safetensors.safe_open(path, framework="pt") as file:
            names = file.keys()  # it can't be iterated itself
            for name in names:
                assert index["weight_map"][name] == path.name
                tensor = file.get_tensor(name)
                sizes[name] = tensor.numel() * tensor.element_size()
                assert tensor.dtype in (torch.float8_e4m3fn, torch.float32, torch.bfloat16)
    assert sizes.keys() == index["weight_map"].keys()
    assert sum(sizes.values()) == index["metadata"]["total_size"] == pytest.approx(SIZE, rel=0.05)


@pytest.mark.slow
def test_the_seed_decides_the_bytes_and_holes_take_no_room(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic_checkpoint, "NOISE_BYTES", 2**16)
    options = {"a": {}, "b": {"seed": 0}, "c": {"seed": 2}, "holes": {"sparse": True}}
    for name, more in options.items():
        make_checkpoint(tmp_path / name, size=2 * 10**6, num_shards=3, **more)
    contents = {name: [path.read_bytes() for path in shards(tmp_path / name)] for name in options}
    assert contents["a"] == contents["b"]
    assert all(one != other for one, other in zip(contents["a"], contents["c"], strict=True))
    statuses = [path.stat() for path in shards(tmp_path / "holes")]
    assert [status.st_size for status in statuses] == [len(content) for content in contents["a"]]
    assert sum(status.st_blocks * 512 for status in statuses) < 500_000
    assert list(check_weights(tmp_path / "holes", "holes")) == []


def test_what_can_not_be_is_said():
    for size in (10**3, 9 * 10**11):
        with pytest.raises(ValueError, match="expected a size from"):
            config_of(size)
