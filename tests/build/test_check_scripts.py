"""What `check` reads in shell scripts: exported variables, programs and their flags."""

import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_triton_build.check import check_repository
from deepseek_triton_build.check.flags import flag_keys
from deepseek_triton_build.check.scripts import ShellScript, read_script
from deepseek_triton_build.data import spelling
from deepseek_triton_build.data.releases import load_release
from deepseek_triton_build.render import trtllm_commands
from deepseek_triton_build.rules.rule import CANONICAL_RELEASE
from support.check_faults import bases
from support.checked import check_alone, serious, write

VARIABLES = {
    "export A=1": {"A": "1"},
    "export A=1\nexport B=2": {"A": "1", "B": "2"},
    "export A=1 B=2 # C=3": {"A": "1", "B": "2"},
    'export A="${A:-v:8192}"': {"A": "v:8192"},
    "[[ -n \"${A:-}\" ]] || export A='a b'": {"A": "a b"},
    'export A="$B/c"': {},  # a value that depends on another
    "export A=$(date)": {},
    "A=1": {},
    "A=1 tritonserver": {"A": "1"},
    "env A=1 B=2 tritonserver --x=y": {"A": "1", "B": "2"},
    "# export A=1\necho 'export A=2'": {},
    "if true; then\n  export A=1\nfi": {"A": "1"},
    'export A="one\ntwo"': {"A": "one\ntwo"},
    "export A=1 \\\n  B=2": {"A": "1", "B": "2"},
}


def test_the_variables_that_a_script_exports():
    assert {text: ShellScript(file="start.sh", text=text).known_values for text in VARIABLES} == VARIABLES


def test_a_variable_has_its_line():
    script = ShellScript(file="start.sh", text='#!/bin/bash\nexport A="\n"\nexport B=2\n')

    assert {name: variable.line for name, variable in script.variables.items()} == {"A": 2, "B": 4}


def test_a_program_has_its_flags_with_their_lines():
    text = 'exec mpirun -n 8 trtllm-serve r1 \\\n  --tp_size 8 \\\n  --max_batch_size=16 --sizes 1 2 "$@"\n'

    program = ShellScript(file="serve.sh", text=text).program

    assert (program.name, program.model) == ("trtllm-serve", "r1")
    found = [(flag.name, [word.text for word in flag.values], flag.line) for flag in program.flags]
    assert found == [("--tp_size", ["8"], 2), ("--max_batch_size", ["16"], 3), ("--sizes", ["1", "2"], 3)]


MODELS = {
    "trtllm-serve /models/r1 --tp_size 8": "/models/r1",
    "trtllm-serve serve r1": "r1",
    "trtllm-bench --model a/b --model_path /models/b throughput": "/models/b",
    "trtllm-eval --model r1 gsm8k": "r1",
    'python3 "$quickstart" --model_dir r1': "r1",
    'trtllm-serve "$MODEL"': None,
    'trtllm-serve "${MODEL:-r1}"': "r1",
    "trtllm-serve --tp_size 8": None,
}


def test_a_program_has_its_model():
    assert {text: ShellScript(file="serve.sh", text=text).program.model for text in MODELS} == MODELS


@pytest.mark.slow
@given(text=st.text(alphabet="ab$\"'\\\n;|&(){}#= ", max_size=40))
def test_any_text_is_read(text):
    script = ShellScript(file="start.sh", text=text)

    assert script.program is None
    assert all(1 <= variable.line <= text.count("\n") + 1 for variable in script.variables.values())


def test_the_flags_of_every_program_set_keys_that_there_are():
    release = load_release(CANONICAL_RELEASE)
    keys = flag_keys() | {key for key, _ in trtllm_commands.flag_meanings().values()}

    assert {key for key in keys if release.find_key(key) is None} == set()
    assert spelling.keys_of_flags("trtllm-serve")["--tp"] == "tensor_parallel_size"


def test_a_script_that_bash_cant_read_has_the_line_and_without_bash_it_is_not_judged(tmp_path, monkeypatch):
    (tmp_path / "start.sh").write_text("#!/bin/bash\nif true; then\n  :\ndone\n")
    _, [finding] = read_script(tmp_path / "start.sh", "start.sh")
    assert (finding.code, finding.line) == ("S010", 4)

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


def test_a_flag_counts_with_its_default_and_else_is_unknown(tmp_path):
    flag = "--ep_size 32"
    unknown = check_repository(serve(tmp_path / "1", flag, '--ep_size "$EP"'))
    known = check_repository(serve(tmp_path / "2", flag, '--ep_size "${EP:-8}"'))
    unrecorded = check_repository(serve(tmp_path / "3", flag, f"{flag} --metadata_server_config_file x.yml"))

    assert not unknown.has_errors
    assert "M003" in {finding.code for finding in serious(known)}
    assert not unrecorded.has_errors
    assert "flags that are not recorded here: --metadata_server_config_file" in unrecorded.unchecked


def test_the_file_alone_says_that_flags_are_missing(tmp_path):
    bases()["wide"].write(tmp_path)
    (tmp_path / "repository/serve.sh").unlink()

    report = check_repository(tmp_path / "repository")

    assert [finding.code for finding in serious(report)] == ["S008"]
    assert any("what flags may give" in clause for clause in report.unchecked)


def test_a_file_that_is_named_is_checked_with_the_script_that_passes_it(tmp_path):
    repository = serve(tmp_path, "--ep_size 32", "--ep_size 8")

    report = check_repository(repository / "extra-llm-api-config.yml")

    assert "M003" in {finding.code for finding in serious(report)}


def test_the_weights_of_a_file_alone_are_judged_by_the_number_of_gpus():
    report = check_alone("tensor_parallel_size: 8\n", release="1.2.1", variant="deepseek-r1", gpu="h200", num_gpus=4)
    assert {finding.code for finding in serious(report)} == {"T013"}


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
