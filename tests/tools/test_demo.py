import pytest

from deepseek_triton_tools.cli.main import main
from deepseek_triton_tools.generating.demo import PROMPTS

TWIN = ["--engine", "simulated", "--preset", "b200x8-r1-fp4-min-latency"]


@pytest.mark.parametrize("options", [[], TWIN], ids=["transformers", "simulated"])
def test_the_demo_answers_every_prompt_and_stops(options, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")

    assert main(["demo", "--max-tokens", "12", *options]) == 0

    printed = capsys.readouterr().out
    assert all(prompt in printed for prompt in PROMPTS)
    assert printed.count("HTTP │") == 4
    assert printed.count("gRPC │") == 1
    assert printed.count(" 12 │") == 5
    assert "Stopped cleanly" in printed


def test_a_preset_without_the_twin_is_refused(capsys):
    assert main(["demo", "--preset", "b200x8-r1-fp4-min-latency"]) == 1
    assert "--preset paces the simulated engine" in capsys.readouterr().err
