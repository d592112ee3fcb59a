"""`bench dataset`: prepare_dataset.py's command lines, the other kinds, convert and show."""

import itertools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from deepseek_triton_tools.cli.main import main

TINY = shlex.quote(str(Path(__file__).resolve().parents[3] / "model_repository/tensorrt_llm/1/tiny"))
"""A word of a command line: the checkout's path may hold a blank."""

ONE = "token-norm-dist --input-mean 5 --output-mean 5 --num-requests 1"


def dataset(line):
    """Run `bench dataset` with these words, and return the exit code."""
    return main(["bench", "dataset", *shlex.split(line)])


@pytest.fixture
def made(capsys):
    """Runs a line, and returns the rows that it printed."""

    def run(line):
        assert dataset(line) == 0
        printed = capsys.readouterr()
        assert printed.err == ""
        return [json.loads(row) for row in printed.out.splitlines()]

    return run


@pytest.fixture
def refused(capsys):
    """Runs a line that is refused, and returns the message."""

    def run(line, code=1):
        assert dataset(line) == code
        printed = capsys.readouterr()
        assert printed.out == ""
        return printed.err.removeprefix("deepseek-triton bench: ").removesuffix("\n")

    return run


# --- prepare_dataset.py ---

V3 = "--stdout --tokenizer=deepseek-ai/DeepSeek-V3 token-norm-dist --input-stdev=0 --output-stdev=0"
R1 = "--tokenizer nvidia/DeepSeek-R1-FP4 --stdout token-norm-dist --input-stdev 0 --output-stdev 0"
PUBLISHED = {
    f"{V3} --input-mean=131072 --output-mean=1024 --num-requests=4": (4, 131072, 1024),
    f"{R1} --input-mean 1024 --output-mean 2048 --num-requests 49152": (49152, 1024, 2048),
    f"{R1} --num-requests 8192 --output-mean 1000 --input-mean 1000": (8192, 1000, 1000),
}


@pytest.mark.slow
def test_published_lines_of_prepare_dataset_work():
    """Its reader takes 24 lines and leaves, as `head` does: all lines would be up to 300 MB."""
    program = [sys.executable, "-m", "deepseek_triton_tools.cli.main", "bench", "dataset"]
    for line, (num, input_len, output_len) in PUBLISHED.items():
        with subprocess.Popen([*program, *shlex.split(line)], stdout=subprocess.PIPE) as child:
            rows = [json.loads(row) for row in itertools.islice(child.stdout, min(num, 24))]
            is_all = num <= 24 and child.stdout.read() == b""
            child.stdout.close()
            assert child.wait() == 0
        assert is_all == (num <= 24)
        assert [row["task_id"] for row in rows] == list(range(min(num, 24)))
        assert {(len(row["input_ids"]), row["output_tokens"]) for row in rows} == {(input_len, output_len)}
        assert {name for row in rows for name in row} == {"task_id", "input_ids", "output_tokens"}
    done = subprocess.run([*program, "show", "-"], input='"abc"\n', capture_output=True, text=True, check=True)
    assert done.stdout.startswith("standard input: 1 requests")


def test_options_stand_before_the_kind_or_after_it(made):
    line = "token-norm-dist --input-mean 20 --output-mean 5 --num-requests 2"
    seeded = made(f"{line} --random-seed 7")
    assert made(f"--random-seed 7 {line}") == seeded == made(f"--random-seed 8 {line} --random-seed 7")
    assert made(line) == made(f"--random-seed 420 --stdout {line}") != seeded


def test_lengths_are_those_of_prepare_dataset(made, refused):
    """Recorded from its formulas with its default seed."""
    normal = "token-norm-dist --input-mean 1000 --input-stdev 200 --output-mean 9 --output-stdev 3 --num-requests 5"
    assert [len(row["input_ids"]) for row in made(normal)] == [903, 619, 895, 938, 1067]
    uniform = "token-unif-dist --input-min 1 --input-max 2 --output-min 100 --output-max 2000 --num-requests 5"
    assert [row["output_tokens"] for row in made(uniform)] == [1276, 1577, 330, 1895, 1769]
    wrong = uniform.replace("--input-min 1", "--input-min 5")
    assert refused(wrong, 2) == "--input-min 5 is more than --input-max 2"


def test_groups_have_a_prefix_and_turns_follow_each_other(made):
    rows = made("shared-prefix --prefix-len 50 --num-prefixes 2 --input-mean 9 --output-mean 3 --num-requests 4")
    prompts = [row["input_ids"] for row in rows]
    assert {len(prompt) for prompt in prompts} == {59}
    assert prompts[0][:50] == prompts[2][:50] != prompts[1][:50] == prompts[3][:50]

    line = "multi-turn --turns 3 --input-mean 9 --later-input-mean 4 --output-mean 5 --num-requests 2 --random-seed 1"
    prompts = [row["input_ids"] for row in made(line)]
    assert [len(prompt) for prompt in prompts] == [9, 9, 18, 18, 27, 27]
    for earlier, later in zip(prompts, prompts[2:], strict=False):
        assert later[: len(earlier)] == earlier


# --- Tokenizers ---


def test_another_tokenizer_has_other_ids(made):
    line = f"--tokenizer {TINY} token-norm-dist --input-mean 5000 --output-mean 5 --num-requests 1"
    ids = made(line)[0]["input_ids"]
    assert (min(ids), max(ids)) == (3, 1247)


@pytest.mark.slow
def test_what_is_no_tokenizer_is_named(tmp_path, monkeypatch, refused, subtests):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for name in ("broken", "empty"):
        Path(name).mkdir()
    Path("broken/tokenizer.json").write_text('{"model": 5}')
    messages = {
        "nowhere/at/all": "there is no folder nowhere/at/all, and a name on the hub is OWNER/NAME",
        "gpt2": "there is no folder gpt2, and a name on the hub is OWNER/NAME",
        "empty": "empty has no tokenizer.json",
        "org/other": "org/other: .* deepseek-triton checkpoint download org/other --include tokenizer.json",
        "broken": "broken/tokenizer.json is no tokenizer",
    }
    for (name, message), kind in itertools.product(messages.items(), (ONE, "show f")):
        with subtests.test(name, kind=kind):
            assert re.match(message, refused(f"{kind} --tokenizer {name}"))


# --- convert and show ---


@pytest.fixture
def sharegpt(tmp_path):
    path = tmp_path / "ShareGPT.json"
    texts = {"Why is the sky blue?": "It is the light, which air scatters.", "Hi": "Hi", "Name the capital.": "Of?"}
    turns = [[{"from": "human", "value": prompt}, {"from": "gpt", "value": answer}] for prompt, answer in texts.items()]
    path.write_text(json.dumps([{"conversations": each} for each in turns]))
    return path


def test_sharegpt_is_converted_with_a_tokenizer_or_a_length(made, refused, sharegpt):
    rows = made(f"convert {sharegpt} --output-mean 7")
    prompts = ["Why is the sky blue?", "Hi", "Name the capital."]
    assert [(row["prompt"], row["output_tokens"]) for row in rows] == [(prompt, 7) for prompt in prompts]
    assert refused(f"convert {sharegpt} --output-stdev 7", 2).startswith("--output-stdev needs --output-mean")
    assert "same file" in refused(f"convert {sharegpt} --output {sharegpt} --output-mean 7", 2)
    assert all(refused(f"show {path}", 2).startswith(f"{path}: ") for path in (f"{sharegpt}s", sharegpt.parent))
    assert all("give --tokenizer DIR" in refused(f"{verb} {sharegpt}", 2) for verb in ("convert", "show"))

    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(f"{shlex.split(TINY)[0]}/tokenizer.json")
    num_tokens = len(tokenizer.encode("It is the light, which air scatters.").ids)
    first = {"task_id": 0, "prompt": "Why is the sky blue?", "output_tokens": num_tokens}
    assert made(f"convert {sharegpt} --tokenizer {TINY} --num-requests 1") == [first]


def test_a_file_is_replaced_only_by_a_whole_one(tmp_path, refused):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a", "output_tokens": 5}\n"b"\n')
    output.write_text("old")
    assert refused(f"convert {source} --output {output}", 2).startswith("request 2 has no number of output tokens")
    assert output.read_text() == "old"
    assert dataset(f"--output {output} convert {source} --output-mean 3") == 0
    assert len(output.read_text().splitlines()) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_show_counts_lengths_and_common_prefixes_or_characters(tmp_path, capsys):
    path = tmp_path / "d.jsonl"
    dataset(f"shared-prefix --prefix-len 64 --input-mean 36 --output-mean 5 --num-requests 4 --output {path}")
    assert dataset(f"show {path}") == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{path}: 4 requests\n")
    assert "input tokens   400    100   100  100  100  100  100" in printed
    assert "output tokens  20     5     5    5    5    5    5" in printed
    assert "48.0%" in printed

    rows = [{"timestamp": at_ms, "payload": {"prompt": text}} for at_ms, text in ((5, "four"), (2505, "six"))]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert dataset(f"show {path}") == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{path}: 2 requests in 2.5 s\n")
    assert "input characters  7" in printed
    assert "input tokens" not in printed


def test_without_numpy_it_says_what_to_install(refused, monkeypatch):
    monkeypatch.setattr("deepseek_triton_tools.cli.bench.find_spec", {}.get)
    for line in (ONE, "convert f", "show f"):
        assert "numpy: pip install '.[bench]'" in refused(line)
