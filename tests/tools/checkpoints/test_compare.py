"""`checkpoint compare`: its figures against plain formulas, its experts against the reference engine."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from bench.synthetic_checkpoint import make_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from deepseek_backend.engines.reference.checkpoint_files import TensorFiles
from deepseek_backend.engines.reference.checkpoint_files import read_config as engine_config
from deepseek_backend.engines.reference.deepseek_model import MixtureOfExperts
from deepseek_triton_tools.checkpoints.number_formats import GROUP, pack_int4, quantize_blocks
from deepseek_triton_tools.checkpoints.stored_tensors import open_checkpoint, read_config
from deepseek_triton_tools.checkpoints.stored_weights import weight_of
from deepseek_triton_tools.checkpoints.weight_comparison import moe_output, moe_weights, random_tokens
from deepseek_triton_tools.checkpoints.weight_errors import OCTAVES, ErrorSums, compare_weights
from deepseek_triton_tools.cli.main import main
from deepseek_triton_tools.host.processes import is_running
from support.small_checkpoint import TINY, write_act_scales, write_checkpoint
from support.waiting import wait_for

Floats = npt.NDArray[np.float32]
NAME = "model.layers.1.mlp.experts.2.down_proj.weight"
numbers = st.floats(-100, 100, width=32)


@pytest.fixture(scope="module")
def w4afp8(tmp_path_factory):
    folder = tmp_path_factory.mktemp("w4afp8")
    scales = write_act_scales(folder / "act_scales.safetensors", read_config(TINY))
    options = ["--to", "w4afp8", "--act-scales", str(scales), "--mtp", "drop", "--device", "cpu"]
    assert main(["checkpoint", "quantize", str(TINY), *options, "--output", str(folder / "checkpoint")]) == 0
    return folder / "checkpoint"


@pytest.fixture
def compared(checkpoint):
    """Compares two checkpoints, and returns the JSON document."""
    return lambda *words: json.loads(checkpoint("compare", *words, "--workers", "1", "--json").out)


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


def errors(a, b):
    sums = ErrorSums()
    sums.add(np.array(a, np.float32), np.array(b, np.float32))
    return sums


def test_no_error_and_no_signal():
    cases = {
        ((1, 1), (1, 1)): (0, math.inf, 1),
        ((0, 0), (1, 1)): (math.inf, -math.inf, 0),
        ((1, 1), (0, 0)): (1, 0, 0),
    }
    found = {case: errors(*case) for case in cases}
    assert {case: (sums.relative_rms, sums.sqnr_db, sums.cosine) for case, sums in found.items()} == cases


def test_errors_are_counted_by_their_size():
    counts = dict(zip(OCTAVES, errors([1] * 5, [1, 1.5, 1.25, 0.75, 1e9]).octaves.tolist(), strict=True))
    assert {octave: count for octave, count in counts.items() if count} == {-1: 1, -2: 2, OCTAVES[-1]: 1}
    # Those of a weight of zeros are beyond any size.
    zeros = errors([0, 0, 0], [0, 1, -2])
    assert zeros.num_differing == zeros.octaves[-1] == zeros.octaves.sum() == 2
    # Values that are not finite are counted, and left out.
    infinite = errors([1, np.nan, 3], [2, 1, np.inf])
    assert (infinite.num_values, infinite.num_not_finite, infinite.relative_rms) == (3, 2, 1)


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


def test_the_experts_are_those_of_the_reference_engine():
    layer = 2
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
def test_a_checkpoint_is_equal_to_itself(compared):
    found = compared(TINY, TINY)

    assert all(one["differing"] == 0 for kind in ("parts", "moe_outputs", "weights") for one in found[kind])
    assert all(one["relative_rms"] == 0 and one["sqnr_db"] is None for one in found["weights"])
    assert [one["same_experts"] for one in found["moe_outputs"]] == [1, 1]
    assert {one["name"] for one in found["weights"]} == {
        name for name in open_checkpoint(TINY) if not name.endswith("_scale_inv")
    }
    assert found["only_in_source"] == found["only_in_other"] == found["other_shapes"] == []


@pytest.mark.slow
def test_w4afp8_changes_the_experts_and_nothing_else(compared, w4afp8):
    found = compared(TINY, w4afp8)

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
    # The figures of a weight are those of its values.
    (figures,) = (one for one in found["weights"] if one["name"] == NAME)
    a, b = (weight_of(open_checkpoint(folder), NAME).read().astype(np.float64) for folder in (TINY, w4afp8))
    assert figures["relative_rms"] == pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a), rel=1e-5)
    assert figures["largest"] == pytest.approx(np.abs(b - a).max(), rel=1e-5)
    assert figures["values"] == a.size


@pytest.mark.slow
def test_layers_and_samples(compared, tmp_path):
    found = compared(TINY, TINY, "--layers", "0,2-2", "--sample", "2")
    names = [one["name"] for one in found["weights"]]
    assert {name.split(".")[2] for name in names} == {"0", "2"}
    of_part = Counter(one["part"] for one in found["weights"])
    assert of_part == {one["part"]: 2 for one in found["parts"]}
    assert len(names) + found["left_out"] == sum(not name.endswith("_scale_inv") for name in open_checkpoint(TINY))
    assert [one["layer"] for one in found["moe_outputs"]] == [2]
    # The second checkpoint needs no config.
    shutil.copy(TINY / "model.safetensors", tmp_path)
    found = compared(TINY, tmp_path, "--sample", "1")
    assert not any(one["differing"] for kind in ("parts", "moe_outputs") for one in found[kind])
    assert len(found["moe_outputs"]) == 2


@pytest.mark.slow
def test_what_people_read(checkpoint, tmp_path, w4afp8):
    page = tmp_path / "error.html"
    out = checkpoint("compare", TINY, w4afp8, "--sample", "4", "--report", page).out
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
    weights = {name: stored[name].read() for name in stored if name.startswith("model.layers.1.")}
    for name in weights:
        if name.endswith(("gate_proj.weight_scale_inv", "up_proj.weight_scale_inv")):
            weights[name] = np.full_like(weights[name], 1e37)
    folder = str(write_checkpoint(tmp_path / "large", weights, read_config(TINY)))

    assert main(["checkpoint", "compare", folder, folder, "--sample", "1", "--workers", "1"]) == 0
    out, err = capfd.readouterr()
    assert re.search(r"\n  1 +not finite +-", out)
    assert "The experts' output in layer 1 has values that are not finite, which are left out." in out
    assert "Warning" not in err


@pytest.mark.slow
def test_refusals(refused, tmp_path, subtests):
    weight = np.ones((128, 128), np.float32)
    values, scales = quantize_blocks(weight)
    a = write_checkpoint(tmp_path / "a", {NAME: weight, "x": weight}, {})
    bad = write_checkpoint(tmp_path / "bad", {NAME: values, f"{NAME}_scale_inv": scales.repeat(2, axis=0)}, {})
    unlike = write_checkpoint(tmp_path / "unlike", {"x": weight[:1]}, {})
    cases = [
        (("gone", "away"), 1, "gone: expected a checkpoint's folder, found nothing.*; away: expected"),
        ((TINY, TINY, "--layers", "7-8"), 1, "--layers: expected layers of .*, found no weight"),
        ((a, bad), 1, rf"{NAME}, F8_E4M3 \[128, 128\]: expected its scales as F32 \[1, 1\], found F32 \[2, 1\]"),
        ((unlike, bad), 1, "expected two checkpoints of one model"),
        # A report that can't be written is told first.
        *(
            (("no-source", "no-other", "--report", tmp_path / report), 2, "--report: expected a file in a folder")
            for report in ("gone/error.html", ".", "a/config.json/error.html")
        ),
    ]
    for words, code, message in cases:
        with subtests.test(" ".join(map(str, words))):
            assert re.search(message, refused("compare", *words, code=code))
    for layers in ("", "3-1", "x", "1,,2", "-1"):
        with subtests.test(layers=layers), pytest.raises(SystemExit, match="2"):
            main(["checkpoint", "compare", str(TINY), str(TINY), f"--layers={layers}"])


@pytest.mark.slow
def test_the_figures_are_there_when_the_report_fails_late(tmp_path, checkpoint):
    report = tmp_path / ("x" * 250)  # its scratch name is too long
    out, err = checkpoint("compare", TINY, TINY, "--sample", "1", "--workers", "1", "--report", report, code=1)
    assert "routed experts" in out
    assert "can't be written" in err


STRANGE_NAMES = ["a\nb", "a\0b", "model.layers.0.²", "model.layers.0.x.y", f"model.{'9' * 5000}.x", "²"]


@pytest.mark.slow
def test_strange_names_and_shapes_are_compared(tmp_path, compared, checkpoint):
    one = np.ones((2, 2), np.float32)
    empty = {"lm_head.weight": np.ones((4, 0), np.float32)}
    tensors = {**empty, **dict.fromkeys(STRANGE_NAMES, one)}
    folder = write_checkpoint(tmp_path / "a", tensors, {"num_hidden_layers": 10**10})
    path = folder / "model-00001-of-000001.safetensors"
    path.write_bytes(with_rows(path.read_bytes(), b"[4,0]", b"[%d,0]" % 2**62))

    values = {one["name"]: one["values"] for one in compared(folder, folder)["weights"]}
    assert values == {"lm_head.weight": 0, **dict.fromkeys(STRANGE_NAMES, 4)}
    checkpoint("compare", folder, folder, "--workers", "1")


def with_rows(content, old, new):
    """Put another shape into the header of a safetensors file."""
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].replace(old, new)
    assert header != content[8 : 8 + length]
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


@pytest.mark.slow
def test_numbers_of_config_json_that_fit_no_weights(tmp_path, refused, compared, subtests):
    folder = shutil.copytree(TINY, tmp_path / "tiny")
    cases = {
        "config.json: expected num_hidden_layers as a whole number, found '3'": {"num_hidden_layers": "3"},
        "layer 1: expected experts that fit the numbers": {"n_group": "8"},
        "layer 1: expected experts that fit the numbers in": {"n_group": 3, "topk_group": 1},
        "layer 1: expected experts that fit the numbers in config.json": {"routed_scaling_factor": "x"},
    }
    for message, changes in cases.items():
        with subtests.test(str(changes)):
            (folder / "config.json").write_text(json.dumps(read_config(TINY) | changes))
            options = ("--layers", "1", "--sample", "1", "--workers", "1")
            assert message in refused("compare", folder, TINY, *options)
    many = {"num_hidden_layers": 10**10, "n_routed_experts": 10**10}
    (folder / "config.json").write_text(json.dumps(read_config(TINY) | many))
    assert compared(folder, TINY, "--sample", "1")["moe_outputs"] == []


# --- How it ends ---


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint of zeros that keeps the processes busy for many seconds."""
    folder = tmp_path_factory.mktemp("large") / "checkpoint"
    fewer = {"num_hidden_layers": 4, "n_routed_experts": 256, "vocab_size": 1280}
    make_checkpoint(folder, size=None, sparse=True, fewer=fewer)
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
