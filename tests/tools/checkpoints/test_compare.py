"""`checkpoint compare`: its figures against plain formulas, its experts against the reference engine."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from bench.synthetic_checkpoint import make_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from deepseek_backend.engines.reference.deepseek_config import read_config as engine_config
from deepseek_backend.engines.reference.feed_forward import MixtureOfExperts
from deepseek_backend.engines.reference.tensor_files import TensorFiles
from deepseek_triton_tools.checkpoints.compared_weight import compare_weights, weight_of
from deepseek_triton_tools.checkpoints.error_figures import OCTAVES, ErrorSums
from deepseek_triton_tools.checkpoints.moe_forward import moe_output, moe_weights, random_tokens
from deepseek_triton_tools.checkpoints.number_formats import GROUP, pack_int4, quantize_blocks
from deepseek_triton_tools.checkpoints.stored_tensors import open_checkpoint, read_config
from deepseek_triton_tools.cli.main import main
from support.small_checkpoint import TINY, write_act_scales, write_checkpoint
from support.waiting import wait_for

Floats = npt.NDArray[np.float32]
NAME = "model.layers.1.mlp.experts.2.down_proj.weight"
numbers = st.floats(-100, 100, width=32)


def quantized(target, *options):
    given = ["--output", str(target), "--device", "cpu", *map(str, options)]
    assert main(["checkpoint", "quantize", str(TINY), *given]) == 0
    return target


@pytest.fixture(scope="module")
def w4afp8(tmp_path_factory):
    folder = tmp_path_factory.mktemp("w4afp8")
    scales = write_act_scales(folder / "act_scales.safetensors", read_config(TINY))
    return quantized(folder / "checkpoint", "--to", "w4afp8", "--act-scales", scales, "--mtp", "drop")


def compared(capsys, *arguments):
    """The JSON document."""
    assert main(["checkpoint", "compare", *map(str, arguments), "--workers", "1", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# --- Figures ---


@pytest.mark.slow
@given(arrays(np.float32, 40, elements=numbers), arrays(np.float32, 40, elements=numbers), st.integers(0, 40))
def test_figures_are_those_of_the_formulas(a, b, cut):
    sums = ErrorSums()
    sums.add(a[:cut], b[:cut])
    rest = ErrorSums()
    rest.add(a[cut:], b[cut:])
    sums += rest

    wide_a, wide_d = a.astype(np.float64), (b - a).astype(np.float64)
    norm_a, norm_b, norm_d = (float(np.linalg.norm(one)) for one in (wide_a, b.astype(np.float64), wide_d))
    assert sums.num_values == 40
    assert sums.num_differing == np.count_nonzero(a != b) == sums.octaves.sum()
    assert sums.largest == np.abs(wide_d).max()
    if norm_d and norm_a and norm_b:
        assert sums.relative_rms == pytest.approx(norm_d / norm_a)
        assert sums.sqnr_db == pytest.approx(20 * math.log10(norm_a / norm_d), abs=1e-6)
        assert sums.cosine == pytest.approx(float(wide_a @ b) / (norm_a * norm_b), abs=1e-6)


def test_no_error_and_no_signal():
    zeros, ones = np.zeros(4, np.float32), np.ones(4, np.float32)
    same, from_zero, to_zero = ErrorSums(), ErrorSums(), ErrorSums()
    same.add(ones, ones)
    from_zero.add(zeros, ones)
    to_zero.add(ones, zeros)

    assert (same.relative_rms, same.sqnr_db, same.cosine) == (0, math.inf, 1)
    assert (from_zero.relative_rms, from_zero.sqnr_db, from_zero.cosine) == (math.inf, -math.inf, 0)
    assert (to_zero.relative_rms, to_zero.sqnr_db, to_zero.cosine) == (1, 0, 0)


def test_errors_are_counted_by_their_size():
    sums = ErrorSums()
    sums.add(np.ones(5, np.float32), np.array([1, 1.5, 1.25, 0.75, 1e9], np.float32))

    counts = dict(zip(OCTAVES, sums.octaves.tolist(), strict=True))
    assert {octave: count for octave, count in counts.items() if count} == {-1: 1, -2: 2, OCTAVES[-1]: 1}


def test_errors_of_a_weight_of_zeros_are_beyond_any_size():
    sums = ErrorSums()
    sums.add(np.zeros(3, np.float32), np.array([0, 1, -2], np.float32))

    assert sums.num_differing == sums.octaves[-1] == sums.octaves.sum() == 2


def test_values_that_are_not_finite_are_counted_and_left_out():
    sums = ErrorSums()
    sums.add(np.array([1, np.nan, 3], np.float32), np.array([2, 1, np.inf], np.float32))

    assert (sums.num_values, sums.num_not_finite, sums.relative_rms) == (3, 2, 1)


# --- Values that are clipped ---


def clipped(folder, weight, other):
    """How many values of the weight the other form of it clips."""
    a = write_checkpoint(folder / "a", {NAME: weight}, {})
    b = write_checkpoint(folder / "b", other, {})
    return compare_weights(*(weight_of(open_checkpoint(one), NAME) for one in (a, b))).num_clipped


def test_int4_clips_what_is_half_a_step_beyond_its_largest(tmp_path):
    weight = np.zeros((3, 2 * GROUP), np.float32)
    weight[1, GROUP : GROUP + 6] = 7.4, -7.4, 7.6, 100, -8, -9  # -8 is stored as such, though it is beyond 7
    values = np.clip(np.rint(weight), -8, 7).astype(np.int8)
    other = {NAME: pack_int4(values), f"{NAME}_scale_inv": np.ones((3, 2), np.float32)}

    assert clipped(tmp_path, weight, other) == 3


def test_fp8_clips_what_is_half_a_step_beyond_its_largest(tmp_path):
    weight = np.full((300, 130), 2.0, np.float32)
    _, scales = quantize_blocks(weight)
    weight[299, 129] = 100
    weight[5, 1] = 2.05  # 459 of its scale, less than half a step beyond 448
    weight[6, 1] = 2.08
    values = np.clip(weight / scales[0, 0], -448, 448).astype(ml_dtypes.float8_e4m3fn)

    assert clipped(tmp_path, weight, {NAME: values, f"{NAME}_scale_inv": scales}) == 2


# --- The mixture of experts ---


@pytest.mark.parametrize("layer", [1, 2])
def test_the_experts_are_those_of_the_reference_engine(layer):
    tensors, config = open_checkpoint(TINY), read_config(TINY)
    norm = weight_of(tensors, f"model.layers.{layer}.post_attention_layernorm.weight").read()
    tokens = random_tokens(norm, 50, seed=1)
    found = moe_output(tokens, layer, config, lambda name: weight_of(tensors, name).read())

    engine = MixtureOfExperts(engine_config(TINY), TensorFiles(TINY, (128, 128)), f"model.layers.{layer}.mlp")
    columns = np.ascontiguousarray(tokens.T)
    assert np.array_equal(found.experts, np.sort(engine.route(columns)[0], axis=1))
    expected = engine(columns).T
    assert np.abs(found.output - expected).max() < 1e-5 * np.abs(expected).max()


def test_random_tokens_have_the_size_that_the_layer_gets():
    norm = np.array([1, 2, 0.5, 3], np.float32)
    tokens = random_tokens(norm, 7, seed=3)

    assert np.sqrt(np.mean(np.square(tokens / norm), axis=1)) == pytest.approx(np.ones(7))
    assert np.array_equal(tokens, random_tokens(norm, 7, seed=3))
    assert not np.array_equal(tokens, random_tokens(norm, 7, seed=4))


def test_the_named_weights_are_those_that_are_read():
    tensors, config = open_checkpoint(TINY), read_config(TINY)
    named = set(moe_weights(1, config))
    read = set()

    def reading(name):
        read.add(name)
        return weight_of(tensors, name).read()

    moe_output(random_tokens(np.ones(config["hidden_size"], np.float32), 100, seed=0), 1, config, reading)
    assert read == named


# --- The command ---


@pytest.mark.slow
def test_a_checkpoint_is_equal_to_itself(capsys):
    found = compared(capsys, TINY, TINY)

    assert all(one["differing"] == 0 for kind in ("parts", "moe_outputs", "weights") for one in found[kind])
    assert all(one["relative_rms"] == 0 and one["sqnr_db"] is None for one in found["weights"])
    assert [one["same_experts"] for one in found["moe_outputs"]] == [1, 1]
    stored = open_checkpoint(TINY)
    assert {one["name"] for one in found["weights"]} == {name for name in stored if not name.endswith("_scale_inv")}
    assert found["only_in_source"] == found["only_in_other"] == found["other_shapes"] == []


@pytest.mark.slow
def test_w4afp8_changes_the_experts_and_nothing_else(capsys, w4afp8):
    found = compared(capsys, TINY, w4afp8)

    errors = {one["part"]: one for one in found["parts"]}
    assert [part for part, one in errors.items() if one["differing"]] == ["routed experts"]
    # A step is a seventh of the largest of 128 values, which is about 2.8 times their RMS.
    assert 0.08 < errors["routed experts"]["relative_rms"] < 0.2
    assert errors["routed experts"]["clipped"] == 0
    assert sum(errors["routed experts"]["errors_by_octave"]) == errors["routed experts"]["differing"]
    assert [one["layer"] for one in found["expert_layers"]] == [1, 2]
    assert all(0.05 < one["relative_rms"] < 0.2 for one in found["moe_outputs"])
    experts = [one for one in found["weights"] if one["part"] == "routed experts"]
    assert {tuple(one["precisions"]) for one in experts} == {("FP8", "INT4")}
    assert "MTP layer" not in errors
    assert all(name.startswith("model.layers.3.") for name in found["only_in_source"])
    assert found["only_in_source"]


@pytest.mark.slow
def test_the_figures_of_a_weight_are_those_of_its_values(capsys, w4afp8):
    found = compared(capsys, TINY, w4afp8, "--layers", "1")

    (figures,) = (one for one in found["weights"] if one["name"] == NAME)
    a, b = (weight_of(open_checkpoint(folder), NAME).read().astype(np.float64) for folder in (TINY, w4afp8))
    assert figures["relative_rms"] == pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a), rel=1e-5)
    assert figures["largest"] == pytest.approx(np.abs(b - a).max(), rel=1e-5)
    assert figures["values"] == a.size


@pytest.mark.slow
def test_layers_and_samples(capsys):
    found = compared(capsys, TINY, TINY, "--layers", "0,2-2", "--sample", "2")

    names = [one["name"] for one in found["weights"]]
    assert {name.split(".")[2] for name in names} == {"0", "2"}
    by_part = {
        one["part"]: [each for each in found["weights"] if each["part"] == one["part"]] for one in found["parts"]
    }
    assert {part: len(weights) for part, weights in by_part.items()} == dict.fromkeys(by_part, 2)
    assert len(names) + found["left_out"] == sum(not name.endswith("_scale_inv") for name in open_checkpoint(TINY))
    assert [one["layer"] for one in found["moe_outputs"]] == [2]


@pytest.mark.slow
def test_the_second_checkpoint_needs_no_config(capsys, tmp_path):
    shutil.copy(TINY / "model.safetensors", tmp_path)
    found = compared(capsys, TINY, tmp_path, "--sample", "1")

    assert not any(one["differing"] for kind in ("parts", "moe_outputs") for one in found[kind])
    assert len(found["moe_outputs"]) == 2


@pytest.mark.slow
def test_what_people_read(capsys, tmp_path, w4afp8):
    page = tmp_path / "error.html"
    assert main(["checkpoint", "compare", str(TINY), str(w4afp8), "--report", str(page)]) == 0

    out = capsys.readouterr().out
    assert "FP8 → INT4" in out
    assert "layer 2" in out
    assert "Only the first checkpoint has 44 tensors: model.layers.3" in out
    text = page.read_text()
    assert "Distribution of the errors" in text
    figures = json.loads(text.partition('id="pictures">')[2].partition("</script>")[0])
    assert [len(figure["data"]) for figure in figures] == [1, 1]
    assert sum(figures[0]["data"][0]["y"]) == pytest.approx(1, abs=0.2)


@pytest.mark.slow
def test_experts_that_overflow_are_told(capfd, tmp_path):
    stored = open_checkpoint(TINY)
    names = [name for name in stored if name.startswith("model.layers.1.")]
    weights = {name: stored[name].read() for name in names}
    for name in names:
        if name.endswith(("gate_proj.weight_scale_inv", "up_proj.weight_scale_inv")):
            weights[name] = np.full_like(weights[name], 1e37)
    folder = write_checkpoint(tmp_path / "large", weights, read_config(TINY))

    assert main(["checkpoint", "compare", str(folder), str(folder), "--sample", "1", "--workers", "1"]) == 0
    out, err = capfd.readouterr()
    assert re.search(r"\n  1 +not finite +-", out)
    assert "The experts' output in layer 1 has values that are not finite, which are left out." in out
    assert "Warning" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone", "away"], r"gone: expected a checkpoint's folder, found nothing.*; away: expected"),
        ([TINY, TINY, "--layers", "7-8"], "--layers: expected layers of .*, found no weight"),
    ],
)
def test_refusals(capsys, arguments, message):
    assert main(["checkpoint", "compare", *map(str, arguments)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line)


@pytest.mark.parametrize("layers", ["", "3-1", "x", "1,,2", "-1"])
def test_layers_that_are_none(layers):
    with pytest.raises(SystemExit) as caught:
        main(["checkpoint", "compare", str(TINY), str(TINY), f"--layers={layers}"])
    assert caught.value.code == 2


def test_other_models_and_damaged_scales(tmp_path, capsys):
    weight = np.ones((128, 128), np.float32)
    values, scales = quantize_blocks(weight)
    a = write_checkpoint(tmp_path / "a", {NAME: weight, "x": weight}, {})
    bad = write_checkpoint(tmp_path / "bad", {NAME: values, f"{NAME}_scale_inv": scales.repeat(2, axis=0)}, {})
    unlike = write_checkpoint(tmp_path / "unlike", {"x": weight[:1]}, {})

    assert main(["checkpoint", "compare", str(a), str(bad)]) == 1
    assert f"{NAME}, F8_E4M3 [128, 128]: expected its scales as F32 [1, 1], found F32 [2, 1]" in capsys.readouterr().err
    assert main(["checkpoint", "compare", str(unlike), str(bad)]) == 1
    assert "expected two checkpoints of one model, found no weight that both have" in capsys.readouterr().err


@pytest.mark.parametrize("report", ["gone/error.html", ".", "a-file/error.html"])
def test_a_report_that_cannot_be_written_is_told_first(tmp_path, capsys, report):
    (tmp_path / "a-file").touch()
    assert main(["checkpoint", "compare", "no-source", "no-other", "--report", str(tmp_path / report)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search("--report: expected a file in a folder that can be written", line)


@pytest.mark.slow
def test_the_figures_are_there_when_the_report_fails_late(tmp_path, capsys):
    report = tmp_path / ("x" * 250)  # its scratch name is too long
    assert main(["checkpoint", "compare", str(TINY), str(TINY), "--sample", "1", "--report", str(report)]) == 1
    out, err = capsys.readouterr()
    assert "routed experts" in out
    assert "can't be written" in err


STRANGE_NAMES = ["a\nb", "a\0b", "model.layers.0.²", "model.layers.0.x.y", f"model.{'9' * 5000}.x", "²"]


@pytest.mark.slow
def test_strange_names_and_shapes_are_compared(tmp_path, capsys):
    one = np.ones((2, 2), np.float32)
    empty = {"lm_head.weight": np.ones((4, 0), np.float32)}
    folder = write_checkpoint(
        tmp_path / "a", {**empty, **dict.fromkeys(STRANGE_NAMES, one)}, {"num_hidden_layers": 10**10}
    )
    path = folder / "model-00001-of-000001.safetensors"
    rows = str(2**62).encode()
    path.write_bytes(with_rows(path.read_bytes(), b"[4,0]", b"[" + rows + b",0]"))

    found = compared(capsys, folder, folder)

    assert {one["name"]: one["values"] for one in found["weights"]} == {
        "lm_head.weight": 0,
        **dict.fromkeys(STRANGE_NAMES, 4),
    }
    assert main(["checkpoint", "compare", str(folder), str(folder), "--workers", "1"]) == 0


def with_rows(content, old, new):
    """Put another shape into the header of a safetensors file."""
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].replace(old, new)
    assert header != content[8 : 8 + length]
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": "3"}, "config.json: expected num_hidden_layers as a whole number, found '3'"),
        ({"n_group": "8"}, "layer 1: expected experts that fit the numbers in config.json"),
        ({"n_group": 3, "topk_group": 1}, "layer 1: expected experts that fit the numbers in config.json"),
        ({"routed_scaling_factor": "x"}, "layer 1: expected experts that fit the numbers in config.json"),
    ],
)
def test_numbers_that_fit_no_weights(tmp_path, capsys, changes, message):
    folder = tmp_path / "tiny"
    shutil.copytree(TINY, folder)
    (folder / "config.json").write_text(json.dumps(read_config(TINY) | changes))

    assert (
        main(["checkpoint", "compare", str(folder), str(TINY), "--layers", "1", "--sample", "1", "--workers", "1"]) == 1
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.slow
def test_config_json_may_ask_for_any_number_of_layers_and_experts(tmp_path, capsys):
    shutil.copytree(TINY, tmp_path / "tiny")
    many = {"num_hidden_layers": 10**10, "n_routed_experts": 10**10}
    (tmp_path / "tiny/config.json").write_text(json.dumps(read_config(TINY) | many))

    assert compared(capsys, tmp_path / "tiny", TINY, "--sample", "1")["moe_outputs"] == []


# --- How it ends ---


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint of zeros that keeps the processes busy for many seconds."""
    folder = tmp_path_factory.mktemp("large") / "checkpoint"
    make_checkpoint(folder, size=20 * 10**9, sparse=True)
    return folder


def processes(pattern, parent):
    """The children of a process whose command line has the pattern."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            command = (path.parent / "cmdline").read_text()
        except OSError:  # it has ended since
            continue
        if int(fields[1]) == parent and pattern in command:
            found.append(int(path.parent.name))
    return found


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "number", "code", "said"),
    [
        ("main", signal.SIGINT, 130, ""),
        ("main", signal.SIGKILL, -signal.SIGKILL, ""),
        ("worker", signal.SIGKILL, 1, "a process that compares was killed; was memory short?"),
    ],
)
def test_no_process_outlives_the_command(large, victim, number, code, said):
    command = [sys.executable, "-m", "deepseek_triton_tools.cli.main", "checkpoint", "compare", str(large), str(large)]
    with subprocess.Popen([*command, "--workers", "2"], stderr=subprocess.PIPE, text=True) as process:
        workers = wait_for(lambda: found if len(found := processes("spawn_main", process.pid)) == 2 else None)
        os.kill(process.pid if victim == "main" else workers[1], number)
        _, err = process.communicate()

    assert process.returncode == code
    assert said in err
    assert "Traceback" not in err
    wait_for(lambda: True if not any(map(is_running, workers)) else None)
