"""What can be tested without a GPU of the runs through Triton: figures, tables, prompts, checkpoints and packing."""

import json
import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from gpu.beside_vllm_backend import PROMPT_TOKENS, prompts
from gpu.compile_v4_kernels import num_splits
from gpu.full_size import (
    MODELS,
    checkpoint,
    engine_arguments,
    loads_of,
    memory_found,
    memory_planned,
    parse_arguments,
    prepare,
    warm_lengths,
)
from gpu.gpu_report import ratios, tables
from gpu.hopper_only import MAGIC, keep_hopper
from gpu.measuring import record
from gpu.served_engines import TINY, their_repository
from gpu.token_streams import Load, Prompt, StreamTimes, Target, figures
from tokenizers import Tokenizer

FOLDER = Path(__file__).parent
MS = 1_000_000


def stream(*arrivals_ms, began_ms=0, tokens=None, error=""):
    arrivals = tuple(int(each * MS) for each in arrivals_ms)
    return StreamTimes(began_ms * MS, arrivals, tokens or len(arrivals), error)


def test_figures_of_two_streams():
    found = figures([stream(10, 20, 30), stream(25, 45, began_ms=5, tokens=5)])
    assert (found.tokens, found.seconds, found.tokens_per_second) == (8, 0.045, pytest.approx(8 / 0.045))
    assert (found.ttft_ms["p50"], found.ttft_ms["p100"]) == (15, 20)
    assert (found.itl_ms["p50"], found.itl_ms["p100"]) == (10, 20)
    assert (found.tpot_ms["p50"], found.tpot_ms["p100"]) == (7.5, 10)
    assert found.responses_per_token == pytest.approx(5 / 8)
    assert found.errors == ()
    # A failed one counts no tokens; one whose tokens came in one response counts.
    found = figures([stream(10, 20), stream(40, tokens=8), stream(10, error="refused"), stream()])
    assert (found.tokens, found.errors, found.tpot_ms["p100"]) == (10, ("no response", "refused"), 10)
    with pytest.raises(ValueError, match="refused"):
        figures([stream(error="refused")])


def measured(system, rate, round_number=1):
    load = Load(streams=2, requests=1, prompt_tokens=8, output_tokens=3)
    spacing = 1000 / rate
    samples = [stream(*(spacing * number for number in (1, 2, 3))) for _ in range(2)]
    cpu = {"alone": 0.3, "engine": 1.0} if system == "engine" else {"server": 0.2, "stub": 0.4, "engine": 1.0}
    return record(round_number, system, load, samples, cpu)


def test_a_table_has_medians_with_their_spread_and_ratios():
    runs = [json.loads(json.dumps(measured("ours", rate))) for rate in (100, 200, 300)] + [measured("engine", 100)]
    rows = [line for line in tables(runs) if line.startswith("| ours")]
    assert len(rows) == 1
    assert rows[0].startswith("| ours | 3 | 400 (200-600) | 5.00 (3.33-10.0) |")
    (row,) = [line for line in ratios(runs, "ours", "engine") if line.startswith("| 2 x 8/3")]
    assert row.startswith("| 2 x 8/3 | 2.00x | 0.50x |")
    assert row.endswith("| 2.00x |")


def test_prompts_have_the_same_number_of_tokens_and_differ():
    found = prompts(TINY / "tokenizer.json", 50)
    known = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    assert {len(known.encode(prompt.text).ids) for prompt in found} == {PROMPT_TOKENS}
    assert len(set(found)) == 50


def test_a_request_has_what_both_backends_take():
    for protocol in ("grpc", "http"):
        request = Target(protocol=protocol, port=1, model="m").request(Prompt("Hello").fields(7))
        for part in (b"text_input", b"sampling_parameters", b"max_tokens", b"ignore_eos", b"stream", b"Hello"):
            assert part in request


@pytest.mark.parametrize(("name", "layers", "width"), [("deepseek-r1", 61, 7168), ("deepseek-v4-flash", 43, 4096)])
def test_the_full_size_checkpoint_has_the_published_shape_and_a_text_for_every_id(tmp_path, name, layers, width):
    folder = checkpoint(tmp_path / name, name)
    config = json.loads((folder / "config.json").read_text())
    shape = SimpleNamespace(**config)
    assert (shape.num_hidden_layers, shape.n_routed_experts, shape.hidden_size) == (layers, 256, width)
    assert shape.vocab_size == 129280
    known = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert known.get_vocab_size() == shape.vocab_size
    texts = known.decode_batch([[number] for number in (300, 5000, shape.vocab_size - 1)])
    assert all(text.startswith(" w") for text in texts)


def test_the_repository_is_the_plans_and_the_engine_alone_gets_its_arguments(tmp_path):
    options = ["--gpus", "2", "--layers", "17", "--batches", "1", "256", "--parallel", "dp"]
    arguments = parse_arguments(["--output", str(tmp_path), *options])

    repository, plan = prepare(arguments, vllm="0.25.1")

    found = engine_arguments(repository)
    expected = {
        "model": str(tmp_path / "checkpoint"),
        "load_format": "dummy",
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
        "enable_prefix_caching": False,
        "max_num_seqs": 128,
    }
    assert expected.items() <= found.items()
    assert found["max_model_len"] >= 7902 + 1000
    assert [load.name for load in loads_of(arguments)] == ["1 x 7902/1000", "256 x 7902/1000"]
    planned = memory_planned(plan)
    assert 70 < planned["weights"] < 100
    assert planned["weights"] + planned["kv_cache"] < planned["total"] < 141


def test_one_gpu_gets_the_first_layers_of_v4(tmp_path):
    options = ["--model", "deepseek-v4-flash", "--layers", "32", "--shapes", "1000/1000", "--batches", "1", "64"]
    arguments = parse_arguments(["--output", str(tmp_path), *options])

    repository, plan = prepare(arguments, vllm="0.25.1")

    expected = {"tensor_parallel_size": 1, "kv_cache_dtype": "fp8", "load_format": "dummy", "max_num_seqs": 64}
    assert expected.items() <= engine_arguments(repository).items()
    planned = memory_planned(plan, block_tokens=256)
    assert planned["weights"] == pytest.approx(109.31, abs=1)  # vLLM's log on an H200
    assert planned["kv_blocks"] == pytest.approx(30_411, rel=0.1)


def test_v4_is_warmed_up_with_each_number_of_tokens_that_has_kernels_of_its_own():
    given = {"max_num_batched_tokens": 512, "max_model_len": 400}
    assert list(warm_lengths(MODELS["deepseek-v4-flash"], given)) == [64, 128, 192, 256, 320, 384]
    assert not warm_lengths(MODELS["deepseek-r1"], given)
    assert num_splits(512) == [16, 18, 22, 26, 33, 44, 64]


def test_vllms_memory_is_read_from_its_log():
    log = """\
(Worker pid=1) INFO 11-24 [gpu_model_runner.py:5307] Model loading took 79.59 GiB memory and 5.2 seconds
(Worker pid=2) INFO 11-24 [gpu_model_runner.py:5307] Model loading took 79.60 GiB memory and 5.1 seconds
(Worker pid=1) INFO 11-24 [gpu_worker.py:539] Available KV cache memory: 36.05 GiB
(EngineCore pid=3) INFO 11-24 [kv_cache_utils.py:2146] GPU KV cache size: 550,944 tokens
(Worker pid=1) INFO 11-24 [gpu_model_runner.py:6708] Graph capturing finished in 21 secs, took 0.67 GiB
"""
    assert memory_found(log) == {"weights": 79.59, "kv_cache": 36.05, "cuda_graphs": 0.67, "kv_tokens": 550944}
    assert memory_found("Model loading took 1.5 GiB and 2 seconds") == {"weights": 1.5}


def test_the_copy_of_their_backend_can_be_imported_with_a_newer_vllm(tmp_path):
    source = tmp_path / "src"
    (source / "utils").mkdir(parents=True)
    (source / "model.py").write_text("import asyncio\n")
    (source / "utils/request.py").write_text("from vllm.inputs.data import TokensPrompt\n")
    made = their_repository(tmp_path / "made", source, {"model": "m"}) / "vllm_model/1"
    assert (made / "utils/request.py").read_text() == "from vllm.inputs import TokensPrompt\n"
    assert (made / "model.py").read_text().startswith("import locale\n")
    assert json.loads((made / "model.json").read_text()) == {"model": "m"}


def fat_binary(*entries):
    """Of (kind, architecture, payload) each."""
    body = b"".join(
        struct.pack("<HHIQIIHHI", kind, 0, 48, len(payload), 0, 0, 0, 0, architecture).ljust(48, b"\1") + payload
        for kind, architecture, payload in entries
    )
    return struct.pack("<IHHQ", MAGIC, 1, 16, len(body)) + body


def library(section):
    """An ELF64 file of one section with fat binaries and one with the names."""
    names = b"\0.nv_fatbin\0.shstrtab\0"
    header = bytearray(64)
    at = 64 + len(section) + len(names)
    struct.pack_into("<Q", header, 0x28, at)
    struct.pack_into("<HHH", header, 0x3A, 64, 2, 1)
    table = struct.pack("<IIQQQQIIQQ", 1, 0, 0, 0, 64, len(section), 0, 0, 0, 0)
    table += struct.pack("<IIQQQQIIQQ", 12, 0, 0, 0, 64 + len(section), len(names), 0, 0, 0, 0)
    return bytearray(header + section + names + table)


def test_code_for_other_gpus_becomes_zeros_and_ptx_stays_where_hopper_has_no_code():
    with_hopper = fat_binary((1, 80, b"P" * 8), (2, 80, b"A" * 8), (2, 90, b"H" * 8))
    without = fat_binary((1, 80, b"P" * 8), (2, 80, b"A" * 8))
    file = library(with_hopper + b"\0" * 8 + without)
    before = len(file)
    assert keep_hopper(file) == 24
    assert len(file) == before
    assert (file.count(b"P" * 8), file.count(b"A" * 8), file.count(b"H" * 8)) == (1, 0, 1)


def test_a_command_goes_on_after_the_time_of_a_call(tmp_path):
    script = FOLDER / "in_background.sh"
    first = subprocess.run([script, tmp_path, "0", "bash", "-c", "echo begun; sleep 1; echo ended; exit 3"])
    assert first.returncode == 75
    second = subprocess.run([script, tmp_path, "30"], capture_output=True, text=True)
    assert (second.returncode, second.stdout) == (3, "begun\nended\n")
