"""The DeepSeek-V3 forward pass in numpy, in float32: attention, experts, layers and head.

Activations are matrices with a column for each token.

Multi-head latent attention (MLA) is that of DeepSeek-V2 (arXiv 2405.04434). A token's keys and values are made of one
latent vector, which is all that the cache stores, with one rotary key that all heads share. A prompt's keys and values
are expanded. A decode leaves the latents as they are, and multiplies the queries and the result by the matrix that
would expand them: that matrix is absorbed. Experts are those of DeepSeek-V3 (arXiv 2412.19437).
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from deepseek_backend.engines.reference.checkpoint_files import DeepseekConfig, TensorFiles, YarnScaling

Array = npt.NDArray[np.float32]
Rotations = npt.NDArray[np.complex64]
# Epsilon of the two norms inside: the default in the published code, which gives them no rms_norm_eps.
_EPS = 1e-6
# Tokens of a prompt whose scores exist at a time: those of 4,096 tokens and 8 heads would take 512 MB.
_QUERIES_AT_ONCE = 256
Indices = npt.NDArray[np.intp]
# Tokens of a row at first. It doubles as rows grow, so that a demo does not take the memory of a full context.
_FIRST_CAPACITY = 256


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
        if config.yarn.mscale and config.yarn.mscale_all_dim:
            size = _mscale(config.yarn.factor, config.yarn.mscale)
            size /= _mscale(config.yarn.factor, config.yarn.mscale_all_dim)
        else:
            size = _mscale(config.yarn.factor, 1)
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


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


class LatentAttention:
    """The attention of one layer. Activations have a column for each token."""

    def __init__(self, config: DeepseekConfig, tensors: TensorFiles, prefix: str, rotations: Rotations) -> None:
        self._heads, self._kv_rank, self._value = config.num_attention_heads, config.kv_lora_rank, config.v_head_dim
        self._nope, self._rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        self._rotations = rotations
        hidden, query_width = config.hidden_size, self._heads * (self._nope + self._rope)
        kv_a = tensors.get(f"{prefix}.kv_a_proj_with_mqa.weight", self._kv_rank + self._rope, hidden)
        if config.q_lora_rank is None:
            first = tensors.get(f"{prefix}.q_proj.weight", query_width, hidden)
            first *= attention_scale(config)
            self._q_rank = query_width
        else:
            self._q_rank = config.q_lora_rank
            first = tensors.get(f"{prefix}.q_a_proj.weight", self._q_rank, hidden)
            self._q_norm = tensors.get(f"{prefix}.q_a_layernorm.weight", self._q_rank)
            self._q_b = tensors.get(f"{prefix}.q_b_proj.weight", query_width, self._q_rank)
            self._q_b *= attention_scale(config)
        self._has_q_b = config.q_lora_rank is not None
        self._query_and_latent = np.concatenate([first, kv_a])
        self._latent_norm = tensors.get(f"{prefix}.kv_a_layernorm.weight", self._kv_rank)
        kv_b_rows = self._heads * (self._nope + self._value)
        self._kv_b = tensors.get(f"{prefix}.kv_b_proj.weight", kv_b_rows, self._kv_rank)
        per_head = self._kv_b.reshape(self._heads, self._nope + self._value, self._kv_rank)
        self._keys, self._values = per_head[:, : self._nope], per_head[:, self._nope :]
        self._output = tensors.get(f"{prefix}.o_proj.weight", hidden, self._heads * self._value)

    def prefill(self, x: Array, cache: Array) -> Array:
        """Return the attention's output for a prompt `x` [hidden_size, n], and fill its `cache` [n, width]."""
        num_tokens = x.shape[1]
        query, states = self._project(x, self._rotations[:num_tokens])
        cache[:] = states
        expanded = self._kv_b @ states[:, : self._kv_rank].T
        keys, values = np.split(expanded.reshape(self._heads, -1, num_tokens), [self._nope], axis=1)
        rotary_keys = states[:, self._kv_rank :].T
        rotary_queries = self._rotated_queries(query, self._rotations[:num_tokens]).transpose(1, 0, 2)
        result = np.empty((self._heads, self._value, num_tokens), np.float32)
        for begin in range(0, num_tokens, _QUERIES_AT_ONCE):
            end = min(begin + _QUERIES_AT_ONCE, num_tokens)
            scores = query[:, : self._nope, begin:end].transpose(0, 2, 1) @ keys[:, :, :end]
            scores += rotary_queries[:, begin:end] @ rotary_keys[:, :end]
            later = np.triu_indices(end - begin, 1 + begin, end)
            scores[:, later[0], later[1]] = -np.inf
            softmax(scores)
            np.matmul(values[:, :, :end], scores.transpose(0, 2, 1), out=result[:, :, begin:end])
        return self._output @ result.reshape(-1, num_tokens)

    def decode(self, x: Array, cache: Array, positions: npt.NDArray[np.intp], lengths: Sequence[int]) -> Array:
        """Return the attention's output for one token of each row, `x` [hidden_size, n], and append it to the `cache`.

        :param cache: the layer's states, [max_num_seqs, capacity, width].
        :param positions: index of each row's token, [n].
        :param lengths: number of tokens of each row, with this one.
        """
        num_rows = x.shape[1]
        turns = self._rotations[positions]
        query, states = self._project(x, turns)
        cache[np.arange(num_rows), positions] = states
        absorbed = np.empty((num_rows, self._heads, cache.shape[-1]), np.float32)
        latent_queries = absorbed[:, :, : self._kv_rank].transpose(1, 0, 2)
        np.matmul(query[:, : self._nope].transpose(0, 2, 1), self._keys, out=latent_queries)
        absorbed[:, :, self._kv_rank :] = self._rotated_queries(query, turns)
        # The rows are as long as they are: a short one does not pay for a long one beside it.
        scores = np.full((num_rows, self._heads, max(lengths)), -np.inf, np.float32)
        for row, length in enumerate(lengths):
            np.matmul(absorbed[row], cache[row, :length].T, out=scores[row, :, :length])
        softmax(scores)
        latents = np.empty((num_rows, self._heads, self._kv_rank), np.float32)
        for row, length in enumerate(lengths):
            np.matmul(scores[row, :, :length], cache[row, :length, : self._kv_rank], out=latents[row])
        result = self._values @ latents.transpose(1, 2, 0)
        return self._output @ result.reshape(-1, num_rows)

    def _project(self, x: Array, turns: Rotations) -> tuple[Array, Array]:
        """Return the queries [heads, nope + rope, n], not rotated yet, and what the cache stores of each token."""
        both = self._query_and_latent @ x
        query, latent, rotary_key = np.split(both, [self._q_rank, self._q_rank + self._kv_rank])
        if self._has_q_b:
            query = self._q_b @ rms_norm(query, self._q_norm, _EPS)
        states = np.empty((x.shape[1], self._kv_rank + self._rope), np.float32)
        states[:, : self._kv_rank] = rms_norm(latent, self._latent_norm, _EPS).T
        states[:, self._kv_rank :] = rotary_key.T
        rotary = states[:, self._kv_rank :].view(np.complex64)
        rotary *= turns
        return query.reshape(self._heads, self._nope + self._rope, -1), states

    def _rotated_queries(self, query: Array, turns: Rotations) -> Array:
        """Return the rotary part of the queries, [n, heads, rope]."""
        rotary = np.ascontiguousarray(query[:, self._nope :].transpose(2, 0, 1))
        pairs = rotary.view(np.complex64)
        pairs *= turns[:, None]
        return rotary


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
        # The largest of each row, in no order.
        experts = np.argpartition(choice, -config.num_experts_per_tok, axis=-1)[:, -config.num_experts_per_tok :]
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
        num_dropped = config.n_group - config.topk_group
        scores = np.add.reduce(best_two, axis=-1)
        dropped = np.argpartition(scores, num_dropped - 1, axis=-1)[:, :num_dropped]
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


Attend = Callable[[int, LatentAttention, Array], Array]
"""Computes the attention of a layer, as a prefill or a decode: (index of the layer, its attention, its input)."""


class _Layer:
    def __init__(self, config: DeepseekConfig, tensors: TensorFiles, index: int, turns: Rotations) -> None:
        prefix = f"model.layers.{index}"
        hidden = config.hidden_size
        self.attention_norm = tensors.get(f"{prefix}.input_layernorm.weight", hidden)
        self.attention = LatentAttention(config, tensors, f"{prefix}.self_attn", turns)
        self.mlp_norm = tensors.get(f"{prefix}.post_attention_layernorm.weight", hidden)
        self.mlp: GatedMlp | MixtureOfExperts
        if index < config.first_k_dense_replace:
            self.mlp = GatedMlp(tensors, f"{prefix}.mlp", hidden, config.intermediate_size)
        else:
            self.mlp = MixtureOfExperts(config, tensors, f"{prefix}.mlp")


class DeepseekModel:
    """A loaded model without a cache. Inside, activations have a column for each token."""

    def __init__(self, config: DeepseekConfig, tensors: TensorFiles) -> None:
        """Load the weights. The layers for multi-token prediction, which follow the others, are left out.

        :raises EngineError: when a tensor is missing or has another shape.
        """
        self.config = config
        table = (config.vocab_size, config.hidden_size)
        self._embedding = tensors.get("model.embed_tokens.weight", *table)
        turns = rotations(config)
        self._layers = [_Layer(config, tensors, index, turns) for index in range(config.num_hidden_layers)]
        self._norm = tensors.get("model.norm.weight", config.hidden_size)
        self._head = self._embedding if config.tie_word_embeddings else tensors.get("lm_head.weight", *table)

    def hidden_states(self, token_ids: Sequence[int], attend: Attend) -> Array:
        """Return the states [len(token_ids), hidden_size] after the last layer and its norm."""
        eps = self.config.rms_norm_eps
        x = np.ascontiguousarray(self._embedding[list(token_ids)].T)
        for index, layer in enumerate(self._layers):
            x += attend(index, layer.attention, rms_norm(x, layer.attention_norm, eps))
            x += layer.mlp(rms_norm(x, layer.mlp_norm, eps))
        return rms_norm(x, self._norm, eps).T

    def logits(self, hidden: Array) -> Array:
        """Return the logits [n, vocab_size] of `hidden` [n, hidden_size]."""
        return np.ascontiguousarray((self._head @ hidden.T).T)


class ModelRunner:
    """A model, and the cache of its rows 0..n-1, which has the latent and the rotary key of each token and layer.

    It knows token ids, hidden states and logits, but no requests. One thread at a time may use it.
    """

    def __init__(self, model: DeepseekModel, max_num_seqs: int) -> None:
        self._model = model
        self.lengths: list[int] = []
        """Number of tokens of each row in the cache."""
        config = model.config
        width = config.kv_lora_rank + config.qk_rope_head_dim
        # The system gives memory to the parts that are written, and to no others.
        self._states = np.zeros((config.num_hidden_layers, max_num_seqs, _FIRST_CAPACITY, width), np.float32)

    def prefill(self, token_ids: Sequence[int]) -> Array:
        """Add a row with a prompt; return the hidden states [len(token_ids), hidden_size] after its tokens."""
        row = len(self.lengths)
        self.lengths.append(len(token_ids))
        self._reserve(len(token_ids))

        def attend(index: int, attention: LatentAttention, x: Array) -> Array:
            return attention.prefill(x, self._states[index, row, : len(token_ids)])

        return self._forward(token_ids, attend)

    def decode(self, token_ids: Sequence[int]) -> Array:
        """Append one token to each row; return the hidden states [n, hidden_size] after these tokens."""
        positions = np.array(self.lengths, np.intp)
        self.lengths = [length + 1 for length in self.lengths]
        self._reserve(max(self.lengths))

        def attend(index: int, attention: LatentAttention, x: Array) -> Array:
            return attention.decode(x, self._states[index], positions, self.lengths)

        return self._forward(token_ids, attend)

    def logits(self, hidden: Array) -> Array:
        """Return the logits [n, vocab_size] of `hidden` [n, hidden_size]; they are large for many states."""
        return self._model.logits(hidden)

    def remove(self, row: int) -> None:
        """Remove a row; the last row takes its index."""
        length = self.lengths.pop()
        last = len(self.lengths)
        if row != last:
            self._states[:, row, :length] = self._states[:, last, :length]
            self.lengths[row] = length

    def _forward(self, token_ids: Sequence[int], attend: Attend) -> Array:
        with np.errstate(over="ignore"):  # `swiglu` says why
            return self._model.hidden_states(token_ids, attend)

    def _reserve(self, num_tokens: int) -> None:
        num_layers, max_num_seqs, filled, width = self._states.shape
        if num_tokens <= filled:
            return
        capacity = filled
        while capacity < num_tokens:
            capacity *= 2
        grown = np.zeros((num_layers, max_num_seqs, capacity, width), np.float32)
        grown[:, : len(self.lengths), :filled] = self._states[:, : len(self.lengths), :filled]
        self._states = grown
