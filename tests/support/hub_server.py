"""A hub of Hugging Face for one model, on a real socket: it lists files, serves ranges, and fails as told.

It answers what huggingface_hub asks for: GET /api/models/NAME/revision/REVISION and /NAME/resolve/COMMIT/FILE. Large
files are redirected to another host, as the real hub does, where no token may arrive.
"""

import asyncio
import hashlib
import json
import random
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import unquote

from support.asgi_server import serving_app

MODEL = "maker/model"
COMMIT = "c0ffee" * 6 + "c0de"
_PIECE = 1000
_OTHER_HOST = "localhost"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault: it happens to one request for a file, or for the list of them."""

    status: int = 0
    """Answer with this status instead."""
    headers: Mapping[str, str] = field(default_factory=dict)
    cut_after: int | None = None
    """Close the connection after so many bytes."""
    hold_after: int | None = None
    """Send nothing after so many bytes, until `release` is set."""
    wrong: bool = False
    """Send other bytes of the same number."""


class HubRequest(NamedTuple):
    name: str
    """The file's name; "" for the list."""
    begin: int
    """The first byte asked for."""
    host: str
    authorization: str


@dataclass
class HubServer:
    files: dict[str, bytes]
    token: str = ""
    """The only one that is let in; "" lets everybody in."""
    listed_sizes: dict[str, int | None] = field(default_factory=dict)
    """Sizes that are listed instead of the real ones."""
    listed_hashes: dict[str, str | None] = field(default_factory=dict)
    """Hashes that are listed instead of the real ones."""
    listed_commit: str = COMMIT
    knows_ranges: bool = True
    url: str = ""
    requests: list[HubRequest] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Name -> bytes sent of it, for all requests."""
    faults: dict[str, deque[Fault]] = field(default_factory=lambda: defaultdict(deque))
    """Name, or "" for the list -> faults, each of one request."""
    always: dict[str, Fault] = field(default_factory=dict)
    release: threading.Event = field(default_factory=threading.Event)

    @property
    def port(self) -> int:
        return int(self.url.rstrip("/").rpartition(":")[2])

    def asked(self, name: str) -> list[int]:
        """Return the first byte of each request for a file's bytes."""
        host = _OTHER_HOST if _is_large(name) else "127.0.0.1"
        return [each.begin for each in self.requests if (each.name, each.host) == (name, host)]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        path, host = unquote(scope["path"]).strip("/"), headers["host"].partition(":")[0]
        listing = f"api/models/{MODEL}/revision/"
        resolve = f"{MODEL}/resolve/{COMMIT}/"
        name = path.removeprefix(resolve) if path.startswith(resolve) else path.removeprefix("cdn/")
        name = "" if path.startswith("api/") else name
        begin = int(headers.get("range", "bytes=0-")[len("bytes=") : -1])
        token = headers.get("authorization", "")
        self.requests.append(HubRequest(name=name, begin=begin, host=host, authorization=token))
        is_large = name in self.files and _is_large(name)
        is_first = path.startswith(resolve) and is_large
        fault = None if is_first else self._fault(name)
        if fault and fault.status:
            await _answer(send, fault.status, b"{}", fault.headers)
        elif self.token and token != f"Bearer {self.token}" and not path.startswith("cdn/"):
            code = {"X-Error-Message": "Invalid credentials in Authorization header"} if token else {}
            await _answer(send, 401, b"{}", code or {"X-Error-Code": "RepoNotFound"})
        elif path.startswith("api/") and not path.startswith(listing):
            await _answer(send, 404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif path.startswith("api/"):
            if path.removeprefix(listing) in ("main", COMMIT):
                await _answer(send, 200, json.dumps(self._listing()).encode(), {"Content-Type": "application/json"})
            else:
                await _answer(send, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif name not in self.files:
            await _answer(send, 404, b"{}", {"X-Error-Code": "EntryNotFound"})
        elif is_first:
            port = scope["server"][1]
            await _answer(send, 302, b"", {"Location": f"http://{_OTHER_HOST}:{port}/cdn/{name}"})
        else:
            await self._send_file(send, name, begin, fault or Fault())

    def _fault(self, name: str) -> Fault | None:
        return self.faults[name].popleft() if self.faults[name] else self.always.get(name)

    def _listing(self) -> dict[str, Any]:
        return {"id": MODEL, "sha": self.listed_commit, "siblings": [self._entry(name) for name in self.files]}

    def _entry(self, name: str) -> dict[str, Any]:
        content = self.files[name]
        size = self.listed_sizes.get(name, len(content))
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        entry: dict[str, Any] = {"rfilename": name, "size": size, "blobId": self.listed_hashes.get(name, blob)}
        if _is_large(name):
            digest = self.listed_hashes.get(name, hashlib.sha256(content).hexdigest())
            entry["lfs"] = {"size": size, "sha256": digest, "pointerSize": 130}
        return entry

    async def _send_file(self, send: Any, name: str, begin: int, fault: Fault) -> None:
        begin = begin if self.knows_ranges else 0
        content = self.files[name]
        rest = (bytes(len(content)) if fault.wrong else content)[begin:]
        headers = {"Content-Length": str(len(rest))}
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        await _start(send, 206 if begin else 200, headers)
        for offset in range(0, len(rest), _PIECE):
            if fault.cut_after is not None and offset >= fault.cut_after:
                return  # uvicorn closes the connection
            while fault.hold_after is not None and offset >= fault.hold_after and not self.release.is_set():
                await asyncio.sleep(0.01)
            piece = rest[offset : offset + _PIECE]
            self.sent[name] += len(piece)
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def one_tensor(num_bytes: int, name: str = "a") -> bytes:
    """Return a safetensors file with one tensor of so many random bytes, the same each time."""
    header = json.dumps({name: {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}).encode()
    return struct.pack("<Q", len(header)) + header + random.Random(num_bytes).randbytes(num_bytes)


@contextmanager
def hub_server(files: dict[str, bytes], **settings: Any) -> Iterator[HubServer]:
    server = HubServer(files, **settings)
    with serving_app(server) as url:
        server.url = url
        try:
            yield server
        finally:
            server.release.set()


def _is_large(name: str) -> bool:
    return name.endswith(".safetensors")


async def _start(send: Any, status: int, headers: Mapping[str, str]) -> None:
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})


async def _answer(send: Any, status: int, body: bytes, headers: Mapping[str, str]) -> None:
    await _start(send, status, {"Content-Length": str(len(body)), **headers})
    await send({"type": "http.response.body", "body": body})
