"""The generated files of the checkout: `make generated` writes them, and a test compares them."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from deepseek_triton_build import PlanRequest, contract_page, make_plan, model_repository, repository_files
from deepseek_triton_build.catalog import json_twins
from deepseek_triton_build.check import rules_page
from deepseek_triton_tools._version import __version__

_EMBEDDED = ("tensorrt_llm/config.pbtxt", "tensorrt_llm/1/model.yaml")
_SOURCES = ("model_repository/tensorrt_llm/1", "build", "client", "tools")
_INDEX = "## Every file\n"
"""The heading in ARCHITECTURE.md, below which each module has a line: the first sentence of its docstring."""


def generated_files() -> dict[Path, bytes]:
    """Return path -> content for every generated file of the checkout."""
    repository = model_repository()
    plan = make_plan(PlanRequest(variant="tiny"))
    content = {file.path.as_posix(): file.content for file in repository_files(plan, version=__version__)}
    files = {repository / name: content[name] for name in _EMBEDDED}
    architecture = repository.parent / "ARCHITECTURE.md"
    written = architecture.read_text("utf-8").partition(_INDEX)[0]
    files[architecture] = (written + _INDEX + "\n".join(_index(repository.parent))).encode()
    files[repository.parent / "docs" / "contract.md"] = contract_page().encode()
    files[repository.parent / "docs" / "rules.md"] = rules_page().encode()
    files |= json_twins()
    return files


def _index(root: Path) -> Iterator[str]:
    """Yield a heading for each folder, and a line for each of its modules."""
    files = [path for source in _SOURCES for path in sorted((root / source).rglob("*.py"), key=_folder_first)]
    folder = None
    for path in (file for file in files if file.name != "__init__.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        if path.parent != folder:
            folder = path.parent
            yield f"\n### `{folder.relative_to(root).as_posix()}/`\n"
        yield f"* `{path.name}`: {_first_sentence(docstring)}"
    yield ""


def _folder_first(path: Path) -> tuple[str, str]:
    return path.parent.as_posix(), path.name


def _first_sentence(docstring: str) -> str:
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) (?=[A-Z])", paragraph)[0]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m deepseek_triton_tools.generated_files",
        description="Write config.pbtxt, model.yaml, docs/contract.md, docs/rules.md, ARCHITECTURE.md, JSON again.",
        allow_abbrev=False,
    )
    parser.parse_args(argv)
    for path, text in generated_files().items():
        path.write_bytes(text)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
