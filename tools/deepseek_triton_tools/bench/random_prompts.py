"""Random prompts of exact length, with shared prefixes and several turns; and which token ids are text."""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from deepseek_triton_tools.bench.workload import BenchRequest, Conversation, DatasetOptions
from deepseek_triton_tools.pages import install_extra
from deepseek_triton_tools.repository.hub_cache import find_snapshot, parse_hub_name
from deepseek_triton_tools.tool_errors import CheckpointError, InstallationError

TokenCounter: TypeAlias = Callable[[Sequence[str]], Sequence[int]]
"""Returns the number of tokens of each text."""

# Every DeepSeek tokenizer begins with the tokens for begin, end and padding.
_FIRST_TEXT = 3
# DeepSeek-V3's other special tokens follow its 128,000 tokens of text. How many ids a server says that there are
# (128,815 with them, 129,280 with padding) depends on the engine, so random prompts mustn't depend on it.
_DEEPSEEK_TEXT = 128_000
# The tiny model has 17 special tokens at the end of a small vocabulary.
_MOST_SPECIAL = 32
_PROMPT, _PREFIX, _ANSWER = 1, 2, 3
"""Parts of the keys of random ids, so that no prompt is the same as a prefix."""


def text_token_ids(vocab_size: int | None = None) -> range:
    """The ids that are text: a special token in a prompt could end it, or begin a thought.

    :param vocab_size: as a server's `model_info` has it; None: DeepSeek-V3's.
    """
    if vocab_size is None or vocab_size >= _DEEPSEEK_TEXT:
        return range(_FIRST_TEXT, _DEEPSEEK_TEXT)
    return range(_FIRST_TEXT, max(vocab_size - _MOST_SPECIAL, _FIRST_TEXT + 1))


def random_ids(vocabulary: range, length: int, *key: int) -> NDArray[np.int64]:
    """Return `length` ids of `vocabulary`, the same ones for the same key of whole numbers from 0."""
    return np.random.default_rng(key).integers(vocabulary.start, vocabulary.stop, length)


class RandomConversations(Sequence[Conversation]):
    """Each is made anew whenever it is asked for: the ids of all would take gigabytes.

    Conversation i has prefix i modulo the number of prefixes, so that the groups take turns.
    """

    def __init__(self, options: DatasetOptions, num: int, vocabulary: range) -> None:
        self._options = options
        self._vocabulary = vocabulary
        later = (options.later_input or options.input).draw(num * (options.turns - 1), options.seed ^ 1)
        first = options.input.draw(num, options.seed)
        self._input_lens = np.column_stack([first, later.reshape(num, options.turns - 1)])
        """[num, turns]"""
        outputs = options.random_output.draw(num * options.turns, options.seed)
        self._output_lens = outputs.reshape(num, options.turns)

    def __len__(self) -> int:
        return len(self._input_lens)

    def __getitem__(self, index: int) -> Conversation:  # type: ignore[override]
        return tuple(
            BenchRequest(
                prompt=tuple(prompt.tolist()),
                output_tokens=int(output_tokens),
                wait_s=self._options.think_s if turn else 0.0,
            )
            for turn, (prompt, output_tokens) in enumerate(
                zip(self._prompts(index), self._output_lens[index], strict=True)
            )
        )

    @cached_property
    def _prefixes(self) -> NDArray[np.int64]:
        """[num_prefixes, prefix_len]"""
        shape = (self._options.num_prefixes, self._options.prefix_len)
        return random_ids(self._vocabulary, shape[0] * shape[1], self._options.seed, _PREFIX).reshape(shape)

    def flat_requests(self) -> Iterator[BenchRequest]:
        """All requests for a program that knows no conversations: the first turns of all, then the second ones.

        Each prompt has the whole text before it, with random ids in place of the answers. So it begins with the prompt
        of the turn before.
        """
        for turn, index in itertools.product(range(self._options.turns), range(len(self))):
            text = []
            for number, prompt in enumerate(self._prompts(index)[:turn]):
                answer_len = int(self._output_lens[index, number])
                answer = random_ids(self._vocabulary, answer_len, self._options.seed, _ANSWER, index, number)
                text += [prompt, answer]
            ids = np.concatenate([*text, self._prompts(index)[turn]])
            yield BenchRequest(prompt=tuple(ids.tolist()), output_tokens=int(self._output_lens[index, turn]))

    def _prompts(self, index: int) -> list[NDArray[np.int64]]:
        """The token ids of each turn."""
        lengths = self._input_lens[index]
        ids = random_ids(self._vocabulary, int(lengths.sum()), self._options.seed, _PROMPT, index)
        first, *later = np.split(ids, np.cumsum(lengths)[:-1])
        return [np.concatenate([self._prefixes[index % self._options.num_prefixes], first]), *later]


# --- A checkpoint's tokenizer ---


def tokenizer_text_ids(name: str) -> range:
    """The ids that are text.

    :param name: a folder, or a model's name on the Hugging Face hub. A DeepSeek's name is enough: its files are not
        read.
    :raises CheckpointError: when there is no tokenizer that can be read.
    """
    hub_name = None if Path(name).is_dir() else parse_hub_name(name)
    if hub_name is not None and "deepseek" in hub_name.model.casefold():
        return text_token_ids()
    path = _tokenizer_file(name)
    try:
        return text_token_ids(len(json.loads(path.read_bytes())["model"]["vocab"]))
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} is no tokenizer: expected a model with a vocab") from error


def tokenizer_counter(name: str) -> TokenCounter:
    """Return what counts tokens, the one that begins a prompt included, as benchmark_serving counts them.

    :raises CheckpointError: when there is no tokenizer that can be read.
    :raises InstallationError: without the package tokenizers.
    """
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise InstallationError(
            f"counting tokens needs the package tokenizers: {install_extra('reference')}"
        ) from error

    path = _tokenizer_file(name)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise CheckpointError(f"{path} is no tokenizer: {error}") from error
    return lambda texts: [len(encoding.ids) for encoding in tokenizer.encode_batch(list(texts))]


def _tokenizer_file(name: str) -> Path:
    hub_name = None if Path(name).is_dir() else parse_hub_name(name)
    folder = find_snapshot(hub_name, only="tokenizer.json")[0] if hub_name else Path(name)
    instead = "name a checkpoint's folder, or leave out the tokenizer"
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {name}, and a name on the hub is OWNER/NAME; {instead}")
    if not (folder / "tokenizer.json").is_file():
        raise CheckpointError(f"{folder} has no tokenizer.json; {instead}")
    return folder / "tokenizer.json"
