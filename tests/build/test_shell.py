"""The templates of scripts: each value has its place, and each place its value."""

import pytest

from deepseek_triton_build.render import shell
from deepseek_triton_build.text import template_lines, template_names


@pytest.fixture
def template(tmp_path, monkeypatch):
    """Write one template, in the place of the real ones, and fill it."""
    (tmp_path / "templates").mkdir()
    monkeypatch.setattr(shell, "__file__", str(tmp_path / "shell.py"))

    def fill(text, **values):
        for cached in (template_lines, template_names):
            cached.cache_clear()
        (tmp_path / "templates" / "piece.sh").write_text("second @@{b}\n\n")
        (tmp_path / "templates" / "script.sh").write_text(text)
        return shell.filled("script.sh", values)

    yield fill
    for cached in (template_lines, template_names):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [
        ("a @@{a}\n  #include piece.sh\n", {"a": 1, "b": 2}, "a 1\n  second 2\n\n"),
        ("#if a\nyes\n#else\nno\n#end\n", {"a": "x"}, "yes\n"),
        ("#if a\nyes\n#else\nno\n#end\n", {"a": []}, "no\n"),
        ("#if not a\n#if b\nboth @@{c}\n#end\n#end\n", {"a": True}, ""),
        ("run \\\n  @@{a} \\\n  end\n", {"a": ["--x 1", "--y"]}, "run \\\n  --x 1 \\\n  --y \\\n  end\n"),
        ("run \\\n  @@{a} \\\n  end\n", {"a": []}, "run \\\n  end\n"),
        ("a\n\n#if a\nb\n#end\n\nc\n", {"a": False}, "a\n\nc\n"),
        ("# one\n#   two @@{a}\n# three\n", {"a": "x"}, "# one two x\n# three\n"),
    ],
)
def test_a_template_is_filled(template, text, values, expected):
    assert template(text, **values) == expected


def test_a_comment_is_wrapped_with_its_value(template):
    lines = template("  # about\n  #   @@{a}\n", a="word " * 40).splitlines()
    assert len(lines) == 2
    assert all(line.startswith("  # ") for line in lines)


def test_a_value_that_is_missing_or_has_no_place_is_an_error(template):
    with pytest.raises(KeyError):
        template("@@{a}\n")
    with pytest.raises(KeyError):
        template("#if a\n#end\n")
    with pytest.raises(ValueError, match="found no use of b"):
        template("@@{a}\n", a=1, b=2)
