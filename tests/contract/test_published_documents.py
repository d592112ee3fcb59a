"""Every command and figure of the published documents, beside the command of ours that answers to it.

A row of published/ holds one printed block: `run`, our command line; `read`, where its answer is looked for; `expect`,
what the document says; and `differs`, where we say something else, with the reason. Of a `whole command`, what ours has
more is a difference too. A row with `none` says why no command of ours answers. tests/build/golden has the
configurations, key by key.
"""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from deepseek_triton_build.catalog import Release, containers, load_release, load_vllm
from deepseek_triton_build.data.spelling import flattened
from deepseek_triton_tools.cli.main import main

PUBLISHED = Path(__file__).with_name("published")
DOCUMENTS = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in sorted(PUBLISHED.glob("*.yaml"))}
ROWS = [
    pytest.param(row, id=f"{name}-{row['block']}") for name, document in DOCUMENTS.items() for row in document["rows"]
]
BUILT = {
    "r1": ["deepseek-r1", "--gpu", "h200"],
    "r1x2": ["deepseek-r1", "--gpu", "h200", "--gpus", "16"],
    "gb": ["deepseek-r1", "--gpu", "gb200", "--gpus", "8"],
    "vllm": ["deepseek-r1", "--gpu", "h200", "--engine", "vllm"],
}
"""Name of a folder in `run` -> what it is built from."""
ALL = ("deepseek-v3", "deepseek-r1", "deepseek-v3.2-exp")
TABLE = {"fp8": ALL, "fp4": ALL, "w4a8": ("deepseek-v3", "deepseek-r1")}
"""Column of the hardware table -> the models in its heading."""
_DEFAULTED = re.compile(r"\$\{\w+:-([^}]*)\}")
"""A variable of the shell with its default."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What our command printed and wrote."""

    code: int
    output: str
    error: str
    folder: Path

    @property
    def document(self):
        return json.loads(self.output)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    for name, words in BUILT.items():
        assert main(["build", *words, "--output", str(folder / name)]) == 0
    return {name: folder / name for name in BUILT}


@pytest.fixture
def ask(built, tmp_path, capsys):
    """Return a function that runs one command line of the table."""

    def run(line):
        checkpoint = tmp_path / "checkpoint"
        checkpoint.mkdir()
        config = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
        (checkpoint / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
        words = shlex.split(line.format(checkpoint=checkpoint, **built))
        if words[0] == "build":
            words += ["--output", str(tmp_path / "out")]
        capsys.readouterr()
        code = main(words)
        shown = capsys.readouterr()
        return Answer(code=code, output=shown.out, error=shown.err, folder=tmp_path)

    return run


def _rows(name, key, value="value"):
    """Return what gives key -> value of a list of the document."""
    return lambda answer, _: {row[key]: row[value] for row in answer.document[name]}


def _document(answer, _):
    return {key: value for key, value in answer.document.items() if not isinstance(value, dict | list)}


def _gpus(answer, gpu):
    """Return precision -> the published number of GPUs, which has to be the same for every model of the column."""
    rows = {(row["variant"], row["precision"]): row["gpus"] for row in answer.document["variants"]}
    counts = {
        precision: {cell["published_gpus"] for name in names for cell in rows[name, precision] if cell["gpu"] == gpu}
        for precision, names in TABLE.items()
    }
    return {precision: found.pop() if len(found) == 1 else found for precision, found in counts.items()}


def _recommended(answer, gpu):
    rows = [row for row in answer.document["variants"] if row["variant"] == "deepseek-r1"]
    return {row["precision"]: cell["recommended_gpus"] for row in rows for cell in row["gpus"] if cell["gpu"] == gpu}


def _checkpoint(answer, which):
    rows = {f"{row['variant']} {row['precision']}": row for row in answer.document["variants"]}
    return {"gigabytes": round(rows[which]["weight_bytes"] / 1e9)}


def _command(answer, script):
    """Return flag -> value of the script's last command; `${NAME:-value}` counts as the value."""
    text = (answer.folder / "out" / script).read_text()
    command = text[text.index("\nexec ") :].replace("\\\n", " ")
    return _flags(shlex.split(_DEFAULTED.sub(r"\1", command).replace('"$@"', "")))


def _whole_command(answer, script):
    """Return what `_command` returns, and the words before the first flag. HOST and PORT say where the server is."""
    text = (answer.folder / "out" / script).read_text()
    program = text[text.index("\nexec ") + len("\nexec ") :].replace("\\\n", " ").partition(" --")[0]
    flags = {flag: value for flag, value in _command(answer, script).items() if flag not in ("--host", "--port")}
    return {"program": " ".join(program.split()), **flags}


def _data_set(answer, _):
    """Return flag -> value of the command that makes the data set, which bench.sh prints when there is none."""
    text = (answer.folder / "out" / "bench.sh").read_text()
    command = text[text.index("make=(") + len("make=(") :]
    return _flags(shlex.split(_DEFAULTED.sub(r"\1", command[: command.index("\n    )")])))


def _flags(words):
    following = [*words[1:], "--"]
    return {
        word: True if after.startswith("--") else yaml.safe_load(after)
        for word, after in zip(words, following, strict=True)
        if word.startswith("--")
    }


def _defaults(answer, _):
    record = yaml.safe_load((answer.folder / "out/tensorrt_llm/1/release.yaml").read_text())["release"]
    known = load_release(record)
    fields = {key: known.find_key(key) for key in Release.keys(known)}
    return {key: field.default for key, field in fields.items() if field is not None}


def _vllm_default(answer, _):
    return {name: argument.default for name, argument in load_vllm(answer.document["vllm"]).arguments.items()}


VALUES = {
    "document": _document,
    "workload": lambda answer, _: answer.document["workload"],
    "settings": _rows("settings", "key"),
    "environment": _rows("environment", "name"),
    "unset environment": _rows("unset_environment", "name"),
    "gpus": _gpus,
    "recommended": _recommended,
    "checkpoint": _checkpoint,
    "oldest release": lambda answer, _: {"release": answer.document["releases"][-1]["release"]},
    "command": _command,
    "whole command": _whole_command,
    "vllm default": _vllm_default,
    "data set": _data_set,
    "json": lambda answer, path: flattened(json.loads((answer.folder / path).read_text())),
    "yaml": lambda answer, path: flattened(yaml.safe_load((answer.folder / "out" / path).read_text())),
    "driver": lambda _, release: {
        "major": int(containers()[load_release(release).containers[0]].driver.partition(".")[0])
    },
    "defaults": _defaults,
}
"""Kind of `read` -> a function that returns what ours says, key -> value."""


def _text(answer, path):
    return (answer.folder / "out" / path).read_text() if path else answer.output


def _refusal(answer, _):
    assert answer.code == 1, answer.output
    return answer.error


TEXTS = {"text": _text, "refusal": _refusal}
"""Kind of `read` -> a function that returns a text in which each entry of `expect` is looked for."""


SENTENCES = {
    "warnings": lambda answer, _: {
        row["code"]: f"{row['message']}; {row['fix']}" for row in answer.document["warnings"]
    },
    "reasons": _rows("settings", "key", "reason"),
    "environment reasons": _rows("environment", "name", "reason"),
}
"""Kind of `read` -> a function that returns key -> a text that has to hold what `expect` gives for the key."""


def _found(row, answer):
    """Return what ours says for each key of `expect`."""
    kinds = {**VALUES, **TEXTS, **SENTENCES}
    kind = max((name for name in kinds if row["read"].startswith(name)), key=len)
    said = kinds[kind](answer, row["read"].removeprefix(kind).strip())
    if kind in VALUES:
        keys = {**row["expect"], **said} if kind.startswith("whole") else row["expect"]
        return {key: said.get(key) for key in keys}
    if kind in SENTENCES:
        return {key: text if text in said.get(key, "") else said.get(key) for key, text in row["expect"].items()}
    ours = {key: entry["ours"] for key, entry in row.get("differs", {}).items()}
    return {
        text: text if text in said else ours[text] if (ours.get(text) or "") in said else None for text in row["expect"]
    }


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in ROWS if "none" not in row.values[0]])
def test_our_command_says_what_the_document_says_but_for_the_listed_differences(row, ask):
    answer = ask(row["run"])
    expected = row["expect"] if isinstance(row["expect"], dict) else {text: text for text in row["expect"]}
    listed = {key: entry["ours"] for key, entry in row.get("differs", {}).items()}

    assert row["read"].startswith("refusal") or answer.code == 0, answer.error
    assert _found(row, answer) == expected | listed
    assert {key for key, value in listed.items() if expected.get(key) == value} == set()


def test_every_difference_and_every_block_without_a_command_has_a_reason():
    rows = [(name, row) for name, document in DOCUMENTS.items() for row in document["rows"]]

    assert [row["block"] for _, row in rows if not row.get("none", "a command")] == []
    assert [row["block"] for _, row in rows if any(not entry["why"] for entry in row.get("differs", {}).values())] == []
    assert len({(name, row["block"]) for name, row in rows}) == len(rows)
