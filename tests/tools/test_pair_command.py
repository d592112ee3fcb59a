"""`build` and `plan` with --profile disagg: what they print, and what they refuse."""

import json

from support.commands import run_command

V3 = ["deepseek-v3", "--gpu", "h200", "--profile", "disagg"]
TINY = ["tiny", "--engine", "simulated", "--profile", "disagg"]


def printed_by(*argv):
    done = run_command(*argv)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_summary_says_how_both_sides_are_started_and_joined(tmp_path):
    pair = tmp_path / "pair"
    printed = " ".join(printed_by("build", *V3, "--generation-servers", "2", "--output", str(pair)).split())
    for words in (
        f"wrote {pair}: DeepSeek-V3",
        "1 context server and 2 generation servers, 24 GPUs in all",
        "Warnings and notes of a context server warning A009",
        f"run it there: {pair}/context/start.sh",
        f"{pair}/generation, the same for 2 servers:",
        "gateway --context-server http://context1:8000 --server http://generation1:8000 "
        "--server http://generation2:8000",
    ):
        assert words in printed


def test_the_document_holds_a_plan_of_each_side(tmp_path):
    options = [*V3, "--context-set", "max_batch_size=16", "--generation-set", "num_gpus=16", "--json"]
    built = json.loads(printed_by("build", *options, "--output", str(tmp_path / "pair")))
    planned = json.loads(printed_by("plan", *options))
    assert built["plan"] == planned
    assert (planned["schema"], planned["gpus"]) == ("deepseek-triton/pair/1", 24)
    assert [planned[side]["profile"] for side in ("context", "generation")] == ["ctx", "gen"]
    assert {row["key"]: row["value"] for row in planned["context"]["settings"]}["max_batch_size"] == 16


def test_plan_shows_both_sides_and_what_would_change(tmp_path):
    printed = printed_by("plan", *V3, "--brief")
    assert printed.index("Context: one server") < printed.index("Generation: one server")
    printed_by("build", *TINY, "--output", str(tmp_path / "pair"))
    assert printed_by("plan", *TINY, "--diff", str(tmp_path / "pair")).count("nothing would change") == 2


def test_what_makes_no_pair_is_refused(tmp_path):
    one = ["deepseek-v3", "--gpu", "h200", "--context-servers", "2"]
    for options, code, said in (
        (one, 2, "--context-servers: only for --profile disagg"),
        ([*V3, "--generation-set", "x"], 2, "--generation-set x: expected KEY=VALUE, as in --generation-set"),
        ([*V3, "--context-set", "num_gpus=none"], 1, "--context-set num_gpus=none: expected a whole number from 1"),
        ([*V3, "--trtllm", "0.21.0"], 1, "no hand-over is proven"),
        ([*V3, "--engine", "vllm"], 1, "leave --engine vllm out"),
    ):
        refused = run_command("build", *options, "--output", str(tmp_path / "pair"))
        assert (refused.returncode, said in " ".join(refused.stderr.split())) == (code, True), refused.stderr
        assert not (tmp_path / "pair").exists()
