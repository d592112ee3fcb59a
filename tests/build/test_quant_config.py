import json
import stat

import pytest

from deepseek_triton_build import UnusableCheckpointError, quant_config_change, write_quant_config
from deepseek_triton_build.render.hf_quant_config import NAME
from support.interrupted import error_of

V3 = {"architectures": ["DeepseekV3ForCausalLM"], "quantization_config": {"quant_method": "fp8"}}
V32 = V3 | {"architectures": ["DeepseekV32ForCausalLM"]}
NVFP4 = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}


@pytest.fixture
def checkpoint(tmp_path):
    def make(config=V3, quant=None):
        (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        if quant is not None:
            (tmp_path / NAME).write_text(quant if isinstance(quant, str) else json.dumps(quant))
        return tmp_path

    return make


def files(folder):
    return {path.name: path.read_text() for path in folder.iterdir() if path.name != "config.json"}


@pytest.mark.parametrize("config", [V3, V32], ids=["v3", "v3.2"])
@pytest.mark.parametrize("kv_cache", ["FP8", None])
def test_a_checkpoint_without_the_file_gets_one_once(checkpoint, config, kv_cache):
    folder = checkpoint(config)
    change = quant_config_change(folder, kv_cache)

    assert files(folder) == {}  # nothing is written before it is applied
    assert write_quant_config(change) is None
    expected = {"quantization": {"quant_algo": "FP8_BLOCK_SCALES", "kv_cache_quant_algo": kv_cache}}
    before = files(folder)
    assert list(before) == [NAME]
    assert json.loads(before[NAME]) == expected
    assert stat.S_IMODE((folder / NAME).stat().st_mode) == 0o644

    again = quant_config_change(folder, kv_cache)
    assert not again.is_needed
    assert "needs no change" in again.summary
    assert write_quant_config(again) is None
    assert files(folder) == before


def test_other_keys_stay_and_the_file_as_it_was_is_kept(checkpoint):
    own = {"producer": {"name": "x"}, "quantization": {"quant_algo": None, "exclude_modules": ["lm_head"]}, "more": 1}
    folder = checkpoint(V3, own)
    (folder / NAME).chmod(0o640)

    backup = write_quant_config(quant_config_change(folder, "FP8"))
    written = json.loads((folder / NAME).read_text())
    assert written == own | {
        "quantization": {"quant_algo": "FP8_BLOCK_SCALES", "exclude_modules": ["lm_head"], "kv_cache_quant_algo": "FP8"}
    }
    assert backup == folder / f"{NAME}.bak"
    assert backup.read_text() == json.dumps(own)
    assert stat.S_IMODE((folder / NAME).stat().st_mode) == 0o640
    assert stat.S_IMODE(backup.stat().st_mode) == 0o640


def test_an_older_backup_is_never_replaced(checkpoint):
    folder = checkpoint(V3, {"quantization": {"kv_cache_quant_algo": "first"}})
    kept = []
    for kv_cache in ("FP8", None, "FP8"):
        change = quant_config_change(folder, kv_cache)
        was = (folder / NAME).read_text()
        kept.append(write_quant_config(change).name)
        assert (folder / kept[-1]).read_text() == was

    assert kept == [f"{NAME}.bak", f"{NAME}.bak.1", f"{NAME}.bak.2"]
    assert "first" in (folder / kept[0]).read_text()


@pytest.mark.parametrize("algo", ["NVFP4", "W4A8_AWQ", "MIXED_PRECISION"])
def test_only_the_kv_cache_changes_in_a_checkpoint_quantized_otherwise(checkpoint, algo):
    section = NVFP4 | {"quant_algo": algo}
    quant = {"producer": {"name": "modelopt"}, "quantization": section}
    folder = checkpoint({"architectures": ["DeepseekV3ForCausalLM"]}, quant)

    assert not quant_config_change(folder, "FP8").is_needed
    write_quant_config(quant_config_change(folder, None))
    assert json.loads((folder / NAME).read_text()) == quant | {"quantization": section | {"kv_cache_quant_algo": None}}


def test_a_link_into_a_cache_is_replaced_but_its_target_is_not_changed(checkpoint, tmp_path_factory):
    blob = tmp_path_factory.mktemp("blobs") / "blob"
    blob.write_text(json.dumps({"quantization": {"quant_algo": "FP8_BLOCK_SCALES"}}))
    folder = checkpoint()
    (folder / NAME).symlink_to(blob)

    write_quant_config(quant_config_change(folder, "FP8"))
    assert not (folder / NAME).is_symlink()
    assert "kv_cache" not in blob.read_text()


REFUSED = [  # config.json, hf_quant_config.json, and what is said
    ({"architectures": ["LlamaForCausalLM"]}, None, "found ['LlamaForCausalLM']"),
    ({}, None, "found []"),
    ({"architectures": "DeepseekV3ForCausalLM"}, None, "found 'Deep"),
    ("{", None, "config.json: expected JSON"),
    ("[]", None, "expected a JSON object, found list"),
    ({"architectures": V3["architectures"]}, None, "expected quant_method fp8"),
    (V3 | {"quantization_config": {"quant_method": "awq"}}, None, "found 'awq'"),
    (V3, "{", "hf_quant_config.json: expected JSON"),
    (V3, {"quantization": 3}, "expected an object under 'quantization'"),
    (V3, {"quantization": {"quant_algo": 5}}, "FP8_BLOCK_SCALES, MIXED_PRECISION"),
    (V3, {"quantization": {"quant_algo": ["NVFP4"]}}, "found ['NVFP4']"),
    (V3, {"quantization": {"quant_algo": "AWQ"}}, "found 'AWQ'"),
]


def test_other_checkpoints_and_broken_files_are_refused_in_one_line(checkpoint, subtests):
    for config, quant, expected in REFUSED:
        with subtests.test(expected):
            folder = checkpoint(config, quant)
            before = files(folder)
            with pytest.raises(UnusableCheckpointError) as caught:
                quant_config_change(folder, "FP8")
            assert expected in str(caught.value)
            assert "\n" not in str(caught.value)
            assert files(folder) == before


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UnusableCheckpointError, match=r"gone/config\.json: can't be read: No such file"):
        quant_config_change(tmp_path / "gone", "FP8")


def test_a_folder_that_can_not_be_written_is_an_error(checkpoint, tmp_path):
    change = quant_config_change(checkpoint(), "FP8")
    (tmp_path / "config.json").unlink()
    tmp_path.rmdir()

    with pytest.raises(UnusableCheckpointError, match=r"can't be written: .*; the checkpoint is as it was"):
        write_quant_config(change)
    tmp_path.mkdir()


def test_a_number_that_json_can_not_express_is_refused_in_one_line(checkpoint):
    folder = checkpoint(V3, '{"quantization": {}, "more": 1e999}')

    with pytest.raises(UnusableCheckpointError, match="holds a number that JSON can't express"):
        write_quant_config(quant_config_change(folder, "FP8"))
    assert list(files(folder)) == [NAME]


WRITE = 'write_quant_config(quant_config_change(folder, "FP8"))'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "point", "is_done"),
    [("fsync", "before-1", False), ("replace", "before-1", False), ("replace", "at-1", True)],
    ids=["writing", "before", "when-done"],
)
def test_an_interrupt_leaves_a_complete_file_and_no_scratch_file(checkpoint, call, point, is_done):
    own = json.dumps({"quantization": {"quant_algo": "FP8_BLOCK_SCALES"}})
    folder = checkpoint(V3, own)

    assert error_of(WRITE, folder, function=call, points=point) == "interrupted"
    assert sorted(files(folder)) == ([NAME, f"{NAME}.bak"] if is_done else [NAME])
    assert files(folder)[f"{NAME}.bak" if is_done else NAME] == own
