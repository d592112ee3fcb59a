"""The checkpoint that the benches read: DeepSeek-V3's layout, whole by our checks and by the safetensors library's."""

import json
import shutil
import subprocess
import sys
import zlib
from types import SimpleNamespace

import pytest
from bench import synthetic_checkpoint
from bench.synthetic_checkpoint import CONFIG, config_of, deal, main, make_checkpoint, tensors_of

from deepseek_triton_build.check import INDEX, check_weights, read_facts

SIZE = 8_000_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("synthetic") / "weights"
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

    assert len({tensor.name for tensor in tensors}) == 91_991
    assert sum(tensor.size for tensor in tensors) == 688_574_839_360
    assert next(iter(files)) == "model-00001-of-000163.safetensors" == of["model.embed_tokens.weight"]
    assert of["lm_head.weight"] == "model-00160-of-000163.safetensors"
    assert of["model.layers.61.eh_proj.weight"] == list(files)[-1] == "model-00163-of-000163.safetensors"
    # Of another size, it is about what was asked for.
    for size in (10**9, 5 * 10**9):
        assert sum(tensor.size for tensor in tensors_of(config_of(size))) == pytest.approx(size, rel=0.01)


def test_our_checks_find_nothing_and_the_safetensors_library_reads_all_of_it(folder):
    assert list(check_weights(folder, "weights")) == []
    facts, findings = read_facts(folder, "weights")
    assert findings == []
    assert (facts.class_name, facts.precision) == ("DeepseekV3ForCausalLM", "fp8")
    # The content does not compress, and differs between shards.
    ends = [path.read_bytes()[-(2**18) :] for path in shards(folder)]
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
def test_the_same_seed_gives_the_same_bytes_and_another_one_others(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic_checkpoint, "NOISE_BYTES", 2**16)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_checkpoint(tmp_path / name, size=400_000, seed=seed)
    contents = {name: [path.read_bytes() for path in shards(tmp_path / name)] for name in "abc"}
    assert contents["a"] == contents["b"]
    assert all(one != other for one, other in zip(contents["a"], contents["c"], strict=True))


@pytest.mark.slow
def test_holes_take_no_room(tmp_path):
    total = make_checkpoint(tmp_path / "full", size=None, sparse=True)
    statuses = [path.stat() for path in shards(tmp_path / "full")]
    assert len(statuses) == 163
    assert total < sum(status.st_size for status in statuses) < total + 20_000_000
    assert sum(status.st_blocks * 512 for status in statuses) < 30_000_000
    assert list(check_weights(tmp_path / "full", "full")) == []


@pytest.mark.slow
def test_the_command_line_in_a_python_without_anything(tmp_path):
    command = [sys.executable, "-S", "-I", synthetic_checkpoint.__file__, tmp_path / "x", "--size", "2MB"]
    done = subprocess.run([*command, "--shards", "3"], capture_output=True, text=True, check=True)
    assert "in 3 shards" in done.stdout
    assert shards(tmp_path / "x")[0].name == "model-00001-of-000003.safetensors"
    assert list(check_weights(tmp_path / "x", "x")) == []


def test_what_can_not_be_is_said_and_nothing_is_written(tmp_path, capsys, monkeypatch):
    def refused(folder, *options):
        assert main([str(tmp_path / folder), *options]) == 1
        return capsys.readouterr().err

    for size in ("1KB", "900GB"):
        assert "expected a size from" in refused("x", "--size", size)
    assert "expected at most" in refused("x", "--size", "2MB", "--shards", "5000")
    assert not (tmp_path / "x").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.json").write_text("mine")
    assert "is not empty" in refused("mine", "--size", "2MB")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["config.json"]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    assert "that are free there" in refused("x", "--size", "2MB")
    assert list((tmp_path / "x").iterdir()) == []
