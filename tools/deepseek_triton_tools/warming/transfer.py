"""The threads that bring files into the page cache, and what is known of each of them meanwhile.

The work is divided into segments, so that all threads share the last files too. A thread holds one file open and at
most one buffer of a step, so the number of threads bounds what is being read at any moment.

splice(2) through a pipe to /dev/null moves the pages and copies none of them: it takes a sixth of the processor time of
reading into a buffer. In both ways the kernel reads ahead as for any sequential reader, and the call returns when the
bytes are in the page cache.
"""

import contextlib
import errno
import fcntl
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from deepseek_triton_tools.tool_errors import ToolError
from deepseek_triton_tools.warming.checksums import Checksum
from deepseek_triton_tools.warming.filesystem import FileSystem
from deepseek_triton_tools.warming.page_cache import ResidentFile
from deepseek_triton_tools.warming.survey import SurveyedFile

SEGMENT = 2**28
"""Bytes of a file that one thread takes at a time: 256 MiB."""
# Bytes of one call, between updates of the progress: 8 MiB. With smaller steps threads wait more for Python's lock.
STEP = 2**23
# Bytes that are copied at once where splice is not possible: 2 MiB, which fit in a processor's cache.
BUFFER = 2**21
# Bytes of the buffers of all threads together. With more than eight threads each has a smaller buffer.
MOST_BUFFERS = 2**24
# Bytes of a thread's pipe: 1 MiB, the most that an ordinary user may give a pipe (/proc/sys/fs/pipe-max-size).
PIPE = 2**20
# Bytes that one call of posix_fadvise brings in at least: the kernel's default read-ahead of 128 KiB.
SMALLEST_READ_AHEAD = 2**17
# Errors of splice on a file system that does not support it, or under a filter of system calls.
_SPLICE_IMPOSSIBLE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM})

_WAIT = "wait until it is whole, then warm again"
_FIXES: Mapping[int, str] = {
    errno.EACCES: "let this user read it",
    errno.EPERM: "let this user read it",
    errno.ENOENT: "it was removed meanwhile; download it again",
    errno.EIO: "the storage failed: its own log (dmesg) says more",
    errno.ESTALE: "the server no longer has it under this handle: mount the file system again",
    errno.EMFILE: "allow this process more open files (ulimit -n)",
}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One file that could not be warmed, or whose content is not what it should be."""

    path: Path
    message: str
    """One line, with the byte offset where there is one."""
    fix: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}; {self.fix}"


@dataclass(kw_only=True)
class FileProgress:
    """The progress of one file. Guarded by the transfer's lock."""

    surveyed: SurveyedFile
    segments_left: int
    done: int = 0
    found: int = 0
    """Bytes of `done` that were in the page cache already."""
    status: os.stat_result | None = None
    """The file's status when it was opened first."""
    problem: Problem | None = None

    @property
    def path(self) -> Path:
        return self.surveyed.file.path


@dataclass(kw_only=True)
class Place:
    """The place where a thread is reading. Only that thread writes it."""

    thread_id: int = 0
    """The kernel's number of the thread."""
    file: FileProgress | None = None
    offset: int = 0
    since_s: float = field(default_factory=time.monotonic)
    """Time of the last byte, by time.monotonic()."""

    def move(self, file: FileProgress | None, offset: int) -> None:
        self.file, self.offset, self.since_s = file, offset, time.monotonic()


class Pace:
    """Makes threads wait so that together they read no more than `rate` bytes a second. None: no limit."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._next_s = 0.0

    def wait(self, num_bytes: int, stop: threading.Event) -> None:
        """Wait until `num_bytes` may be read, or `stop` is set."""
        if self._rate is None:
            return
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._next_s)
            self._next_s = begin + num_bytes / self._rate
        stop.wait(begin - now)


_Segment: TypeAlias = tuple[FileProgress, int, int]
"""(file, begin, end): what one thread takes at a time."""


class _ChangedError(Exception):
    """The file is no longer as long as it was; the message says how it differs."""


class Transfer:
    """One pass over `files` with `jobs` threads, which bring them into the page cache."""

    def __init__(
        self, files: Sequence[SurveyedFile], *, jobs: int, rate_limit: float | None, checksums: Mapping[Path, Checksum]
    ) -> None:
        self.files = [FileProgress(surveyed=file, segments_left=0) for file in files]
        self.ended = threading.Event()
        """Set when every thread has ended."""
        self.error: BaseException | None = None
        """The error that ended a thread: a bug, or there was no file descriptor left to open /dev/null with."""
        self._pace = Pace(rate_limit)
        self._checksums = checksums
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._segments = deque(segment for file in self.files for segment in self._segments_of(file))
        self.places = [Place() for _ in range(min(jobs, len(self._segments)))]
        self._num_running = len(self.places)
        if not self.places:
            self.ended.set()

    @property
    def num_verified(self) -> int:
        """Files that have a checksum; it is compared."""
        return sum(file.path in self._checksums for file in self.files)

    def start(self) -> None:
        """Start the threads.

        :raises ToolError: when this machine allows no further thread at all.
        """
        for number, place in enumerate(self.places):
            # A thread that waits for a dead file server can't be ended. As a daemon it does not keep the process alive.
            thread = threading.Thread(target=self._run, args=(place,), name=f"warm-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the threads that did start do all the work
                if not number:
                    raise ToolError(f"{error}: allow this user more threads (ulimit -u, pids.max)") from error
                self._count_ended(len(self.places) - number)
                return

    def stop(self) -> None:
        """Let the threads end after the step that they are in."""
        self._stop.set()

    def skip_damaged(self, problem: Problem) -> None:
        """Read no more of the file that `problem` is about. Called from the thread of the damage check."""
        for file in self.files:
            if file.path == problem.path:
                self._fail(file, problem.message, problem.fix)

    def _segments_of(self, file: FileProgress) -> Iterator[_Segment]:
        size = file.surveyed.file.size
        # A checksum is computed from the first byte to the last, so such a file is one segment.
        length = size if file.path in self._checksums else SEGMENT
        begins = range(0, size, length) if size else range(1)
        file.segments_left = len(begins)
        for begin in begins:
            yield file, begin, min(begin + length, size)

    def _run(self, place: Place) -> None:
        place.thread_id = threading.get_native_id()
        try:
            with closing(Sink(len(self.places))) as sink:
                while not self._stop.is_set():
                    with self._lock:
                        segment = self._segments.popleft() if self._segments else None
                    if segment is None:
                        break
                    if segment[0].problem is None:
                        self._read_segment(*segment, sink, place)
        except BaseException as error:
            self.error = error
            raise
        finally:
            place.move(None, 0)
            self._count_ended(1)

    def _count_ended(self, num_threads: int) -> None:
        with self._lock:
            self._num_running -= num_threads
            if not self._num_running:
                self.ended.set()

    def _read_segment(self, file: FileProgress, begin: int, end: int, sink: "Sink", place: Place) -> None:
        place.move(file, begin)
        try:
            reader = FileReader(file.path, file.surveyed.file_system, sink)
            with closing(reader) as source, closing(ResidentFile(file.path)) as pages:
                with self._lock:
                    file.status = file.status or source.status
                if source.status.st_size > file.surveyed.file.size:
                    raise _ChangedError("it is longer by now")
                if checksum := self._checksums.get(file.path):
                    self._verify(file, source, place, checksum)
                else:
                    self._bring_in(file, begin, end, source, pages, place)
            self._finish_segment(file)
        except _ChangedError as error:
            before = f"{file.surveyed.file.size:,} bytes when the warm-up began"
            self._fail(file, f"{error}, and had {before}", _WAIT)
        except OSError as error:
            fix = _FIXES.get(error.errno or 0, "read it by hand (cat) to see whether the storage delivers it")
            self._fail(file, f"can't be read at byte {place.offset:,}: {error.strerror}", fix)

    def _bring_in(
        self, file: FileProgress, begin: int, end: int, source: "FileReader", pages: ResidentFile, place: Place
    ) -> None:
        windows = []
        # All windows are asked about before the first is read, because what the kernel reads ahead for one window would
        # count as resident in the next. A partly resident one is divided into small ones.
        for first, past in _divided(begin, end, file.surveyed.file_system.reading.window):
            resident = pages.resident(first, past - first) or 0
            steps = _divided(first, past, STEP) if 0 < resident < past - first else []
            windows += [(at, to, pages.resident(at, to - at) or 0) for at, to in steps] or [(first, past, resident)]
        for first, past, resident in windows:
            place.move(file, first)
            if resident == past - first:
                with self._lock:
                    file.done += resident
            else:
                self._read_range(file, place, first, past, source.bring_in)
            # When a thread is stopped within a window, more of the window may have been found than was counted as done.
            with self._lock:
                file.found = min(file.found + resident, file.done)

    def _verify(self, file: FileProgress, source: "FileReader", place: Place, checksum: Checksum) -> None:
        digest = checksum.begin()

        def read(offset: int, step: int) -> int:
            content = source.read(offset, step)
            digest.update(content)
            return len(content)

        is_whole = self._read_range(file, place, 0, file.surveyed.file.size, read)
        if is_whole and digest.hexdigest() != checksum.digest:
            message = f"its {checksum.algorithm} is {digest.hexdigest()}, and {checksum.digest} by {checksum.source}"
            self._fail(file, message, "download it again")

    def _read_range(
        self, file: FileProgress, place: Place, offset: int, end: int, read: Callable[[int, int], int]
    ) -> bool:
        """Read step by step, as fast as the pace allows. Returns False when the transfer was stopped before the end.

        :param read: called with the offset and the bytes to ask for; returns how many came, 0 at the file's end.
        """
        while offset < end:
            step = min(STEP, end - offset)
            place.since_s = math.inf  # waiting for the pace is no stall
            self._pace.wait(step, self._stop)
            place.since_s = time.monotonic()
            if self._stop.is_set():
                return False
            if not (num_bytes := read(offset, step)):
                raise _ChangedError(f"ends at byte {offset:,}")
            with self._lock:
                file.done += num_bytes
            offset += num_bytes
            place.move(file, offset)
        return True

    def _finish_segment(self, file: FileProgress) -> None:
        """Count a segment as done. After the last one, check that the file was not changed meanwhile."""
        if self._stop.is_set():
            return
        with self._lock:
            file.segments_left -= 1
            if file.segments_left or file.problem or file.status is None:
                return
        then, now = file.status, os.stat(file.path)
        if (then.st_ino, then.st_size, then.st_mtime_ns) != (now.st_ino, now.st_size, now.st_mtime_ns):
            sizes = f"{then.st_size:,} bytes, then {now.st_size:,}"
            self._fail(file, f"changed while it was read: {sizes}", _WAIT)

    def _fail(self, file: FileProgress, message: str, fix: str) -> None:
        # When several segments fail, the first problem is kept.
        with self._lock:
            file.problem = file.problem or Problem(path=file.path, message=message, fix=fix)


def _divided(begin: int, end: int, length: int) -> list[tuple[int, int]]:
    """The range in pieces of `length` bytes."""
    return [(at, min(at + length, end)) for at in range(begin, end, length)]


class Sink:
    """Discards the bytes that one of `num_threads` threads reads. Its buffer is made when it is first needed."""

    def __init__(self, num_threads: int = 1) -> None:
        self._size = min(BUFFER, MOST_BUFFERS // num_threads)
        self._nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            self._out, self._in = os.pipe2(os.O_CLOEXEC)
        except OSError:
            os.close(self._nowhere)
            raise
        with contextlib.suppress(OSError):  # a user with many pipes gets small ones, which work too
            fcntl.fcntl(self._in, fcntl.F_SETPIPE_SZ, PIPE)

    def splice(self, fd: int, offset: int, length: int) -> int:
        """Move at most PIPE bytes of a file to /dev/null. Returns how many; 0 at the file's end."""
        passed = left = os.splice(fd, self._in, min(PIPE, length), offset_src=offset)
        while left:
            left -= os.splice(self._out, self._nowhere, left)
        return passed

    @cached_property
    def buffer(self) -> bytearray:
        return bytearray(self._size)

    def close(self) -> None:
        for descriptor in (self._nowhere, self._out, self._in):
            os.close(descriptor)


class FileReader:
    """A file that one thread reads.

    :raises OSError: when the file can't be opened.
    """

    def __init__(self, path: Path, system: FileSystem, sink: Sink) -> None:
        self._sink = sink
        self._ahead = system.reading.read_ahead
        self._piece = max((system.read_ahead_kb or 0) * 1024, SMALLEST_READ_AHEAD)
        self._copies = system.reading.method == "read"
        self._advised = 0
        # With O_NONBLOCK a pipe in the place of the file is an error; without it, opening it would wait for a writer.
        self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self.status = os.fstat(self.fd)
        # This doubles the kernel's read-ahead, which helps where it is small. Doubling one of 8 MiB cost a third of the
        # rate.
        if self._ahead:
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def bring_in(self, offset: int, length: int) -> int:
        """Bring at most `length` bytes from `offset` into the page cache. Returns how many; 0 at the file's end.

        :raises OSError: when the storage can't deliver them.
        """
        # Ask the kernel to read ahead, in pieces that are no larger than it takes at once.
        end = min(offset + self._ahead, self.status.st_size) if self._ahead else 0
        self._advised = max(self._advised, offset)
        while self._advised < end:
            os.posix_fadvise(self.fd, self._advised, self._piece, os.POSIX_FADV_WILLNEED)
            self._advised += self._piece
        if not self._copies:
            try:
                return self._splice(offset, length)
            except OSError as error:
                if error.errno not in _SPLICE_IMPOSSIBLE:
                    raise
                self._copies = True
        return len(self.read(offset, length))

    def _splice(self, offset: int, length: int) -> int:
        done = 0
        try:
            while done < length and (passed := self._sink.splice(self.fd, offset + done, length - done)):
                done += passed
        except OSError:
            if not done:
                raise
        return done  # the next call fails at the byte that could not be read, and its error is reported

    def read(self, offset: int, length: int) -> memoryview:
        """Read at most BUFFER bytes. They lie in the thread's buffer until the next call.

        :raises OSError: when the storage can't deliver them.
        """
        view = memoryview(self._sink.buffer)[:length]
        return view[: os.preadv(self.fd, [view], offset)]

    def close(self) -> None:
        os.close(self.fd)
