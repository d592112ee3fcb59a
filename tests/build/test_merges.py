"""Merges of hand edits with what is generated now: by lines and by settings."""

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_triton_build import PlanRequest, format_files, make_plan
from deepseek_triton_build.render.key_merge import NoSettingsError, merge_by_keys
from deepseek_triton_build.render.line_merge import merge_by_lines
from deepseek_triton_tools.plans.plan_diff import changed_lines

SCRIPT = "set -e\n# ports\nport=8000\nrun \\\n  --port 8000\nexit\n"


def by_lines(yours, now, keep="yours"):
    return merge_by_lines(SCRIPT, yours, now, keep)


def test_changes_of_other_lines_are_both_made():
    merged = by_lines(SCRIPT.replace("set -e", "set -eu"), SCRIPT.replace("exit", "exit 0"))

    assert merged.text == SCRIPT.replace("set -e", "set -eu").replace("exit", "exit 0")
    assert merged.conflicts == ()


def test_the_same_change_on_both_sides_is_one():
    changed = SCRIPT.replace("8000", "9000")

    assert (by_lines(changed, changed).text, by_lines(changed, changed).conflicts) == (changed, ())


@pytest.mark.parametrize("keep", ["yours", "generated"])
def test_another_change_of_the_same_line_is_a_conflict(keep):
    merged = by_lines(SCRIPT.replace("port=8000", "port=1"), SCRIPT.replace("port=8000", "port=2"), keep)

    [conflict] = merged.conflicts
    assert (conflict.where, conflict.yours, conflict.before, conflict.now) == (
        "line 3",
        "port=1\n",
        "port=8000\n",
        "port=2\n",
    )
    assert f"port={1 if keep == 'yours' else 2}\n" in merged.text


def test_lines_of_one_command_are_not_put_together_from_both():
    """A comment beside a changed line is another thing."""
    merged = by_lines(SCRIPT.replace("run \\", "run --fast \\"), SCRIPT.replace("--port 8000", "--port 1"))
    assert [conflict.where for conflict in merged.conflicts] == ["lines 4 to 5"]

    merged = by_lines(SCRIPT.replace("port=8000", "port=1"), SCRIPT.replace("# ports", "# all ports"))
    assert (merged.text.splitlines()[1:3], merged.conflicts) == (["# all ports", "port=1"], ())


@pytest.mark.parametrize("line", ["#!/bin/sh", "#SBATCH --nodes=2"])
def test_lines_that_programs_read_are_no_comments(line):
    script = f"{line}\nset -e\n"
    merged = merge_by_lines(script, f"{line}x\nset -e\n", f"{line}\nset -eu\n", "yours")

    assert [conflict.where for conflict in merged.conflicts] == ["lines 1 to 2"]
    assert changed_lines("job.slurm", script.encode(), f"{line}x\nset -e\n".encode()) == [f"-{line}", f"+{line}x"]


def test_two_insertions_in_one_place_are_a_conflict():
    merged = by_lines(SCRIPT.replace("exit\n", "a\nexit\n"), SCRIPT.replace("exit\n", "b\nexit\n"))

    [conflict] = merged.conflicts
    assert (conflict.yours, conflict.before, conflict.now) == ("a\n", None, "b\n")


def test_a_last_line_without_an_end_gets_one():
    assert by_lines(SCRIPT + "mine", SCRIPT.replace("set -e", "set -eu")).text.endswith("exit\nmine\n")


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


def test_settings_that_both_sides_add_stand_side_by_side():
    merged = by_keys(BASE + "mine: 1\n", BASE + "# why new\nnew: 2\n")

    assert merged.text == BASE + "mine: 1\n# why new\nnew: 2\n"
    assert merged.conflicts == ()


def test_a_setting_that_both_sides_add_stands_there_once():
    merged = by_keys("new: 1\n" + BASE, BASE + "new: 2\n")

    [conflict] = merged.conflicts
    assert (conflict.where, conflict.yours, conflict.before, conflict.now) == ("new", "new: 1", None, "new: 2")
    assert yaml.safe_load(merged.text)["new"] == 1
    assert merged.text.count("new:") == 1


def test_an_edit_goes_where_its_setting_goes():
    moved = BASE.replace("# why b\nb: 2\n", "") + "# now better\nb: 2\n"

    assert by_keys(BASE.replace("b: 2", "b: 7  # mine"), moved).text == moved.replace("b: 2", "b: 7  # mine")


@pytest.mark.parametrize(
    ("yours", "now", "where"),
    [
        pytest.param(BASE.replace("c: 3", "c: 4"), BASE.replace("c: 3", "c: 5"), "section.c", id="both changed"),
        pytest.param(BASE.replace("c: 3", "c: 4"), BASE.replace("  c: 3\n", ""), "section.c", id="now gone"),
        pytest.param(BASE.replace("b: 2\n", ""), BASE.replace("b: 2", "b: 3"), "b", id="removed by hand"),
        pytest.param(
            BASE.replace("b: 2", "# never raise it\nb: 2"), BASE.replace("b: 2\n", ""), "b", id="comment of a gone one"
        ),
        pytest.param(BASE.replace("[3, 4]", "[5, 6]"), BASE.replace("[3, 4]", "[7, 8]"), "section.shapes", id="lines"),
        pytest.param(
            BASE[: BASE.index("section")] + "section: null\nlast: true\n",
            BASE.replace("c: 3", "c: 5"),
            "section",
            id="section emptied",
        ),
    ],
)
def test_a_conflict_names_the_setting(yours, now, where):
    mine, new = by_keys(yours, now), by_keys(yours, now, "generated")

    assert [conflict.where for conflict in mine.conflicts] == [conflict.where for conflict in new.conflicts] == [where]
    assert yaml.safe_load(mine.text) == yaml.safe_load(yours)
    assert yaml.safe_load(new.text) == yaml.safe_load(now)


def test_comments_of_both_sides_stay():
    merged = by_keys(BASE.replace("# why b", "# because of incident 42"), BASE.replace("# why b", "# a better reason"))

    assert "# a better reason\n# because of incident 42\nb: 2\n" in merged.text
    assert merged.conflicts == ()


def test_another_indentation_is_no_edit():
    head, _, section = BASE.partition("section:\n")
    wide = "".join(f"  {line}" if line.startswith(" ") else line for line in section.splitlines(keepends=True))
    merged = by_keys(f"{head}section:\n{wide.replace('c: 3', 'c: 4')}", BASE.replace("a: 1", "a: 2"))

    assert merged.text.replace(" ", "") == BASE.replace("a: 1", "a: 2").replace("c: 3", "c: 4").replace(" ", "")
    assert (yaml.safe_load(merged.text)["section"]["c"], merged.conflicts) == (4, ())


@pytest.mark.parametrize(
    "text",
    ["a: 1\na: 2\n", "- a\n", "a: {\n", "{a: 1}\n", "a: 1\n---\nb: 2\n", "? [a]\n: 1\n", ""],
    ids=["twice", "list", "broken", "flow", "two documents", "list as key", "empty"],
)
def test_other_yaml_is_not_taken_apart(text):
    with pytest.raises(NoSettingsError):
        merge_by_keys(BASE, text, BASE.replace("a: 1", "a: 2"), "yours")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("  d: 4\n", "  # d: 4\n", id="setting"),
        pytest.param("  d: 4\n", "  d: 4\n\n  # e: 5\n", id="comment"),
        pytest.param("  - y\n", "  # - y\n", id="item"),
        pytest.param("last: true\n", "last: true\n  # more\n", id="end"),
    ],
)
def test_what_is_commented_out_at_the_end_of_a_section_stays_in_it(old, new):
    """The generator puts other settings behind the section."""
    base = "section:\n  c: 3\n  d: 4\nitems:\n  - x\n  - y\nlast: true\n"

    def with_others(text):
        return text.replace("items:", "one: 1\nitems:").replace("last:", "two: 2\nlast:")

    merged = merge_by_keys(base, base.replace(old, new), with_others(base), "yours")
    assert (merged.text, merged.conflicts) == (with_others(base.replace(old, new)), ())


@pytest.mark.parametrize("end", ["two  \n", "two\n  # three\n"])
def test_all_of_a_text_in_yaml_counts(end):
    base = "a: 1\ntext: |\n  one\n  two\nlast: 1\n"
    yours = base.replace("two\n", end)

    assert merge_by_keys(base, yours, base.replace("a: 1", "a: 2"), "yours").text == yours.replace("a: 1", "a: 2")


def test_aliases_that_end_are_merged():
    yours = BASE.replace("b: 2", "b: &b 2") + "mine: *b\n"

    assert by_keys(yours, BASE.replace("a: 1", "a: 2")).text == yours.replace("a: 1", "a: 2")


@pytest.mark.parametrize("value", ["!env FOO", "2024-13-45", "="])
def test_values_that_no_parser_reads_are_not_merged(value):
    with pytest.raises(NoSettingsError):
        merge_by_keys(BASE, BASE + f"mine: {value}\n", BASE.replace("a: 1", "a: 2"), "yours")


# Random edits of what build writes, and an upgrade to another release


def written(release):
    plan = make_plan(PlanRequest(variant="deepseek-r1", gpu="h200", num_gpus=8, profile="latency", release=release))
    return {file.path.name: file.content.decode() for file in format_files("trtllm-serve", plan, version="1.0")}


OLD = written("1.0.0")
NEW = {release: written(release) for release in ("0.21.0", "1.2.1")}
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
@settings(max_examples=300, deadline=None)
@given(EDITS, st.sampled_from(sorted(NEW)), st.sampled_from(["yours", "generated"]))
def test_no_edit_of_settings_is_lost_silently(edits, release, keep):
    base, now = OLD[YAML_NAME], NEW[release][YAML_NAME]
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
@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 10**6)), max_size=6),
    st.sampled_from(sorted(NEW)),
    st.sampled_from(["yours", "generated"]),
)
def test_no_edit_of_a_script_is_lost_silently(edits, release, keep):
    base, now = OLD[SCRIPT_NAME], NEW[release][SCRIPT_NAME]
    lines = base.splitlines()
    for number, (replaces, which) in enumerate(edits):
        at = which % len(lines)
        lines[at : at + replaces] = [f"echo mine-{number}"]
    merged = merge_by_lines(base, "\n".join(lines) + "\n", now, keep)

    told = "".join(conflict.yours or "" for conflict in merged.conflicts).splitlines()
    for line in lines:
        assert not line.startswith("echo mine-") or line in merged.text.splitlines() or line in told
    assert edits or merged.text == now
