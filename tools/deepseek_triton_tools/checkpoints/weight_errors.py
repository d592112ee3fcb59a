"""Figures of the difference between a weight and the same weight in another precision, summed over many values."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from deepseek_triton_tools.checkpoints.number_formats import BLOCK, GROUP, LARGEST_FP8, Floats
from deepseek_triton_tools.checkpoints.stored_weights import StoredWeight

OCTAVES = range(-24, 6)
"""Powers of two at which the bins of the distribution begin: of an error, divided by the RMS of the values around it.
The first takes what is smaller too, the last what is larger."""
_EXPONENT_BITS = 23
_EXPONENT_BIAS = 127
_NUM_EXPONENTS = 256
_ROWS = 2 * BLOCK
"""Rows that are compared at once: few enough for a processor's cache."""
_LAST_STEPS = {"fp8": (LARGEST_FP8, 32.0), "int4": (7.0, 1.0)}
"""The largest number of a format, and the distance to the next that it would have."""


@dataclass
class ErrorSums:
    """Sums over the values a of a weight, b of the other, and d = b - a. Those that are not finite are left out."""

    num_values: int = 0
    num_not_finite: int = 0
    num_clipped: int = 0
    num_differing: int = 0
    aa: float = 0.0
    bb: float = 0.0
    ab: float = 0.0
    dd: float = 0.0
    largest: float = 0.0
    """The largest magnitude of d."""
    octaves: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(OCTAVES), np.int64))
    """Number of differing values by the size of their error; OCTAVES says where each bin begins."""

    def add(self, a: Floats, b: Floats) -> None:
        """Add the values of two arrays of the same shape."""
        with np.errstate(over="ignore", invalid="ignore"):
            d = b - a
        num_not_finite = d.size - int(np.count_nonzero(np.isfinite(d)))
        if num_not_finite:
            keep = np.isfinite(d)
            a, b, d = a[keep], b[keep], d[keep]
        self.num_values += d.size + num_not_finite
        self.num_not_finite += num_not_finite
        aa = _dot(a, a)
        self.aa += aa
        num_differing = int(np.count_nonzero(d))
        if not num_differing:
            self.bb += aa
            self.ab += aa
            return
        self.num_differing += num_differing
        self.bb += _dot(b, b)
        self.ab += _dot(a, b)
        self.dd += _dot(d, d)
        np.abs(d, out=d)
        self.largest = max(self.largest, float(d.max()))
        with np.errstate(over="ignore"):
            d /= max(np.float32(math.sqrt(aa / a.size)), np.finfo(np.float32).tiny)
        self.octaves += _by_octave(d, d.size - num_differing)

    def __iadd__(self, other: ErrorSums) -> ErrorSums:
        for name in ("num_values", "num_not_finite", "num_clipped", "num_differing", "aa", "bb", "ab", "dd"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.largest = max(self.largest, other.largest)
        self.octaves += other.octaves
        return self

    @property
    def relative_rms(self) -> float:
        """||b - a|| / ||a||; infinite where only a is zero."""
        if not self.dd:
            return 0.0
        return math.sqrt(self.dd / self.aa) if self.aa else math.inf

    @property
    def sqnr_db(self) -> float:
        """The signal's power over the error's, in decibels; infinite where there is no error."""
        if not self.dd:
            return math.inf
        return 10 * math.log10(self.aa / self.dd) if self.aa else -math.inf

    @property
    def cosine(self) -> float:
        """The cosine of the angle between both; 1 where both are zero, 0 where one is."""
        if not self.dd:
            return 1.0
        return self.ab / math.sqrt(self.aa * self.bb) if self.aa and self.bb else 0.0

    @property
    def clipped_share(self) -> float:
        return self.num_clipped / self.num_values if self.num_values else 0.0


def _dot(a: Floats, b: Floats) -> float:
    """The sum of products, in float64: squares of small weights have no float32."""
    return float(np.einsum("i,i->", a.ravel(), b.ravel(), dtype=np.float64))


def _by_octave(ratios: Floats, num_zeros: int) -> npt.NDArray[np.int64]:
    """Count ratios of at least 0, without those that are 0 exactly; infinite ones are in the last bin."""
    exponents = (ratios.view(np.uint32).ravel() >> _EXPONENT_BITS).astype(np.intp)
    by_exponent = np.bincount(exponents, minlength=_NUM_EXPONENTS)
    by_exponent[0] -= num_zeros
    bins = np.clip(np.arange(_NUM_EXPONENTS) - _EXPONENT_BIAS - OCTAVES.start, 0, len(OCTAVES) - 1)
    return np.bincount(bins, by_exponent, len(OCTAVES)).astype(np.int64)


# What is not finite is counted.
@np.errstate(over="ignore", invalid="ignore")
def compare_weights(a: StoredWeight, b: StoredWeight) -> ErrorSums:
    """Sum up how `b` differs from `a`, a few rows at a time. Both have the same shape.

    :raises CheckpointError: when one can't be read.
    """
    sums = ErrorSums()
    # It may have any number of rows.
    if 0 in a.shape:
        return sums
    if len(a.shape) != 2:
        sums.add(a.read().ravel(), b.read().ravel())
        return sums
    for begin in range(0, a.shape[0], _ROWS):
        end = min(begin + _ROWS, a.shape[0])
        before, after = a.read(begin, end), b.read(begin, end)
        sums.add(before, after)
        scales = b.read_scales(begin, end)
        if scales is not None:
            if b.format == "fp8":
                scales = scales.repeat(BLOCK, axis=0)[: end - begin]
            sums.num_clipped += _num_clipped(before, after, scales, *_LAST_STEPS[b.format])
    return sums


def _num_clipped(before: Floats, after: Floats, scales: Floats, largest: float, step: float) -> int:
    """Count the values that lie beyond the largest number of their group by more than rounding can explain."""
    columns = before.shape[1]
    limits = scales * np.float32(largest + step / 2)
    if (np.maximum.reduceat(np.abs(before), np.arange(0, columns, GROUP), axis=1) <= limits).all():
        return 0
    is_beyond = np.abs(before) > limits.repeat(GROUP, axis=1)[:, :columns]
    is_far = np.abs(after - before) > (scales * np.float32(step / 2)).repeat(GROUP, axis=1)[:, :columns]
    return int(np.count_nonzero(is_beyond & is_far))
