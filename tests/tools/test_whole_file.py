"""Files that are written whole or not at all."""

import gzip
import os
import stat
import subprocess
import sys

import pytest

from deepseek_triton_tools.host.whole_file import sweep, whole_file
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


def test_its_mode_and_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "plain").touch()
    with whole_file(tmp_path / "it"):
        pass
    assert stat.S_IMODE((tmp_path / "it").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    (tmp_path / "folder").mkdir()
    for name, error in {"nowhere/it": "No such file or directory", "folder": "Is a directory"}.items():
        with pytest.raises(ToolError, match=f"{name} can't be written: {error}"), whole_file(tmp_path / name) as file:
            file.write("text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "it", "plain"]


def test_what_a_killed_process_has_left_is_swept_though_nobody_has_asked_for_its_end(tmp_path):
    program = (
        "import sys, pathlib; from deepseek_triton_tools.host.whole_file import whole_file\n"
        "with whole_file(pathlib.Path(sys.argv[1])): print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "it")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        (part,) = tmp_path.iterdir()
        sweep(tmp_path)
        assert part.exists()

        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        sweep(tmp_path)
        assert not part.exists()
