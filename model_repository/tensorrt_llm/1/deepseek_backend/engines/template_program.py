"""Renders chat templates in a process of its own: whatever a template does, the server goes on.

`bounded_template.py` runs this file as a program. A request is a line of JSON; the answer is a line with a word and a
number of bytes, and then the bytes: `text`, the prompt, or `error` or `memory`, which say why there is none.

argv: megabytes of memory, seconds of the processor for a request, and the folders to import jinja2 from.
"""

import json
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn


def _compiler() -> Callable[[str], Any]:
    from jinja2 import TemplateError
    from jinja2.ext import Extension
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """Takes transformers' tag around answers, which only training needs."""

        tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

        def parse(self, parser: "Parser") -> "list[Node]":
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
    )
    # jinja's own filter would escape the JSON for HTML.
    environment.filters["tojson"] = lambda value, ensure_ascii=False, **options: json.dumps(
        value, ensure_ascii=ensure_ascii, **options
    )
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    return lru_cache(maxsize=8)(environment.from_string)


def main() -> None:
    megabytes, seconds = map(int, sys.argv[1:3])
    sys.path += sys.argv[3:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the server's, which closes stdin when it ends
    compiled = _compiler()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (megabytes * 2**20,) * 2)
    for line in sys.stdin.buffer:
        # The kernel ends this process when it has used so much more; no thread could stop a call within C.
        usage = resource.getrusage(resource.RUSAGE_SELF)
        used = int(usage.ru_utime + usage.ru_stime)
        resource.setrlimit(resource.RLIMIT_CPU, (used + seconds + 1, resource.RLIM_INFINITY))
        word = b"text"
        try:
            request = json.loads(line)
            template = compiled(request["source"])
            values = request["values"]
            answer = b"" if values is None else template.render(**values).encode("utf-8", "surrogatepass")
        except MemoryError:
            word, answer = b"memory", b"it needs more than %d MiB of memory" % megabytes
        except Exception as error:
            # A template may raise anything.
            # Of the message only the beginning: it may hold as much as the template likes.
            text = f"{type(error).__name__}: {str(error)[:2000]}"
            word, answer = b"error", " ".join(text.split()).encode("utf-8", "replace")
        sys.stdout.buffer.write(b"%s %d\n" % (word, len(answer)))
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
