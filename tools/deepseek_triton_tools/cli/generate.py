"""`deepseek-triton generate`: one prompt or conversation, the answer as it comes; with --input, many of them."""

import argparse
import os
import sys
from pathlib import Path

from deepseek_triton_client import Client, Completion, Retries, SamplingParams
from deepseek_triton_tools.cli.client_options import (
    add_address,
    add_client_options,
    add_sampling_options,
    chat_model,
    client_of,
    sampling_params,
)
from deepseek_triton_tools.cli.parsing import VerbParser, option, path, positive
from deepseek_triton_tools.generating.batch import run_batch
from deepseek_triton_tools.generating.records import (
    Request,
    as_asked,
    as_json,
    complain_of_cut,
    completion_record,
    read_messages,
    read_text,
    usage_line,
)
from deepseek_triton_tools.terminal.output_streams import complain, to_reader
from deepseek_triton_tools.terminal.tables import AnswerPrinter
from deepseek_triton_tools.tool_errors import ToolError

_OF_ONE = ("prompt", "file", "messages", "raw", "json", "no_stream", "usage", "hide_reasoning")
"""Options of one request."""
_OF_MANY = ("output", "concurrency", "resume", "overwrite", "max_failures")
"""Options of a batch."""
_PATIENCE_S = 3600  # of a batch with a server that is full of long answers, or is lost: R1 may load for an hour


def add_options(verb: VerbParser) -> None:
    verb.runs(
        _generate,
        'deepseek-triton generate "Why is the sky blue?" --system "One sentence." --usage',
        "deepseek-triton generate --input prompts.jsonl --output answers.jsonl --concurrency 32 --max-tokens 256",
        common="--url --model --raw --system --messages --input --output --json --max-tokens --temperature --top-p",
    )
    verb.usage = "%(prog)s [PROMPT] [options]"
    option(verb, "prompt PROMPT", "the prompt; - or nothing: read standard input", nargs="?")
    option(verb, "--file FILE", "read the prompt from a file instead", path)
    option(verb, "--messages FILE", "a conversation: JSON list of {role, content}", path)
    form = verb.add_mutually_exclusive_group()
    option(form, "--chat", "send the prompt as a message, by the model's chat form (default: where it has one)")
    option(form, "--raw", "have the prompt completed as it is")
    option(verb, "--system TEXT", "system message, what the model is told first; implies --chat")
    option(verb, "--no-stream", "wait for the whole text")
    option(verb, "--hide-reasoning", "show the answer without the reasoning, as a pipe or a file does")
    option(verb, "-v --usage", "print tokens and times on standard error")
    option(verb, "--json", "print one JSON object with text, usage, times and details")
    batch = verb.add_argument_group(
        "many prompts, as JSON Lines",
        'A line of the input is a JSON string, or an object with "prompt" or "messages" and, where wanted,\n'
        '"id", "request_id" and sampling fields. A line of the output is an object with the id and the text, or\n'
        'an "error".',
    )
    option(batch, "--input FILE", "prompts; - is standard input", path)
    option(batch, "--output FILE", "answers, in the same order; - is standard output", path)
    option(batch, "--concurrency N", "requests at once (default: 16)", positive)
    existing = batch.add_mutually_exclusive_group()
    option(existing, "--resume", "ask what --output lacks, and what failed in it")
    option(existing, "--overwrite", "replace --output if it exists")
    option(batch, "--max-failures N", "stop when N have failed (default: never)", positive)
    add_address(verb, is_positional=False)
    add_client_options(verb)
    add_sampling_options(verb)


def _generate(args: argparse.Namespace) -> int:
    """Ask, and print the text: as it comes, at the end, or in one JSON object. Raises ToolError when there is nothing
    to ask or the files can't be used together, and DeepseekTritonError when it can't be answered."""
    is_batch = args.input is not None
    misplaced = [name for name in (_OF_ONE if is_batch else _OF_MANY) if getattr(args, name) not in (None, False)]
    if misplaced:
        options = ", ".join("PROMPT" if name == "prompt" else f"--{name.replace('_', '-')}" for name in misplaced)
        raise ToolError(f"{options}: {'not with' if is_batch else 'only with'} --input", exit_code=2)
    params = sampling_params(args)
    if is_batch:
        if args.output is None:
            raise ToolError("--input needs --output FILE (- is standard output)", exit_code=2)
        if args.resume and str(args.output) == "-":
            raise ToolError("--resume needs an --output that can be read again", exit_code=2)
        if all(map(os.path.exists, (args.input, args.output))) and args.input.samefile(args.output):
            raise ToolError(f"--input and --output are the same file, {args.output}", exit_code=2)
        return run_batch(
            args.input,
            args.output,
            params,
            lambda: client_of(args, Retries(attempts_when_full=_PATIENCE_S, max_s=2)),  # a second each on average
            chat=args.chat,
            system=args.system,
            concurrency=args.concurrency or 16,
            resume=args.resume,
            overwrite=args.overwrite,
            max_failures=args.max_failures,
            patience_s=_PATIENCE_S if args.retries is None else 0,
            by_contract=not any(url.rstrip("/").endswith("/v1") for url in args.urls or ()),
        )
    request = _request(args)
    completion: Completion | None = None
    with client_of(args) as client, to_reader():
        if "prompt" in request and not args.raw:
            request = as_asked(request, chat=chat_model(client)[1], system=None)
        completion = _answer(client, request, params, args)
    if completion is None:
        return 0  # the reader has left
    if args.usage:
        complain(usage_line(completion))
    return complain_of_cut(completion, "generate")


def _request(args: argparse.Namespace) -> Request:
    """Return the request of the command line. Raises ToolError unless there is exactly one that can be read."""
    sources = {"PROMPT": args.prompt, "--file": args.file, "--messages": args.messages}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) > 1:
        raise ToolError(f"give one of {' and '.join(given)}", exit_code=2)
    if args.raw and (args.messages or args.system) is not None:
        raise ToolError("--raw: not with --messages and --system, which are for chats", exit_code=2)
    if args.messages is not None:
        request: Request = {"messages": read_messages(args.messages)}
    elif args.file is not None or args.prompt == "-" or not given:
        if not given and sys.stdin.isatty():
            raise ToolError("give a prompt, --file FILE, --messages FILE or --input FILE, or pipe one in", exit_code=2)
        request = {"prompt": read_text(args.file or Path("-"))}
    else:
        request = {"prompt": args.prompt}
    asked = request.get("prompt", "messages")
    if not (asked if args.raw else asked.strip()):
        raise ToolError(f"{given[0] if given else 'standard input'}: expected a prompt, got nothing", exit_code=2)
    return as_asked(request, chat=args.chat, system=args.system)


def _answer(client: Client, request: Request, params: SamplingParams, args: argparse.Namespace) -> Completion:
    printer = AnswerPrinter(with_reasoning=not args.hide_reasoning)
    is_chat = "messages" in request
    content = request["messages"] if is_chat else request["prompt"]
    # The chunks of several answers come mixed, and the best of several answers is known only at the end.
    whole = args.no_stream or (params.n or 1) > 1 or (params.best_of or 1) > 1
    if whole:
        completion = (client.chat if is_chat else client.generate)(content, params)
    else:
        # With --json too: only a stream has a time to the first token.
        with (client.stream_chat if is_chat else client.stream)(content, params) as stream:
            if not args.json:
                try:
                    for chunk in stream:
                        printer.show(chunk.text, chunk.reasoning)
                finally:
                    printer.end()
            completion = stream.completion()
    if args.json:
        print(as_json(completion_record(completion)))
    elif whole:
        for number, answer in enumerate(completion.answers, start=1):
            if len(completion.answers) > 1:
                print(f"--- answer {number} of {len(completion.answers)} ---")
            printer.show(answer.text, answer.reasoning)
            printer.end()
    return completion
