import pytest

from deepseek_triton_tools import generated_files as module


@pytest.mark.slow
def test_generated_files_are_what_the_sources_say():
    """`make generated` writes them again."""
    assert [str(path) for path, content in module.generated_files().items() if path.read_bytes() != content] == []


def test_make_generated_writes_them(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "generated_files", lambda: {tmp_path / "page.md": b"as it is now"})

    module.main([])

    assert (tmp_path / "page.md").read_bytes() == b"as it is now"


def test_with_any_argument_nothing_is_written(monkeypatch, capsys):
    monkeypatch.setattr(module, "generated_files", lambda: pytest.fail("it was about to write"))
    for argument, status in (("--help", 0), ("--check", 2), ("docs", 2)):
        with pytest.raises(SystemExit) as ended:
            module.main([argument])
        assert ended.value.code == status
        assert ("docs/rules.md" if argument == "--help" else argument) in "".join(capsys.readouterr())
