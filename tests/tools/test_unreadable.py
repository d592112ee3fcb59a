"""Files that the user may not read or write: each verb says in one line which it is."""

from pathlib import Path

import pytest

from deepseek_triton_tools.cli.main import main
from deepseek_triton_tools.terminal.output_streams import to_reader
from support.rights import without_rights

HTTPS = ["generate", "hi", "--retries", "0", "--url", "https://127.0.0.1:9"]


@pytest.fixture
def _closed(tmp_path, monkeypatch):
    """In the current folder: `closed/file` and `file`, of which neither can be read, and `open`."""
    monkeypatch.chdir(tmp_path)
    Path("closed").mkdir()
    for name in ("closed/file", "file", "open"):
        Path(name).write_text('"hello"\n')
    Path("models/model").mkdir(parents=True)
    for name in ("closed", "file", "models/model"):
        Path(name).chmod(0)
    with without_rights():
        yield
    Path("closed").chmod(0o700)
    Path("models/model").chmod(0o700)


UNREADABLE = [
    (["generate", "--file", "closed/file"], "closed/file"),
    (["generate", "--messages", "file"], "file"),
    (["generate", "--input", "closed/file", "--output", "answers"], "closed/file"),
    (["generate", "--input", "open", "--output", "closed/answers"], "closed/answers"),
    (["generate", "--input", "open", "--output", "file", "--overwrite"], "file"),
    (["generate", "hi", "--token-file", "closed/file"], "closed/file"),
    ([*HTTPS, "--ca", "closed/file"], "closed/file"),
    ([*HTTPS, "--ca", "file"], "file"),
    ([*HTTPS, "--cert", "open", "--key", "closed/file"], "closed/file"),
    (["chat", "--load", "closed/file"], "closed/file"),
    (["serve", "closed"], "closed"),
    (["serve", "closed/repository"], "closed/repository"),
    (["serve", "models"], "models/model"),
    (["build", "tiny", "--engine", "simulated", "--output", "closed/out"], "closed/out"),
    (["launch", "local", "closed"], "closed"),
    (["warm", "files", "closed"], "closed"),
    (["warm", "files", "closed/model"], "closed/model"),
    (["check", "closed"], "closed"),
]


@pytest.mark.slow
@pytest.mark.usefixtures("_closed")
def test_one_line_says_what_can_not_be_read(capsys, subtests):
    for argv, named in UNREADABLE:
        with subtests.test(" ".join(argv)):
            assert main(argv) in (1, 2)
            captured = capsys.readouterr()
            [line] = (captured.out + captured.err).splitlines()
            assert line.startswith(f"deepseek-triton {argv[0]}: ")
            assert named in line
            assert "Permission denied" in line


@pytest.mark.usefixtures("_closed")
def test_a_file_that_no_verb_expected_is_named_too(capsys, monkeypatch):
    monkeypatch.setattr("deepseek_triton_tools.cli.generate.read_text", lambda path: path.read_text())

    assert main(["generate", "--file", "file"]) == 1
    assert capsys.readouterr().err == "deepseek-triton generate: file: Permission denied\n"


@pytest.mark.usefixtures("_closed")
def test_a_file_that_can_not_be_read_is_no_fault_of_stdout():
    with pytest.raises(PermissionError), to_reader():
        Path("file").read_text()
