"""`check` finds realistic faults with their causes, and nothing in what has none."""

import itertools
import re

import pytest

from support.check_faults import EXTRA, FAULTS, MODEL_YAML, SERVE, bases, missed, recipes
from support.checked import serious


@pytest.mark.slow
@pytest.mark.parametrize("base", bases())
def test_each_fault_of_a_folder_is_found_with_its_cause_and_nothing_in_the_folder_as_it_was(base, tmp_path):
    bases()[base].write(tmp_path)
    findings = bases()[base].check(tmp_path, {}).findings
    known = recipes()[base.removeprefix("recipe ")]["errors"] if base.startswith("recipe ") else []

    assert {finding.code for finding in findings if finding.severity == "error"} == set(known)
    assert [fault.name for fault in FAULTS if fault.base == base and fault.is_found_in(findings)] == []
    assert missed(base) == {}


MISSPELLED = [lambda key: key[:-1], lambda key: key[:-3] + key[-2] + key[-3] + key[-1]]
KEYS = {
    "r1": (MODEL_YAML, r"(?m)^ *([a-z_]+):"),
    "mtp": (MODEL_YAML, r"(?m)^ *([a-z_]+):"),
    "fp4": (MODEL_YAML, r"(?m)^ *([a-z_]+):"),
    "wide": (EXTRA, r"(?m)^ *([a-z_]+):"),
    "serve": (SERVE, r"(?m)^  --([a-z_]+) .*\\$"),
    "vllm": (MODEL_YAML, r"(?m)^ *([a-z_]+):"),
    "vllm mtp": (MODEL_YAML, r"(?m)^ *([a-z_]+):"),
    "vllm serve": (SERVE, r"(?m)^  --([a-z-]+).*\\$"),
}


@pytest.mark.slow
@pytest.mark.parametrize("base", KEYS)
def test_any_key_or_flag_that_is_misspelled_is_found(base, tmp_path):
    """By turns a letter is missing and two are exchanged."""
    file, key = KEYS[base]
    bases()[base].write(tmp_path)
    text = (tmp_path / file).read_text()
    before = {(one.code, one.message) for one in bases()[base].check(tmp_path, {}).findings}
    missed = []
    for found, misspelled in zip(re.finditer(key, text), itertools.cycle(MISSPELLED), strict=False):
        spelled = misspelled(found[1])
        if spelled == found[1]:
            continue
        (tmp_path / file).write_text(text[: found.start(1)] + spelled + text[found.end(1) :])
        findings = serious(bases()[base].check(tmp_path, {}))
        if all((one.code, one.message) in before for one in findings):
            missed.append(spelled)

    assert missed == []


def test_the_table_is_as_long_as_promised():
    assert len({(fault.base, fault.name) for fault in FAULTS}) == len(FAULTS) > 200
