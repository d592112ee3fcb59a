"""Draws the losses of a training run: `python -m tiny_checkpoint.picture training.jsonl loss.svg`.

It needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def draw(log: Path, picture: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    # Without these two each drawing would have other bytes.
    matplotlib.rcParams["svg.hashsalt"] = "tiny"
    from matplotlib import pyplot

    settings, *lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    steps = [line["step"] for line in lines]
    figure, axes = pyplot.subplots(figsize=(8, 4))
    axes.plot(steps, [line["loss"] for line in lines], label="next token")
    axes.plot(steps, [line["ahead_loss"] for line in lines], label="token after it (MTP layer)")
    axes.axvline(settings["settings"]["unrounded_steps"], color="grey", linestyle=":", label="FP8 from here")
    axes.set(xlabel=f"step of {settings['settings']['rows']} x {settings['settings']['length']} tokens", yscale="log")
    axes.set_ylabel("weighted cross entropy, nats")
    axes.set_title(f"{settings['device']}, {lines[-1]['seconds'] / 60:.1f} minutes")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(picture, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw the losses of a training run.")
    parser.add_argument("log", type=Path, help="training.jsonl")
    parser.add_argument("picture", type=Path, help="the SVG file to write")
    args = parser.parse_args()
    draw(args.log, args.picture)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
