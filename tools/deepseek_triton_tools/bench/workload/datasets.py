"""The conversations that a benchmark sends."""

from __future__ import annotations

from deepseek_triton_tools.bench.workload.dataset_files import (
    TokenCounter,
    first_conversations,
    read_conversations,
)
from deepseek_triton_tools.bench.workload.dataset_options import DatasetOptions
from deepseek_triton_tools.bench.workload.lazy_conversations import LazyConversations
from deepseek_triton_tools.bench.workload.random_conversations import RandomConversations
from deepseek_triton_tools.generating.prompt_sources import file_name
from deepseek_triton_tools.tool_errors import ToolError


def make_conversations(
    options: DatasetOptions, num: int | None, vocabulary: range, count_tokens: TokenCounter | None = None
) -> LazyConversations:
    """Return `num` conversations, always the same ones for the same arguments.

    They are made when they are asked for, so that many of them need no memory. A slice of them is lazy too, and they
    can be pickled.

    :param num: None: all of the file.
    :param vocabulary: ids for random prompts, from `text_token_ids`.
    :param count_tokens: counts a text's tokens, for ShareGPT's answers.
    :raises ToolError: when the file can't be used, or is a trace with fewer requests.
    """
    if options.file is not None:
        found = read_conversations(options.file, options, vocabulary, count_tokens, num)
        return found if num is None else first_conversations(found, num, file_name(options.file))
    if num is None:
        raise ToolError("random prompts have no end: expected a number of requests", exit_code=2)
    return RandomConversations(options, num, vocabulary)
