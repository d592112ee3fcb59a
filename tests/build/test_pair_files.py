"""The folder of a disaggregated pair: each side as it is written by itself, and one manifest for all of it."""

import fcntl
import json
import os
import shlex
import subprocess
from dataclasses import replace

import pytest
import yaml

from deepseek_triton_build import (
    DISAGGREGATED,
    DisaggregatedRequest,
    OutputError,
    PlanRequest,
    RefusedPlanError,
    ReplacementError,
    UnknownNameError,
    format_files,
    make_disaggregated_plan,
    pair_files,
    write_repository,
)
from deepseek_triton_tools.cli.main import main

V3 = DisaggregatedRequest(both=PlanRequest(variant="deepseek-v3", gpu="h200", profile=DISAGGREGATED), num_generation=2)
TINY = DisaggregatedRequest(both=PlanRequest(variant="tiny", engine="simulated", profile=DISAGGREGATED))


def test_each_side_is_as_it_is_written_by_itself():
    plan = make_disaggregated_plan(V3)
    files = {file.path.as_posix(): file.content for file in pair_files(plan, version="1.0")}

    for side, server in plan.sides.items():
        alone = {f"{side}/{file.path}": file.content for file in format_files("triton", server, version="1.0")}
        assert alone.items() <= files.items()
    record = json.loads(files["deepseek-triton.json"])
    assert set(record["files"]) == files.keys() - {"deepseek-triton.json"}
    assert (record["context_servers"], record["generation_servers"], record["gpus"]) == (1, 2, 24)


@pytest.mark.slow
def test_the_manifests_options_write_the_same_pair_again(tmp_path, capsys):
    request = replace(V3, context=(("num_gpus", 8), ("stream_interval", 2)), generation=(("num_gpus", 16),))
    first = {file.path.as_posix(): file.content for file in pair_files(make_disaggregated_plan(request), version="1.0")}
    options = json.loads(first["deepseek-triton.json"])["options"]

    assert main(["build", *shlex.split(options), "--output", str(tmp_path / "pair")]) == 0
    again = json.loads((tmp_path / "pair/deepseek-triton.json").read_text())
    assert again["options"] == options
    for side in ("context", "generation"):
        name = f"{side}/tensorrt_llm/deepseek-triton.json"
        assert json.loads((tmp_path / "pair" / name).read_text())["plan"] == json.loads(first[name])["plan"]


@pytest.mark.slow
def test_a_changed_pair_is_replaced_by_force_only(tmp_path):
    files = pair_files(make_disaggregated_plan(TINY), version="1.0")
    write_repository(files, tmp_path / "pair")
    assert write_repository(files, tmp_path / "pair")  # nothing was changed

    (tmp_path / "pair/generation/start.sh").write_text("#!/bin/sh\n")
    with pytest.raises(ReplacementError, match=r"changed since it was generated: generation/start\.sh"):
        write_repository(files, tmp_path / "pair")
    more = pair_files(make_disaggregated_plan(replace(TINY, num_generation=2)), version="1.0")
    with pytest.raises(ReplacementError, match="holds another deployment"):
        write_repository(more, tmp_path / "pair")


def test_a_pair_of_which_one_server_runs_is_not_replaced(tmp_path):
    files = pair_files(make_disaggregated_plan(TINY), version="1.0")
    write_repository(files, tmp_path / "pair")

    with (tmp_path / "pair/generation/tensorrt_llm/deepseek-triton.json").open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        with pytest.raises(OutputError, match=r"a server runs from this folder; .* launch stop \S+/pair/generation,"):
            write_repository(files, tmp_path / "pair", force=True)


def test_a_format_of_one_server_is_refused():
    plan = make_disaggregated_plan(TINY)
    with pytest.raises(RefusedPlanError, match="disagg can't be written as trtllm-bench; use --format triton"):
        pair_files(plan, version="1.0", format="trtllm-bench")
    with pytest.raises(UnknownNameError, match=r"did you mean .triton.\?"):
        pair_files(plan, version="1.0", format="tritn")


def written(tmp_path, **changes):
    plan = make_disaggregated_plan(replace(V3, **changes))
    write_repository(pair_files(plan, version="1.0", format="trtllm-serve"), tmp_path / "pair")
    return tmp_path / "pair"


def test_the_orchestrator_names_every_server_once(tmp_path):
    config = yaml.safe_load((written(tmp_path, num_context=2) / "disagg_config.yaml").read_text())

    assert (config["hostname"], config["port"], config["backend"]) == ("localhost", 8000, "pytorch")
    assert config["context_servers"] == {"num_instances": 2, "urls": ["localhost:8001", "localhost:8002"]}
    assert config["generation_servers"] == {"num_instances": 2, "urls": ["localhost:8003", "localhost:8004"]}


def test_the_orchestrators_script_waits_for_a_load(tmp_path):
    pair = written(tmp_path)
    program = tmp_path / "trtllm-serve"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    for own, waits in (({}, "5280"), ({"START_TIMEOUT": "7200"}, "7200")):
        said = subprocess.run(
            [pair / "orchestrator.sh", "-l", "debug"], env=environment | own, check=True, capture_output=True, text=True
        )
        config = str(pair / "disagg_config.yaml")
        assert said.stdout.split() == ["disaggregated", "-c", config, "-t", waits, "-r", "1200", "-l", "debug"]


def test_a_router_by_kv_cache_counts_in_the_servers_blocks(tmp_path):
    events = (("kv_cache_config.event_buffer_max_size", 1024), ("kv_cache_config.enable_block_reuse", True))
    own = (
        ("conditional_disagg_config.max_local_prefill_length", 256),
        ("generation_servers.router.type", "kv_cache_aware"),
    )
    config = yaml.safe_load((written(tmp_path, generation=events, orchestrator=own) / "disagg_config.yaml").read_text())

    assert config["conditional_disagg_config"] == {"max_local_prefill_length": 256}
    assert config["generation_servers"]["router"] == {"type": "kv_cache_aware", "tokens_per_block": 64}


def test_servers_that_register_themselves_are_not_listed(tmp_path):
    own = (("disagg_cluster.cluster_uri", "http://localhost:8000"),)
    config = yaml.safe_load((written(tmp_path, orchestrator=own) / "disagg_config.yaml").read_text())

    assert config["disagg_cluster"] == {"cluster_uri": "http://localhost:8000"}
    assert "context_servers" not in config


def test_a_wrong_setting_of_the_orchestrator_is_refused():
    for own in (("port", 99999), ("port.x", 1), ("context_servers", 7), ("disagg_cluster", True)):
        with pytest.raises(RefusedPlanError, match=f"{own[0].partition('.')[0]}: expected .* found .*G031"):
            make_disaggregated_plan(replace(V3, orchestrator=(own,)))


def test_settings_of_the_orchestrator_need_its_format():
    plan = make_disaggregated_plan(replace(V3, orchestrator=(("port", 9000),)))
    with pytest.raises(RefusedPlanError, match="--disagg is for trtllm-serve's orchestrator"):
        pair_files(plan, version="1.0")


@pytest.mark.parametrize("release", ["1.0.0", "1.1.0", "1.2.0", "1.2.1"])
def test_every_release_has_both_formats_with_scripts(release):
    plan = make_disaggregated_plan(replace(V3, both=replace(V3.both, release=release)))
    for format in ("triton", "trtllm-serve"):
        scripts = [file.content.decode() for file in pair_files(plan, version="1.0", format=format) if file.executable]
        assert len(scripts) >= 2
        assert [text for text in scripts if f"for TensorRT-LLM {release}" not in text] == []
