"""`--from-recipe`: a file of others as the start of a plan."""

import json
import shlex
import ssl

import pytest
import trustme

from deepseek_triton_tools.cli.main import main
from support.http_server import HttpServer

DATABASE = "examples/configs/database/deepseek-ai/DeepSeek-R1-0528/H200_SXM/1k8k_tp8_conc64.yaml"
ENGINE = """\
backend: pytorch
tensor_parallel_size: 8
moe_expert_parallel_size: 4
max_num_tokens: 1216
trust_remote_code: true
kv_cache_config: {free_gpu_memory_fraction: 0.7}
cuda_graph_config: {batch_sizes: [1, 8, 64]}
"""
DRAFTS = "speculative_config: {decoding_type: MTP, max_draft_len: 2}\n"
R1_VLLM = "vllm serve deepseek-ai/DeepSeek-R1 -tp 8 --max-num-seqs 48 --port 9000 --trust-remote-code"
PAGE = f"""\
# Serving

    vllm serve not/this-one

```python
vllm serve not/this-one --tensor-parallel-size 2
```
```bash
{R1_VLLM}
```
``` bash
vllm serve deepseek-ai/DeepSeek-R1 \\
  -dp 8 --speculative-config '{{"method": "mtp", "num_speculative_tokens": 1}}'
```
"""


@pytest.fixture
def planned(tmp_path, capsys):
    """Plans from a file with this text; returns what is planned, its settings, and the notes."""

    def plan(text, *words, name="mine.yaml", at=""):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        code = main(["plan", *words, "--from-recipe", f"{tmp_path / name}{at}", "--json"])
        shown = capsys.readouterr()
        document = json.loads(shown.out) if code == 0 else {}
        return document, {row["key"]: row for row in document.get("settings", ())}, shown.err

    return plan


def values(settings, *keys):
    return [settings[key]["value"] if key in settings else None for key in keys]


def test_the_place_in_the_database_says_what_the_file_is_for(planned):
    document, settings, notes = planned(ENGINE + DRAFTS, name=DATABASE)
    assert [document[key] for key in ("variant", "precision", "gpu", "gpus")] == ["deepseek-r1-0528", "fp8", "h200", 8]
    assert document["workload"] == {"isl": 1024, "osl": 8192, "concurrency": 64}
    keys = ("moe_expert_parallel_size", "max_num_tokens", "cuda_graph_config.batch_sizes")
    assert values(settings, *keys, "enable_attention_dp") == [4, 1216, [1, 8, 64], False]
    reasons = {settings[key]["reason"].partition(" instead of ")[0] for key in keys}
    assert reasons == {"from deepseek-ai/DeepSeek-R1-0528/H200_SXM/1k8k_tp8_conc64.yaml"}
    # The newer name of the draft tokens, which the release at hand does not count.
    drafts = ("speculative_config.num_nextn_predict_layers", "speculative_config.max_draft_len")
    assert values(settings, *drafts, "trust_remote_code") == [2, None, False]
    assert [line.partition(".yaml: ")[2].split(":")[0] for line in notes.splitlines()] == ["trust_remote_code"]


R1 = ("deepseek-r1", "--gpu", "h200")
TAKEN = [  # text of a YAML file, words, settings
    (ENGINE, R1, {"tensor_parallel_size": 8, "speculative_config.decoding_type": None}),
    (ENGINE, (*R1, "--set", "enable_attention_dp=true"), {"enable_attention_dp": True}),
    (ENGINE, (*R1, "--mtp", "1"), {"speculative_config.num_nextn_predict_layers": 1}),
    (ENGINE + DRAFTS, (*R1, "--mtp", "0"), {"speculative_config.decoding_type": None}),
    (ENGINE, (*R1, "--set", "max_num_tokens=2048"), {"max_num_tokens": 2048, "moe_expert_parallel_size": 4}),
    (ENGINE, (*R1, "--set", "cuda_graph_config.max_batch_size=8"), {"cuda_graph_config.batch_sizes": None}),
    ("model: deepseek-ai/DeepSeek-V3\ntp_size: 8\n", ("--gpu", "h200"), {"model": "deepseek-ai/DeepSeek-V3"}),
    ("model: nvidia/DeepSeek-R1-FP4-v2\n", ("r1", "--gpu", "b200"), {"model": "nvidia/DeepSeek-R1-FP4-v2"}),
    ("model: nvidia/DeepSeek-R1-FP4\n", ("--gpu", "b200", "--precision", "fp8"), {"model": "deepseek-ai/DeepSeek-R1"}),
    ("kv_cache_free_gpu_memory_fraction: 0.6\n", R1, {"kv_cache_config.free_gpu_memory_fraction": 0.6}),
    ("cuda_graph_config: null\n", R1, {"cuda_graph_config": None, "cuda_graph_config.enable_padding": None}),
    (ENGINE, (*R1, "--trtllm", "0.21.0"), {"cuda_graph_batch_sizes": [1, 8, 64]}),
]


def test_a_file_gives_settings_and_the_command_line_goes_before(planned):
    for text, words, expected in TAKEN:
        _, settings, notes = planned(text, *words)
        assert settings, (words, notes)
        assert values(settings, *expected) == list(expected.values()), (text, words)


NOTES = [  # text, words, a part of the note, and the line of the file in it
    ("nonsense_key: 1\nstream_interval: 4\n", R1, "nonsense_key is not", 1),
    ("stream_interval: 4\nmax_num_tokens: many\n", R1, "max_num_tokens: expected", 2),
    ("kv_cache_free_gpu_memory_fraction: 0.6\n", R1, "taken as that", 1),
    ("backend: tensorrt\n", R1, "pytorch only", None),
    ("cuda_graph_config: {}\n", R1, "nothing is in it", None),
    (ENGINE, (*R1, "--gpus", "16"), "gpus 8; --gpus 16 is taken", None),
    (ENGINE, (*R1, "--set", "max_num_tokens=2048"), "max_num_tokens 1216; 2048 is taken", None),
    ("model: deepseek-ai/DeepSeek-V3\n", R1, "model deepseek-ai/DeepSeek-V3; deepseek-r1 is taken", None),
    ("kv_cache_config: {dtype: fp8}\n", (*R1, "--kv-cache-dtype", "auto"), "'fp8'; 'auto' is taken", None),
]


def test_what_is_not_taken_is_a_line_each(planned):
    for text, words, part, line in NOTES:
        document, _, notes = planned(text, *words)
        place = "mine.yaml" + (f":{line}: " if line else ": ")
        assert any(note.startswith(f"note: {place}") and part in note for note in notes.splitlines()), (text, notes)
        assert document, (text, notes)


def test_a_name_that_the_file_contradicts_is_told(planned):
    document, _, notes = planned(ENGINE, *R1, name="1k1k_tp4_conc8.yaml")
    assert (document["gpus"], document["workload"]["isl"]) == (8, 1024)
    assert "tensor_parallel_size: 8: the file's name says 4" in notes


def test_a_command_of_vllm_is_taken_from_script_and_page(planned):
    for text, name, at in ((R1_VLLM, "r1.sh", ""), (PAGE, "r1.md", "#L9"), (f"guide: |\n{PAGE}", "r1.yaml", "#L10")):
        document, settings, notes = planned(text, "--gpu", "h200", name=name, at=at)
        assert (document["engine"], document["variant"], document["gpus"]) == ("vllm", "deepseek-r1", 8)
        assert values(settings, "tensor_parallel_size", "max_num_seqs", "trust_remote_code") == [8, 48, False]
        assert settings["max_num_seqs"]["reason"] == f"from {name} instead of 128"
        assert "--port" in notes
    document, settings, notes = planned(PAGE, "--gpu", "h200", name="r1.md", at="#L13-L14")
    keys = ("data_parallel_size", "tensor_parallel_size", "speculative_config.num_speculative_tokens")
    assert values(settings, *keys) == [8, None, 1]
    assert notes == ""


def test_what_vllm_does_not_take_is_a_line_each(planned):
    script = (
        "export VLLM_USE_V1=1 MINE=2\n"
        "vllm serve deepseek-ai/DeepSeek-R1 -dp 2 -tp 4 --node-rank 1 --no-such-flag --max-model-len $LONGEST\n"
    )
    document, settings, notes = planned(script, "--gpu", "h200", name="r1.sh")
    assert (document["gpus"], *values(settings, "data_parallel_size", "node_rank")) == (8, 8, None)
    parts = ("VLLM_USE_V1", "MINE", "-tp 4 within", "node_rank: 1", "--no-such-flag", "--max-model-len (line 2)")
    assert [part for part in parts if sum(part in note for note in notes.splitlines()) != 1] == []


REFUSED = [  # text, file's name, words, a part of the line
    (ENGINE, "mine.yaml", (), "VARIANT"),
    (ENGINE, "mine.yaml", (*R1, "--engine", "vllm"), "mine.yaml is for tensorrt_llm"),
    (ENGINE, "mine.yaml", (*R1, "--profile", "disagg"), "leave --profile disagg out"),
    (ENGINE, "mine.yaml", (*R1, "--sla", "tpot=30", "--gpus", "8", "--isl", "1", "--osl", "1"), "--from-recipe"),
    (ENGINE, "mine.yaml", ("tiny",), "leave out --gpus, --from-recipe"),
    ("model: Qwen/Qwen3-8B\n", "mine.yaml", ("--gpu", "h200"), "unknown Hugging Face name 'Qwen/Qwen3-8B'"),
    ("a: [\n", "mine.yaml", R1, "mine.yaml: not YAML"),
    ("- a\n", "mine.yaml", R1, "expected a mapping"),
    ("server_configs: [1]\n", "mine.yaml", R1, "found none that TensorRT-LLM"),
    ("moe_config: {backend: DEEPGEMM}\n", "mine.yaml", (*R1, "--precision", "w4a8"), "M002"),
    ("x" * (2**20 + 1), "mine.yaml", R1, "1,048,576 bytes"),
    (PAGE, "r1.md", ("--gpu", "h200"), "r1.md#L9 (deepseek-ai/DeepSeek-R1 -tp 8"),
    ("trtllm-serve m --config x.yaml\n", "r1.sh", R1, "found none"),
    ("text\n", "r1.md", R1, "found none"),
]


def test_a_file_that_is_no_start_of_a_plan_is_refused_in_a_line(planned):
    for text, name, words, part in REFUSED:
        document, _, said = planned(text, *words, name=name)
        assert not document, part
        assert part in said.splitlines()[-1], said


def test_places_that_have_no_file_are_refused(capsys):
    for place in ("nowhere.yaml", "http://127.0.0.1/r1.yaml", "https://[/r1.yaml", "https://127.0.0.1:1/a b.yaml"):
        assert main(["plan", *R1, "--from-recipe", place]) == 2
        assert f"--from-recipe {place}: " in capsys.readouterr().err


@pytest.mark.slow
def test_an_address_is_asked_once_and_the_folder_needs_it_no_more(tmp_path, monkeypatch, capsys):
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    server = HttpServer(tls=context)
    try:
        server.script(server.body(200, ENGINE.encode()))
        address = f"{server.url}/{DATABASE}?token=secret"
        assert main(["build", "--from-recipe", address, "--output", str(tmp_path / "r1")]) == 0
    finally:
        server.stop()
    written = "".join(path.read_text() for path in (tmp_path / "r1").rglob("*.[jy][sa]*"))
    assert "moe_expert_parallel_size: 4" in written
    assert "secret" not in written + capsys.readouterr().err
    (manifest,) = (tmp_path / "r1").rglob("deepseek-triton.json")
    stamp = json.loads(manifest.read_text())["options"]
    assert main(["plan", *shlex.split(stamp), "--diff", str(tmp_path / "r1")]) == 0
