"""A pace that `plan --sla` wrote, as the preset of servers that rehearse it."""

import json

import pytest
import yaml

from deepseek_backend.engines.simulated.simulated_options import parse_options
from deepseek_triton_tools.cli.main import main
from deepseek_triton_tools.sla.model_paces import ModelPaces
from deepseek_triton_tools.sla.server_layouts import PacedModel, ServerLayout

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


def options_of(repository):
    (config,) = repository.glob("*/1/model.yaml")
    return parse_options(yaml.safe_load(config.read_text())["triton_config"]["engine_options"])


def test_one_server_takes_the_folder_or_a_file(capsys, paces, tmp_path):
    assert main([*BUILD, "--preset", str(paces), "--output", str(tmp_path / "one")]) == 0
    assert main([*BUILD, "--preset", str(paces / "context.json"), "--output", str(tmp_path / "other")]) == 0

    one, other = options_of(tmp_path / "one"), options_of(tmp_path / "other")
    assert (one.preset, one.limits.max_batch_size) == ("server", 1)
    assert (other.preset, other.limits.max_batch_size) == ("context", 2)
    # 4,000 tokens of 35,136 bytes at 400 Gb/s.
    assert one.transfer_seconds(4000) == pytest.approx(0.00281, rel=0.01)


def test_a_pair_takes_the_pace_of_each_side(capsys, paces, tmp_path):
    built = tmp_path / "pair"
    assert main([*BUILD, "--profile", "disagg", "--preset", str(paces), "--output", str(built)]) == 0

    assert [options_of(built / side).preset for side in ("context", "generation")] == ["context", "generation"]
    recorded = json.loads((built / "deepseek-triton.json").read_text())["options"]
    assert "paces/context.json" in recorded
    assert "pair_ns" not in recorded


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param(None, "can't be read: No such file", id="missing"),
        pytest.param("{", "server.json: Expecting property name", id="no JSON"),
        pytest.param("[1]", "server.json: expected a mapping", id="a list"),
        pytest.param('{"title": "x"}', "server.json: expected a mapping with title, source", id="another"),
    ],
)
def test_another_file_is_refused(capsys, paces, tmp_path, content, said):
    for file in list(paces.iterdir()):
        file.unlink()
    if content is not None:
        (paces / "server.json").write_text(content)

    assert main([*BUILD, "--preset", str(paces), "--output", str(tmp_path / "built")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "plan --sla --write-pace DIR" in error
    assert not (tmp_path / "built").exists()


@pytest.mark.parametrize(
    ("left", "options", "said"),
    [
        pytest.param(("context", "generation"), [], "has the paces of a pair: add --profile disagg", id="pair"),
        pytest.param(("server",), ["--profile", "disagg"], "has the pace of one server: leave --profile", id="server"),
    ],
)
def test_paces_of_the_other_kind_are_refused(capsys, paces, tmp_path, left, options, said):
    for file in list(paces.iterdir()):
        if file.stem not in left:
            file.unlink()

    assert main([*BUILD, *options, "--preset", str(paces), "--output", str(tmp_path / "built")]) == 2
    assert said in capsys.readouterr().err
