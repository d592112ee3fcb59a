"""The generated files of the checkout: `make generated` writes them, and a test compares them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from deepseek_triton_build import PlanRequest, contract_page, make_plan, model_repository, repository_files
from deepseek_triton_build.check import rules_page
from deepseek_triton_tools._version import __version__

_EMBEDDED = ("tensorrt_llm/config.pbtxt", "tensorrt_llm/1/model.yaml")


def generated_files() -> dict[Path, bytes]:
    """Return path -> content for every generated file of the checkout."""
    repository = model_repository()
    plan = make_plan(PlanRequest(variant="tiny"))
    content = {file.path.as_posix(): file.content for file in repository_files(plan, version=__version__)}
    files = {repository / name: content[name] for name in _EMBEDDED}
    files[repository.parent / "docs" / "contract.md"] = contract_page().encode()
    files[repository.parent / "docs" / "rules.md"] = rules_page().encode()
    return files


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m deepseek_triton_tools.generated_files",
        description="Write config.pbtxt, model.yaml, docs/contract.md, docs/rules.md again.",
        allow_abbrev=False,
    )
    parser.parse_args(argv)
    for path, text in generated_files().items():
        path.write_bytes(text)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
