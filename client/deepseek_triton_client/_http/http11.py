"""HTTP/1.1 with h11, the client's side of one connection. No I/O: bytes in, bytes out."""

from __future__ import annotations

from collections.abc import Mapping

import h11

Headers = list[tuple[bytes, bytes]]

Head = tuple[int, Mapping[str, str]]
"""Status and headers of a response; header names are in lower case."""

_SETTINGS = b"\x04\0\0\0\0\0"
"""Type, flags and stream of the frame that begins every HTTP/2 connection, behind its length of 3 bytes (RFC 9113)."""


MOST_INFORMATIONAL = 100
"""Responses of status 1xx before the response. A server may send any number of them, and never another one."""


class Http11Protocol:
    """One request after the other on one connection. Raises h11.LocalProtocolError for a request that is not HTTP,
    h11.RemoteProtocolError for a response that is not, and ConnectionError for a response that breaks off."""

    def __init__(self) -> None:
        self._http = h11.Connection(h11.CLIENT)
        self._is_broken_off = False
        self._is_complete = False
        self._num_informational = 0

    @property
    def is_idle(self) -> bool:
        """Whether the last response was read to its end, nothing came after it, and another request may follow."""
        http = self._http
        return http.our_state is http.their_state is h11.DONE and not http.trailing_data[0]

    def request(self, method: str, target: bytes, headers: Headers, body: bytes) -> bytes:
        """Return the bytes of a request. With a body, `headers` must have a content-length."""
        if self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
            self._is_complete = False
            self._num_informational = 0
        send = self._http.send
        data = send(h11.Request(method=method, target=target, headers=headers)) or b""
        if body:
            data += send(h11.Data(data=body)) or b""
        return data + (send(h11.EndOfMessage()) or b"")

    def feed(self, data: bytes) -> None:
        """Take in received bytes; no bytes mean that the server has closed its side."""
        self._is_broken_off = not data
        self._http.receive_data(data)

    def head(self) -> Head | None:
        """Return the head of the response, or None if it has not arrived."""
        while True:
            event = self._next()
            if event is h11.NEED_DATA:
                return None
            if isinstance(event, h11.Response):
                return event.status_code, {name.decode(): value.decode("latin-1") for name, value in event.headers}
            self._num_informational += 1
            if self._num_informational > MOST_INFORMATIONAL:
                raise h11.RemoteProtocolError(f"it has more than {MOST_INFORMATIONAL} informational responses")

    def body(self) -> bytes | None:
        """Return the part of the body that has arrived: None if there is none yet, b"" at its end."""
        pieces = []
        while not self._is_complete:
            event = self._next()
            if isinstance(event, h11.Data):
                pieces.append(bytes(event.data))
            elif event is h11.NEED_DATA:
                break
            else:
                self._is_complete = True
        return b"".join(pieces) if pieces or self._is_complete else None

    def _next(self) -> object:
        try:
            return self._http.next_event()
        except h11.RemoteProtocolError as exc:
            if self._http.trailing_data[0][3:].startswith(_SETTINGS):
                raise h11.RemoteProtocolError(
                    "it is HTTP/2, so this is a gRPC port: grpc:// instead of http://"
                ) from exc
            if self._is_broken_off:
                raise ConnectionAbortedError("the server closed it before the end of its response") from exc
            raise
