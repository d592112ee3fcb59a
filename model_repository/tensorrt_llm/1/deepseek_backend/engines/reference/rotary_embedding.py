"""Rotary position embedding: the rotation of each pair of dimensions at each position, with YaRN's long context."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from deepseek_backend.engines.reference.deepseek_config import DeepseekConfig, YarnScaling

Array = npt.NDArray[np.float32]
Rotations = npt.NDArray[np.complex64]


def rotations(config: DeepseekConfig) -> Rotations:
    """Return the factor of each pair of dimensions at each position, [max_position_embeddings, qk_rope_head_dim / 2].

    DeepSeek interleaves the two dimensions of a pair, so that a pair is a complex number, and turning it is a
    multiplication. Frequencies and angles are float32, rounded as in the published code: 4,000 tokens on, the rounding
    of a frequency is a turn by 0.0002.
    """
    dim = config.qk_rope_head_dim
    frequencies = 1 / np.float32(config.rope_theta) ** (np.arange(0, dim, 2, dtype=np.float32) / dim)
    size = 1.0
    if config.yarn is not None:
        frequencies = _slowed(frequencies, config.rope_theta, config.yarn)
        size = _rotation_size(config.yarn)
    angles = np.outer(np.arange(config.max_position_embeddings, dtype=np.float32), frequencies)
    turns: Rotations = (size * np.exp(1j * angles)).astype(np.complex64)
    return turns


def attention_scale(config: DeepseekConfig) -> float:
    """Return the factor of the attention scores."""
    scale: float = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    if config.yarn is not None and config.yarn.mscale_all_dim:
        scale *= _mscale(config.yarn.factor, config.yarn.mscale_all_dim) ** 2
    return scale


def _slowed(frequencies: Array, base: float, yarn: YarnScaling) -> Array:
    """Return YaRN's frequencies: fast dimensions keep theirs, slow ones are divided, and a ramp lies between them."""
    dim = 2 * len(frequencies)

    def dimension_with(turns: float) -> float:
        """Return the index of the pair that turns so often in the original context; it need not be whole."""
        return dim * math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(dimension_with(yarn.beta_fast)), 0)
    high = min(math.ceil(dimension_with(yarn.beta_slow)), dim - 1)
    ramp = (np.arange(len(frequencies), dtype=np.float32) - low) / max(high - low, 0.001)
    slowed = np.clip(ramp, 0, 1, dtype=np.float32)
    blended: Array = frequencies * (1 - slowed) + frequencies / yarn.factor * slowed
    return blended


def _rotation_size(yarn: YarnScaling) -> float:
    if yarn.mscale and yarn.mscale_all_dim:
        return _mscale(yarn.factor, yarn.mscale) / _mscale(yarn.factor, yarn.mscale_all_dim)
    return _mscale(yarn.factor, 1)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
