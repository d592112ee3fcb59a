"""Results as files: our own, and those that other programs read."""

import csv
import json
import math
from array import array
from dataclasses import replace

import pytest

from deepseek_triton_tools.bench.result import (
    BenchPoint,
    BenchRun,
    MetricSummary,
    RequestRecord,
    Slo,
    csv_text,
    read_result,
    write_result,
    write_samples,
)
from deepseek_triton_tools.bench.run_figures import run_figures, run_timeline
from deepseek_triton_tools.bench.sweep import run_name, serving_document, trtllm_document
from deepseek_triton_tools.bench.workload import LoadPoint
from deepseek_triton_tools.tool_errors import ToolError
from support.made_up_bench import made_up_result, read_samples

RECORDS = (
    RequestRecord(
        index=0,
        sent_s=0.0,
        chunk_s=[0.5, 0.6, 0.8],
        chunk_tokens=[1, 2, 1],
        ended_s=1.0,
        num_input_tokens=8,
        num_output_tokens=4,
    ),
    RequestRecord(index=1, sent_s=0.5, ended_s=2.0, num_input_tokens=8, outcome="failed", error="overloaded: full"),
)
SLO = Slo(ttft_ms=600)
FIGURES = run_figures(RECORDS, gpus=8, concurrency=2, slo=SLO)
LOAD = LoadPoint(num_requests=2, concurrency=2)
RUN = BenchRun(figures=FIGURES, timeline=run_timeline(RECORDS, 4))
RESULT = made_up_result(
    [BenchPoint(load=LOAD, runs=(RUN,))],
    date="2026-01-31T12:00:05+00:00",
    slo=SLO,
    server={"engine": "simulated", "limits": {"max_batch_size": 8}},
)


def _edited(folder, edit):
    """A bench.json whose document was changed by `edit`."""
    path = folder / "bench.json"
    write_result(RESULT, path)
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))
    return path


def test_fields_of_a_newer_version_are_passed_over_and_those_with_a_default_may_lack(tmp_path):
    def older(document):
        del document["server"], document["points"][0]["runs"][0]["figures"]["peak_concurrency"]

    assert read_result(_edited(tmp_path, lambda document: document.update(weather="mild"))) == RESULT
    assert read_result(_edited(tmp_path, older)).points[0].runs[0].figures.peak_concurrency == 0


def test_a_result_is_read_as_it_was_written(tmp_path):
    """JSON has no infinity, and no tuples."""
    metrics = {'up{a="\u00fc"}': MetricSummary(first=-1.5, last=2.0, mean=1e-300, max=1e300)}
    other = BenchRun(figures=replace(FIGURES, goodput=None), server_metrics=metrics, interrupted=True)
    closed, opened = LOAD, LoadPoint(num_requests=2, rate=math.inf, burstiness=0.1, duration_s=0.5)
    points = tuple(BenchPoint(load=load, runs=(RUN, other)) for load in (closed, opened))
    for result in (replace(RESULT, points=points), replace(RESULT, gpus=None, slo=Slo(), points=(), server={})):
        write_result(result, tmp_path / "bench.json")
        assert read_result(tmp_path / "bench.json") == result == read_result(tmp_path)


def test_what_bench_did_not_write_is_refused(tmp_path, subtests):
    edits = {
        "'deepseek-triton/bench/2'": lambda document: document.update(schema="deepseek-triton/bench/2"),
        "its schema is None": lambda document: document.pop("schema"),
        "`points`": lambda document: document.pop("points"),
        "`$.gpus`": lambda document: document.update(gpus="8"),
        "`$.points[0].runs[0].interrupted`": lambda document: document["points"][0]["runs"][0].update(interrupted=0),
        "`$.urls`": lambda document: document.update(urls="http://a"),
        "`$.points[0].runs[0].figures.ttft_ms.p50`": lambda document: document["points"][0]["runs"][0]["figures"][
            "ttft_ms"
        ].update(p50="fast"),
    }
    start = f"{tmp_path}/bench.json: expected what deepseek-triton bench writes"
    for reason, edit in edits.items():
        with subtests.test(reason):
            with pytest.raises(ToolError) as caught:
                read_result(_edited(tmp_path, edit))
            assert str(caught.value).startswith(start)
            assert reason in str(caught.value)
    for content in (b"", b"{", b"[]", b"\xff\xfe", b"3"):
        with subtests.test(repr(content)):
            (tmp_path / "bench.json").write_bytes(content)
            with pytest.raises(ToolError) as caught:
                read_result(tmp_path)
            assert str(caught.value).startswith(start)


def test_files_that_cannot_be_read_or_written(tmp_path):
    with pytest.raises(ToolError, match=r"bench\.json can't be read") as caught:
        read_result(tmp_path)
    assert caught.value.exit_code == 2
    with pytest.raises(ToolError, match=r"bench\.json can't be written"):
        write_result(RESULT, tmp_path / "nowhere/bench.json")


def test_a_result_that_cannot_be_written_leaves_the_old_one(tmp_path):
    """JSON has no NaN."""
    write_result(RESULT, tmp_path / "bench.json")
    broken = replace(RESULT, server={"load": math.nan})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_result(broken, tmp_path / "bench.json")
    assert read_result(tmp_path) == RESULT
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]


# --- benchmark_serving and vllm bench serve ---

READ_BY_OTHERS = {
    *("date", "backend", "model_id", "tokenizer_id", "num_prompts", "duration", "completed", "failed"),
    *("total_input_tokens", "total_output_tokens", "request_throughput", "output_throughput"),
    *("total_token_throughput", "user_throughput", "request_rate", "burstiness", "max_concurrency"),
    *("request_goodput", "request_goodput:"),
    *(f"{of}_{name}_ms" for of in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")),
}


def test_the_document_of_a_run_has_the_keys_of_benchmark_serving():
    document = serving_document(RESULT, LOAD, FIGURES)

    assert set(document) >= READ_BY_OTHERS
    assert (document["date"], document["request_rate"], document["max_concurrency"]) == ("20260131-120005", "inf", 2)
    assert (document["completed"], document["failed"]) == (1, 1)
    assert document["request_goodput"] == document["request_goodput:"] == 0.5
    assert document["mean_itl_ms"] == pytest.approx(150)  # between chunks, as there; between tokens it is 100
    json.dumps(document, allow_nan=False)
    # InferenceX's utils/process_result.py takes each `*_ms` as a number, and divides by each of the TPOT's.
    assert float(document["total_token_throughput"]) > float(document["output_throughput"]) == pytest.approx(4 / 2)
    assert len([float(value) for key, value in document.items() if key.endswith("ms")]) == 28
    assert float(document["mean_tpot_ms"]) == pytest.approx(100)
    # A run of a duration sends more or fewer than were planned.
    more = replace(FIGURES, completed=5, failed=2, cancelled=1)
    assert serving_document(RESULT, LOAD, more)["num_prompts"] == 8


def test_files_are_named_after_the_load():
    names = {
        (LoadPoint(num_requests=1, concurrency=4096), 0): "concurrency_4096",
        (LoadPoint(num_requests=1, concurrency=32), 2): "concurrency_32_run_3",
        (LoadPoint(num_requests=1, rate=2.5, concurrency=32), 0): "rate_2.5_concurrency_32",
        (LoadPoint(num_requests=7, rate=math.inf), 0): "7_at_once",
        (LoadPoint(num_requests=100, rate=math.inf, concurrency=8), 0): "100_at_once_concurrency_8",
        (LoadPoint(num_requests=100, rate=100.0), 0): "rate_100",
        (LoadPoint(num_requests=100, rate=200.0), 0): "rate_200",
        (LoadPoint(num_requests=100, rate=1000.0), 0): "100_at_once_rate_1000",
        (LoadPoint(num_requests=100, rate=1234567.0), 0): "100_at_once_rate_1234567",
        (LoadPoint(num_requests=1), 0): "trace",
    }
    assert {case: run_name(*case) for case in names} == names


# --- trtllm-bench ---


def test_the_report_of_trtllm_bench():
    document = trtllm_document(RESULT, FIGURES)

    sections = "engine machine world_info request_info performance streaming_metrics decoding_stats dataset"
    assert list(document) == sections.split()
    performance = document["performance"]
    assert performance["system_output_throughput_tok_s"] == pytest.approx(2.0)
    assert performance["output_throughput_per_user_tok_s"] == pytest.approx(4.0)
    assert performance["output_throughput_per_gpu_tok_s"] == pytest.approx(0.25)
    assert set(performance["request_latency_percentiles_ms"]) == {
        *("p50", "p90", "p95", "p99"),
        *("minimum", "maximum", "average"),
    }
    assert document["request_info"]["avg_num_concurrent_requests"] == pytest.approx(0.5)
    assert document["engine"]["backend"] == "simulated"
    json.dumps(document, allow_nan=False)


# --- CSV and samples ---


def test_csv_has_a_row_for_each_run():
    again = replace(RUN, figures=replace(FIGURES, goodput=None), interrupted=True)
    open_loop = BenchPoint(load=LoadPoint(num_requests=3, rate=math.inf), runs=(RUN,))
    result = replace(RESULT, points=(replace(RESULT.points[0], runs=(RUN, again)), open_loop))
    first, second, third = csv.DictReader(csv_text(result).splitlines())

    assert [row["run"] for row in (first, second, third)] == ["1", "2", "1"]
    assert [row["interrupted"] for row in (first, second)] == ["0", "1"]
    assert [row["load"] for row in (first, third)] == ["concurrency 2", "3 at once"]
    assert float(first["ttft_ms_p99"]) == pytest.approx(500)
    assert float(first["output_throughput"]) == pytest.approx(2)
    assert (first["goodput"], second["goodput"], first["rate"], third["rate"]) == ("0.5", "", "", "inf")
    assert first.keys() == third.keys()


def test_samples_are_read_as_they_were_written(tmp_path):
    """Load processes have arrays of times and tokens; so the figures of the file are those of the run."""
    late = replace(RECORDS[1], index=7, due_s=0.123456, num_cached_tokens=3, outcome="cancelled", error='"\u00fc"\n')
    arrays = [
        replace(each, chunk_s=array("d", each.chunk_s), chunk_tokens=array("I", each.chunk_tokens))
        for each in (*RECORDS, late)
    ]
    write_samples(arrays, tmp_path / "requests.jsonl.gz")
    assert read_samples(tmp_path / "requests.jsonl.gz") == [*RECORDS, late]
