"""HTTP/1.1, the client's end of one connection, over h11. No I/O: bytes in, bytes out."""

from __future__ import annotations

from collections.abc import Mapping

import h11

Headers = list[tuple[bytes, bytes]]

Head = tuple[int, Mapping[str, str]]
"""A response's status and headers, their names in lower case."""


class Http11Protocol:
    """One request after the other. Raises h11.LocalProtocolError for a request that is not HTTP,
    h11.RemoteProtocolError for a response that isn't, and ConnectionError for one that breaks off.
    """

    def __init__(self) -> None:
        self._http = h11.Connection(h11.CLIENT)
        self._is_broken_off = False
        self._is_complete = False

    @property
    def is_idle(self) -> bool:
        """The last response was read to its end, nothing came after it, and another request may follow."""
        http = self._http
        return http.our_state is http.their_state is h11.DONE and not http.trailing_data[0]

    def request(self, method: str, target: bytes, headers: Headers, body: bytes) -> bytes:
        """All of it as it is sent. `headers` have a content-length where there is a body."""
        if self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
            self._is_complete = False
        send = self._http.send
        data = send(h11.Request(method=method, target=target, headers=headers)) or b""
        if body:
            data += send(h11.Data(data=body)) or b""
        return data + (send(h11.EndOfMessage()) or b"")

    def feed(self, data: bytes) -> None:
        """What came; nothing where the server has closed its end."""
        self._is_broken_off = not data
        self._http.receive_data(data)

    def head(self) -> Head | None:
        """None as long as it is not there."""
        while True:
            event = self._next()
            if event is h11.NEED_DATA:
                return None
            if isinstance(event, h11.Response):
                return event.status_code, {name.decode(): value.decode("latin-1") for name, value in event.headers}

    def body(self) -> bytes | None:
        """What there is of it; None as long as there is nothing, and nothing at its end."""
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
            if self._is_broken_off:
                raise ConnectionAbortedError("the server closed it before the end") from exc
            raise
