"""`check` finds realistic faults with their causes, and nothing in what has none."""

import re

import pytest

from support.check_faults import EXTRA, FAULTS, MODEL_YAML, SERVE, bases, recipes
from support.checked import serious


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found_with_its_cause(fault, tmp_path):
    findings = fault.report(tmp_path).findings

    assert fault.is_found_in(findings), [f"{one.code} {one.message}; {one.fix}" for one in findings]


@pytest.mark.parametrize("name", [name for name in bases() if not name.startswith("recipe")])
def test_what_is_generated_has_no_errors_and_no_fault_of_the_table(name, tmp_path):
    bases()[name].write(tmp_path)

    findings = bases()[name].check(tmp_path, {}).findings

    assert [finding for finding in findings if finding.severity == "error"] == []
    assert [fault.name for fault in FAULTS if fault.base == name and fault.is_found_in(findings)] == []


@pytest.mark.parametrize("name", recipes())
def test_published_arguments_have_only_the_errors_that_are_known(name, tmp_path):
    base = bases()[f"recipe {name}"]
    base.write(tmp_path)

    findings = base.check(tmp_path, {}).findings

    assert {finding.code for finding in findings if finding.severity == "error"} == set(recipes()[name]["errors"])
    assert [one.name for one in FAULTS if one.base == f"recipe {name}" and one.is_found_in(findings)] == []


MISSPELLED = {
    "a letter missing": lambda key: key[:-1],
    "two letters exchanged": lambda key: key[:-3] + key[-2] + key[-3] + key[-1],
}


@pytest.mark.slow
@pytest.mark.parametrize("how", MISSPELLED)
@pytest.mark.parametrize(
    ("base", "file", "key"),
    [
        ("r1", MODEL_YAML, r"(?m)^ *([a-z_]+):"),
        ("mtp", MODEL_YAML, r"(?m)^ *([a-z_]+):"),
        ("fp4", MODEL_YAML, r"(?m)^ *([a-z_]+):"),
        ("wide", EXTRA, r"(?m)^ *([a-z_]+):"),
        ("serve", SERVE, r"(?m)^  --([a-z_]+) .*\\$"),
        ("vllm", MODEL_YAML, r"(?m)^ *([a-z_]+):"),
        ("vllm mtp", MODEL_YAML, r"(?m)^ *([a-z_]+):"),
        ("vllm serve", SERVE, r"(?m)^  --([a-z-]+).*\\$"),
    ],
)
def test_any_key_or_flag_that_is_misspelled_is_found(base, file, key, how, tmp_path):
    bases()[base].write(tmp_path)
    text = (tmp_path / file).read_text()
    before = {(one.code, one.message) for one in bases()[base].check(tmp_path, {}).findings}
    missed = []
    for found in re.finditer(key, text):
        spelled = MISSPELLED[how](found[1])
        if spelled == found[1]:
            continue
        (tmp_path / file).write_text(text[: found.start(1)] + spelled + text[found.end(1) :])
        findings = serious(bases()[base].check(tmp_path, {}))
        if all((one.code, one.message) in before for one in findings):
            missed.append(spelled)

    assert missed == []


def test_the_table_is_as_long_as_promised():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) > 200
