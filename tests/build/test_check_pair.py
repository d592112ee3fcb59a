"""`check` of a disaggregated pair that was edited by hand: its two sides together, and its orchestrator."""

import shutil

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepseek_triton_build import (
    DISAGGREGATED,
    DisaggregatedRequest,
    NothingToCheckError,
    PlanRequest,
    RefusedPlanError,
    Workload,
    make_disaggregated_plan,
    pair_files,
    write_repository,
)
from deepseek_triton_build.catalog import RELEASES, gpus, variants
from deepseek_triton_build.check import CheckOptions, check_repository

BOTH = PlanRequest(variant="deepseek-v3", gpu="h200", profile=DISAGGREGATED)
WEIGHTY = ("error", "warning")


def written(folder, format):
    plan = make_disaggregated_plan(DisaggregatedRequest(both=BOTH, num_generation=2))
    write_repository(pair_files(plan, version="1.0", format=format), folder)
    return folder


@pytest.fixture
def served(tmp_path):
    return written(tmp_path / "pair", "trtllm-serve")


@pytest.fixture
def repositories(tmp_path):
    return written(tmp_path / "pair", "triton")


def edited(path, edit):
    document = yaml.safe_load(path.read_text())
    edit(document)
    path.write_text(yaml.safe_dump(document))


def codes(report):
    """What was found, without notes, as that a file was changed."""
    return {finding.code for finding in report.findings if finding.severity in WEIGHTY}


LENGTHS = st.one_of(st.none(), st.integers(64, 60_000))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    variant=st.sampled_from(sorted(name for name, entry in variants().items() if not entry.model)),
    gpu=st.sampled_from(sorted(name for name in gpus() if name != "a100")),
    release=st.sampled_from([release for release in RELEASES if release != "0.21.0"]),
    format=st.sampled_from(["triton", "trtllm-serve"]),
    workload=st.builds(Workload, isl=LENGTHS, osl=LENGTHS, concurrency=st.one_of(st.none(), st.integers(1, 4096))),
    tokens=st.one_of(st.none(), st.integers(32, 256).map(lambda blocks: 64 * blocks)),
)
@example(
    variant="deepseek-v3.2-exp",
    gpu="h200",
    release="1.2.1",
    format="triton",
    workload=Workload(isl=4000, osl=500),
    tokens=None,
)
@example(variant="deepseek-v3", gpu="h100", release="1.0.0", format="triton", workload=Workload(), tokens=None)
@example(variant="deepseek-v3", gpu="h200", release="1.2.1", format="trtllm-serve", workload=Workload(), tokens=8192)
def test_check_takes_what_build_writes(variant, gpu, release, format, workload, tokens, tmp_path_factory):
    both = PlanRequest(variant=variant, gpu=gpu, release=release, workload=workload, profile=DISAGGREGATED)
    context = () if tokens is None else (("max_num_tokens", tokens),)
    try:
        plan = make_disaggregated_plan(DisaggregatedRequest(both=both, context=context))
    except RefusedPlanError as refused:
        if "G009" in str(refused):
            raise
        return
    folder = tmp_path_factory.mktemp("pair")
    write_repository(pair_files(plan, version="1.0", format=format), folder / "pair")

    report = check_repository(folder / "pair")
    said = {warned.rule.code for part in (*plan.sides.values(), plan) for warned in part.warnings}
    assert not report.has_errors, report.findings
    assert codes(report) <= said
    if (workload, tokens) == (Workload(), None):
        assert codes(report) == set()


EDITS = [
    ("generation", lambda file: file.pop("cache_transceiver_config"), "G002"),
    ("context", lambda file: file["kv_cache_config"].update(enable_block_reuse=True), "G010"),
]


@pytest.mark.slow
@pytest.mark.parametrize("format", ["triton", "trtllm-serve"])
def test_a_pair_as_it_was_written_is_right_and_an_edit_of_one_side_is_found(format, tmp_path, subtests):
    pair = written(tmp_path / "pair", format)
    report = check_repository(pair)
    assert codes(report) == set()
    assert [model.file.partition("/")[0] for model in report.models] == ["context", "generation"]

    name = "tensorrt_llm/1/model.yaml" if format == "triton" else "extra-llm-api-config.yml"
    for side, edit, code in EDITS:
        before = (pair / side / name).read_text()
        edited(pair / side / name, edit)
        with subtests.test(code):
            [finding] = [finding for finding in check_repository(pair).findings if finding.code == code]
            assert finding.file == f"{side}/{name}"
        (pair / side / name).write_text(before)


@pytest.mark.slow
def test_a_side_alone_is_checked_as_before(repositories):
    edited(repositories / "context/tensorrt_llm/1/model.yaml", lambda file: file.pop("disable_overlap_scheduler"))

    assert codes(check_repository(repositories / "context")) == set()


CONFIG_EDITS = [
    (lambda file: file["context_servers"].update(urls=["http://ctx:8001"]), "G020"),
    (lambda file: file.update(disagg_cluster={"cluster_uri": "x", "inactive_interval_sec": 5}), "G026"),
    (lambda file: file["context_servers"].update(urls=["localhost:9001"]), "G034"),
    (lambda file: file["context_servers"].update(url=file["context_servers"].pop("urls")), "G031"),
]


@pytest.mark.slow
def test_an_edit_of_disagg_config_is_found_in_the_folder_and_in_the_file_alone(served, subtests):
    path = served / "disagg_config.yaml"
    before = path.read_text()
    for edit, code in CONFIG_EDITS:
        path.write_text(before)
        edited(path, edit)
        for place in (served, path):
            with subtests.test(f"{code} in {place.name}"):
                report = check_repository(place)
                assert codes(report) == {code}
                assert {finding.file for finding in report.findings if finding.code == code} == {path.name}


START, REQUEST = '-t "${START_TIMEOUT:-5280}"', '-r "${REQUEST_TIMEOUT:-1200}"'


def test_the_timeouts_of_the_orchestrators_script_are_read(served):
    script = served / "orchestrator.sh"
    text = script.read_text()
    for old, new, expected in (
        (START, "-t 180", {"G029"}),
        (START, "--server_start_timeout=7200", set()),
        (f"  {START} \\\n  {REQUEST} \\\n", "", {"G029", "G030"}),
        (REQUEST, "-r 60", {"G030"}),
    ):
        assert old in text
        script.write_text(text.replace(old, new))
        assert codes(check_repository(served)) == expected


def test_a_metadata_server_beside_a_cluster_is_found(served):
    script = served / "orchestrator.sh"
    script.write_text(script.read_text().replace('"$@"', '-m etcd.yaml "$@"'))
    assert codes(check_repository(served)) == set()

    edited(served / "disagg_config.yaml", lambda file: file.update(disagg_cluster={"cluster_uri": "http://a:1"}))
    assert codes(check_repository(served)) == {"G027"}


def test_an_orchestrators_file_has_any_name_and_needs_no_servers(tmp_path):
    other = tmp_path / "mine.yml"
    other.write_text("context_servers: {urls: ['ctx:1']}\ngeneration_servers: {urls: ['http://gen:1']}\n")
    assert codes(check_repository(other)) == {"G020"}

    other.write_text("disagg_cluster: {cluster_uri: 'http://a:1'}\n")
    assert codes(check_repository(other)) == set()
    assert codes(check_repository(other, CheckOptions(release="1.1.0"))) == {"G026"}


def test_a_changed_script_of_the_pair_is_named(served):
    with (served / "orchestrator.sh").open("a") as script:
        script.write("# mine\n")

    assert [(f.code, f.file) for f in check_repository(served).findings if f.severity == "note"] == [
        ("S005", "orchestrator.sh")
    ]


def test_a_pair_without_one_side_is_named(repositories):
    for side in ("generation", "context"):
        shutil.rmtree(repositories / side)
        with pytest.raises(NothingToCheckError, match=f"expected a pair's two sides.* found no folder {side};"):
            check_repository(repositories)
        (repositories / side).mkdir()
