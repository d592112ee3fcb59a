"""The environment variables that operators set for an engine, with their values, and names that may be misspelled."""

import re
from collections.abc import Mapping
from functools import cache
from itertools import compress

from deepseek_triton_build.data.own_files import load_yaml
from deepseek_triton_build.data.planned_settings import is_engine_variable
from deepseek_triton_build.text import nearest_name

# List in environment_variables.yaml -> an expression that its values fit, and the same in words.
_KINDS = {
    "switches": ("[01]", "0 or 1"),
    "numbers": (r"\d+", "a whole number"),
    "pairs": (r"\w+:[^,:]+(,\w+:[^,:]+)*", "name:value, separated by commas"),
    "others": (".*", "anything"),
}


@cache
def known_variables() -> Mapping[str, tuple[str, str]]:
    """Return each variable with an expression that its values fit, and the same in words."""
    table = load_yaml("environment_variables.yaml")
    known = {f"{start}{end}": _KINDS["others"] for start, ends in table["libraries"].items() for end in ends.split()}
    known |= {name: kind for group, kind in _KINDS.items() for name in table[group]}
    choices = {name: ("|".join(values), f"one of {', '.join(values)}") for name, values in table["choices"].items()}
    return known | choices


def nearest_variable(name: str) -> str | None:
    """Return the variable of TensorRT-LLM, or of a library below it, that `name` may be a misspelling of.

    None when it is a right one, or none is near.
    """
    table, known = load_yaml("environment_variables.yaml"), known_variables()
    if name in known or any(re.match(family, name) for family in table["families"]):
        return None
    starts = tuple(table["libraries"])
    own = name.partition("_")[0]
    # UCC_TLS is no misspelled UCX_TLS, and other makers have RCCL_, HCCL_ and so on.
    may_begin_wrong = not is_engine_variable(name) and not re.match("[A-Z]CCL_", name)
    # Those in mixed case are Open MPI's, which has many more: ..._if_exclude is no misspelled ..._if_include.
    likely = (
        entry.partition("_")[0] == own
        if name.startswith(starts)
        else entry.isupper() and (may_begin_wrong or not entry.startswith(starts))
        for entry in known
    )
    return nearest_name(name, compress(known, likely), lacks_some=True)
