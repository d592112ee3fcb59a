"""The reference engine's log-probabilities are transformers', and a checkpoint that it can't compute is refused."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from deepseek_backend.engines.reference import checkpoint_loading
from deepseek_backend.engines.reference.checkpoint_files import TensorFiles, read_config
from deepseek_backend.engines.reference.checkpoint_loading import load_checkpoint
from deepseek_backend.engines.reference.deepseek_model import DeepseekModel, ModelRunner
from deepseek_backend.engines.reference.token_sampling import log_softmax
from deepseek_backend.errors import EngineError
from deepseek_triton_build import model_repository
from support.checkpoint_variants import VARIANTS, write_variant
from support.record_vectors import RECORDED
from support.tensor_writing import as_bfloat16, as_float32, as_fp8, write_tensors

TOLERANCE = 1e-4
"""Largest absolute difference of a log-probability."""
TINY = model_repository() / "tensorrt_llm/1/tiny"


def load(folder):
    config = read_config(folder)
    return DeepseekModel(config, TensorFiles(folder, config.weight_block_size))


def logprobs_of(model, token_ids, num_prompt):
    """Return the log-probabilities [len(token_ids), vocab_size]: a prefill of `num_prompt` tokens, then decodes.

    A row that is two tokens long runs beside the decodes.
    """
    runner = ModelRunner(model, 2)
    rows = [runner.logits(runner.prefill(token_ids[:num_prompt]))]
    runner.prefill([1, 2])
    for token_id in token_ids[num_prompt:]:
        rows.append(runner.logits(runner.decode([token_id, 3]))[:1])
    return log_softmax(np.concatenate(rows))


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("variant")
    write_variant(request.param, folder)
    return request.param, folder


@pytest.mark.slow
def test_logprobs_are_those_that_transformers_computed(variant):
    name, folder = variant
    for num_prompt in (200, 300) if name == "production" else (1, 200, 300):
        compare_with_recorded(load(folder), name, num_prompt)


@pytest.mark.slow
def test_logprobs_of_the_embedded_checkpoint_are_those_that_transformers_computed():
    compare_with_recorded(load(TINY), "tiny", 200)


def compare_with_recorded(model, name, num_prompt):
    recorded = np.load(RECORDED / f"{name}.npz")
    got = logprobs_of(model, recorded["token_ids"].tolist(), num_prompt)[recorded["positions"]]
    assert np.abs(got - recorded["logprobs"]).max() < TOLERANCE


def test_every_fp8_number_is_read():
    """The largest is 448, the smallest 2^-9; there is no infinity."""
    from deepseek_backend.engines.reference.checkpoint_files import _E4M3

    assert _E4M3[[0x00, 0x01, 0x07, 0x08, 0x38, 0x3C, 0x7E]].tolist() == [0, 2**-9, 7 * 2**-9, 2**-6, 1, 1.5, 448]
    assert np.isnan(_E4M3[[0x7F, 0xFF]]).all()
    assert (_E4M3[1:0x7F] == -_E4M3[0x81:0xFF]).all()
    assert (np.diff(_E4M3[:0x7F]) > 0).all()


def test_blocks_of_fp8_have_their_own_scales_and_need_them(tmp_path):
    """The last blocks of a matrix may be cut."""
    values = np.random.RandomState(0).standard_normal((130, 300)).astype(np.float32)
    values[:128, :128] *= 100
    write_tensors(tmp_path / "model.safetensors", as_fp8("a", values))
    got = TensorFiles(tmp_path, (128, 128)).get("a", 130, 300)
    assert np.abs(got / values - 1)[np.abs(values) > 0.1].max() < 2**-4
    write_tensors(tmp_path / "model.safetensors", {"a": as_fp8("a", values)["a"], "b": as_float32(values)})
    with pytest.raises(EngineError, match="the checkpoint has no tensor a_scale_inv"):
        TensorFiles(tmp_path, (128, 128)).get("a", 130, 300)


def test_bfloat16_and_half_precision_are_read(tmp_path):
    values = np.array([[1.0, -2.5], [0.0078125, 3e38]], np.float32)
    half = ("F16", np.array([1.5, -0.25], np.float16))
    write_tensors(tmp_path / "model.safetensors", {"a": as_bfloat16(values), "b": half})
    files = TensorFiles(tmp_path, (128, 128))
    np.testing.assert_allclose(files.get("a", 2, 2), values, rtol=2**-8)
    assert files.get("b", 2).tolist() == [1.5, -0.25]


@pytest.fixture
def folder(tmp_path):
    """Return a small checkpoint, for a single test to damage."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write_variant("without-yarn", folder, vocab_size=40)
    return folder


CHANGES = [  # of config.json
    ({"architectures": ["LlamaForCausalLM"]}, r"architectures: expected \['DeepseekV3For.*got \['LlamaFor"),
    ({"architectures": None}, r"architectures: expected .*, got None"),
    ({"topk_method": "greedy"}, "topk_method: expected 'noaux_tc', got 'greedy'"),
    ({"scoring_func": "softmax"}, "scoring_func: expected 'sigmoid', got 'softmax'"),
    ({"rope_interleave": False}, "rope_interleave: expected True, got False"),
    ({"quantization_config": {"quant_method": "awq"}}, "quant_method: expected fp8, got 'awq'"),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling.type: expected yarn, got 'linear'"),
    ({"n_group": 8}, "n_group: expected groups of two or more of the 8 experts, of equal size, got 8 groups"),
    ({"kv_lora_rank": None}, r"keys are missing: 'kv_lora_rank'"),
    ({"hidden_size": 80}, r"embed_tokens.weight: expected shape \[40, 80\] by config.json, got \[40, 64\]"),
    ({"num_hidden_layers": 3}, r"no tensor model.layers.2.input_layernorm.weight; config.json asks for it"),
]


def test_a_model_that_it_can_not_compute_is_refused(folder, subtests):
    config = json.loads((folder / "config.json").read_text())
    for changes, problem in CHANGES:
        (folder / "config.json").write_text(json.dumps(config | changes))
        with subtests.test(problem), pytest.raises(EngineError, match=problem):
            load(folder)


POINTER = b"version https://git-lfs.github.com/spec/v1"
DAMAGES = [  # the bytes of the file after it, and what is said
    (None, "model.safetensors: can't be read: No such file"),
    (lambda whole: whole[:-100], "model.safetensors: it is cut: it has .* bytes, and .* ends at byte"),
    (lambda whole: whole[:1000], "model.safetensors: no safetensors file: its header is not JSON"),
    (lambda whole: POINTER, "it begins with .* as its header's length"),
]


def test_a_damaged_file_is_refused_by_name(folder, subtests):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for damage, problem in DAMAGES:
        path.unlink(missing_ok=True)
        if damage:
            path.write_bytes(damage(whole))
        with subtests.test(problem), pytest.raises(EngineError, match=problem):
            load(folder)
    write_tensors(path, {"model.embed_tokens.weight": ("I8", np.zeros((40, 64), np.int8))})
    with pytest.raises(EngineError, match=r"model.embed_tokens.weight: expected a data type of F8_E4M3, .*, got I8"):
        load(folder)


@pytest.fixture
def listed(random_checkpoint, tmp_path):
    """Return a checkpoint with checksums.sha256, as sha256sum writes it."""
    folder = Path(shutil.copytree(random_checkpoint, tmp_path / "listed"))
    names = ("config.json", "model.safetensors", "tokenizer.json")
    lines = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (folder / "checksums.sha256").write_text("".join(lines))
    return folder


@pytest.mark.slow
def test_a_file_that_is_not_the_listed_one_is_refused_before_anything_is_loaded(listed, monkeypatch, subtests):
    assert load_checkpoint(str(listed), version_dir=Path()).vocab_size > 800

    def loaded(_):
        raise AssertionError("loaded before the checksums were compared")

    monkeypatch.setattr(checkpoint_loading, "read_config", loaded)
    for name in ("model.safetensors", "tokenizer.json"):
        whole = (listed / name).read_bytes()
        wrong = f"{name} is not the file that it should be, by checksums.sha256"
        for damaged, problem in (whole[:-100], wrong), (whole[:-1] + b"?", wrong), (None, f"{name} is missing"):
            (listed / name).unlink()
            if damaged:
                (listed / name).write_bytes(damaged)
            with subtests.test(problem), pytest.raises(EngineError, match=rf"can't load the checkpoint .*: {problem}"):
                load_checkpoint(str(listed), version_dir=Path())
            (listed / name).write_bytes(whole)


def test_add_bos_token_counts_where_the_tokenizer_adds_none(random_checkpoint, tmp_path):
    """DeepSeek's own tokenizer.json does not put the token before a text; tokenizer_config.json says that it goes."""
    folder = Path(shutil.copytree(random_checkpoint, tmp_path / "checkpoint"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text()) | {"post_processor": None}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    document = json.loads((folder / "tokenizer_config.json").read_text())
    for given in (True, False, None):
        (folder / "tokenizer_config.json").write_text(json.dumps(document | {"add_bos_token": given}))
        checkpoint = load_checkpoint(str(folder), version_dir=Path())
        plain = checkpoint.encode("Hello", False)
        assert checkpoint.encode("Hello", True) == ([0, *plain] if given else plain)
        assert checkpoint.bos_token == (document["bos_token"] if given else "")


@pytest.mark.slow
def test_the_number_of_threads_is_that_of_the_library():
    """It is read back by the library's own function, in a process of its own."""
    code = """
import ctypes, numpy
from pathlib import Path
from deepseek_backend.engines.reference.reference_engine import set_blas_threads
set_blas_threads(1)
paths = {line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if "openblas" in line}
for path in paths:
    names = ("openblas_get_num_threads64_", "scipy_openblas_get_num_threads64_", "openblas_get_num_threads")
    print(*[getattr(ctypes.CDLL(path), name)() for name in names if hasattr(ctypes.CDLL(path), name)])
"""
    environment = {"PYTHONPATH": str(model_repository() / "tensorrt_llm/1"), "OPENBLAS_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    if not done.stdout:
        pytest.skip("numpy does not use OpenBLAS here")
    assert done.stdout == "1\n"
