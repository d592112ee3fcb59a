"""What `check` reads in shell scripts: exported variables, programs and their flags."""

import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_triton_build.check import CheckOptions, check_repository
from deepseek_triton_build.check.flags import flag_keys
from deepseek_triton_build.check.scripts import ShellScript, read_script
from deepseek_triton_build.data.releases import load_release, spelling
from deepseek_triton_build.render import quickstart
from deepseek_triton_build.rules.rule import CANONICAL_RELEASE
from support.check_faults import bases
from support.checked import serious, write

VARIABLES = [
    pytest.param("export A=1", {"A": "1"}, id="plain"),
    pytest.param("export A=1\nexport B=2", {"A": "1", "B": "2"}, id="line by line"),
    pytest.param("export A=1 B=2 # C=3", {"A": "1", "B": "2"}, id="two on a line, and a comment"),
    pytest.param('export A="${A:-v:8192}"', {"A": "v:8192"}, id="a default"),
    pytest.param("[[ -n \"${A:-}\" ]] || export A='a b'", {"A": "a b"}, id="unless it is set"),
    pytest.param('export A="$B/c"', {}, id="a value that depends on another"),
    pytest.param("export A=$(date)", {}, id="a value that depends on a program"),
    pytest.param("A=1", {}, id="no export"),
    pytest.param("A=1 tritonserver", {"A": "1"}, id="for one command"),
    pytest.param("env A=1 B=2 tritonserver --x=y", {"A": "1", "B": "2"}, id="by env"),
    pytest.param("# export A=1\necho 'export A=2'", {}, id="no command"),
    pytest.param("if true; then\n  export A=1\nfi", {"A": "1"}, id="in a branch"),
    pytest.param('export A="one\ntwo"', {"A": "one\ntwo"}, id="a value of two lines"),
    pytest.param("export A=1 \\\n  B=2", {"A": "1", "B": "2"}, id="a line that goes on"),
]


@pytest.mark.parametrize(("text", "expected"), VARIABLES)
def test_the_variables_that_a_script_exports(text, expected):
    assert ShellScript(file="start.sh", text=text).known_values == expected


def test_a_variable_has_its_line():
    script = ShellScript(file="start.sh", text='#!/bin/bash\nexport A="\n"\nexport B=2\n')

    assert {name: variable.line for name, variable in script.variables.items()} == {"A": 2, "B": 4}


def test_a_program_has_its_flags_with_their_lines():
    text = 'exec mpirun -n 8 trtllm-serve r1 \\\n  --tp_size 8 \\\n  --max_batch_size=16 --sizes 1 2 "$@"\n'

    program = ShellScript(file="serve.sh", text=text).program

    assert program is not None
    assert (program.name, program.model) == ("trtllm-serve", "r1")
    found = [(flag.name, [word.text for word in flag.values], flag.line) for flag in program.flags]
    assert found == [("--tp_size", ["8"], 2), ("--max_batch_size", ["16"], 3), ("--sizes", ["1", "2"], 3)]


MODELS = [
    ("trtllm-serve /models/r1 --tp_size 8", "/models/r1"),
    ("trtllm-serve serve r1", "r1"),
    ("trtllm-bench --model a/b --model_path /models/b throughput", "/models/b"),
    ("trtllm-eval --model r1 gsm8k", "r1"),
    ('python3 "$quickstart" --model_dir r1', "r1"),
    ('trtllm-serve "$MODEL"', None),
    ('trtllm-serve "${MODEL:-r1}"', "r1"),
    ("trtllm-serve --tp_size 8", None),
]


@pytest.mark.parametrize(("text", "model"), MODELS)
def test_a_program_has_its_model(text, model):
    program = ShellScript(file="serve.sh", text=text).program

    assert program is not None
    assert program.model == model


@given(text=st.text(alphabet="ab$\"'\\\n;|&(){}#= ", max_size=40))
def test_any_text_is_read(text):
    script = ShellScript(file="start.sh", text=text)

    assert script.program is None
    assert all(1 <= variable.line <= text.count("\n") + 1 for variable in script.variables.values())


def test_the_flags_of_every_program_set_keys_that_there_are():
    release = load_release(CANONICAL_RELEASE)
    keys = flag_keys() | {key for key, _ in quickstart.flag_meanings().values()}

    assert {key for key in keys if release.find_key(key) is None} == set()
    assert spelling.keys_of_flags("trtllm-serve")["--tp"] == "tensor_parallel_size"


def test_a_script_that_bash_cant_read_has_the_line(tmp_path):
    (tmp_path / "start.sh").write_text("#!/bin/bash\nif true; then\n  :\ndone\n")

    _, [finding] = read_script(tmp_path / "start.sh", "start.sh")

    assert (finding.code, finding.line) == ("S010", 4)


def test_without_bash_the_syntax_is_not_judged(tmp_path, monkeypatch):
    (tmp_path / "start.sh").write_text("if\n")
    monkeypatch.setattr(shutil, "which", lambda _: None)

    assert read_script(tmp_path / "start.sh", "start.sh")[1] == []


def serve(folder, old, new):
    bases()["wide"].write(folder)
    path = folder / "repository/serve.sh"
    text = path.read_text()
    assert f"  {old} " in text
    path.write_text(text.replace(f"  {old} ", f"  {new} "))
    return folder / "repository"


def test_a_flag_that_depends_on_the_caller_is_unknown_and_not_one(tmp_path):
    report = check_repository(serve(tmp_path, "--ep_size 32", '--ep_size "$EP"'))

    assert not report.has_errors


def test_a_flag_with_a_default_counts_with_it(tmp_path):
    report = check_repository(serve(tmp_path, "--ep_size 32", '--ep_size "${EP:-8}"'))

    assert "M002" in {finding.code for finding in serious(report)}


def test_the_file_alone_says_that_flags_are_missing(tmp_path):
    bases()["wide"].write(tmp_path)
    (tmp_path / "repository/serve.sh").unlink()

    report = check_repository(tmp_path / "repository")

    assert [finding.code for finding in serious(report)] == ["S008"]
    assert any("what flags may give" in clause for clause in report.unchecked)


def test_a_file_that_is_named_is_checked_with_the_script_that_passes_it(tmp_path):
    repository = serve(tmp_path, "--ep_size 32", "--ep_size 8")

    report = check_repository(repository / "extra-llm-api-config.yml")

    assert "M002" in {finding.code for finding in serious(report)}


def test_a_flag_that_is_not_recorded_is_said(tmp_path):
    report = check_repository(serve(tmp_path, "--ep_size 32", "--ep_size 32 --metadata_server_config_file x.yml"))

    assert not report.has_errors
    assert "flags that are not recorded here: --metadata_server_config_file" in report.unchecked


def test_the_weights_of_a_file_alone_are_judged_by_the_number_of_gpus(tmp_path):
    path = tmp_path / "extra.yaml"
    path.write_text("tensor_parallel_size: 8\n")
    options = CheckOptions(release="1.2.1", variant="deepseek-r1", gpu="h200", num_gpus=4)

    assert {finding.code for finding in serious(check_repository(path, options))} == {"T013"}


def test_a_script_whose_program_is_not_known_leaves_its_flags_unknown(tmp_path):
    bases()["wide"].write(tmp_path / "other")
    script = tmp_path / "other/repository/serve.sh"
    script.write_text("#!/bin/bash\nexec ./our-own-server\n")

    report = check_repository(script.parent)

    assert not report.has_errors
    assert any("starts no program that is known here" in clause for clause in report.unchecked)
    assert any("what flags may give" in clause for clause in report.unchecked)


def test_a_repository_beside_a_script_is_checked_too(tmp_path):
    bases()["serve"].write(tmp_path)
    write(tmp_path / "repository", model_yaml="")

    report = check_repository(tmp_path / "repository")

    assert [model.file for model in report.models] == ["extra-llm-api-config.yml", "tensorrt_llm/1/model.yaml"]
    assert "S003" in {finding.code for finding in serious(report)}
