import subprocess
import sys

import pytest

from deepseek_triton_tools.cli import main


def run(*argv):
    return subprocess.run([sys.executable, "-m", "deepseek_triton_tools.cli", *argv], capture_output=True, text=True)


def test_help_names_every_verb_and_imports_nothing_heavy():
    program = (
        "import sys\nfrom deepseek_triton_tools.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n"
        "    print(sorted({'httpx', 'rich', 'yaml', 'numpy', 'torch'} & set(sys.modules)))"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    for verb in ("demo", "build", "serve", "generate"):
        assert verb in printed
    assert printed.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("argv", "code", "expected"),
    [
        pytest.param(["build", "deepsek-r1", "--output", "x"], 2, "did you mean 'deepseek-r1'", id="variant"),
        pytest.param(
            ["build", "deepseek-r1", "--gpu", "h200", "--gpus", "4", "--output", "x"], 1, "needs 8 x h200", id="gpus"
        ),
        pytest.param(["serve", "nowhere"], 1, "nowhere", id="no folder"),
        pytest.param(["generate", "hi", "--url", "http://127.0.0.1:9"], 1, "127.0.0.1:9", id="no server"),
    ],
)
def test_what_goes_wrong_is_one_line_on_stderr(argv, code, expected, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert main(argv) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith(f"deepseek-triton {argv[0]}: ")
    assert expected in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["generate", "hi", "--temprature", "1"], "did you mean --temperature?"),
        (["serve", ".", "--http-prot=1"], "did you mean --http-port?"),
        (["serve", ".", "--exit-timeout", "-5"], "--exit-timeout"),
    ],
)
def test_a_misspelt_option_is_refused_with_the_nearest(argv, expected, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)

    assert caught.value.code == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("port", ["0", "70000", "http"])
def test_a_port_is_a_number_or_auto(port, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["serve", ".", "--http-port", port])

    assert caught.value.code == 2
    assert "expected a number from 1 to 65535 or auto" in capsys.readouterr().err


def test_build_prints_what_it_wrote_and_how_to_run_it(capsys, tmp_path):
    assert main(["build", "deepseek-r1", "--gpu", "h200", "--gpus", "8", "--output", str(tmp_path / "r1")]) == 0

    printed = capsys.readouterr().out
    assert "KV cache" in printed
    assert f"{tmp_path}/r1/start.sh" in printed
    assert (tmp_path / "r1/tensorrt_llm/1/release.yaml").is_file()


def test_the_module_runs_as_a_program():
    assert run("--version").stdout.startswith("deepseek-triton ")
