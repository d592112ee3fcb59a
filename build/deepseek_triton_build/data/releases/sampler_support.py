"""Tell which sampling fields the engine honours under a set of LLM arguments, by the release's record.

The samplers of 0.21 to 1.2 accept every field and ignore many, so a default that the sampler ignores is never written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepseek_triton_build.data.releases import Release


def sampler_of(release: Release, settings: Mapping[str, Any]) -> str:
    """Return the sampler that `settings` select: the one of the record's first rule whose conditions all hold.

    :param settings: LLM arguments as dotted paths, under the release's own keys.
    """
    for rule in release.record["sampler"]["choose"]:
        if all(_holds(settings, key, value) for key, value in rule["when"].items()):
            return str(rule["sampler"])
    raise LookupError(f"the record of {release.version} has no rule at its end that always holds")


def honoured_fields(release: Release, settings: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the SamplingParams fields that work under `settings`."""
    section = release.record["sampler"]
    sampler = section["samplers"][sampler_of(release, settings)]
    return frozenset((*section["always"], *sampler["honours"]["fields"]))


def _holds(settings: Mapping[str, Any], key: str, value: Any) -> bool:
    if value == "any":
        return settings.get(key) is not None or any(name.startswith(f"{key}.") for name in settings)
    return bool(settings.get(key) == value)
