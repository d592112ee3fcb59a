"""The file of answers: a run that was stopped anywhere goes on with every whole answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_triton_tools.evaluation.questions import open_answers
from deepseek_triton_tools.tool_errors import ToolError

TINY = {"name": "tiny", "engine": "reference"}


def answers_in(file):
    with open_answers(file, TINY, overwrite=False) as kept:
        return {key: record["text"] for key in map(str, range(9)) if (record := kept.get(key)) is not None}


@pytest.mark.slow
@given(texts=st.lists(st.text(), min_size=1, max_size=5), data=st.data())
def test_a_file_that_was_cut_anywhere_keeps_its_whole_answers(texts, data, tmp_path_factory):
    file = tmp_path_factory.mktemp("cut") / "answers.jsonl"
    with open_answers(file, TINY, overwrite=False) as kept:
        first = file.stat().st_size
        for key, text in enumerate(texts):
            kept.add(str(key), {"text": text})
    content = file.read_bytes()
    cut = data.draw(st.integers(first, len(content)))
    file.write_bytes(content[:cut])

    whole = content[:cut].count(b"\n") - 1
    assert answers_in(file) == {str(key): text for key, text in enumerate(texts[:whole])}
    with open_answers(file, TINY, overwrite=False) as kept:
        kept.add("8", {"text": "later"})
    assert answers_in(file)["8"] == "later"


def test_answers_of_another_server_are_refused_by_what_differs(tmp_path):
    file = tmp_path / "answers.jsonl"
    with open_answers(file, TINY, overwrite=False) as kept:
        kept.add("1", {"text": "Paris"})
    with open_answers(file, TINY | {"tool_form": "fenced"}, overwrite=False) as kept:
        assert kept.num_before == 1  # of a release that did not write this fact
    other = TINY | {"engine": "vllm"}

    differs = r"engine was 'reference' and is 'vllm'.*--overwrite"
    with pytest.raises(ToolError, match=differs), open_answers(file, other, overwrite=False):
        pass
    with open_answers(file, other, overwrite=True) as kept:
        assert kept.num_before == 0


def test_another_file_is_left_as_it_is_and_two_runs_do_not_write_one(tmp_path):
    file = tmp_path / "answers.jsonl"
    for content in ("hello\n", "[1]\n", '{"server": {}}\n{"text": "no key"}\n'):
        file.write_text(content)
        with pytest.raises(ToolError, match="no file of answers"), open_answers(file, TINY, overwrite=False):
            pass
        assert file.read_text() == content
    with (
        open_answers(file, TINY, overwrite=True),
        pytest.raises(ToolError, match="another run"),
        open_answers(file, TINY, overwrite=False),
    ):
        pass
