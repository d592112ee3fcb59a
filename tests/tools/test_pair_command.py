"""`build` and `plan` with --profile disagg: what they print, and what they refuse."""

import json

from deepseek_triton_tools.cli.main import main

V3 = ["deepseek-v3", "--gpu", "h200", "--profile", "disagg"]
TINY = ["tiny", "--engine", "simulated", "--profile", "disagg"]


def test_the_summary_says_how_both_sides_are_started_and_joined(tmp_path, capsys):
    pair = tmp_path / "pair"
    assert main(["build", *V3, "--generation-servers", "2", "--output", str(pair)]) == 0

    printed = " ".join(capsys.readouterr().out.split())
    for words in (
        f"wrote {pair}: DeepSeek-V3",
        "1 context server and 2 generation servers, 24 GPUs in all",
        "Warnings and notes of a context server warning A009",
        f"run it there: {pair}/context/start.sh",
        f"{pair}/generation, the same for 2 servers:",
        "join them: deepseek-triton gateway --context-server http://context1:8000 --server http://generation1:8000 "
        "--server http://generation2:8000",
    ):
        assert words in printed


def test_the_document_holds_a_plan_of_each_side(tmp_path, capsys):
    options = [*V3, "--context-set", "max_batch_size=16", "--generation-set", "num_gpus=16", "--json"]
    assert main(["build", *options, "--output", str(tmp_path / "pair")]) == 0
    built = json.loads(capsys.readouterr().out)
    assert main(["plan", *options]) == 0
    planned = json.loads(capsys.readouterr().out)

    assert built["plan"] == planned
    assert (planned["schema"], planned["gpus"]) == ("deepseek-triton/pair/1", 24)
    assert [planned[side]["profile"] for side in ("context", "generation")] == ["ctx", "gen"]
    assert {row["key"]: row["value"] for row in planned["context"]["settings"]}["max_batch_size"] == 16


def test_plan_shows_both_sides_and_what_would_change(tmp_path, capsys):
    assert main(["plan", *V3, "--brief"]) == 0
    printed = capsys.readouterr().out
    assert printed.index("Context: one server") < printed.index("Generation: one server")

    assert main(["build", *TINY, "--output", str(tmp_path / "pair")]) == 0
    capsys.readouterr()
    assert main(["plan", *TINY, "--diff", str(tmp_path / "pair")]) == 0
    assert capsys.readouterr().out.count("nothing would change") == 2


def test_what_makes_no_pair_is_refused(tmp_path, capsys):
    one = ["deepseek-v3", "--gpu", "h200", "--context-servers", "2"]
    for options, code, said in (
        (one, 2, "--context-servers: only for --profile disagg"),
        ([*V3, "--generation-set", "x"], 2, "--generation-set x: expected KEY=VALUE, as in --generation-set"),
        ([*V3, "--context-set", "num_gpus=none"], 1, "--context-set num_gpus=none: expected a whole number from 1"),
        ([*V3, "--trtllm", "0.21.0"], 1, "no hand-over is proven"),
        ([*V3, "--engine", "vllm"], 1, "leave --engine vllm out"),
    ):
        assert main(["build", *options, "--output", str(tmp_path / "pair")]) == code
        assert said in " ".join(capsys.readouterr().err.split())
        assert not (tmp_path / "pair").exists()
