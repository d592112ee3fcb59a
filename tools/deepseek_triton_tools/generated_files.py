"""The generated files of the checkout: `make generated` writes them, and a test compares them."""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from deepseek_triton_build import PlanRequest, contract_tables, make_plan, model_repository, repository_files
from deepseek_triton_build.check import rules_page
from deepseek_triton_tools._version import __version__

_MARK = "<!-- make generated writes what follows from deepseek_backend/contract.py -->\n\n"
_EMBEDDED = ("tensorrt_llm/config.pbtxt", "tensorrt_llm/1/model.yaml")


def generated_files() -> dict[Path, bytes]:
    """Return path -> content for every generated file of the checkout."""
    repository = model_repository()
    plan = make_plan(PlanRequest(variant="tiny"))
    content = {file.path.as_posix(): file.content for file in repository_files(plan, version=__version__)}
    files = {repository / name: content[name] for name in _EMBEDDED}
    page = repository.parent / "docs" / "contract.md"
    text, mark, _ = page.read_text("utf-8").partition(_MARK)
    files[page] = f"{text}{mark}{contract_tables()}".encode()
    return files


def write_site_pages(folder: Path) -> None:
    """Write a copy of docs/ to `folder`, with the pages that only the site has. `folder` is replaced."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(model_repository().parent / "docs", folder)
    (folder / "rules.md").write_text(rules_page(), "utf-8")
    for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        (folder / name.lower()).write_text(f'--8<-- "{name}"\n', "utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m deepseek_triton_tools.generated_files",
        description="Write config.pbtxt, model.yaml and the tables of docs/contract.md again.",
        allow_abbrev=False,
    )
    parser.add_argument("--site", type=Path, metavar="DIR", help="write the pages of the site to DIR instead")
    if site := parser.parse_args(argv).site:
        write_site_pages(site)
        return
    for path, text in generated_files().items():
        path.write_bytes(text)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
