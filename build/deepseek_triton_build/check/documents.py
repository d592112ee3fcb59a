"""Files of a folder that others wrote, and text, YAML and JSON in them with the line of each key.

Only regular files are opened: reading a pipe may never end. Whatever a file holds, it gives findings and no exception.
"""

import errno
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from deepseek_triton_build.check import codes
from deepseek_triton_build.check.yaml_lines import faulty_line
from deepseek_triton_build.data.finding import Code, Finding
from deepseek_triton_build.text import limit_yaml_depth, printable_line, safe_name, short_repr


class NotAFileError(OSError):
    """The path exists, but is a folder, a pipe, a device or a socket."""


def open_file(path: Path) -> BinaryIO:
    """Open `path` for reading.

    :raises NotAFileError: when it is no regular file.
    :raises OSError: when it can't be read.
    :raises ValueError: for a path that no file can have.
    """
    _require_file(os.stat(path))  # checked before opening, because opening a device may already have an effect
    # Another process may put a pipe in its place after the first look; O_NONBLOCK keeps open() from waiting.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    opened = os.fdopen(descriptor, "rb")
    try:
        _require_file(os.fstat(descriptor))
    except NotAFileError:
        opened.close()
        raise
    return opened


def read_bytes(path: Path, most: int) -> bytes | None:
    """Return the content of `path`; None when it has more than `most` bytes.

    :raises OSError, ValueError: as open_file raises them.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(size + 1) if size <= most else b""  # the file may be growing, so the read is limited
    return content if size <= most else None


def _require_file(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise NotAFileError(errno.EINVAL, "not a regular file")


MAX_TEXT_BYTES = 64 * 2**20
"""Size of the largest file that is read. The largest real one, the index of a checkpoint's tensors, has 10 MB."""
MAX_YAML_VALUES = 100_000
"""Values in one document. The limit is needed because anchors can unfold a short text without end."""

_Loader: Any = getattr(yaml, "CLoader", yaml.Loader)
# Largest integer that is read. No setting is larger, and Python refuses to print very long numbers.
_LARGEST_INTEGER = 2**64 - 1
_COLLECTION_TAGS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("map", "seq", "set", "omap", "pairs"))
_PLAIN_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


@dataclass(frozen=True, kw_only=True)
class Document:
    """A YAML file that is a mapping."""

    file: str
    values: Mapping[Any, Any]
    lines: Mapping[str, int]
    """Dotted path of a key -> its line, from 1."""

    def line(self, key: str) -> int | None:
        """Return the line of `key` or, when the file doesn't have it, of the nearest section it would be in."""
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        return self.lines.get(key)

    def place(self, key: str | None) -> tuple[str, int | None, str]:
        """Return file, line and name of `key`; without a key, no line."""
        return self.file, self.line(key) if key else None, key or ""

    def finding(self, check: Code, key: str, message: str, fix: str) -> Finding:
        """Return a finding about `key`, whose message begins with the key."""
        message = message if message.startswith(key) else f"{key}: {message}"
        return check.finding(message, fix, file=self.file, line=self.line(key), key=key)


def read_text(path: Path, file: str) -> str | Finding:
    """Return the file's text, or the finding that says why it can't be read."""
    try:
        content = read_bytes(path, MAX_TEXT_BYTES)
        if content is None:
            message = f"expected a text file, found more than {MAX_TEXT_BYTES:,} bytes"
            return codes.UNREADABLE.finding(message, "put the right file there", file=file)
        return content.decode("utf-8")
    except NotAFileError:
        return codes.UNREADABLE.finding("expected a file, found something else", "put a file there", file=file)
    except OSError as error:
        fix = "put the file there" if isinstance(error, FileNotFoundError) else "make it readable"
        return codes.UNREADABLE.finding(f"can't be read: {error.strerror}", fix, file=file)
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        message = f"byte {error.start} is not UTF-8 (0x{error.object[error.start]:02x})"
        return codes.UNREADABLE.finding(message, "save the file as UTF-8", file=file, line=line)


def read_yaml(path: Path, file: str) -> tuple[Document | None, list[Finding]]:
    """Return the mapping in a YAML file, and every problem with it; no document when the file holds no mapping."""
    text = read_text(path, file)
    return (None, [text]) if isinstance(text, Finding) else _parse_document(text, file)


def read_json_document(path: Path, file: str) -> tuple[Document | None, list[Finding]]:
    """Return the object in a JSON file with the lines of its keys, and every problem with it."""
    values, findings = read_json(path, file)
    text = read_text(path, file)
    if values is None or isinstance(text, Finding):
        return None, findings
    # Nearly all JSON is YAML too, which gives the lines. Only a tab before a key is none.
    document, found = _parse_document(text.replace("\t", " "), file)
    findings += [finding for finding in found if finding.code == codes.DUPLICATE_KEY.code]
    return Document(file=file, values=values, lines={} if document is None else document.lines), findings


def read_written_yaml(text: str, file: str, first_line: int) -> tuple[Document | None, list[Finding]]:
    """Return the mapping in a YAML text that `file` holds from a line on, as read_yaml does."""
    document, findings = _parse_document(text, file)
    above = first_line - 1
    findings = [replace(finding, line=finding.line and finding.line + above) for finding in findings]
    if document is None:
        return None, findings
    return replace(document, lines={key: line + above for key, line in document.lines.items()}), findings


def _parse_document(text: str, file: str) -> tuple[Document | None, list[Finding]]:
    reader = _DocumentReader(file)
    try:
        limit_yaml_depth(text)
        node = yaml.compose(text, Loader=_Loader)
        values = None if node is None else reader.value(node, "", ())
    except yaml.YAMLError as error:
        return None, [_broken(error, text, file)]
    if not isinstance(values, dict):
        found = "nothing" if values is None else f"a {'list' if isinstance(values, list) else 'single value'}"
        message = f"expected a mapping of LLM arguments, found {found}"
        return None, [
            codes.NOT_A_MAPPING.finding(message, "write keys and values, `model: ...` first", file=file, line=1)
        ]
    return Document(file=file, values=values, lines=reader.lines), reader.findings


def read_json(path: Path, file: str) -> tuple[dict[str, Any] | None, list[Finding]]:
    """Return the object in a JSON file, and what is wrong with it."""
    text = read_text(path, file)
    if isinstance(text, Finding):
        return None, [text]
    fix = "download or write it again"
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        message = f"not JSON: {error.msg} at column {error.colno}"
        return None, [codes.BROKEN.finding(message, fix, file=file, line=error.lineno)]
    except (RecursionError, ValueError) as error:
        return None, [codes.BROKEN.finding(f"not JSON that can be read: {error}", fix, file=file)]
    if not isinstance(value, dict):
        return None, [
            codes.BROKEN.finding(f"expected a JSON object, found {short_repr(value)}", fix, file=file, line=1)
        ]
    return value, []


@dataclass
class _DocumentReader:
    """One walk over the nodes of a YAML document, which collects values, lines and duplicate keys."""

    file: str
    lines: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    num_values: int = 0
    _constructor: Any = field(default_factory=yaml.constructor.SafeConstructor)
    _searched: set[int] = field(default_factory=set)
    """Identities of the mappings that were searched for duplicates."""

    def value(self, node: yaml.Node, path: str, above: tuple[int, ...]) -> Any:
        """Return the value that `node` stands for.

        :param above: identities of the nodes that hold `node`.
        :raises yaml.YAMLError: when the safe loader would refuse it.
        """
        self.num_values += 1
        if self.num_values > MAX_YAML_VALUES:
            raise _refused(f"more than {MAX_YAML_VALUES:,} values", node)
        if id(node) in above:
            raise _refused("an alias of a section that holds it", node)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if node.tag not in _PLAIN_TAGS:
            raise _refused(f"a tag that the safe loader doesn't make a mapping or list of: {node.tag}", node)
        above = (*above, id(node))
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, path, above) for item in node.value]
        assert isinstance(node, yaml.MappingNode)  # the third and last kind of node
        self._find_duplicates(node, path)
        # It expands `<<: *base` as the safe loader does.
        self._constructor.flatten_mapping(node)
        values = {}
        for key_node, value_node in node.value:
            key = self._key(key_node)
            below = _join(path, key)
            self.lines[below] = key_node.start_mark.line + 1
            values[key] = self.value(value_node, below, above)
        return values

    def _find_duplicates(self, node: yaml.MappingNode, path: str) -> None:
        if id(node) in self._searched:  # by now it holds the merged keys too, and these may be overridden
            return
        self._searched.add(id(node))
        first: dict[Any, int] = {}
        for key_node, _ in node.value:
            key, line = self._key(key_node), key_node.start_mark.line + 1
            if key in first:
                dotted = _join(path, key)
                message = f"{dotted} is given twice, first on line {first[key]}; the last one counts"
                fix = "remove one of them"
                self.findings.append(codes.DUPLICATE_KEY.finding(message, fix, file=self.file, line=line, key=dotted))
            first.setdefault(key, line)

    def _key(self, node: yaml.Node) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            raise _refused("a key that is a list or a mapping", node)
        return node.value if node.tag == "tag:yaml.org,2002:merge" else self._scalar(node)

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        if node.tag in _COLLECTION_TAGS:
            raise _refused(f"a single value that is tagged {node.tag}", node)
        try:
            value = self._constructor.construct_object(node)
        except (ValueError, ArithmeticError, LookupError, AttributeError, TypeError) as error:
            # PyYAML's constructors assume that a tag fits its text. It need not: !!bool maybe, !!int "", 2026-99-99.
            raise _refused(f"{short_repr(node.value)} is not of type {node.tag.rpartition(':')[2]}", node) from error
        if isinstance(value, int) and not -(2**63) <= value <= _LARGEST_INTEGER:
            raise _refused("a whole number of more than 64 bits", node)
        return value


def _refused(problem: str, where: Any) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, where.start_mark)


def _broken(error: yaml.YAMLError, text: str, file: str) -> Finding:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if getattr(error, "context", None) == "expected a single document in the stream":
        message, fix = "expected one YAML document, found several (---)", "write each into a file of its own"
        return codes.BROKEN.finding(message, fix, file=file, line=mark and mark.line + 1)
    fault = faulty_line(text) if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None else None
    if fault is not None and not isinstance(error, yaml.constructor.ConstructorError):
        return codes.BROKEN.finding(f"not YAML: {fault.message}", fault.fix, file=file, line=fault.line)
    position = getattr(error, "position", None)
    line = None
    if mark is not None:
        line = mark.line + 1
    elif isinstance(position, int):
        line = text.count("\n", 0, position) + 1
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or error
    message = printable_line(f"not YAML: {problem}")
    return codes.BROKEN.finding(message, "correct it; the cause may be in the lines before it", file=file, line=line)


def _join(path: str, key: Any) -> str:
    return f"{path}.{key_name(key)}" if path else key_name(key)


def key_name(key: Any) -> str:
    """Return a key of a document as findings and dotted paths write it. YAML allows keys that are not strings."""
    return safe_name(key) if isinstance(key, str) else short_repr(key)
