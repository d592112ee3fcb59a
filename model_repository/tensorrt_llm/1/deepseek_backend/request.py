"""Tensors and request parameters -> GenerateRequest. Pure: knows numpy arrays, not pb_utils.

A value may come three ways, later ones winning: the model's `default_sampling`, `sampling_parameters` (one JSON object),
request parameters (every key of a /generate body that is not an input tensor), and input tensors.
"""

from __future__ import annotations

import difflib
import fnmatch
import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from deepseek_backend.config import BackendConfig
from deepseek_backend.contract import (
    EXEMPT_PARAMETERS,
    INPUTS,
    SAMPLING_BY_NAME,
    SAMPLING_FIELDS,
    Dtype,
    SamplingField,
)
from deepseek_backend.errors import RequestError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling fields of contract.SAMPLING_FIELDS, checked. None: not given."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    exclude_input_from_output: bool | None = None

    @property
    def greedy(self) -> bool:
        """No sampling asked for: temperature 0, or neither temperature, top_k, top_p nor min_p given."""
        if self.temperature == 0 or self.top_k == 1:
            return True
        return self.temperature is None and not self.top_k and self.top_p is None and self.min_p is None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerateRequest:
    """One prompt to generate from, as engines see it. Compared by identity."""

    request_id: str
    """Unique among the requests the backend holds; made by the backend, not the client's id."""
    prompt: str
    sampling: SamplingParams
    max_tokens: int
    """sampling.max_tokens or the model's default. The engine cuts it to the room its context leaves."""
    streaming: bool = False
