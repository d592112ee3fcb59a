"""A pace that `plan --sla` wrote, as the preset of servers that rehearse it."""

import json

import pytest
import yaml

from deepseek_backend.engines.simulated.simulated_options import parse_options
from deepseek_triton_tools.cli.main import main
from deepseek_triton_tools.sla.paces import ModelPaces, PacedModel, ServerLayout

MODEL = PacedModel(architecture="deepseek-v3", precision="fp8", gpu="h200", kv_dtype="fp8")
TP8 = ServerLayout(num_gpus=8, expert_parallel_size=8)
BUILD = ["build", "tiny", "--engine", "simulated"]


@pytest.fixture
def paces(tmp_path):
    """A folder as --write-pace makes it."""
    folder = tmp_path / "paces"
    folder.mkdir()
    document = {
        "source": "a test",
        "num_ranks": 1,
        "kv_cache_tokens": 500_000,
        "kv_token_bytes": 35136,
        "max_num_tokens": 8192,
        "max_seq_len": 500_000,
        "num_draft_tokens": 0,
        "tokens_per_step": 1.0,
        "pace": ModelPaces().tables(MODEL, [TP8])[TP8],
    }
    for rows, side in enumerate(("server", "context", "generation"), 1):
        (folder / f"{side}.json").write_text(json.dumps({"title": side, "max_batch_size": rows, **document}))
    return folder


@pytest.fixture
def build(paces, tmp_path, capsys):
    """Builds with a preset and other options; the folder, or what was said of a refusal."""

    def run(preset, *options, code=0):
        built = tmp_path / f"built-{preset.stem}"
        assert main([*BUILD, *options, "--preset", str(preset), "--output", str(built)]) == code
        error = capsys.readouterr().err
        assert built.exists() == (code == 0)
        return error if code else built

    return run


def options_of(repository):
    (config,) = repository.glob("*/1/model.yaml")
    return parse_options(yaml.safe_load(config.read_text())["triton_config"]["engine_options"])


def test_one_server_takes_the_folder_or_a_file(build, paces):
    one, other = options_of(build(paces)), options_of(build(paces / "context.json"))
    assert (one.preset, one.limits.max_batch_size) == ("server", 1)
    assert (other.preset, other.limits.max_batch_size) == ("context", 2)
    # 4,000 tokens of 35,136 bytes at 400 Gb/s.
    assert one.transfer_seconds(4000) == pytest.approx(0.00281, rel=0.01)


@pytest.mark.slow
def test_a_pair_takes_the_pace_of_each_side(build, paces):
    built = build(paces, "--profile", "disagg")
    assert [options_of(built / side).preset for side in ("context", "generation")] == ["context", "generation"]
    recorded = json.loads((built / "deepseek-triton.json").read_text())["options"]
    assert "paces/context.json" in recorded
    assert "pair_ns" not in recorded


def test_another_file_or_the_paces_of_the_other_kind_are_refused(build, paces):
    server = paces / "server.json"
    text = server.read_text()
    server.unlink()
    assert "has the paces of a pair: add --profile disagg" in build(paces, code=2)
    for side in ("context", "generation"):
        (paces / f"{side}.json").unlink()
    server.write_text(text)
    assert "has the pace of one server: leave --profile" in build(paces, "--profile", "disagg", code=2)
    contents = {
        "{": "server.json: Expecting property name",
        "[1]": "server.json: expected a mapping",
        '{"title": "x"}': "server.json: expected a mapping with title, source",
        None: "can't be read: No such file",
    }
    for content, said in contents.items():
        if content is None:
            server.unlink()
        else:
            server.write_text(content)
        error = build(paces, code=2)
        assert said in error
        assert "plan --sla --write-pace DIR" in error
