"""Work-arounds for known faults of the containers, taken from the release record. None of them changes a file.

There is one kind so far: `missing_names`, names that TensorRT-LLM imports from a package that is too old to have them.
Each name is supplied only where it is really missing, so that a newer package is left alone.

The engine's workers, which this backend doesn't start, have the same faults. They get the same names through
`process/overlay/sitecustomize.py`: start.sh puts the overlay folder on PYTHONPATH.
"""

from __future__ import annotations

import importlib
import logging
import types
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

_FIELD_TYPES: dict[str, type] = {"str": str, "int": int}


def apply_quirks(release: Mapping[str, Any]) -> list[str]:
    """Supply what the container lacks. Call this before tensorrt_llm is imported.

    :returns: `module.name` of everything supplied; each is logged too.
    """
    return [
        supplied
        for quirk in release["quirks"]
        for missing in quirk.get("missing_names", ())
        for supplied in _supply(quirk, missing)
    ]


def _supply(quirk: Mapping[str, Any], missing: Mapping[str, Any]) -> list[str]:
    full_name = f"{missing['module']}.{missing['name']}"
    try:
        module = importlib.import_module(missing["module"])
    except ModuleNotFoundError:
        return []  # TensorRT-LLM's own message about the missing package is better
    if hasattr(module, missing["name"]):
        return []
    setattr(module, missing["name"], _make_class(missing))
    logger.warning("supplied %s: %s (quirk %s)", full_name, quirk["what"], quirk["id"])
    return [full_name]


def _make_class(missing: Mapping[str, Any]) -> type:
    """Make a class with the record's base and fields: enough for an import of what the newer package has."""
    package, _, base = missing["base"].rpartition(".")
    annotations = {name: _FIELD_TYPES[kind] for name, kind in missing["fields"].items()}
    return types.new_class(
        missing["name"],
        (getattr(importlib.import_module(package), base),),
        exec_body=lambda body: body.update(__module__=missing["module"], __annotations__=annotations),
    )
