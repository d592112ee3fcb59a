"""Reading Prometheus's text format."""

import math

import pytest

from deepseek_triton_client._core.exceptions import ProtocolError
from deepseek_triton_client._core.results import Metrics, Sample

TRITON = """\
# HELP nv_inference_request_success Number of successful inference requests, all batch sizes
# TYPE nv_inference_request_success counter
nv_inference_request_success{model="tensorrt_llm",version="1"} 5.000000
nv_inference_request_success{model="tensorrt_llm",version="2"} 2
nv_inference_request_success{model="other",version="1"} 1

nv_cpu_utilization 0.25
"""


def test_the_metrics_of_a_server():
    metrics = Metrics.parse(TRITON)
    assert metrics.text == TRITON
    assert len(metrics.samples) == 4
    name = "nv_inference_request_success"
    assert metrics.samples[0] == Sample(name, {"model": "tensorrt_llm", "version": "1"}, 5.0)
    assert metrics.value(name) == 8
    assert metrics.value(name, model="tensorrt_llm") == 7
    assert metrics.value(name, version="1", model="tensorrt_llm") == 5
    assert metrics.value("nv_cpu_utilization") == 0.25


def test_what_is_not_there_is_a_key_error_with_what_is_near():
    metrics = Metrics.parse(TRITON)
    with pytest.raises(KeyError, match="near: nv_cpu_utilization"):
        metrics.value("nv_cpu_utilisation")
    with pytest.raises(KeyError, match=r"no metric xyz'$|no metric xyz\"$"):
        metrics.value("xyz")
    with pytest.raises(KeyError, match="'model': 'x'"):
        metrics.value("nv_inference_request_success", model="x")


def test_lines():
    lines = [
        ("a 1", {}, 1),
        ("a 1 1395066363000", {}, 1),
        ("a{} 1 -5", {}, 1),
        ("  a\t1.5e-3  ", {}, 0.0015),
        ("a 1\r", {}, 1),
        ("a +Inf", {}, math.inf),
        ("a -Inf", {}, -math.inf),
        ('a{b="c"}1', {"b": "c"}, 1),
        ('a { b = "c" , } 1', {"b": "c"}, 1),
        ('a{b="",c="}"} 1', {"b": "", "c": "}"}, 1),
        ('a{b="x,y=\\"z\\""} 1', {"b": 'x,y="z"'}, 1),
        (r'a{b="C:\\n\n"} 1', {"b": "C:\\n\n"}, 1),
        ('a{b="你 #"} 1', {"b": "你 #"}, 1),
    ]
    assert [Metrics.parse(line).samples for line, _, _ in lines] == [
        (Sample("a", labels, value),) for _, labels, value in lines
    ]
    assert math.isnan(Metrics.parse("a NaN").value("a"))
    assert Metrics.parse("").samples == ()
    assert Metrics.parse('a{name="b"} 1').value("a", name="b") == 1


def test_what_is_none():
    numbers = ("<html>", "a", "a b", "a 1 2 3", "a 1 x")
    for line in (*numbers, '1a{b="c"} 1', 'a{b="c" 1', "a{b=c} 1", 'a{b="c"d="e"} 1', "a{,} 1"):
        with pytest.raises(ProtocolError, match="line 2"):
            Metrics.parse(f"ok 1\n{line}\n")
