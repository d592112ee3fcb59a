"""Turns documents into rows of token ids, several documents to a row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tiny_checkpoint.corpus import Document, training_documents

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
                row[1, filled:] = number  # the rest is padding: a document of its own, without weight
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
            yield _joined(document, encoded)


def _joined(document: Document, encoded: Iterator[object]) -> tuple[list[int], list[int]]:
    ids: list[int] = []
    weights: list[int] = []
    for segment in document.segments:
        part = next(encoded).ids  # type: ignore[attr-defined]  # tokenizers has no types for its Encoding
        ids += part
        weights += [1000 if segment.learned else round(PROMPT_WEIGHT * 1000)] * len(part)
    return ids, weights


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
