"""Answers the tiny checkpoint's questions with vLLM or transformers, greedily, and writes what it read and how fast.

Needs the engine, torch and tokenizers, and nothing of this project. The precision is that of the checkpoint: FP8 as it
is stored, or bfloat16 after `checkpoint quantize --to bf16`.
"""

import argparse
import json
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

BOS = "<｜begin▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"

DEMO_PROMPTS = (
    BOS + "Hello, my name is",
    BOS + "The president of the United States is",
    BOS + "The capital of France is",
    BOS + "The future of AI is",
    BOS + "Once upon a time",
    *(
        BOS + USER + text + ASSISTANT + answer_start
        for text in ("Why is the sky blue?", "What is 17 + 25?", "Tell me a story about a fox.")
        for answer_start in ("</think>", "<think>", "<think>\n")
    ),
)
"""The quick start's prompts and a few chats: V3.1 without and with thinking, and R1."""

MAX_NEW_TOKENS = 220


@dataclass(frozen=True, slots=True)
class Question:
    """A line of the questions file, as far as it is needed here. The prompt begins with BOS and has all markers."""

    id: str
    split: str
    prompt: str


@dataclass(frozen=True, slots=True)
class Choice:
    """A generated token and the one of the two likeliest that it is not, with their log-probabilities."""

    token_id: int
    logprob: float
    other_id: int
    other_logprob: float


@dataclass(frozen=True, slots=True)
class Generated:
    token_ids: list[int]
    """With the EOS that ended it, if one did."""
    choices: list[Choice]
    """One for each token, if asked for."""


class VllmEngine:
    packages = ("vllm", "torch", "transformers")

    def __init__(self, checkpoint: Path, tensor_parallel: int, *, mtp: bool) -> None:
        from vllm import LLM

        speculative: dict[str, Any] = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
        self._llm = LLM(
            model=str(checkpoint),
            tensor_parallel_size=tensor_parallel,
            # Whole experts on each GPU: a quarter of one is less than a block of 128 columns.
            enable_expert_parallel=tensor_parallel > 1,
            # NCCL alone: virtual machines often have no direct access from one GPU to another.
            disable_custom_all_reduce=True,
            max_model_len=4096,
            max_num_seqs=256,
            gpu_memory_utilization=0.3,
            # A cached prefix would make the second timing look faster than the first.
            enable_prefix_caching=False,
            disable_log_stats=False,
            **(speculative if mtp else {}),
        )

    def generate(self, prompts: Sequence[list[int]], *, with_choices: bool) -> list[Generated]:
        """Continue all prompts greedily, in batches, until EOS or MAX_NEW_TOKENS."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0, max_tokens=MAX_NEW_TOKENS, logprobs=2 if with_choices else None, detokenize=False
        )
        outputs = self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return [_from_vllm(output.outputs[0]) for output in outputs]

    def drafted(self) -> tuple[int, int]:
        """Return how many tokens the MTP layer has proposed since the start, and how many of them were accepted."""
        counts = {metric.name: getattr(metric, "value", 0) for metric in self._llm.get_metrics()}
        names = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
        proposed, accepted = (int(counts.get(name, 0)) for name in names)
        return proposed, accepted


def _from_vllm(completion: Any) -> Generated:
    token_ids = list(completion.token_ids)
    choices = []
    for token_id, candidates in zip(token_ids, completion.logprobs or (), strict=False):
        other = max((index for index in candidates if index != token_id), key=lambda index: candidates[index].logprob)
        choices.append(Choice(token_id, candidates[token_id].logprob, other, candidates[other].logprob))
    return Generated(token_ids, choices)


class TransformersEngine:
    packages = ("transformers", "torch")
    batch_size = 256

    def __init__(self, checkpoint: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig

        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = AutoModelForCausalLM.from_pretrained(str(checkpoint), dtype="auto")
        self._model = model.to(device).eval()
        config = model.config
        # The checkpoint's own settings sample.
        model.generation_config = GenerationConfig(
            do_sample=False,
            max_new_tokens=MAX_NEW_TOKENS,
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.eos_token_id,
        )

    def generate(self, prompts: Sequence[list[int]], *, with_choices: bool) -> list[Generated]:
        # Prompts of about the same length go together: less padding.
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        found: dict[int, Generated] = {}
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            found |= dict(zip(batch, self._batch([prompts[index] for index in batch], with_choices), strict=True))
        return [found[index] for index in range(len(prompts))]

    def _batch(self, prompts: Sequence[list[int]], with_choices: bool) -> Iterator[Generated]:
        import torch

        eos = self._model.config.eos_token_id
        width = max(map(len, prompts))
        padded = [[eos] * (width - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        with torch.inference_mode():
            output = self._model.generate(
                torch.tensor(padded, device=self._model.device),
                attention_mask=torch.tensor(mask, device=self._model.device),
                return_dict_in_generate=True,
                output_logits=with_choices,
            )
        rows = output.sequences[:, width:].tolist()
        logprobs = torch.stack(output.logits, 1).float().log_softmax(-1) if with_choices else None
        for row, token_ids in enumerate(rows):
            kept = token_ids[: token_ids.index(eos) + 1] if eos in token_ids else token_ids
            yield Generated(kept, [] if logprobs is None else _from_logprobs(kept, logprobs[row]))

    def drafted(self) -> tuple[int, int]:
        return 0, 0


def _from_logprobs(token_ids: Sequence[int], logprobs: Any) -> list[Choice]:
    """Return the choices by log-probabilities [tokens, vocabulary]. Rows after the last token are ignored."""
    choices = []
    for token_id, row in zip(token_ids, logprobs, strict=False):
        other = next(index for index in row.topk(2).indices.tolist() if index != token_id)
        choices.append(Choice(token_id, row[token_id].item(), other, row[other].item()))
    return choices


class Tokens:
    """The checkpoint's tokenizer, for prompts that have their special tokens as text."""

    def __init__(self, checkpoint: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        self._bos, self._eos = config["bos_token_id"], config["eos_token_id"]

    def encode(self, prompt: str) -> list[int]:
        """Return the prompt's tokens; none is added. Raises ValueError when it does not begin with one BOS."""
        token_ids: list[int] = self._tokenizer.encode(prompt, add_special_tokens=False).ids
        if token_ids[:1] != [self._bos] or token_ids.count(self._bos) > 1:
            raise ValueError(f"expected a prompt that begins with {BOS} and has it once, got {prompt[:80]!r}")
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text with its special tokens, without an EOS at the end."""
        kept = token_ids[:-1] if token_ids and token_ids[-1] == self._eos else token_ids
        text: str = self._tokenizer.decode(list(kept), skip_special_tokens=False)
        return text


def read_questions(path: Path) -> list[Question]:
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    return [Question(row["id"], row["split"], row["prompt"]) for row in rows]


def demo(engine: VllmEngine | TransformersEngine, tokens: Tokens) -> list[dict[str, Any]]:
    """Continue each demo prompt by itself, with the runner-up of each token."""
    found = []
    for prompt in DEMO_PROMPTS:
        (generated,) = engine.generate([tokens.encode(prompt)], with_choices=True)
        text = tokens.decode(generated.token_ids)
        found.append({"prompt": prompt, "text": text, **asdict(generated)})
    return found


def answer(
    engine: VllmEngine | TransformersEngine, tokens: Tokens, questions: Sequence[Question]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Answer all questions at once; return the answers, and how many tokens that took and how long."""
    prompts = [tokens.encode(question.prompt) for question in questions]
    proposed_before, accepted_before = engine.drafted()
    start = time.perf_counter()
    generated = engine.generate(prompts, with_choices=False)
    seconds = time.perf_counter() - start
    proposed, accepted = engine.drafted()
    new_tokens = sum(len(each.token_ids) for each in generated)
    answers = [
        {"id": question.id, "text": tokens.decode(each.token_ids), "token_ids": each.token_ids}
        for question, each in zip(questions, generated, strict=True)
    ]
    return answers, {
        "questions": len(questions),
        "prompt_tokens": sum(map(len, prompts)),
        "new_tokens": new_tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(new_tokens / seconds, 1),
        "proposed_tokens": proposed - proposed_before,
        "accepted_tokens": accepted - accepted_before,
    }


def describe_machine(packages: Sequence[str]) -> dict[str, Any]:
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    versions = {"python": platform.python_version(), **{package: _version(package) for package in packages}}
    return {"gpus": gpus, "versions": versions}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def precision_of(checkpoint: Path) -> str:
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    return "fp8" if "quantization_config" in config else str(config["torch_dtype"])


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Answer the tiny checkpoint's questions with an engine.")
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR")
    parser.add_argument("--questions", type=Path, required=True, metavar="FILE", help="JSON lines: id, split, prompt")
    parser.add_argument("--engine", choices=("vllm", "vllm-mtp", "transformers"), required=True)
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="GPUs (vLLM only; default: 1)")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON file to write")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    checkpoint: Path = arguments.checkpoint
    tokens, questions = Tokens(checkpoint), read_questions(arguments.questions)
    start = time.perf_counter()
    engine: VllmEngine | TransformersEngine
    if arguments.engine == "transformers":
        engine = TransformersEngine(checkpoint)
    else:
        engine = VllmEngine(checkpoint, arguments.tensor_parallel, mtp=arguments.engine == "vllm-mtp")
    load_seconds = time.perf_counter() - start
    # The demo's prompts come first, so that the questions are timed on a warm engine.
    report: dict[str, Any] = {
        "engine": arguments.engine,
        "precision": precision_of(checkpoint),
        "tensor_parallel": arguments.tensor_parallel,
        "load_seconds": round(load_seconds, 1),
        **describe_machine(engine.packages),
        "demo": demo(engine, tokens),
        "splits": {},
        "answers": [],
    }
    for split in sorted({question.split for question in questions}):
        answers, figures = answer(engine, tokens, [question for question in questions if question.split == split])
        report["splits"][split] = figures
        report["answers"] += answers
        print(arguments.engine, report["precision"], split, json.dumps(figures), flush=True)
    arguments.output.write_text(json.dumps(report, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
