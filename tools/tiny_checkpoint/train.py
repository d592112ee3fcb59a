"""Trains the tiny checkpoint: `python -m tiny_checkpoint.train --output DIR`, some minutes on one H200.

It writes `network.pt` (the trained network in float32) and `training.jsonl` (the losses). `tiny_checkpoint.export`
makes the checkpoint of it.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tiny_checkpoint.architecture import CONFIG
from tiny_checkpoint.corpus import training_documents
from tiny_checkpoint.network import Network, causal_mask

PROMPT_WEIGHT = 0.1
"""Weight of the loss at tokens that the model is only asked, against 1 at those that it answers."""

_DOCUMENTS_AT_ONCE = 512


class Rows(IterableDataset[torch.Tensor]):
    """Rows of [3, length] int32: token ids, number of the document, weight of the loss in thousandths.

    Each worker process makes documents of its own from `seed`, so that the rows are the same in every run with the
    same number of workers.
    """

    def __init__(self, tokenizer_file: Path, *, length: int, seed: int) -> None:
        self.tokenizer_file, self.length, self.seed = tokenizer_file, length, seed

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        seed = self.seed * 1000 + (worker.id if worker else 0)
        tokenizer = Tokenizer.from_file(str(self.tokenizer_file))
        row = np.zeros((3, self.length), np.int32)
        filled = number = 0
        for ids, weights in _encoded(tokenizer, seed):
            if len(ids) > self.length:
                continue
            if filled + len(ids) > self.length:
                # The rest is padding: a document of its own, without weight.
                row[1, filled:] = number
                yield torch.from_numpy(row)
                row = np.zeros((3, self.length), np.int32)
                filled = number = 0
            row[0, filled : filled + len(ids)] = ids
            row[1, filled : filled + len(ids)] = number
            row[2, filled : filled + len(ids)] = weights
            filled += len(ids)
            number += 1


def _encoded(tokenizer: Tokenizer, seed: int) -> Iterator[tuple[list[int], list[int]]]:
    """Return the token ids and weights of documents without end."""
    for part in range(1_000_000):
        documents = list(training_documents(seed * 1_000_000 + part, _DOCUMENTS_AT_ONCE))
        texts = [segment.text for document in documents for segment in document.segments]
        encoded = iter(tokenizer.encode_batch(texts, add_special_tokens=False))
        for document in documents:
            ids: list[int] = []
            weights: list[int] = []
            for segment in document.segments:
                segment_ids = next(encoded).ids
                ids += segment_ids
                weights += [1000 if segment.learned else round(PROMPT_WEIGHT * 1000)] * len(segment_ids)
            yield ids, weights


def batches(tokenizer_file: Path, *, rows: int, length: int, seed: int, workers: int) -> Iterator[torch.Tensor]:
    """Return batches [rows, 3, length] int32 without end."""
    loader = DataLoader(
        Rows(tokenizer_file, length=length, seed=seed),
        batch_size=rows,
        num_workers=workers,
        prefetch_factor=8 if workers else None,
        pin_memory=torch.cuda.is_available(),
    )
    return iter(loader)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The settings of a training run."""

    steps: int = 7_770
    rows: int = 32
    """Rows in a batch."""
    length: int = 1024
    """Tokens in a row."""
    seed: int = 1
    peak_rate: float = 3e-3
    warmup_steps: int = 300
    last_rate: float = 0.02
    """Learning rate at the end, as a part of the peak."""
    weight_decay: float = 0.05
    unrounded: float = 0.2
    """Part of the run, at its beginning, that computes without FP8."""
    ahead_weight: float = 0.3
    """Weight of the loss of the layer that predicts ahead, as in DeepSeek-V3's report."""
    balance_step: float = 1e-3
    """How far a step moves an expert's bias, as in DeepSeek-V3's report."""

    def rate(self, step: int) -> float:
        """Return the learning rate: it rises to the peak, then falls along a cosine."""
        risen = min(1.0, (step + 1) / self.warmup_steps)
        fallen = self.last_rate + (1 - self.last_rate) * 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return self.peak_rate * risen * fallen


def losses(network: Network, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of the next token, and that of the one after it, of a batch [rows, 3, length]."""
    token_ids, document_ids, weights = batch.long().unbind(1)
    mask = causal_mask(document_ids)
    states = network(token_ids, mask)
    following = _shifted(token_ids, 1)
    ahead = network.predict_ahead(states, following, mask)
    return (
        _loss(network.lm_head(states), following, _weights(weights, document_ids, 1)),
        _loss(network.lm_head(ahead), _shifted(token_ids, 2), _weights(weights, document_ids, 2)),
    )


def _shifted(values: torch.Tensor, distance: int) -> torch.Tensor:
    return F.pad(values[:, distance:], (0, distance))


def _weights(weights: torch.Tensor, document_ids: torch.Tensor, distance: int) -> torch.Tensor:
    """Return the weight of the token `distance` further on; 0 where it belongs to another document."""
    same = document_ids == F.pad(document_ids[:, distance:], (0, distance), value=-1)
    return _shifted(weights, distance).float() / 1000 * same


def _loss(logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    each = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return (each * weights.flatten()).sum() / weights.sum().clamp(min=1)


def train(output: Path, schedule: Schedule, *, device: str, workers: int, compiled: bool) -> None:
    """Train a network and write it to `output`."""
    torch.manual_seed(schedule.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    network = Network(CONFIG).to(device)
    matrices = [parameter for parameter in network.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in network.parameters() if parameter.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": schedule.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=schedule.peak_rate,
        betas=(0.9, 0.95),
        fused=device != "cpu",
    )
    count = sum(parameter.numel() for parameter in network.parameters())
    print(f"{count / 1e6:.1f} million parameters, {schedule}", flush=True)
    compute = torch.compile(losses, dynamic=False) if compiled else losses
    rows = batches(
        output / "tokenizer.json", rows=schedule.rows, length=schedule.length, seed=schedule.seed, workers=workers
    )
    network.round_to_fp8(is_on=False)
    device_name = torch.cuda.get_device_name() if device == "cuda" else device
    started = time.monotonic()
    with (output / "training.jsonl").open("w") as log:
        log.write(json.dumps({"settings": asdict(schedule), "device": device_name, "torch": torch.__version__}) + "\n")
        for step in range(schedule.steps):
            if step == int(schedule.unrounded * schedule.steps):
                network.round_to_fp8(is_on=True)
            for group in optimizer.param_groups:
                group["lr"] = schedule.rate(step)
            batch = next(rows).to(device, non_blocking=True)
            with torch.autocast(device, torch.bfloat16):
                loss, ahead_loss = compute(network, batch)
            (loss + schedule.ahead_weight * ahead_loss).backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step % 50 == 0:
                _record(log, network, step, loss.item(), ahead_loss.item(), time.monotonic() - started)
            for experts in network.experts():
                experts.balance(schedule.balance_step)
    torch.save(network.state_dict(), output / "network.pt")


def _record(log: TextIO, network: Network, step: int, loss: float, ahead_loss: float, seconds: float) -> None:
    shares = [float(experts.load.max() / experts.load.sum().clamp(min=1)) for experts in network.experts()]
    line = {
        "step": step,
        "loss": round(loss, 4),
        "ahead_loss": round(ahead_loss, 4),
        "seconds": round(seconds, 1),
        "largest_expert_share": [round(share, 3) for share in shares],
    }
    log.write(json.dumps(line) + "\n")
    log.flush()
    if step % 500 == 0 or step < 200:
        print(line, flush=True)


def main() -> int:
    default = Schedule()
    parser = argparse.ArgumentParser(description="Train the tiny DeepSeek-V3 checkpoint.")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write into")
    parser.add_argument("--steps", type=int, default=default.steps, help="default: %(default)s")
    parser.add_argument("--rows", type=int, default=default.rows, help="rows in a batch (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=default.seed, help="default: %(default)s")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=12, help="processes that make documents (default: %(default)s)")
    parser.add_argument("--no-compile", action="store_true", help="do without torch.compile")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    schedule = Schedule(
        steps=args.steps, rows=args.rows, seed=args.seed, warmup_steps=min(default.warmup_steps, args.steps // 10 + 1)
    )
    train(args.output, schedule, device=args.device, workers=args.workers, compiled=not args.no_compile)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
