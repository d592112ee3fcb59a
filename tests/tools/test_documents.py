"""The README and the documentation: every command and snippet in them, and the site."""

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from deepseek_backend.backend_metrics import FAMILIES, PREFIX
from deepseek_backend.config import parse_config
from deepseek_launcher.main import _parser as launcher_parser
from deepseek_launcher.rank import parse_event
from deepseek_triton_client import InvalidRequest
from deepseek_triton_client.testing import FakeServer
from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.bench.result import write_result
from deepseek_triton_tools.cli.main import VERBS, main, program_parser
from deepseek_triton_tools.generated_files import write_site_pages
from deepseek_triton_tools.launching.launch_forms import LAUNCH_FORMS
from support.check_faults import write_weights
from support.documents import PAGES, ROOT, commands, read, snippets
from support.made_up_bench import made_up_result

pytestmark = pytest.mark.documents

README = read("README.md")


def test_the_readme_is_short_and_lists_every_command():
    """What doesn't fit belongs in docs/, whose index names every page."""
    assert len(README) <= 7_000
    assert {verb for verb in VERBS if f"| `{verb}` |" not in README} == set()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    index = (ROOT / "docs/index.md").read_text("utf-8")
    assert {page for page in pages if f"({page})" not in index} == set()


def _anchors(text):
    """The name of each section, as the site and GitHub make it."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    named = (re.sub(r"[`*]|<.*?>", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading)) for heading in headings)
    slugs = {re.sub(r"[^\w -]", "", name.lower()).strip().replace(" ", "-") for name in named}
    return slugs | set(re.findall(r'<a id="(.*?)">', text))


def test_the_links_of_a_page_lead_somewhere():
    """The strict site sees the pages in docs/ only."""
    wrong = []
    for page in PAGES:
        for address in re.findall(r"\]\((?!https?:)([^)\s]+)\)", read(page)):
            name, _, anchor = address.partition("#")
            target = (ROOT / page).parent / name if name else ROOT / page
            if not target.exists() or (anchor and anchor not in _anchors(target.read_text("utf-8"))):
                wrong.append((page, address))
    assert wrong == []


LEFT_OVER = re.compile(
    r"\b(?:TODO|FIXME|XXX|TBD|WIP)\b|\b(?i:lorem ipsum|to be (?:written|decided))\b|^(?:<{7}|={7}$|>{7})"
    r"|[(\[](?i:delete|remove|rewrite|move|check|explain|add)\b[^)\]\n]{0,60}[)\]](?!\()",
    re.MULTILINE,
)
DOUBLED = re.compile(r"(?<![\w`.-])([A-Za-z])([a-z]+)\s+(?i:\1)\2(?![\w`-])")


def leftovers(text):
    """What was left of the writing of a page: notes to its author, sections without a text, rows of a table with
    fewer or more cells than its head, and words that stand twice."""
    prose = re.sub(r"^( *)(```|~~~).*?^\1\2$", "`", text, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "`", prose, flags=re.DOTALL)
    found = [match[0] for match in LEFT_OVER.finditer(prose)]
    found += [match[0] for line in re.split(r"\n\s*\n|\|", prose) for match in DOUBLED.finditer(line)]
    heads = [*re.finditer(r"^(#+) .*$", prose, re.MULTILINE)]
    for head, following in itertools.zip_longest(heads, heads[1:]):
        within = prose[head.end() : following.start() if following else None]
        if not within.strip() and not (following and len(following[1]) > len(head[1])):
            found.append(head[0])
    for table in re.findall(r"(?:^ *\|.*\n)+", prose + "\n", re.MULTILINE):
        rows = [re.split(r"(?<!\\)\|", row.strip().removeprefix("|").removesuffix("|")) for row in table.splitlines()]
        found += ["|".join(row) for row in rows if len(row) != len(rows[0])]
    return found


def test_no_page_has_left_overs_of_its_writing():
    written = {
        "Fast (delete: explained in the table).": ["(delete: explained in the table)"],
        "Soon: TODO. [Delete](a.md) it, `TODO`.": ["TODO"],
        "```sh\n# TODO\n```\n": [],
        "It is\nis so. Had `is` is.": ["is\nis"],
        "# A\n\n## B\n\ntext\n\n## C\n\n# D\n": ["## C", "# D"],
        "| a | b |\n| - | - |\n| `x|y` | c |\n| d |\n| e | |\n": [" d "],
    }
    assert {text: leftovers(text) for text in written} == written
    assert {page: found for page in PAGES if (found := leftovers(read(page)))} == {}


FOLDERS_SHIPPED = ("build", "client", "tools", "model_repository")
SHIPPED = [
    path
    for folder in FOLDERS_SHIPPED
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".sh", ".yaml", ".pbtxt", ".md", ".toml") and "__pycache__" not in path.parts
]


def test_what_the_pages_for_contributors_name_is_there():
    """Files, make targets, functions, settings: a rename would leave the pages behind."""
    tops = (ROOT / top for top in ("Makefile", "pyproject.toml", "docs", "tests", *FOLDERS_SHIPPED))
    paths = [path for top in tops for path in (top, *top.rglob("*"))]
    code = (path.read_text("utf-8") for path in paths if path.suffix in (".py", ".toml") or path.name == "Makefile")
    text, file = "\n".join([*map(str, paths), *code]), r"[\w-]+\.(?:py|sh|yaml|md|toml|jsonl?|pbtxt|html)\b"
    pages = re.sub(r"```.*?```", "", read("ARCHITECTURE.md") + read("CONTRIBUTING.md"), flags=re.DOTALL)
    written = {name for span in re.findall(r"`([^`\n]+)`", pages) for name in re.findall(rf"{file}|\w+", span)}
    patterns = {"Z.yaml", "first_texts", "rYY", "test_launch_", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"}
    assert written - {*re.findall(r"\w+", text), *re.findall(file, text)} <= patterns


def named(pattern):
    """What the pattern finds in what is shipped."""
    return {found for path in SHIPPED for found in re.findall(pattern, path.read_text("utf-8"))}


def test_what_programs_name_is_there():
    """Pages, which the wheel holds too (tests/tools/test_packaging.py), schemas of JSON documents, and extras."""
    pages = named(r"(?<![\w/-])docs/[\w-]+\.md")
    assert len(pages) > 5
    assert pages - {*PAGES, "docs/llmapi.md"} == set()
    schemas, text = named(r'"(deepseek-triton/[\w-]+/\d+)"'), "".join(map(read, PAGES))
    assert len(schemas) > 5
    assert {name for name in schemas if name not in text} == set()
    project = read("pyproject.toml")
    assert {extra for extra in named(r"install_extra\([\"'](\w+)") if f"\n{extra} = [" not in project} == set()
    # No public index has this project.
    assert re.search(r"pip install '?deepseek-triton", text) is None
    assert named(r"pip install '?deepseek-triton") == set()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built strictly: a broken link or anchor fails."""
    folder = tmp_path_factory.mktemp("site")
    write_site_pages(folder / ".cache/docs")
    for path in [ROOT / "mkdocs.yml", *ROOT.glob("*.md")]:
        shutil.copy(path, folder)
    build = [Path(sys.executable).with_name("zensical"), "build", "--strict"]
    done = subprocess.run(build, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / ".cache/site"


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Zensical needs Python 3.11")
def test_the_site_loads_nothing_from_the_network(site):
    loaded = re.compile(r"""<(?:(?:script|img|iframe)[^>]*\ssrc|link[^>]*\shref)=["']?(https?:[^"' >]+)""")
    assert (site / "index.html").is_file()
    assert {address for page in site.rglob("*.html") for address in loaded.findall(page.read_text("utf-8"))} == set()


LANGUAGES = {"sh", "python", "yaml", "json", "toml", "ini", "promql", "text"}
FOLDERS = {
    command.argv[command.argv.index("--output") + 1]
    for page in PAGES
    for command in commands(page)
    if "build" in command.argv
}
BUILDS_R1 = "getting-started.md#3-build-and-check"
PARSER = program_parser(VERBS)
METRICS = {f"{PREFIX}{family.name}" if not family.name.startswith(PREFIX) else family.name for family in FAMILIES}


def test_every_snippet_says_what_it_is():
    """A test of another kind runs each kind; output, which nobody types, is text."""
    assert {str(snippet) for snippet in snippets() if snippet.language not in LANGUAGES} == set()


def test_the_yaml_of_a_page_is_what_its_reader_takes(tmp_path, subtests):
    """tests/gateway/test_gateway_documents.py has those of the gateway's page: they are of other programs."""
    for snippet in snippets("yaml"):
        document = yaml.safe_load(snippet.text)
        if snippet.page == "docs/gateway.md":
            continue
        with subtests.test(str(snippet)):
            if "rules" in document:  # prometheus-adapter's
                [rule] = document["rules"]
                assert rule["seriesQuery"].partition("{")[0] in METRICS
            else:
                parse_config({"model": "tiny"} | document, version_dir=tmp_path)


def test_the_queries_of_a_page_name_metrics():
    for snippet in snippets("promql"):
        named = {name.removesuffix("_bucket") for name in re.findall(r"deepseek_triton_\w+", snippet.text)}
        assert named, snippet
        assert named <= METRICS, snippet


@pytest.mark.slow
def test_the_documents_of_doctor_have_the_shape_of_their_page(capsys):
    tuning, snippet = snippets("json", page="docs/doctor.md")
    main(["doctor", "--tune", "--json"])
    shown, real = json.loads(tuning.text), json.loads(capsys.readouterr().out)
    assert (shown.keys(), shown["schema"]) == (real.keys(), real["schema"])
    assert shown["hosts"][0].keys() == real["hosts"][0].keys()
    assert shown["hosts"][0]["settings"][0].keys() == real["hosts"][0]["settings"][0].keys()
    main(["doctor", "--json"])
    shown, real = json.loads(snippet.text), json.loads(capsys.readouterr().out)
    assert (shown.keys(), shown["schema"]) == (real.keys(), real["schema"])
    for name in ("findings", "capabilities"):
        assert shown[name][0].keys() == real[name][0].keys()


def test_the_rows_of_a_batch_are_those_of_its_page(tmp_path):
    [snippet] = snippets("json", page="docs/client.md")
    (tmp_path / "in").write_text('{"id": "q-17", "prompt": "hi"}\n{"id": "q-18", "prompt": "hi"}\n')
    with FakeServer() as server:
        server.script(["hi"], InvalidRequest("...", code="E_PROMPT_TOO_LONG"))
        files = ["--input", f"{tmp_path}/in", "--output", f"{tmp_path}/out"]
        assert main(["generate", *files, "--concurrency", "1", "--url", server.url]) == 1
    shown, real = map(str.splitlines, (snippet.text, (tmp_path / "out").read_text()))
    assert [list(json.loads(row)) for row in shown] == [list(json.loads(row)) for row in real]


SUMMARIZE = """

def summarize(client, text):
    try:
        return client.generate(text, max_tokens=200).text
    except Exception:
        return None
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["survey", "pytest"])
def test_the_python_of_a_page_runs(name, tmp_path):
    """tests/live/test_examples.py has those that need a server."""
    [snippet] = [snippet for snippet in snippets("python") if name in snippet.text]
    write_weights(tmp_path / "models/DeepSeek-R1")
    program = tmp_path / "test_snippet.py"
    program.write_text(snippet.text.replace("/models/", f"{tmp_path}/models/") + SUMMARIZE)
    run = ["-m", "pytest", "-q", "-p", "no:cacheprovider"] if name == "pytest" else []
    done = subprocess.run([sys.executable, *run, program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout or re.search(r"^0 \d+$", done.stdout, re.MULTILINE)


def test_the_lines_of_a_rank_are_those_of_its_page():
    lines = [line for snippet in snippets("text") for line in re.findall(".*deepseek-triton rank.*", snippet.text)]
    assert len(lines) == 3
    for line in lines:
        assert parse_event(line.replace('"..."', f'"{16 * "0"}"'), "0123abcd") is not None, line


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_the_commands_of_a_page_work_in_their_order(page, tmp_path, monkeypatch, capsys):
    """Run, or where that takes GPUs, other machines or a server, put to the program's own parser, beside the
    repositories that the page itself has built. tests/live/test_examples.py asks a server what the pages ask it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_weights(tmp_path / "models/DeepSeek-R1")
    (tmp_path / "result").mkdir()
    write_result(made_up_result(), tmp_path / "result/bench.json")
    typed = commands(page)
    if BUILDS_R1 in read(page):
        typed = [*(command for command in commands("docs/getting-started.md") if "build" in command.argv), *typed]
    for command in typed:
        argv = [re.sub("^(/mnt)?/models/", f"{tmp_path}/models/", word) for word in command.argv]
        missing = {word for word in argv[1:] if word in FOLDERS and not Path(word).is_dir()}
        if "build" not in argv:
            assert missing == set(), f"{command.statement}: not built before"
        assert command.program in PROGRAMS or Path(argv[0]).suffix == ".sh", command.statement
        capsys.readouterr()
        PROGRAMS.get(command.program, _bash)(argv)
        if command.output:
            Path(command.output).write_text(capsys.readouterr().out)


def test_commands_in_the_text_are_ones():
    for page in PAGES:
        text = re.sub(r"```.*?```", "", read(page), flags=re.DOTALL)
        for span in re.findall(r"`(?:\.venv/bin/)?deepseek-triton ([^`]+)`", text):
            assert span.split()[0] in {*VERBS, "--help"}, (page, span)
            if re.search(r"\b[A-Z]{2,}|\.\.\.|\|", span) is None and " -" in span:
                assert PARSER.parse_known_args(shlex.split(span))[1] == [], (page, span)


def _ours(argv):
    _, unknown = PARSER.parse_known_args(argv[1:])
    assert unknown == []
    verb, *rest = argv[1:]
    if verb == "launch" and rest[0] in LAUNCH_FORMS:
        runs_nothing = [] if "--output" in rest else ["--dry-run"]
        rest = [rest[0], *runs_nothing, *(word for word in rest[1:] if word not in ("--submit", "--dry-run"))]
    is_here = verb != "check" or Path(rest[0]).is_dir()
    if verb in ("build", "plan", "variants", "check") or (verb == "launch" and rest[0] not in ("stop", "list")):
        assert not is_here or main([verb, *rest]) == 0, argv


def _make(argv):
    subprocess.run(["make", "--dry-run", *argv[1:]], cwd=ROOT, check=True, capture_output=True)


def _pip(argv):
    """tests/tools/test_packaging.py builds the wheel and installs it."""
    *options, given = argv[2:]
    if argv[1] == "wheel":
        assert (options, given) == (["--no-deps"], ".")
    else:
        name = re.fullmatch(rf"(?:\.|deepseek_triton-{__version__}-py3-none-any\.whl)(?:\[([\w,]+)\])?", given)
        assert name is not None, argv
        assert all(f"\n{extra} = [" in read("pyproject.toml") for extra in (name[1] or "").split(",") if extra)


def _python(argv):
    """tests/live/test_tiny_model.py converts the checkpoint."""
    if argv[1:3] == ["-m", "venv"]:
        assert re.fullmatch(r"~/[a-z-]+", argv[3])
    elif argv[1].startswith("tools/"):
        assert (ROOT / argv[1]).is_file()
    else:
        assert argv[1] == "tensorrt_llm/1/supervise.py"
        launcher_parser().parse_args(argv[2:])


def _bash(argv):
    subprocess.run(["bash", "-n", argv[argv[0] == "bash"]], check=True)


def _really(argv):
    subprocess.run(argv, check=True, capture_output=True)


def _cp(argv):
    assert Path(argv[-2]).exists()


def _docker(argv):
    """There is no daemon. docker parses the whole command before it looks for one."""
    for at, word in enumerate(argv):
        if word == "-c":
            subprocess.run(["bash", "-n", "-c", argv[at + 1]], check=True)
    if shutil.which("docker"):
        done = subprocess.run(argv, env={**os.environ, "DOCKER_HOST": "unix:///nobody"}, capture_output=True, text=True)
        assert "nobody" in done.stderr, done.stderr


def _kubectl(argv):
    if shutil.which("kubectl"):
        nowhere = [*argv, "--server=http://127.0.0.1:9", "--request-timeout=1s"]
        done = subprocess.run(nowhere, capture_output=True, text=True)
        assert "refused" in done.stderr, done.stderr


def _slurm(argv):
    """Its programs have the options; what srun runs is a command too."""
    if shutil.which(argv[0]):
        Path("slurm.conf").write_text("ClusterName=none\nSlurmctldHost=localhost\n")
        helping = {**os.environ, "SLURM_CONF": os.path.abspath("slurm.conf")}
        done = subprocess.run([argv[0], "--help"], env=helping, capture_output=True, text=True, check=True)
        listed = done.stdout + done.stderr
        options = list(itertools.takewhile(lambda word: not word.endswith(("bash", ".slurm")), argv[1:]))
        assert [word for word in options if word[:2] == "--" and word.partition("=")[0] not in listed] == []
    if "-c" in argv:
        task = {"SLURM_LOCALID": "3", "SLURM_NTASKS_PER_NODE": "8"}
        script = argv[-1].replace("exec ", "echo ")
        said = subprocess.run(["bash", "-c", script], env=task, capture_output=True, text=True, check=True).stdout
        assert "--share 4/8" in said
        _ours(said.split())


def _elsewhere(argv):
    """tests/live/test_examples.py asks servers, tests/conformance/test_aiperf_plugin.py runs AIPerf. The others are in
    Triton's container only."""


PROGRAMS = {
    "deepseek-triton": _ours, "make": _make, "pip": _pip, "python3": _python, "bash": _bash, "mkdir": _really,
    "ssh-keygen": _really, "cp": _cp, "docker": _docker, "kubectl": _kubectl, "srun": _slurm, "scancel": _slurm,
    "sbatch": _slurm, **dict.fromkeys([".", "curl", "cat", "aiperf", "perf_analyzer"], _elsewhere),
}  # fmt: skip
