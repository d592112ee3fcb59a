"""Files that are written whole or not at all."""

import gzip
import stat

import pytest

from deepseek_triton_tools.host.whole_file import whole_file
from deepseek_triton_tools.tool_errors import ToolError


def test_the_old_file_stays_until_the_block_ends(tmp_path):
    """A name in .gz is compressed; an error leaves what was there."""
    path = tmp_path / "it"
    path.write_text("old")
    with whole_file(path) as file:
        file.write("new\n")
        file.flush()
        assert path.read_text() == "old"
    with pytest.raises(KeyError), whole_file(path) as file:
        raise KeyError(file.write("half"))
    assert path.read_bytes() == b"new\n"
    assert list(tmp_path.iterdir()) == [path]
    with whole_file(tmp_path / "it.gz") as file:
        file.write("ü\n" * 1000)
    assert gzip.decompress((tmp_path / "it.gz").read_bytes()).decode() == "ü\n" * 1000


@pytest.mark.slow
def test_others_may_read_it_as_far_as_the_umask_says(tmp_path):
    (tmp_path / "plain").touch()
    with whole_file(tmp_path / "it"):
        pass
    assert stat.S_IMODE((tmp_path / "it").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


@pytest.mark.slow
def test_a_place_that_cannot_be_written_is_named(tmp_path):
    with (
        pytest.raises(ToolError, match="nowhere/it can't be written: No such file or directory"),
        whole_file(tmp_path / "nowhere/it"),
    ):
        raise AssertionError("the block must not begin")
    (tmp_path / "it").mkdir()
    with pytest.raises(ToolError, match="it can't be written: Is a directory"), whole_file(tmp_path / "it") as file:
        file.write("text")
    assert [path.name for path in tmp_path.iterdir()] == ["it"]
