"""The release record this package stands in for."""

import os
from pathlib import Path

import yaml


def _read():
    beside = Path(__file__).parents[1] / "release.yaml"
    path = Path(os.environ.get("STANDIN_RELEASE", beside))
    return yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


RECORD = _read()


def fields_of(class_name):
    """The recorded fields of a class of LLM arguments, inherited ones included."""
    entry = RECORD["classes"][class_name]
    inherited = fields_of(entry["inherits"]) if "inherits" in entry else {}
    return {**inherited, **entry["fields"]}


class Sampler:
    """What the record says of the sampler that the LLM arguments select."""

    def __init__(self, llm_args):
        section = RECORD["sampler"]
        self.name = _selected(llm_args)
        entry = section["samplers"][self.name]
        missing = [row for row in section["needs"] if not is_met(row, llm_args)]
        self.without_argument = {field: row["llm_arg"] for row in missing for field in row["fields"]}
        self.fatal = {field for row in entry.get("fails", ()) for field in row["fields"]}
        """Fields that end every running request."""
        self.honoured = {*section["always"], *entry["honours"]["fields"]} - self.without_argument.keys()
        self.logprobs = entry.get("logprobs", {})

    @property
    def most_logprobs(self):
        most = self.logprobs["most"]
        return float("inf") if most is None else most


def is_met(need, llm_args):
    """The argument that a field needs has the value it must have, or any."""
    given = llm_args.get(need["llm_arg"])
    return bool(given == need["value"]) if "value" in need else given is not None


def _selected(llm_args):
    """The sampler that the first fitting rule of the record names."""
    for rule in RECORD["sampler"]["choose"]:
        if all(_fits(wanted, _at(llm_args, path)) for path, wanted in rule["when"].items()):
            return str(rule["sampler"])
    raise AssertionError("the record has no last rule")


def _fits(wanted, given):
    return given is not None if wanted == "any" else bool(given == wanted)


def _at(llm_args, path):
    value = llm_args
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value
