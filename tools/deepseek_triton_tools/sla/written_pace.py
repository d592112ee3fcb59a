"""Checks a pace that `plan --sla --write-pace` wrote."""

from __future__ import annotations

import json
from pathlib import Path

from deepseek_backend.engines.simulated.presets import find_preset


def check_pace(place: Path) -> None:
    """Raise ValueError where the file can't be read, or the simulated engine does not take its document."""
    try:
        document = json.loads(place.read_text("utf-8"))
        if not isinstance(document, dict):
            raise ValueError("expected a mapping")
        find_preset(document)
    except OSError as error:
        raise ValueError(f"{place} can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: {error}") from error
