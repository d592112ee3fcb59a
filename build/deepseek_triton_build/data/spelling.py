"""One LLM argument, many names: its name in each release, and its flag of trtllm-serve, trtllm-bench and trtllm-eval.

The planner's own (canonical) names are the dotted paths of TensorRT-LLM 1.2.1, such as `kv_cache_config.dtype`. The
functions here take and return settings as flat mappings of such paths. They translate names only: they don't make up
for a default that changed between releases (CUDA graphs, overlapped scheduling).
"""

from collections.abc import Iterable, Mapping
from functools import cache, partial
from typing import Any

from deepseek_triton_build.build_errors import UnknownNameError
from deepseek_triton_build.data.own_files import load_yaml
from deepseek_triton_build.data.releases import load_release

MIXED = "mixed"
"""Stands for all eras up to our own at once: for a file with keys of several."""

_OURS = "1.2"
_NEST = "pytorch_backend_config."


def spell(settings: Mapping[str, Any], release_version: str) -> dict[str, Any]:
    """Return the canonical `settings` under the keys of `release_version`, a release or an era.

    A key that the release has no other name for stays as it is.

    :raises UnknownNameError: for a release without a record.
    """
    era, table = _era(release_version), _table()
    spelled: dict[str, Any] = {}
    for key, value in settings.items():
        flag = table["switches"].get(key, {}).get(era)
        choices = table["choices"].get(key, {}).get(era, {})
        if flag and not value:  # null is off, an empty section is on with its defaults
            spelled[flag] = isinstance(value, Mapping)
        elif isinstance(value, str) and value in choices:
            spelled |= choices[value]
        else:
            era_key = _renamed(key, era)
            section_flag = table["switches"].get(key.partition(".")[0], {}).get(era)
            if section_flag and era_key != key:
                spelled[section_flag] = True
            is_inverted = era_key in table["inverted"] and isinstance(value, bool)
            spelled[era_key] = not value if is_inverted else value
    return spelled


def canonical(settings: Mapping[str, Any], era_or_release: str) -> dict[str, Any]:
    """Return `settings` of an era under the canonical keys; `MIXED` takes the names of every era.

    Where both an old and a new name of one argument are given, the new one counts. A key that is no old name stays as
    it is.

    :raises UnknownNameError: for a release without a record.
    """
    # 0.19 nests in pytorch_backend_config what 0.21 has flat, also keys that the table doesn't list for 0.19.
    eras = _eras_to_ours() if era_or_release == MIXED else [_era(era_or_release)]
    eras = ["0.19", "0.21"] if eras == ["0.19"] else eras
    result: dict[str, Any] = {}
    names = {key: _canonical_name(key, eras) for key in settings}
    for key, value in settings.items():
        canonical_key = names[key]
        # Where an old and a new name are both given, the new one counts.
        if key == canonical_key or names.get(canonical_key) != canonical_key:
            is_inverted = key in _table()["inverted"] and isinstance(value, bool)
            result.setdefault(canonical_key, not value if is_inverted else value)
    # After all names: a switch of an era turns a section on or off whose keys may stand behind it.
    for era in eras:
        _settle_switches(result, era)
        _settle_choices(result, era)
    return result


def moved(key: str, release_version: str) -> str | None:
    """Return the name in `release_version` of `key`, another release's name; None when the release has no other name.

    :raises UnknownNameError: for a release without a record.
    """
    era = _era(release_version)
    versions = _table()["eras"][era] if release_version == era else [release_version]
    target = _name_in_era(key, era)
    return target if target != key and any(load_release(version).find_key(target) for version in versions) else None


def flag_name(program: str, canonical_key: str) -> str | None:
    """Return the command line flag of `program` for a canonical key; None when only a YAML file can give it.

    :raises UnknownNameError: for an unknown program.
    """
    flags = _flags(program).get(canonical_key)
    return flags[0] if flags else None


def keys_of_flags(program: str) -> dict[str, str]:
    """Return every known flag of `program`, with the canonical key that it sets.

    :raises UnknownNameError: for an unknown program.
    """
    return {flag: key for key, flags in _flags(program).items() for flag in flags}


def flattened(section: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the values of nested sections by their dotted paths; an empty section counts as a value."""
    flat: dict[str, Any] = {}
    for key, value in section.items():
        below = flattened(value) if isinstance(value, Mapping) else {}
        flat |= {f"{key}.{path}": entry for path, entry in below.items()} or {f"{key}": value}
    return flat


_table = cache(partial(load_yaml, "spelling.yaml"))


def _eras_to_ours() -> list[str]:
    eras = list(_table()["eras"])
    return eras[: eras.index(_OURS) + 1]


def _era(name: str) -> str:
    for era, versions in _table()["eras"].items():
        if name == era or name in versions:
            return str(era)
    load_release(name)  # raises with the reason for one that has no record
    raise LookupError(f"{name} has no era: add it to data/spelling.yaml")


def _flags(program: str) -> Mapping[str, list[str]]:
    programs: Mapping[str, Mapping[str, list[str]]] = _table()["flags"]
    if program not in programs:
        raise UnknownNameError("program", program, programs)
    return programs[program]


def _renamed(key: str, era: str) -> str:
    return str(_table()["keys"].get(key, {}).get(era, key))


def _canonical_name(key: str, eras: Iterable[str]) -> str:
    """Return the canonical name of `key`, a name in one of `eras`; `key` itself when it has no other."""
    table, eras = _table(), list(eras)
    for era in eras:
        for canonical_key, by_era in table["keys"].items():
            if by_era.get(era) == key:
                return str(canonical_key)
    is_switch = any(key in flags.values() for flags in table["switches"].values())
    if key.startswith(_NEST) and "0.19" in eras and not is_switch:
        return _canonical_name(key.removeprefix(_NEST), eras)
    return str(table["aliases"].get(key, key))


def _name_in_era(key: str, era: str) -> str:
    """Return the name in `era` of the argument that any era calls `key`; its values are not translated."""
    canonical_key = _canonical_name(key, _eras_to_ours())
    for section, flags in _table()["switches"].items():
        if canonical_key in (section, *flags.values()):
            return str(flags.get(era, section))
    for chosen, by_era in _table()["choices"].items():
        # The first value that an era chooses by this key.
        ways = (way for choices in by_era.values() for way in choices.items())
        value = next((value for value, keys in ways if canonical_key in keys), None)
        if canonical_key == chosen or value:
            choices = by_era.get(era, {})
            era_keys = choices.get(value) or next(iter(choices.values()), {chosen: None})
            return str(next(iter(era_keys)))
    return _renamed(canonical_key, era)


def _settle_switches(settings: dict[str, Any], era: str) -> None:
    """Replace the flags of `era` by the sections that they turn on or off."""
    for section, flags in _table()["switches"].items():
        if flags.get(era) not in settings:
            continue
        is_on = settings.pop(flags[era])
        below = [key for key in settings if key.startswith(f"{section}.")]
        if not is_on:
            for key in below:
                del settings[key]
            settings.setdefault(section, None)
        elif not below:
            settings.setdefault(section, {})


def _settle_choices(settings: dict[str, Any], era: str) -> None:
    """Replace the keys of `era` that choose a value together by the canonical key with that value."""
    for canonical_key, by_era in _table()["choices"].items():
        choices: Mapping[str, Mapping[str, Any]] = by_era.get(era, {})
        era_keys = {key for choice in choices.values() for key in choice} & settings.keys()
        if not era_keys:
            continue
        fitting = [value for value, choice in choices.items() if choice.items() <= settings.items()]
        for key in era_keys:
            del settings[key]
        settings.setdefault(canonical_key, fitting[0] if fitting else list(choices)[-1])
