"""Where TensorRT-LLM is installed, `check` asks its own classes too; the stand-in stands for it here."""

import pytest

from deepseek_triton_build import PlanRequest, format_files, make_plan, write_repository
from deepseek_triton_build.catalog import DEFAULT_RELEASE
from deepseek_triton_build.check import CheckOptions, check_repository
from standin.loading import PACKAGE_PARENT
from support.checked import edited, only

MODEL_YAML = "tensorrt_llm/1/model.yaml"


@pytest.fixture
def repository(tmp_path):
    """R1 with MTP for 8 x H200, as generated for the newest release."""
    plan = make_plan(PlanRequest(variant="deepseek-r1", gpu="h200", profile="latency"))
    write_repository(format_files("triton", plan, version="0"), tmp_path / "r1")
    return tmp_path / "r1"


@pytest.fixture
def installed(repository, monkeypatch):
    """Its stand-in, where `check` and its processes find packages. It is never imported here."""
    monkeypatch.syspath_prepend(PACKAGE_PARENT)
    monkeypatch.setenv("STANDIN_RELEASE", str(repository / "tensorrt_llm/1/release.yaml"))


def spoil(repository, old, new):
    path = repository / MODEL_YAML
    path.write_text(edited(path.read_text(), old, new))
    return check_repository(repository)


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_what_is_generated_is_taken(repository):
    report = check_repository(repository)

    assert [finding for finding in report.findings if finding.code == "S027"] == []
    assert not any("TorchLlmArgs" in clause for clause in report.unchecked)


REFUSALS = [
    ("\nmax_seq_len:", "\nmax_seq_length:", "max_seq_length", "Extra inputs", "S011"),
    ("  free_gpu_memory_fraction: ", "  fraction: ", "kv_cache_config.fraction", "Extra", "S011"),
    ("decoding_type: MTP", "decoding_type: mtp", None, "Invalid decoding_type: mtp", "S015"),
    ("\nmax_seq_len: 65536", "\nmax_seq_len: long", None, "expected int | None", "S014"),
]


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("old", "new", "key", "words", "ours"), REFUSALS)
def test_its_errors_stand_beside_ours(repository, old, new, key, words, ours):
    report = spoil(repository, old, new)

    finding = only(report, "S027")
    assert words in finding.message
    assert f"TensorRT-LLM {DEFAULT_RELEASE} refuses it" in finding.message
    assert (finding.file, finding.key) == (MODEL_YAML, key)
    assert only(report, ours).severity == "error"
    assert key is None or finding.line == only(report, ours).line


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_a_file_by_itself_is_asked_about_too(tmp_path):
    path = tmp_path / "extra.yaml"
    path.write_text("moe_config: {backend: CUTLASS, load_balancers: 1}\n")

    report = check_repository(path, CheckOptions(release=DEFAULT_RELEASE))

    assert only(report, "S027").key == "moe_config.load_balancers"


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_another_release_is_not_asked(repository):
    report = check_repository(repository, CheckOptions(release="1.1.0"))

    assert any(f"{DEFAULT_RELEASE} is installed and 1.1.0 is checked" in clause for clause in report.unchecked)


RANKS = "import os\nraise ImportError(sorted(n for n in os.environ if 'RANK' in n))\n"
NOT_ASKED = {
    "raise ImportError('libcuda.so.1: cannot open shared object file')\n": ("TorchLlmArgs", "libcuda.so.1"),
    "import os\nprint('MPI_Init failed')\nos._exit(7)\n": ("its process ended with 7", "MPI_Init failed"),
    RANKS: ("['MY_RANK']",),  # it is asked as no rank of a job
}


@pytest.mark.slow
def test_one_that_cant_be_asked_is_said(repository, tmp_path, monkeypatch):
    assert not any("TorchLlmArgs" in clause for clause in check_repository(repository).unchecked)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_RANK", "MY_RANK"):
        monkeypatch.setenv(name, "0")
    for program, words in NOT_ASKED.items():
        (tmp_path / "tensorrt_llm.py").write_text(program)
        unchecked = check_repository(repository).unchecked
        assert any(all(word in clause for word in words) for clause in unchecked), unchecked
