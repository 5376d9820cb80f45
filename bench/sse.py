"""Server-sent events out of a byte stream, however the network cut it."""

from __future__ import annotations

MAX_EVENT_BYTES = 16 * 1024 * 1024


class EventTooLarge(ValueError):
    """The server sent an event larger than MAX_EVENT_BYTES without ending it."""


class SSEReader:
    """Incremental reader: feed it bytes, get the `data` of every event that is complete by then.

    Lines end in LF, CR LF or CR. `data` lines of one event are joined by LF; comments and other fields are skipped.
    """

    def __init__(self) -> None:
        self._rest = b""  # an unfinished line
        self._data: list[bytes] = []  # data lines of the unfinished event
        self._num_data_bytes = 0
        self._after_cr = False  # the last byte seen was CR: an LF that follows belongs to it

    def feed(self, chunk: bytes) -> list[str]:
        """Take in bytes and return the completed events. Raises EventTooLarge, or UnicodeDecodeError."""
        if not chunk:
            return []
        if self._after_cr and chunk[0] == 0x0A:
            chunk = chunk[1:]
            self._after_cr = False
            if not chunk:
                return []
        self._after_cr = chunk[-1] == 0x0D
        lines = (self._rest + chunk).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop()
        events = [event for line in lines if (event := self._take_line(line)) is not None]
        if len(self._rest) + self._num_data_bytes > MAX_EVENT_BYTES:
            raise EventTooLarge(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return events

    def _take_line(self, line: bytes) -> str | None:
        """The event's data when `line` is the empty line that ends it."""
        if not line:
            if not self._data:
                return None
            event = b"\n".join(self._data).decode()
            self._data = []
            self._num_data_bytes = 0
            return event
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
            self._num_data_bytes += len(value)
        return None
