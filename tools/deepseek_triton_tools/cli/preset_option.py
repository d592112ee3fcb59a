"""--preset of `build` and `plan`: the name of a deployment, or a pace that `plan --sla --write-pace` wrote."""

from __future__ import annotations

from pathlib import Path

from deepseek_triton_tools.tool_errors import ToolError


def preset_or_file(given: str | None, side: str = "server") -> str | None:
    """Return a name as it is, and of a folder the file of `side`: server, context or generation.

    :raises ToolError: for a file that the simulated engine does not take; it says why.
    """
    if given is None or not (given.endswith(".json") or Path(given).is_dir()):
        return given
    from deepseek_triton_tools.sla.paces import check_pace

    place = Path(given, f"{side}.json") if Path(given).is_dir() else Path(given)
    if Path(given).is_dir() and not place.exists():
        _refuse_other_kind(given, side)
    try:
        check_pace(place)
    except ValueError as error:
        said = f"--preset: {error}; `plan --sla --write-pace DIR` writes what it takes"
        raise ToolError(said, exit_code=2) from error
    return str(place)


def _refuse_other_kind(folder: str, side: str) -> None:
    """Raise ToolError where the folder has the paces of a pair, and one server is built, or the other way round."""
    is_pair = Path(folder, "generation.json").exists()
    if side == "server" and is_pair:
        said = f"has the paces of a pair: add --profile disagg, or name {Path(folder, 'generation.json')}"
    elif side != "server" and not is_pair and Path(folder, "server.json").exists():
        said = "has the pace of one server: leave --profile disagg out"
    else:
        return
    raise ToolError(f"--preset {folder}: {said}", exit_code=2)
