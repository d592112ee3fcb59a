"""Small functions of activations, which are matrices with a column for each token."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Return `x` [width, n] with the columns divided by their root mean square, times `weight` [width]."""
    mean_square = np.add.reduce(x * x, axis=0)
    mean_square /= len(x)
    mean_square += eps
    result: Array = x / np.sqrt(mean_square)
    result *= weight[:, None]
    return result


def swiglu(gate_and_up: Array) -> Array:
    """Return silu(gate) * up of the two halves of `gate_and_up` [2 * width, n], which is changed."""
    width = len(gate_and_up) // 2
    gate, up = gate_and_up[:width], gate_and_up[width:]
    up *= gate
    np.negative(gate, out=gate)
    np.exp(gate, out=gate)  # infinite for a strongly negative gate, whose silu is then 0
    gate += 1
    up /= gate
    return up


def softmax(scores: Array) -> None:
    """Change `scores` [..., n] to probabilities that add up to 1 over the last axis."""
    scores -= np.maximum.reduce(scores, axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= np.add.reduce(scores, axis=-1, keepdims=True)
