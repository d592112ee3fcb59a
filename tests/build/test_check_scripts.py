"""What `check` reads in shell scripts: exported variables, programs and their flags."""

import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_triton_build.check import CheckOptions, check_repository
from deepseek_triton_build.check.flags import flag_keys
from deepseek_triton_build.check.scripts import ShellScript, read_script
from deepseek_triton_build.data import spelling
from deepseek_triton_build.data.releases import load_release
from deepseek_triton_build.render import trtllm_commands
from deepseek_triton_build.rules.rule import CANONICAL_RELEASE
from support.check_faults import bases
from support.checked import check_alone, only, serious, write

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


# A script with `m`, and the words after it in each program that it may start. What it can't say stays as it is written.
STARTED = {
    'A=(--tp 8 "b c")\nA+=(--ep "$EP")\ntrtllm-serve m "${A[@]}"': [["--tp", "8", "b c", "--ep", "$EP"]],
    'A="--tp 8"\ntrtllm-serve m $A $B "${C[@]}" "$@"': [["--tp", "8", "$B", "${C[@]}", "$@"]],
    'C="trtllm-serve m"\nC="$C --tp 8"\neval $C': [["--tp", "8"]],
    "srun -n 8 bash -c 'trtllm-serve m --tp $((4*2))'": [["--tp", "8"]],
    'ssh host "cd /x && trtllm-serve m --tp 8"': [["--tp", "8"]],
    "ssh host <<'X'\ntrtllm-serve m --tp 8\nX": [["--tp", "8"]],
    "cat > run.sh <<X\ntrtllm-serve m --tp 8\nX\nbash run.sh": [["--tp", "8"]],
    "f() { trtllm-serve m --tp $1 ${2:-x}; }\nf 8; f 4 y": [["--tp", "8", "x"], ["--tp", "4", "y"]],
    "for i in {0..1}; do trtllm-serve m --port $((8000+i)) & done": [["--port", "8000"], ["--port", "8001"]],
    "for ((i=0; i<2; i++)); do trtllm-serve m $i; done": [["0"], ["1"]],
    "while read -r host; do ssh $host trtllm-serve m $host; done < hosts": [["$host"]],
    "case ${R:-a} in a) trtllm-serve m 1;; b|c) trtllm-serve m 2;; esac": [["1"], ["2"]],
    "case b in a) trtllm-serve m 1;; *) trtllm-serve m 2;; esac": [["2"]],
    'if [ "$R" = a ]; then T=1; else T=2; fi\ntrtllm-serve m $T\n[ "$R" = a ] && trtllm-serve m x$T': [
        ["1"],
        ["2"],
        ["x1"],
    ],
    'if [ -z "$T" ]; then T=8; fi\ntrtllm-serve m $T': [["8"]],
    '[[ -n "${D:-}" ]] && A=--debug\ntrtllm-serve m ${A:-}': [["--debug"], []],
    'set -- --tp 8\ntrtllm-serve m "$@"': [["--tp", "8"]],
    'test -f x || exit 1\nN=$(seq 2 | tail -1)\ntrtllm-serve m "$N" `echo 3`': [["$(seq 2 | tail -1)", "3"]],
    "M=/a/b.tar\ntrtllm-serve m ${M##*/} ${M%.tar} ${M/a/c} ${#M}": [["b.tar", "/a/b", "/c/b.tar", "8"]],
    "nohup setsid trtllm-serve m 1 > log 2>&1 &\necho trtllm-serve m 2\npkill -f 'trtllm-serve m'": [["1"]],
    "python3 -u -m tensorrt_llm.commands.serve serve m 1": [["1"]],
    "docker run --name trtllm-serve image trtllm-serve m 1": [["1"]],
    "docker exec trtllm-serve bash -lc 'trtllm-serve m 1'": [["1"]],
    'kubectl exec pod -- bash -c "exec trtllm-serve m 1"': [["1"]],
    'main() {\n  trtllm-serve m 1\n}\n"$@"': [["1"]],
    "declare -A T=([a]=8 [b]=4)\ntrtllm-serve m ${T[b]} ${T[$X]}": [["4", "${T[$X]}"]],
    'G=(x y)\nfor i in "${!G[@]}"; do trtllm-serve m $i${G[$i]}; done': [["0x"], ["1y"]],
    "T=8\nwhile [ $# -gt 0 ]; do case $1 in -t) T=$2; shift 2;; esac; done\ntrtllm-serve m $T": [["8"]],
    "xargs -a words trtllm-serve m": [["what xargs adds"]],
}


def test_programs_are_found_with_the_words_that_a_shell_would_give_them():
    found = {text: ShellScript(file="serve.sh", text=text).programs for text in STARTED}

    assert {text: [[word.text for word in one.words[1:]] for one in found[text]] for text in STARTED} == STARTED


EIGHT = "--tp_size 8 --ep_size 8"
R1 = "deepseek-ai/DeepSeek-R1"
# A script, and what is found in it on 8 H200, with the line; no line: what is not checked.
CHECKED = {
    f'trtllm-serve {R1} "${{ARGS[@]}}"': {"more flags (line 1)"},
    f"trtllm-serve {R1} $ARGS": {"more flags (line 1)"},
    'trtllm-serve "$@"': {"more flags (line 1)"},
    f"trtllm-serve {R1} {'--tp_size $(nproc) --ep_size 8'}": {"--tp_size (line 1)"},
    f"trtllm-serve {R1} --config /etc/llm.yaml": {"/etc/llm.yaml"},
    f"vllm serve {R1} --config $CONFIG": {"its YAML file (line 1)"},
    f"trtllm-serve {R1} --tensor_parallel_size 8 --moe_expert_parallel_size 8": set(),
    f"cat > x.yml <<X\ntensor_parallel_size: 8\nmax_batch_size: 0\nX\ntrtllm-serve {R1} --config x.yml": {"S016:3"},
    f"cat > x.yml <<X\ntensor_parallel_size: $T\nX\ntrtllm-serve {R1} --config x.yml": {"tensor_parallel_size"},
    f"cat > x.yml <<X\nspeculative_config: [$T]\nX\ntrtllm-serve {R1} {EIGHT} --config x.yml": {"speculative_config"},
    f"printf 'max_num_seq: 4' > x.yml\nvllm serve {R1} -tp 8 --config x.yml": {"S011:1"},
    f"trtllm-serve {R1} --tp_sizes 8 --ep_size 8": {"S022:1"},
    # Several servers
    f"vllm serve {R1} -tp 8 &\nvllm serve {R1} -tp 8 --max-num-seq 1": {"S022:2", "T012:2"},
    f"vllm serve {R1} -tp 8 &\nwait\nvllm serve {R1} -tp 8": set(),
    f"for i in 0 8; do\nCUDA_VISIBLE_DEVICES=$i vllm serve {R1} -tp 8 &\ndone": {"T013:2"},
    f"if [ $A = 1 ]; then trtllm-serve {R1} {EIGHT}; else\ntrtllm-serve {R1} --tp_size 8 --ep_size 6; fi": {
        "P002:2"  # P003 has the same cause
    },
    # Processes and ranks
    f"mpirun -n 8 trtllm-llmapi-launch trtllm-serve {R1} {EIGHT}": set(),
    f"mpirun -np 4 trtllm-llmapi-launch trtllm-serve {R1} {EIGHT}": {"T018:1"},
    f"mpirun -n $N trtllm-llmapi-launch trtllm-serve {R1} {EIGHT}": set(),
    f"mpirun -n 8 trtllm-serve {R1} {EIGHT}": {"T018:1"},
    f"#SBATCH -N1 --ntasks-per-node=8\nsrun trtllm-llmapi-launch trtllm-serve {R1} {EIGHT}": set(),
    f"#SBATCH -N 2 --ntasks-per-node=8\nsrun trtllm-llmapi-launch trtllm-serve {R1} {EIGHT}": {"T018:2"},
    f"#SBATCH -N 2 --ntasks-per-node=8\nsrun -n8 trtllm-llmapi-launch trtllm-serve {R1} {EIGHT}": set(),
    f"#SBATCH --ntasks 8\ntrtllm-llmapi-launch trtllm-serve {R1} {EIGHT}": {"T018:2"},
    f"srun -N 2 --ntasks-per-node 1 trtllm-serve {R1} {EIGHT}": set(),
    f"srun -n 8 vllm serve {R1} -tp 8": {"T018:1"},
    f"docker run --gpus 4 vllm/vllm-openai:v0.24.0 {R1} -tp 8": {"T013:1"},
}


@pytest.mark.parametrize("text", CHECKED)
def test_what_a_script_does_not_say_is_unknown_and_all_else_is_checked(tmp_path, text):
    (tmp_path / "run.sbatch").write_text(f"{text}\n")

    for path in (tmp_path, tmp_path / "run.sbatch"):
        report = check_repository(path, CheckOptions(gpu="h200", num_gpus=8, release="1.2.1", vllm="0.24.0"))
        unseen = [clause.rpartition(": ")[2] for clause in report.unchecked if "does not say by itself" in clause]
        found = {f"{finding.code}:{finding.line}" for finding in serious(report)}
        assert found | set(unseen) == CHECKED[text]


def test_more_ranks_than_a_node_has_gpus_need_something_that_starts_them(tmp_path):
    options = CheckOptions(gpu="h200", release="1.2.1")
    for start, codes in {
        "": ["T018"],
        "$LAUNCH ": [],
        "#SBATCH --ntasks=16\n": [],
        "mpirun -n 16 trtllm-llmapi-launch ": [],
    }.items():
        (tmp_path / "serve.sh").write_text(f"{start}trtllm-serve {R1} --tp_size 16 --ep_size 16\n")
        assert [finding.code for finding in serious(check_repository(tmp_path, options))] == codes


def test_the_container_that_a_script_names_says_the_release(tmp_path):
    for image, release in {
        "nvcr.io/nvidia/tensorrt-llm/release:1.1.0": "1.1.0",
        "nvcr.io#nvidia/tensorrt-llm/release:1.2.0": "1.2.0",
        "nvcr.io/nvidia/tritonserver:25.10-trtllm-python-py3": "1.0.0",
    }.items():
        command = f"srun --container-image={image} trtllm-serve {R1} {EIGHT}"
        (tmp_path / "serve.sh").write_text(f"{command}\n")
        report = check_repository(tmp_path)
        assert (report.models[0].release, report.models[0].release_from) == (release, "serve.sh")


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

    assert ("upgrade" in only(report, "S008").fix, len(serious(report))) == (True, 1)
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
