"""The user's own questions: every wrong row is named, and each scorer has its meaning."""

import json

import pytest

from deepseek_triton_tools.cli.eval import _SCORERS
from deepseek_triton_tools.evaluation.tasks import SCORERS, own_questions
from deepseek_triton_tools.tool_errors import ToolError


def written(folder, *rows):
    file = folder / "own.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_scorers():
    right = {
        ("exact", " Paris\n", "Paris"): True,
        ("exact", "Paris.", "Paris"): False,
        ("contains", "It is PARIS.", "paris"): True,
        ("contains", "It is Rome.", "Paris"): False,
        ("regex", "Answer: B", r"Answer:\s*B\b"): True,
        ("regex", "Answer: C", r"Answer:\s*B\b"): False,
        ("number", "3 + 4 is 7, so $1,007.50", "1007.5"): True,
        ("number", "It is -3.", "3"): False,
        ("number", "It is 7.", "7.0"): True,
        ("number", "none", "7"): False,
    }
    assert {case: SCORERS[case[0]](*case[1:]) for case in right} == right
    assert tuple(SCORERS) == _SCORERS  # the command line names every one


def test_all_wrong_rows_are_named_at_once(tmp_path, capsys):
    file = written(
        tmp_path,
        {"question": "2 + 2?", "answer": 4},
        {"question": "2 + 2?", "prompt": "2 + 2 =", "answer": "4"},
        {"answer": "4"},
        {"messages": [{"content": "hi"}], "answer": "4"},
        {"prompt": "a", "answer": {"b": 1}},
        {"prompt": "a", "answer": "(", "scorer": "regex"},
        {"prompt": "a", "answer": "four", "scorer": "number"},
        {"prompt": "a", "answer": "4", "scorer": "best"},
    )
    with pytest.raises(ToolError, match=r"^7 of 8 lines of .*own.jsonl are wrong$"):
        own_questions(file, scorer="exact", limit=None)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"{file} line {number}" for number in range(2, 9)]
    assert lines[-1].endswith("scorer: expected one of exact, contains, regex, number, got 'best'")


def test_broken_json_is_named_with_its_line_in_the_file(tmp_path, capsys):
    file = tmp_path / "own.jsonl"
    file.write_text('{"question": "a", "answer": 1}\n\n{"question": "a"}\n{"question": "a", "answer": 1\n')
    with pytest.raises(ToolError, match="2 of 3 lines"):
        own_questions(file, scorer="exact", limit=None)
    assert capsys.readouterr().err.splitlines() == [
        f"{file} line 3: expected the keys answer; it lacks answer",
        f"{file} line 4: not JSON: Expecting ',' delimiter at character 31",
    ]


def test_rows_of_a_table_are_named_too(tmp_path, capsys):
    file = tmp_path / "own.csv"
    file.write_text("question,answer\na,1\n")
    assert own_questions(file, scorer="exact", limit=None).name == "own"
    file.write_text("question\na\n")
    with pytest.raises(ToolError, match="1 of 1 rows"):
        own_questions(file, scorer="exact", limit=None)
    assert capsys.readouterr().err == f"{file} row 1: expected the keys answer; it lacks answer\n"


def test_a_file_of_another_form_or_none_is_refused(tmp_path):
    file = tmp_path / "own.jsonl"
    for content, expected in {"": "is empty", "{": "1 of 1 lines", "[1]\n": "1 of 1 lines"}.items():
        file.write_text(content)
        with pytest.raises(ToolError, match=expected):
            own_questions(file, scorer="exact", limit=None)
    for missing, expected in ((None, "--task own needs --data FILE"), (tmp_path / "none", "no such file")):
        with pytest.raises(ToolError, match=expected) as refused:
            own_questions(missing, scorer="exact", limit=None)
        assert refused.value.exit_code == 2
