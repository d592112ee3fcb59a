import re
import shlex
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from deepseek_triton_build import DISAGGREGATED, FORMATS, make_disaggregated_plan, make_plan
from deepseek_triton_build.catalog import PRECISIONS, RELEASES, gpus, last_image, load_release, profiles, variants
from deepseek_triton_build.data.vllm import DEFAULT_VLLM
from deepseek_triton_build.render.formats import pair_options
from deepseek_triton_build.render.stamp import build_options
from deepseek_triton_tools.cli.main import VERBS, main, program_parser
from deepseek_triton_tools.cli.parsing import forms_of
from deepseek_triton_tools.cli.plan_request import pair_request, plan_request
from deepseek_triton_tools.launching.launch_forms import LAUNCH_FORMS
from support.commands import run_command
from support.documents import PAGES, commands, read

PARSER = program_parser(VERBS)


R1 = ["deepseek-r1", "--gpu", "h200"]
LONG = "x" * 5000
READ_AND_IMPORTED = """
import sys
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
from deepseek_triton_tools.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print(*sys.modules, *[path.rpartition("/")[2] for path in opened])
"""


@pytest.mark.slow
def test_a_verb_reads_and_imports_what_it_needs(tmp_path, subtests):
    """Each of these is a hundredth of a second or more."""
    for argv, unneeded in (
        (["build", "--help"], ["deepseek_triton_build.planning", "deepseek_triton_build.rules", "trtllm-1.2.1.yaml"]),
        (["plan", *R1], ["deepseek_triton_build.check"]),
        (["build", *R1, "--output", "r1"], ["deepseek_triton_build.check", "trtllm-1.1.0.yaml"]),
        (["check", "r1"], ["deepseek_triton_build.planning.plan", "trtllm-1.1.0.yaml", "grpc"]),
    ):
        command = [sys.executable, "-c", READ_AND_IMPORTED, *argv]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        used = done.stdout.splitlines()[-1].split()
        with subtests.test(argv):
            assert "gpus.yaml" in used
            assert {"rich", "numpy", "importlib.resources", *unneeded} & set(used) == set()


WRONG_OPTIONS = [
    (["generate", "hi", "--temprature", "1"], "did you mean --temperature?"),
    (["serve", ".", "--http-prot=1"], "did you mean --http-port?"),
    (["serve", ".", "--exit-timeout", "-5"], "--exit-timeout"),
    (["serve", ".", "--address=0.0.0.0"], "--address=0.0.0.0; here it is --host"),
    (["serve", ".", "--log-info", "1"], "tritonserver's own arguments come after --"),
    (["serve", ".", "more"], "unrecognized arguments: more"),
    *((["serve", ".", "--http-port", port], "expected a number from 1 to 65535") for port in ("0", "70000", "http")),
    (["generate", "why", "not"], "text with blanks needs quotes"),
    (["plan", "deepseek-r1", "--format", "ctx"], "--format ctx; --format is an option of build"),
    (["plan", "deepseek-r1", "--zz"], "unrecognized arguments: --zz\n"),
    (["check", ""], "expected a value, got nothing"),
    (["serve", " "], "expected a value, got nothing"),
    (["warm", "files", "x", "--ready-file", ""], "expected a value, got nothing"),
    (["check", "r1", "--model", f"/{LONG}"], "a name of more than 255 bytes"),
    (["serve", LONG], "a name of more than 255 bytes"),
    (["launch", "docker", "r1", "--shm-size", "9" * 400], "expected a size such as"),
    (["serve", "r1", "--exit-timeout", "\u00b2"], "expected a whole number of seconds"),
    (["serve", "r1", "--http-port", "9" * 5000], "expected a number from 1 to 65535 or auto"),
    (["plan", "deepseek-r1", "--isl", "9" * 5000], "expected a whole number from 1"),
    (["demo", "--max-tokens", "0"], "expected a whole number from 1"),
]


@pytest.mark.slow
def test_a_wrong_option_is_refused_with_what_is_expected():
    for argv, expected in WRONG_OPTIONS:
        done = run_command(*argv)
        assert (done.returncode, expected in done.stderr) == (2, True), argv


@pytest.mark.slow
def test_help_lists_the_names_there_are():
    assert [verb for verb in VERBS if verb not in run_command("--help").stdout] == []
    for verb in ("plan", "build"):
        printed = run_command(verb, "--help").stdout
        assert f"deepseek-triton {verb} " in printed.partition("examples:")[2]
        names = printed.partition("\nnames:\n")[2]
        typed = (*variants(), *gpus(), *profiles(), *RELEASES, "fp4 (nvfp4)", "26.07")
        assert [name for name in typed if name not in names] == []


EVERY_VERB = [
    (verb, *form) for verb, parser in forms_of(PARSER).items() for form in [(), *((f,) for f in forms_of(parser))]
]


@pytest.mark.slow
def test_every_verb_has_examples_that_parse():
    for verb in EVERY_VERB:
        printed = run_command(*verb, "--help").stdout
        examples = printed.partition("examples:\n")[2].partition("\n\n")[0].splitlines()
        assert len(examples) == 2, verb
        for example in examples:
            argv = shlex.split(example.partition("deepseek-triton ")[2].partition(";")[0])
            assert tuple(argv[: len(verb)]) == verb or (verb == ("bench", "run") and argv[0] == "bench")
            _, unknown = PARSER.parse_known_args(argv[: argv.index(">")] if ">" in argv else argv)
            assert unknown == [], verb


def leaves(parser):
    return [leaf for form in forms_of(parser).values() for leaf in leaves(form)] or [parser]


def listed(leaf):
    return re.findall(r"^  -\S+", leaf.format_help().partition("\nnames:")[0], re.MULTILINE)


def test_help_shows_the_usual_options_and_help_all_every_one():
    for verb, parser in forms_of(program_parser(VERBS)).items():
        known = {name for leaf in leaves(parser) for action in leaf._actions for name in action.option_strings}
        for leaf in leaves(parser):
            every = listed(leaf)
            leaf.shorten()
            usual = listed(leaf)
            assert (set(leaf.common.split()) - known, set(usual) - set(every)) == (set(), set()), verb
            assert len(usual) <= 14, leaf.prog
            more = re.search(r"(\d+) more options", leaf.format_help())
            assert int(more[1] if more else 0) == len(every) - len(usual), leaf.prog


def test_a_missing_form_lists_the_forms(capsys):
    verbs = forms_of(PARSER)
    launches = {("launch", *first): verbs["launch"] for first in [(), ("--json",), ("r1",)]}
    for argv, parser in {(): PARSER, ("bench",): verbs["bench"], **launches}.items():
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert [form for form in forms_of(parser) if form not in error] == [], argv


HELP_OF_EACH = """
import os, sys
from contextlib import redirect_stdout
from deepseek_triton_tools.cli.main import VERBS, main
heavy = {'asyncio', 'httpx', 'rich', 'yaml', 'shtab', 'deepseek_triton_build', 'numpy', 'torch'}
for argv in ([], *([verb] for verb in VERBS)):
    if not os.fork():
        try:
            with open(os.devnull, "w") as null, redirect_stdout(null):
                main([*argv, "--help"])
        except SystemExit:
            verbs = {name for name in VERBS if f'deepseek_triton_tools.cli.{name}' in sys.modules}
            print(*argv, "uses", *sorted((heavy & set(sys.modules) | verbs) - set(argv)), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.slow
def test_help_imports_only_the_verb_and_nothing_that_an_extra_brings():
    done = subprocess.run([sys.executable, "-c", HELP_OF_EACH], capture_output=True, text=True, check=True)
    names = dict.fromkeys(("plan", "build"), " deepseek_triton_build yaml")  # the names of the catalogue
    assert done.stdout.splitlines() == ["uses", *(f"{verb} uses{names.get(verb, '')}" for verb in VERBS)]


def test_what_follows_two_dashes_is_the_servers():
    for before in (["."], [".", "--http-port", "9"], ["--verbose", "."]):
        args, unknown = PARSER.parse_known_args(["serve", *before, "--", "--log-verbose", "1", "--", "--http-port"])
        assert (args.repository, args.server_args) == (Path("."), ["--log-verbose", "1", "--", "--http-port"])
        assert unknown == []


COMPLETE = """\
COMP_WORDS=(deepseek-triton "$@"); COMP_CWORD=$#; COMPREPLY=()
_shtab_deepseek_triton
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.slow
def test_bash_completes_verbs_forms_and_options():
    module = [sys.executable, "-m", "deepseek_triton_tools.cli.main"]
    completion = subprocess.run([*module, "completion", "bash"], capture_output=True, text=True, check=True).stdout

    def offered(*typed):
        script = completion + COMPLETE
        done = subprocess.run(["bash", "-s", *typed], input=script, capture_output=True, text=True, check=True)
        return set(done.stdout.split())

    assert offered("") == set(VERBS)
    assert offered("la") == {"launch"}
    assert offered("launch", "") == {*LAUNCH_FORMS, "ssh-setup", "recipe", "stop", "list"}
    assert offered("warm", "form", "s") == {"systemd", "slurm-prolog"}
    assert offered("launch", "slurm", "--part") == {"--partition"}
    assert run_command("completion", "zsh").stdout.startswith("#compdef deepseek-triton")
    assert run_command("completion", "tcsh").stdout.startswith("# AUTOMATICALLY")


@pytest.mark.documents
def test_a_folder_has_one_deployment_in_all_the_docs():
    """Whoever types the commands of several pages would be asked for --force otherwise."""
    deployments = defaultdict(set)
    for argv in (command.argv for page in PAGES for command in commands(page)):
        # `plan --write-pace paces` makes the folder first.
        if "build" in argv[1:2] and argv[2] in variants() and "paces" not in argv:
            args = PARSER.parse_args(argv[1:])
            request = plan_request(args)
            if request.profile == DISAGGREGATED:
                pair = make_disaggregated_plan(pair_request(args, request))
                deployments[args.output].add(pair_options(pair, format=args.format))
            else:
                deployments[args.output].add(build_options(make_plan(request), format=args.format))

    assert len(deployments) > 3
    assert {folder: options for folder, options in deployments.items() if len(options) > 1} == {}


@pytest.mark.documents
def test_the_generators_page_names_everything_there_is():
    page = read("docs/generator.md")

    for name in (*variants(), *gpus(), *profiles(), *RELEASES, *FORMATS, *PRECISIONS):
        assert f"`{name}`" in page or f"| {name} " in page, name
    rows = {row.split("`")[1]: row for row in page.splitlines() if row.startswith("| `")}
    for gpu in gpus().values():
        row = rows.get(gpu.name.replace("gb300-nvl72", "gb300"), f"{gpu.title} | 8 | - | - | - |")  # a100 has none
        fewest, more = gpu.published_min_gpus, gpu.recommended_gpus
        counts = (f"{fewest.get(name, '-')} ({more.get(name)})" for name in ("fp8", "fp4", "w4a8"))
        assert row.endswith(f" | {gpu.gpus_per_node} | {' | '.join(counts)} |".replace(" (None)", "")), row
        assert re.search(r"\d+ GB|$", gpu.title)[0] in row
    for release in RELEASES:
        assert f"| {', '.join(load_release(release).containers)} |" in page
    assert last_image()[1:] in page
    assert f"| {RELEASES[0]} (default) |" in page
    assert f"{load_release(RELEASES[0]).containers[0]}-trtllm" in read("docs/getting-started.md")
    defaults = {f"(default: {RELEASES[0]})", f"(default: {DEFAULT_VLLM}, "}
    assert {said for said in defaults if said not in read("tools/deepseek_triton_tools/cli/plan_options.py")} == set()
