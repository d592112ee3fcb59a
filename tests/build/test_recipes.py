"""Every configuration that NVIDIA's documents print for DeepSeek, compared key by key with the plan that asks for it.

A case of golden/ holds one printed block: its YAML and flags as they stand there, the request for the same thing, and
every key in which the plan differs or says more, with the reason. golden/README.md lists the blocks and their cases.
"""

from pathlib import Path

import pytest
import yaml

from deepseek_triton_build import (
    PlanRequest,
    RefusedPlanError,
    Setting,
    Workload,
    format_files,
    make_plan,
    write_repository,
)
from deepseek_triton_build.catalog import RELEASES, load_release, profiles
from deepseek_triton_build.check import CheckOptions, check_repository
from deepseek_triton_build.data.spelling import canonical, flattened, spell
from deepseek_triton_build.render.model_configuration import yaml_lines
from support.check_faults import recipes
from support.checked import serious
from support.flags import from_flags

GOLDEN = Path(__file__).with_name("golden")


def load(path):
    return yaml.safe_load(path.read_text("utf-8"))


CASES = {path.stem: load(path) for path in sorted(GOLDEN.glob("[!_]*.yaml"))}
ALWAYS_ADDED = load(GOLDEN / "_always_added.yaml")
SHARED_TABLES = {"always": ALWAYS_ADDED["always"], **ALWAYS_ADDED["recipes"]}
SCRIPT_FLAGS = load(GOLDEN / "_flags.yaml")

NOT_LLM_ARGUMENTS = {"--host", "--port", "--warmup", "--num_requests", "--streaming"}
"""Flags about the server's socket or the benchmark's run. The cases leave out paths of data sets and files."""

NOT_IN_YAML = ("launch", "workload", "environment")
"""Prefixes of published() that are no LLM arguments."""


def arguments_of(program, flags):
    if program not in SCRIPT_FLAGS:
        return from_flags(program, flags)
    arguments = {}
    for flag, value in flags.items():
        inverted, _, key = SCRIPT_FLAGS[program][flag].rpartition(" ")
        arguments[key] = not value if inverted else value
    return arguments


def published(case):
    """Return the block's settings under canonical keys; those that are no LLM arguments have a prefix of their own."""
    arguments = flattened(case.get("yaml", {}))
    for program, flags in case.get("flags", {}).items():
        arguments |= arguments_of(program, flags)
    said = {key: value for key, value in canonical(arguments, case["era"]).items() if key not in NOT_LLM_ARGUMENTS}
    if "--concurrency" in said:
        said["workload.concurrency"] = said.pop("--concurrency")
    said |= {f"launch.{key}": case["launch"][key] for key in ("ranks", "nodes") if "launch" in case}
    return said | {f"environment.{name}": str(value) for name, value in case.get("environment", {}).items()}


def request_of(case, release):
    fields = dict(case["request"])
    fields["workload"] = Workload(**fields.get("workload", {}))
    fields["overrides"] = tuple((key, value) for key, value in fields.get("overrides", ()))
    return PlanRequest(**fields, release=release)


def planned(plan):
    """Return the plan in the form of published()."""
    return {
        **plan.canonical,
        "workload.concurrency": plan.workload.concurrency,
        "launch.ranks": plan.world_size,
        "launch.nodes": plan.num_nodes,
        **{f"environment.{variable.name}": variable.value for variable in plan.environment},
    }


def value_of(said, key, expected):
    """Return `said[key]`; a section that is only turned on (`{}`) equals the section with any keys set."""
    if expected == {} and any(other.startswith(f"{key}.") for other in said):
        return {}
    return said.get(key)


def rows(case, field, release):
    """Return the rows of `field` that hold for `release`, by key."""
    return {row["key"]: row for row in case.get(field, []) if release in row.get("releases", RELEASES)}


def plans_of(case):
    """Yield each release that can serve the case, and its plan; the others have to refuse it."""
    for release in RELEASES:
        if release not in case.get("refused", {}):
            yield release, make_plan(request_of(case, release))
        else:
            with pytest.raises(RefusedPlanError, match=case["refused"][release]):
                make_plan(request_of(case, release))


V4_DIFFERS = {"latency": {"print_iter_log", "enable_lm_head_tp_in_adp"}, "throughput": {"print_iter_log"}}


@pytest.mark.parametrize("profile", V4_DIFFERS)
def test_v4_pro_is_planned_as_in_nvidias_curated_files(profile, tmp_path):
    row = recipes()[f"v4-pro-{profile}"]
    release = row["release"]
    place = {"gpu": row["gpu"], "engine": "tensorrt_llm", "release": release}
    plan = make_plan(PlanRequest(variant=row["variant"], profile=profile, **place))
    said = canonical(flattened(row["arguments"]), release)

    assert {key for key, value in said.items() if plan.canonical.get(key) != value} == V4_DIFFERS[profile]
    assert plan.canonical["custom_tokenizer"] == "deepseek_v4"
    assert (plan.layout.num_gpus, plan.recipe.id) == (row["gpus"], row["name"])
    write_repository(format_files("trtllm-serve", plan, version="1.0"), tmp_path / "serve")
    assert serious(check_repository(tmp_path / "serve", CheckOptions())) == []


RENAMED = {"PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_ALLOC_CONF"}
"""By PyTorch."""


@pytest.mark.parametrize("name", CASES)
def test_the_plan_says_what_the_document_says_but_for_the_listed_differences(name):
    case = CASES[name]
    said = published(case)
    for release, plan in plans_of(case):
        ours, omitted = planned(plan), {omission.key for omission in plan.omissions}
        found = {key: (value, value_of(ours, key, value)) for key, value in said.items()}
        # A release without the key can't say it, and the plan says so.
        found = {
            key: (value, mine)
            for key, (value, mine) in found.items()
            if mine != value and (release == case["release"] or key not in omitted)
        }
        listed = {key: (row["published"], row["planned"]) for key, row in rows(case, "differences", release).items()}
        assert found == listed, release
        assert plan.recipe.id == case["recipe"]

        variables = [variable.name for variable in (*plan.environment, *plan.unset_environment)]
        assert len(set(variables)) == len(variables)
        assert all({one, RENAMED.get(one)} & {*variables} for one in case.get("environment", {}))


@pytest.mark.parametrize("name", CASES)
def test_what_the_plan_says_beyond_the_document_is_explained(name):
    case = CASES[name]
    plan = make_plan(request_of(case, case["release"]))
    said = published(case)

    beyond = {
        key: value
        for key, value in planned(plan).items()
        if key.partition(".")[0] not in ("launch", "workload") and key not in said
    }
    unexplained = {key: value for key, value in beyond.items() if not shared_row(case, key, value)}

    assert unexplained == {key: row["planned"] for key, row in rows(case, "added", case["release"]).items()}


def shared_row(case, key, value):
    """Return where the shared table explains what a plan adds, (table, key); None where it doesn't."""
    table = case["recipe"] if key in ALWAYS_ADDED["recipes"].get(case["recipe"], {}) else "always"
    row = SHARED_TABLES[table].get(key)
    return (table, key) if row and row.get("value", value) == value else None


@pytest.mark.parametrize("name", CASES)
def test_the_names_of_a_release_are_its_own_and_lead_back_to_the_same_settings(name):
    case = CASES[name]
    said = canonical(flattened(case.get("yaml", {})), case["era"])
    assert [canonical(spell(said, release), release) for release in RELEASES] == [said] * len(RELEASES)

    release = load_release(case["release"])
    arguments = {key: value for key, value in published(case).items() if key.partition(".")[0] not in NOT_IN_YAML}
    assert [key for key in spell(arguments, release.version) if release.find_key(key) is None] == []


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["era"] == "0.19"])
def test_check_finds_no_error_in_what_was_published_for_a_release_that_is_only_checked(name, tmp_path):
    case = CASES[name]
    model = make_plan(request_of(case, case["release"])).checkpoint.model
    printed = {key: value for key, value in published(case).items() if key.partition(".")[0] not in NOT_IN_YAML}
    if any(key.startswith("speculative_config.") for key in printed):
        printed["speculative_config.decoding_type"] = "MTP"  # as the script's --mtp_nextn has it
    spelled = {"tensor_parallel_size": 8} | spell(printed, "0.19.0") | {"model": model, "backend": "pytorch"}
    path = tmp_path / "model.yaml"
    path.write_text("\n".join(yaml_lines([Setting(key, value, "") for key, value in spelled.items()])), "utf-8")

    found = check_repository(path, CheckOptions(release="0.19.0", gpu=case["request"]["gpu"])).findings

    assert [finding for finding in found if finding.severity == "error"] == []


def test_every_row_has_a_reason_and_every_case_and_recipe_is_listed():
    reasons = {
        (name, row["key"]): row.get("reason")
        for name, case in CASES.items()
        for row in (*case.get("differences", []), *case.get("added", []))
    }
    assert [row for row, reason in reasons.items() if not reason] == []

    recipes = [recipe for profile in profiles().values() for recipe in profile.recipes]
    printed = {recipe.id for recipe in recipes if not recipe.source.startswith("derived from")}
    assert printed - {case["recipe"] for case in CASES.values()} == {f"v4-pro-{profile}" for profile in V4_DIFFERS}
    listed = (GOLDEN / "README.md").read_text("utf-8")
    assert [name for name in CASES if f"`{name}`" not in listed] == []


def test_every_row_of_the_shared_table_is_needed():
    used = set()
    for case in CASES.values():
        said = published(case)
        plan = planned(make_plan(request_of(case, case["release"])))
        used |= {shared_row(case, key, value) for key, value in plan.items() if key not in said}

    assert used - {None} == {(table, key) for table, entries in SHARED_TABLES.items() for key in entries}
