"""Merges of hand edits with what is generated now: by lines and by settings."""

from functools import cache

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_triton_build import PlanRequest, format_files, make_plan
from deepseek_triton_build.render.merge import NoSettingsError, merge_by_keys, merge_by_lines
from deepseek_triton_tools.plans.folder_changes import changed_lines

SCRIPT = "set -e\n# ports\nport=8000\nrun \\\n  --port 8000\nexit\n"


def changed(*pairs, text=SCRIPT):
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return text


def by_lines(yours, now, keep="yours"):
    return merge_by_lines(SCRIPT, yours, now, keep)


STRICT, PORTS = ("set -e", "set -eu"), ("# ports", "# all ports")
NO_CONFLICTS = [  # one side, the other, and both
    (changed(STRICT), changed(("exit", "exit 0")), changed(STRICT, ("exit", "exit 0"))),
    (changed(("8000", "9000")), changed(("8000", "9000")), changed(("8000", "9000"))),  # the same is one
    (changed(("port=8000", "port=1")), changed(PORTS), changed(("port=8000", "port=1"), PORTS)),
    (changed(("# ports", "a=1\n# ports\nb=2")), changed(PORTS), changed(("# ports", "a=1\n# all ports\nb=2"))),
    (
        changed(PORTS),
        changed(("port=8000", "port=1")),
        changed(("# ports", "# all ports\n# ports"), ("port=8000", "port=1")),
    ),
    (f"{SCRIPT}mine", changed(STRICT), f"{changed(STRICT)}mine\n"),  # a last line without an end gets one
]


def test_changes_of_other_lines_are_both_made():
    for yours, now, text in NO_CONFLICTS:
        merged = by_lines(yours, now)
        assert (merged.text, merged.conflicts) == (text, ())


def told(merged):
    return [(conflict.where, conflict.yours, conflict.before, conflict.now) for conflict in merged.conflicts]


def test_changes_of_the_same_line_command_or_place_are_a_conflict():
    for keep, port in ("yours", 1), ("generated", 2):
        merged = by_lines(changed(("port=8000", "port=1")), changed(("port=8000", "port=2")), keep)
        assert told(merged) == [("line 3", "port=1\n", "port=8000\n", "port=2\n")]
        assert f"port={port}\n" in merged.text

    merged = by_lines(changed(("run \\", "run --fast \\")), changed(("--port 8000", "--port 1")))
    assert [conflict.where for conflict in merged.conflicts] == ["lines 4 to 5"]
    [(_, *inserted)] = told(by_lines(changed(("exit\n", "a\nexit\n")), changed(("exit\n", "b\nexit\n"))))
    assert inserted == ["a\n", None, "b\n"]


def test_lines_that_programs_read_are_no_comments():
    for line in ("#!/bin/sh", "#SBATCH --nodes=2"):
        script = f"{line}\nset -e\n"
        merged = merge_by_lines(script, f"{line}x\nset -e\n", f"{line}\nset -eu\n", "yours")
        assert [conflict.where for conflict in merged.conflicts] == ["lines 1 to 2"]
        assert changed_lines("job.slurm", script.encode(), f"{line}x\nset -e\n".encode()) == [f"-{line}", f"+{line}x"]
    assert changed_lines("a.yaml", b"a: 1\nb: 2\nc: 3\n", b"c: 3\na: 9\nb: 2\n") == ["-a: 1", "+a: 9"]  # c moved


BASE = """\
# stamp
a: 1
# why b
b: 2
section:
  # why c
  c: 3
  shapes:
    [[1, 2],
     [3, 4]]
last: true
"""


def by_keys(yours, now, keep="yours"):
    return merge_by_keys(BASE, yours, now, keep)


def of_base(*pairs):
    return changed(*pairs, text=BASE)


A2, C4, B7 = ("a: 1", "a: 2"), ("c: 3", "c: 4"), ("b: 2", "b: 7  # mine")
MOVED = of_base(("# why b\nb: 2\n", "")) + "# now better\nb: 2\n"
REASONS = ("# why b", "# a better reason\n# because of incident 42")
ALIAS = of_base(("b: 2", "b: &b 2")) + "mine: *b\n"
MERGED = [  # one side, the other, and both
    (BASE + "mine: 1\n", BASE + "# why new\nnew: 2\n", BASE + "mine: 1\n# why new\nnew: 2\n"),
    (of_base(B7), MOVED, changed(B7, text=MOVED)),  # an edit goes where its setting goes
    (of_base(("# why b", "# because of incident 42")), of_base(("# why b", "# a better reason")), of_base(REASONS)),
    (ALIAS, of_base(A2), changed(A2, text=ALIAS)),
]


def test_settings_of_both_sides_stand_side_by_side():
    for yours, now, text in MERGED:
        merged = by_keys(yours, now)
        assert (merged.text, merged.conflicts) == (text, ())

    head, _, section = BASE.partition("section:\n")  # another indentation is no edit
    wide = "".join(f"  {line}" if line.startswith(" ") else line for line in section.splitlines(keepends=True))
    merged = by_keys(f"{head}section:\n{changed(C4, text=wide)}", of_base(A2))
    assert merged.text.replace(" ", "") == of_base(A2, C4).replace(" ", "")
    assert (yaml.safe_load(merged.text)["section"]["c"], merged.conflicts) == (4, ())


def test_a_setting_that_both_sides_add_stands_there_once():
    merged = by_keys("new: 1\n" + BASE, BASE + "new: 2\n")

    assert told(merged) == [("new", "new: 1", None, "new: 2")]
    assert yaml.safe_load(merged.text)["new"] == 1
    assert merged.text.count("new:") == 1


EMPTIED = BASE[: BASE.index("section")] + "section: null\nlast: true\n"
CONFLICTS = [
    (of_base(C4), of_base(("c: 3", "c: 5")), "section.c"),
    (of_base(C4), of_base(("  c: 3\n", "")), "section.c"),
    (of_base(("b: 2\n", "")), of_base(("b: 2", "b: 3")), "b"),
    (of_base(("b: 2", "# never raise it\nb: 2")), of_base(("b: 2\n", "")), "b"),
    (of_base(("[3, 4]", "[5, 6]")), of_base(("[3, 4]", "[7, 8]")), "section.shapes"),
    (EMPTIED, of_base(("c: 3", "c: 5")), "section"),
]


def test_a_conflict_names_the_setting():
    for yours, now, where in CONFLICTS:
        mine, new = by_keys(yours, now), by_keys(yours, now, "generated")
        assert [[conflict.where for conflict in one.conflicts] for one in (mine, new)] == [[where]] * 2
        assert yaml.safe_load(mine.text) == yaml.safe_load(yours)
        assert yaml.safe_load(new.text) == yaml.safe_load(now)


def test_other_yaml_is_not_taken_apart():
    """Keys twice, a list, broken, in flow style, two documents, a list as a key, nothing, or no value of YAML's."""
    others = ["a: 1\na: 2\n", "- a\n", "a: {\n", "{a: 1}\n", "a: 1\n---\nb: 2\n", "? [a]\n: 1\n", ""]
    others += [f"{BASE}mine: {value}\n" for value in ("!env FOO", "2024-13-45", "=")]
    for text in others:
        with pytest.raises(NoSettingsError):
            merge_by_keys(BASE, text, of_base(A2), "yours")


def test_what_is_commented_out_at_the_end_of_a_section_stays_in_it():
    """The generator puts other settings behind the section."""
    base = "section:\n  c: 3\n  d: 4\nitems:\n  - x\n  - y\nlast: true\n"
    others = (("items:", "one: 1\nitems:"), ("last:", "two: 2\nlast:"))
    for edit in (
        ("  d: 4\n", "  # d: 4\n"),
        ("  d: 4\n", "  d: 4\n\n  # e: 5\n"),
        ("  - y\n", "  # - y\n"),
        ("last: true\n", "last: true\n  # more\n"),
    ):
        merged = merge_by_keys(base, changed(edit, text=base), changed(*others, text=base), "yours")
        assert (merged.text, merged.conflicts) == (changed(edit, *others, text=base), ())


def test_all_of_a_text_in_yaml_counts():
    base = "a: 1\ntext: |\n  one\n  two\nlast: 1\n"
    for end in ("two  \n", "two\n  # three\n"):
        yours = base.replace("two\n", end)
        assert merge_by_keys(base, yours, changed(A2, text=base), "yours").text == changed(A2, text=yours)


# Random edits of what build writes, and an upgrade to another release


@cache
def written(release):
    plan = make_plan(PlanRequest(variant="deepseek-r1", gpu="h200", num_gpus=8, profile="latency", release=release))
    return {file.path.name: file.content.decode() for file in format_files("trtllm-serve", plan, version="1.0")}


NEW = ("0.21.0", "1.2.1")
YAML_NAME, SCRIPT_NAME = "extra-llm-api-config.yml", "serve.sh"
EDITS = st.lists(
    st.tuples(
        st.sampled_from(["value", "remove", "comment", "key", "tail"]), st.integers(0, 10**6), st.integers(0, 99)
    ),
    max_size=6,
)


def edited(text, edits):
    """Change a YAML file as people do. Each edit leaves something that is found again."""
    lines = text.splitlines()
    for number, (kind, which, value) in enumerate(edits):
        leaves = [
            at
            for at, line in enumerate(lines)
            if ": " in line and not line.lstrip().startswith("#") and not line.endswith(":") and "[" not in line
        ]
        at = leaves[which % len(leaves)]
        indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        if kind == "value":
            lines[at] = f"{lines[at].partition(':')[0]}: {value}"
        elif kind == "tail":
            lines[at] += f"  # note {number}"
        elif kind == "comment":
            lines.insert(at, f"{indent}# note {number}")
        elif kind == "key":
            lines.insert(at, f"{indent}mine_{number}: {value}")
        elif len(leaves) > 1:
            del lines[at]
    return "\n".join(lines) + "\n"


def leaves_of(values, path=()):
    if not isinstance(values, dict) or not values:
        return {path: values}
    return {key: leaf for name, below in values.items() for key, leaf in leaves_of(below, (*path, name)).items()}


def is_told(path, conflicts):
    """Whether a conflict is about the setting, its section, or a part of it."""
    told = [tuple(conflict.where.split(".")) for conflict in conflicts]
    return any(path[: len(where)] == where or where[: len(path)] == path for where in told)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(EDITS, st.sampled_from(NEW), st.sampled_from(["yours", "generated"]))
def test_no_edit_of_settings_is_lost_silently(edits, release, keep):
    base, now = (written(one)[YAML_NAME] for one in ("1.0.0", release))
    yours = edited(base, edits)
    merged = merge_by_keys(base, yours, now, keep)
    was, mine, new, result = (leaves_of(yaml.safe_load(text)) for text in (base, yours, now, merged.text))

    for path in was.keys() | mine.keys() | new.keys() | result.keys():
        hand_made = (path in mine) != (path in was) or mine.get(path) != was.get(path)
        expected = mine if hand_made else new
        if not is_told(path, merged.conflicts):
            assert (path in result, result.get(path)) == (path in expected, expected.get(path)), path
        elif keep == "yours" and hand_made:
            assert (path in result, result.get(path)) == (path in mine, mine.get(path)), path
    for note in {word for word in yours.split("# ") if word.startswith("note ")}:
        assert note.split("\n")[0] in merged.text or merged.conflicts
    assert (yours != base) or merged.text == now


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 10**6)), max_size=6),
    st.sampled_from(NEW),
    st.sampled_from(["yours", "generated"]),
)
def test_no_edit_of_a_script_is_lost_silently(edits, release, keep):
    base, now = (written(one)[SCRIPT_NAME] for one in ("1.0.0", release))
    lines = base.splitlines()
    for number, (replaces, which) in enumerate(edits):
        at = which % len(lines)
        lines[at : at + replaces] = [f"echo mine-{number}"]
    merged = merge_by_lines(base, "\n".join(lines) + "\n", now, keep)

    given = "".join(conflict.yours or "" for conflict in merged.conflicts).splitlines()
    for line in lines:
        assert not line.startswith("echo mine-") or line in merged.text.splitlines() or line in given
    assert edits or merged.text == now
