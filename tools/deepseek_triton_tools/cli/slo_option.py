"""Limits on the times of requests, as options take them."""

from __future__ import annotations

import argparse
import math

from deepseek_triton_tools.bench.result import Slo

SLO_NAMES = ("ttft", "tpot", "itl", "e2el")


def slo(text: str) -> Slo:
    """Limits in milliseconds, such as "ttft=500,tpot=30"."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, given = part.strip().partition("=")
        try:
            limit = float(given)
        except ValueError:
            limit = 0.0
        if name not in SLO_NAMES or not 0 < limit < math.inf:
            raise argparse.ArgumentTypeError(
                f"expected limits in ms of {', '.join(SLO_NAMES)}, such as ttft=500,tpot=30, got {text!r:.100}"
            )
        if f"{name}_ms" in limits:
            raise argparse.ArgumentTypeError(f"expected one limit of {name}, got several: {text!r:.100}")
        limits[f"{name}_ms"] = limit
    return Slo(**limits)
