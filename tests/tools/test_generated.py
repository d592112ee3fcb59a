import pytest

from deepseek_triton_tools import generated_files as module


@pytest.mark.slow
def test_generated_files_are_what_the_sources_say():
    """`make generated` writes them again."""
    assert [str(path) for path, content in module.generated_files().items() if path.read_bytes() != content] == []


def test_only_without_arguments_they_are_written(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    monkeypatch.setattr(module, "generated_files", lambda: {page: b"as it is now"})
    for argument, status in (("--help", 0), ("--check", 2), ("docs", 2)):
        with pytest.raises(SystemExit) as ended:
            module.main([argument])
        assert (ended.value.code, page.exists()) == (status, False)
    module.main([])
    assert page.read_bytes() == b"as it is now"
