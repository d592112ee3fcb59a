import re

import pytest

from deepseek_triton_build import version_dir
from deepseek_triton_tools.cli.main import main
from deepseek_triton_tools.generating.demo import PROMPTS

pytestmark = pytest.mark.slow

SIMULATED = ["--engine", "simulated", "--preset", "b200x8-r1-fp4-min-latency"]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            [],
            marks=pytest.mark.skipif(not (version_dir() / "tiny").is_dir(), reason="there is no checkpoint yet"),
            id="reference",
        ),
        pytest.param(SIMULATED, id="simulated"),
    ],
)
def test_the_demo_answers_every_prompt_and_stops(options, capsys):
    assert main(["demo", "--max-tokens", "12", *options]) == 0

    printed = capsys.readouterr().out
    assert all(prompt in printed for prompt in PROMPTS)
    rows = re.findall(r"  (HTTP|gRPC)  \d+ ms +(\d+) ", printed)
    assert rows == [("HTTP", "12")] * 4 + [("gRPC", "12")]
    assert "Stopped cleanly" in printed


def test_a_preset_without_the_simulated_engine_is_refused(capsys):
    assert main(["demo", "--preset", "b200x8-r1-fp4-min-latency"]) == 1
    assert "--preset paces the simulated engine" in capsys.readouterr().err
