"""The second half of a layer: a dense MLP, or routed experts beside shared ones (arXiv 2412.19437)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from deepseek_backend.engines.reference.activations import swiglu
from deepseek_backend.engines.reference.deepseek_config import DeepseekConfig
from deepseek_backend.engines.reference.tensor_files import TensorFiles

Array = npt.NDArray[np.float32]
Indices = npt.NDArray[np.intp]


class GatedMlp:
    """silu(gate) * up, then down. Activations have a column for each token."""

    def __init__(self, tensors: TensorFiles, prefix: str, hidden_size: int, width: int) -> None:
        names = (f"{prefix}.{name}_proj.weight" for name in ("gate", "up"))
        self.gate_and_up = np.concatenate([tensors.get(name, width, hidden_size) for name in names])
        self.down = tensors.get(f"{prefix}.down_proj.weight", hidden_size, width)

    def __call__(self, x: Array) -> Array:
        return self.down @ swiglu(self.gate_and_up @ x)


class MixtureOfExperts:
    """Each token goes to its own few experts, and to the shared ones."""

    def __init__(self, config: DeepseekConfig, tensors: TensorFiles, prefix: str) -> None:
        hidden, width, number = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
        self._config = config
        self._router = tensors.get(f"{prefix}.gate.weight", number, hidden)
        self._bias = tensors.get(f"{prefix}.gate.e_score_correction_bias", number)
        self._experts = [GatedMlp(tensors, f"{prefix}.experts.{index}", hidden, width) for index in range(number)]
        self._shared = GatedMlp(tensors, f"{prefix}.shared_experts", hidden, width * config.n_shared_experts)

    def __call__(self, x: Array) -> Array:
        experts, weights = self.route(x)
        result = self._shared(x)
        result += self._routed(x, experts, weights)
        return result

    def route(self, x: Array) -> tuple[Indices, Array]:
        """Return the experts of each token and their weights, both [tokens, num_experts_per_tok].

        The bias decides which experts are chosen, and has no part in their weights.
        """
        config = self._config
        scores = 1 / (1 + np.exp(-(self._router @ x).T))
        choice = scores + self._bias
        if config.topk_group < config.n_group:
            self._mask_groups(choice)
        experts = _largest(choice, config.num_experts_per_tok)
        weights = np.take_along_axis(scores, experts, -1)
        if config.norm_topk_prob:
            weights /= np.add.reduce(weights, axis=-1, keepdims=True) + np.float32(1e-20)
        weights *= np.float32(config.routed_scaling_factor)
        return experts, weights

    def _mask_groups(self, choice: Array) -> None:
        """Leave the experts of topk_group groups in `choice`. A group's score is the sum of its two best."""
        config = self._config
        groups = choice.reshape(len(choice), config.n_group, -1)  # a view: what is written there is in `choice`
        best_two = np.partition(groups, -2, axis=-1)[..., -2:]
        dropped = _smallest(np.add.reduce(best_two, axis=-1), config.n_group - config.topk_group)
        groups[np.arange(len(choice))[:, None], dropped] = -np.inf

    def _routed(self, x: Array, experts: Indices, weights: Array) -> Array:
        """Return the weighted sum of each token's experts. The tokens are sorted by expert: each runs once."""
        per_token = experts.shape[1]
        flat = experts.ravel()
        order = flat.argsort(kind="stable")
        ends = np.bincount(flat, minlength=len(self._experts)).cumsum().tolist()
        spans = [span for span in zip(self._experts, [0, *ends[:-1]], ends, strict=True) if span[1] < span[2]]
        inputs = x[:, order // per_token]
        width = len(self._experts[0].gate_and_up)
        gate_and_up = np.empty((width, len(flat)), np.float32)
        for expert, begin, end in spans:
            np.matmul(expert.gate_and_up, inputs[:, begin:end], out=gate_and_up[:, begin:end])
        inner = swiglu(gate_and_up)
        inner *= weights.ravel()[order]
        outputs = inputs  # the same shape, and no longer needed
        for expert, begin, end in spans:
            np.matmul(expert.down, inner[:, begin:end], out=outputs[:, begin:end])
        by_token = np.empty_like(order)
        by_token[order] = np.arange(len(order))
        result: Array = np.add.reduce(outputs[:, by_token].reshape(len(x), -1, per_token), axis=-1)
        return result


def _largest(values: Array, number: int) -> Indices:
    """Return the indices of the `number` largest in each row, in no order."""
    return np.argpartition(values, -number, axis=-1)[:, -number:]


def _smallest(values: Array, number: int) -> Indices:
    return np.argpartition(values, number - 1, axis=-1)[:, :number]
