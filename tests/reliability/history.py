"""The history of a run: one line of JSON for each request, with all that its client saw."""

import gzip
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

NO_END = "no end"
NOT_ASKED = "not asked"


@dataclass(kw_only=True)
class Record:
    """What the client of one request saw. Times are by time.monotonic(), which all processes of the machine share."""

    job: int
    part: int
    """Number of the request within its job."""
    began_s: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0
    status: int = 0
    """HTTP's; 0 over gRPC, and where no answer came."""
    responses: int = 0
    """Number of responses or events."""
    texts: dict[int, str] = field(default_factory=dict)
    """Text by sequence."""
    reasons: dict[int, list[str]] = field(default_factory=dict)
    """Finish reasons by sequence: one, if all is well."""
    tokens: dict[int, int] = field(default_factory=dict)
    """Number of output tokens by sequence."""
    prompt_tokens: list[int] = field(default_factory=list)
    """Every number of prompt tokens that was told."""
    total_tokens: int | None = None
    logprobs: int = 0
    """Number of tokens that had log-probabilities."""
    ids: list[str] = field(default_factory=list)
    """Ids that responses had, each once."""
    call: str = ""
    """Arguments of calls, joined."""
    handover: str = ""
    """context_phase_params of a context server's answer."""
    errors: list[str] = field(default_factory=list)
    finals: int | None = None
    """Number of final responses; None where the protocol does not tell."""
    closed: bool = False
    """Whether the answer ended as its protocol ends answers."""
    late: int = 0
    """Number of responses with text or an end behind the end of their sequence."""
    left: bool = False
    lost: str = ""
    """How the connection broke, or that no end came in time."""

    def as_line(self) -> str:
        """Return the record without what is as it is by default."""
        empty = Record(job=self.job, part=self.part, began_s=self.began_s)
        return json.dumps(
            {name: value for name, value in asdict(self).items() if value != getattr(empty, name) or name in _ALWAYS},
            ensure_ascii=False, separators=(",", ":"),
        )  # fmt: skip


_ALWAYS = ("job", "part", "began_s")
_BY_SEQUENCE = ("texts", "reasons", "tokens")


def read_records(folder: Path) -> Iterator[Record]:
    """Yield the records of every client of a run, in no order."""
    names = {each.name for each in fields(Record)}
    for path in sorted(folder.glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                document: dict[str, Any] = json.loads(line)
                for name in _BY_SEQUENCE:
                    document[name] = {int(key): value for key, value in document.get(name, {}).items()}
                assert document.keys() <= names
                yield Record(**document)
