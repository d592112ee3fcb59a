"""What the code costs the next person: `make house` prints the figures, `make lint` holds the limits.

`python tests/house.py tools/deepseek_triton_tools/bench` lists what is grain there: private functions with one caller,
and modules that one module imports.
"""

import ast
import io
import math
import statistics
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("model_repository", "build", "client", "tools")
# What an import statement calls the packages is what stands below these.
IMPORT_ROOTS = ("model_repository/tensorrt_llm/1", "build", "client", "tools")
PACKAGE_FILE = "__init__.py"

# Name of the figure -> at most. `deep`: folders between a package and a module; `median`, `long`: lines of a function,
# the latter of the longest tenth.
GOALS: dict[str, float] = {
    "production lines": 64_000,
    "modules": 380,
    "lines of tools": 30_000,
    "lines of client": 4_900,
    "private functions with one caller, %": 12,
    "modules that one module imports": 60,
    "deep": 2,
    "median": 10,
    "long": 30,
    "code lines for each comment line": 50,
    "characters of ARCHITECTURE.md": 24_000,
    "pages of docs": 26,
    "words of docs": 50_000,
    "test lines": 75_000,
}
# Where a goal is not reached: what was, when the limits were set. These may only come down.
REACHED: dict[str, float] = {
    "production lines": 81_050,
    "lines of tools": 39_550,
    "lines of client": 5_650,
    "private functions with one caller, %": 17,
    "modules that one module imports": 80,
    "test lines": 84_450,
}
SLACK = 1.03
LIMITS = {name: math.floor(most * SLACK) for name, most in (GOALS | REACHED).items()}


@dataclass(frozen=True)
class Module:
    path: Path

    @cached_property
    def source(self) -> str:
        return self.path.read_text("utf-8")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return [*ast.walk(ast.parse(self.source))]

    @cached_property
    def name(self) -> str:
        """As an import statement has it."""
        inside = next(ROOT / root for root in IMPORT_ROOTS if self.path.is_relative_to(ROOT / root))
        parts = self.path.relative_to(inside).with_suffix("").parts
        return ".".join(parts[:-1] if self.path.name == PACKAGE_FILE else parts)

    @property
    def lines(self) -> int:
        return self.source.count("\n")

    @property
    def depth(self) -> int:
        """Folders between the package and the file."""
        return self.name.count(".") - (0 if self.path.name == PACKAGE_FILE else 1)

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        return (node for node in self.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))

    def private_with_one_caller(self) -> list[str]:
        """Names with one underscore of functions that the module itself uses in one place."""
        uses = Counter(getattr(node, "id", getattr(node, "attr", "")) for node in self.nodes)
        return [
            function.name
            for function in self.functions()
            if function.name.startswith("_") and not function.name.startswith("__") and uses[function.name] == 1
        ]

    def imports(self) -> Iterator[str]:
        """What it may mean by each name that it imports: a module, or something in a module."""
        package = self.name.split(".") if self.path.name == PACKAGE_FILE else self.name.split(".")[:-1]
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) - node.level + 1] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                for alias in node.names:
                    yield f"{base}.{alias.name}"
                    yield base

    def code_and_comment_lines(self) -> tuple[int, int]:
        """Lines with code that is no docstring, and those with nothing but a comment."""
        prose = {
            line
            for node in self.nodes
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        code, comments = set[int](), 0
        blank = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.COMMENT}
        for token in tokenize.generate_tokens(io.StringIO(self.source).readline):
            if token.type == tokenize.COMMENT:
                comments += token.line.lstrip().startswith("#")
            elif token.type not in blank:
                code.update(range(token.start[0], token.end[0] + 1))
        return len(code - prose), comments


def production() -> list[Module]:
    return [Module(path) for part in PARTS for path in sorted((ROOT / part).rglob("*.py"))]


def imported_once(modules: list[Module]) -> list[str]:
    """Modules that exactly one other module imports."""
    names = {module.name for module in modules}
    importers: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        wanted = set(module.imports()) & names
        # `from package import module` means the module, not the package.
        wanted -= {name for name in wanted if any(other.startswith(f"{name}.") for other in wanted)}
        for name in wanted - {module.name}:
            importers[name].add(module.name)
    return sorted(name for name, users in importers.items() if len(users) == 1)


@cache
def figures() -> dict[str, float]:
    modules = production()
    functions = [(node.end_lineno or 0) - node.lineno + 1 for module in modules for node in module.functions()]
    private = sum(len(module.private_with_one_caller()) for module in modules)
    code, comments = map(sum, zip(*(module.code_and_comment_lines() for module in modules), strict=True))
    pages = list((ROOT / "docs").glob("**/*.md"))
    lines = {part: sum(each.lines for each in modules if each.path.is_relative_to(ROOT / part)) for part in PARTS}
    return {
        "production lines": sum(lines.values()),
        "modules": len(modules),
        "lines of tools": lines["tools"],
        "lines of client": lines["client"],
        "private functions with one caller, %": 100 * private / len(functions),
        "modules that one module imports": len(imported_once(modules)),
        "deep": max(module.depth for module in modules),
        "median": statistics.median(functions),
        "long": statistics.quantiles(functions, n=10)[-1],
        "code lines for each comment line": code / comments,
        "characters of ARCHITECTURE.md": len((ROOT / "ARCHITECTURE.md").read_text("utf-8")),
        "pages of docs": len(pages),
        "words of docs": sum(len(page.read_text("utf-8").split()) for page in pages),
        "test lines": sum(path.read_text("utf-8").count("\n") for path in (ROOT / "tests").rglob("*.py")),
    }


def too_much() -> list[str]:
    """The figures that are worse than their limits."""
    return [
        f"{name}: {value:.6g}, at most {LIMITS[name]}; take as much out: `python tests/house.py FOLDER` shows where"
        for name, value in figures().items()
        if value > LIMITS[name]
    ]


def grain(below: Path) -> Iterator[str]:
    modules = production()
    once = set(imported_once(modules))
    within = [module for module in modules if module.path.is_relative_to(below)]
    for module in within or sys.exit(f"{below}: expected a folder of modules, in {', '.join(PARTS)}"):
        by_one = "by one module, " if module.name in once else ""
        names = " ".join(module.private_with_one_caller())
        yield f"{module.path.relative_to(below)}: {by_one}{module.lines} lines, {names}"


def main() -> None:
    if sys.argv[1:]:
        print(*grain(Path(sys.argv[1]).resolve()), sep="\n")
        return
    for name, value in figures().items():
        print(f"{name:38} {value:8.1f}   at most {LIMITS[name]:6}, goal {GOALS[name]:g}".replace(".0 ", "   "))
    sys.exit("\n".join(too_much()) or 0)


if __name__ == "__main__":
    main()
