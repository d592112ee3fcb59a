"""How often the model accepts what its draft layer proposes: `python -m tiny_checkpoint.acceptance CHECKPOINT`.

The draft layer, DeepSeek's multi-token prediction, proposes the token after the next one. An engine that decodes
greedily accepts a proposal which is its own next token. The backend must be on PYTHONPATH, as `make tiny-checkpoint`
says.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from deepseek_backend.engines.reference.checkpoint_files import DeepseekConfig, TensorFiles
from deepseek_backend.engines.reference.checkpoint_loading import LoadedCheckpoint, load_checkpoint
from deepseek_backend.engines.reference.deepseek_model import (
    LatentAttention,
    MixtureOfExperts,
    ModelRunner,
    rms_norm,
    rotations,
)
from tiny_checkpoint.answering import generate, loaded
from tiny_checkpoint.corpus import training_documents
from tiny_checkpoint.questions import Question, questions

TEXT_SEED, NUM_DOCUMENTS = 10**15, 500
"""Training draws its documents with seeds far below."""

Array = npt.NDArray[np.float32]
Accepted = npt.NDArray[np.bool_]
"""Whether each proposal in a row is accepted."""


class DraftLayer:
    """The layer that follows the model's own, with its embedding and head. Activations have a column for each token.

    vLLM hides the first embedding of a text from it (vllm/model_executor/models/deepseek_mtp.py); training did not.
    """

    def __init__(self, config: DeepseekConfig, tensors: TensorFiles) -> None:
        prefix, hidden = f"model.layers.{config.num_hidden_layers}", config.hidden_size
        table = (config.vocab_size, hidden)
        self._config = config
        self._embedding = tensors.get(f"{prefix}.embed_tokens.weight", *table)
        self._norms = {
            name: tensors.get(f"{prefix}.{name}.weight", hidden)
            for name in ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "shared_head.norm")
        }
        self._projection = tensors.get(f"{prefix}.eh_proj.weight", hidden, 2 * hidden)
        self._attention = LatentAttention(config, tensors, f"{prefix}.self_attn", rotations(config))
        self._mlp = MixtureOfExperts(config, tensors, f"{prefix}.mlp")
        self._head = tensors.get(f"{prefix}.shared_head.head.weight", *table)

    def logits(self, states: Array, next_ids: Sequence[int]) -> Array:
        """Return the logits [n, vocab_size] of the token after `next_ids` [n].

        :param states: the model's own states [n, hidden_size], after its norm, of the tokens before `next_ids`.
        """
        joined = [self._normed(self._embedding[list(next_ids)].T, "enorm"), self._normed(states.T, "hnorm")]
        x = self._projection @ np.concatenate(joined)
        cache = np.empty((len(next_ids), self._config.kv_lora_rank + self._config.qk_rope_head_dim), np.float32)
        # activations.swiglu says why.
        with np.errstate(over="ignore"):
            x += self._attention.prefill(self._normed(x, "input_layernorm"), cache)
            x += self._mlp(self._normed(x, "post_attention_layernorm"))
        return (self._head @ self._normed(x, "shared_head.norm")).T

    def _normed(self, x: Array, name: str) -> Array:
        return rms_norm(x, self._norms[name], self._config.rms_norm_eps)


class Drafting:
    """A checkpoint with its draft layer."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint: LoadedCheckpoint = load_checkpoint(str(folder.resolve()), version_dir=folder)
        config = self.checkpoint.model.config
        self._draft = DraftLayer(config, TensorFiles(folder, config.weight_block_size))
        self._runner = ModelRunner(self.checkpoint.model, 1)

    def accepted(self, token_ids: Sequence[int]) -> Accepted:
        """Return for each token from the third on whether the proposal for its place is accepted.

        One pass over the whole text gives the same proposals as drafting token by token: no token sees a later one.
        """
        states = self._runner.prefill(token_ids[:-1])
        self._runner.remove(0)
        chosen = self._runner.logits(states[1:]).argmax(-1)
        proposed = self._draft.logits(states[:-1], token_ids[1:-1]).argmax(-1)
        result: Accepted = proposed == chosen
        return result


def proposals(accepted: Accepted) -> Iterator[bool]:
    """Yield those of `accepted` that an engine makes: an accepted token comes with its successor, which needs none."""
    place = 0
    while place < len(accepted):
        yield bool(accepted[place])
        place += 1 + int(accepted[place])


class Shares:
    """Counts accepted proposals by kind."""

    def __init__(self) -> None:
        self._made: Counter[str] = Counter()
        self._accepted: Counter[str] = Counter()

    def add(self, kind: str, accepted: Sequence[bool] | Accepted) -> None:
        for row in (kind, "all"):
            self._made[row] += len(accepted)
            self._accepted[row] += sum(map(bool, accepted))

    def share(self, kind: str = "all") -> float:
        return self._accepted[kind] / self._made[kind]

    def table(self, heading: str) -> str:
        """Return the shares in Markdown."""
        kinds = sorted(self._made, key=lambda kind: (kind == "all", kind))
        rows = [
            f"| {kind} | {self._made[kind]:,} | {100 * self.share(kind):.1f} |" for kind in kinds if self._made[kind]
        ]
        return "\n".join([f"| {heading} | proposals | accepted, % |", "| --- | ---: | ---: |", *rows])


def on_own_answers(drafting: Drafting, subjects: Sequence[Question], answers: Mapping[str, Sequence[int]]) -> Shares:
    """Return the shares over the model's greedy `answers`: the token ids of each, with the end token, by question."""
    shares = Shares()
    for question in subjects:
        prompt_ids = drafting.checkpoint.encode(question.prompt, False)
        accepted = drafting.accepted([*prompt_ids, *answers[question.id]])
        # The prompt's own pass gives the answer's first token, so the first proposal is for the second.
        shares.add(question.kind, list(proposals(accepted[len(prompt_ids) - 1 :])))
    return shares


def own_answers(checkpoint: Path, subjects: Sequence[Question]) -> dict[str, list[int]]:
    with loaded(checkpoint) as engine:
        steps = generate(engine, {question.id: question.prompt for question in subjects})
    return {name: [token_id for step in of_one for token_id in step.token_ids] for name, of_one in steps.items()}


def on_text(drafting: Drafting, count: int = NUM_DOCUMENTS) -> Shares:
    """Return the shares at every place that the model writes, over documents that training has not drawn."""
    shares = Shares()
    for document in training_documents(TEXT_SEED, count):
        parts = [(drafting.checkpoint.encode(segment.text, False), segment.learned) for segment in document.segments]
        token_ids = [token_id for ids, _ in parts for token_id in ids]
        written = np.array([learned for ids, learned in parts for _ in ids])
        shares.add(document.kind, drafting.accepted(token_ids)[written[2:]])
    return shares


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure how often the draft layer's proposals are accepted.")
    parser.add_argument("checkpoint", type=Path, help="the checkpoint's folder")
    checkpoint: Path = parser.parse_args().checkpoint
    drafting = Drafting(checkpoint)
    held_out = [question for question in questions() if question.split == "held_out"]
    answers = own_answers(checkpoint, held_out)
    print(on_own_answers(drafting, held_out, answers).table("own answers to held-out questions"), end="\n\n")
    print(on_text(drafting).table("held-out text"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
