"""Takes the code for other GPUs than Hopper's out of a library, so that it packs small.

`python hopper_only.py LIBRARY...` changes each file in place. An .nv_fatbin section is a row of fat binaries. Each has
a header (magic 0xBA55ED50, version, bytes of the header, bytes of the rest) and entries (kind 1 is PTX, 2 machine code;
their header's size, the payload's size, and at byte 28 the architecture). Payloads that Hopper does not run are filled
with zeros: the file keeps its size and its addresses, and xz takes the zeros away. PTX stays where a fat binary has no
machine code for Hopper.
"""

import struct
import sys
from collections.abc import Iterator
from pathlib import Path

MAGIC = 0xBA55ED50
PTX, MACHINE_CODE = 1, 2
HOPPER = 90
_NAMES = (b".nv_fatbin", b"__nv_relfatbin")


def fat_sections(library: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each section with fat binaries, by the ELF64 section headers."""
    table = struct.unpack_from("<Q", library, 0x28)[0]
    size, count, names = struct.unpack_from("<HHH", library, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", library, table + number * size) for number in range(count)]
    name_table = headers[names][4]
    for header in headers:
        name = bytes(library[name_table + header[0] : name_table + header[0] + 32]).partition(b"\0")[0]
        if name.startswith(_NAMES):
            yield header[4], header[4] + header[5]


def keep_hopper(library: bytearray) -> int:
    """Fill the other payloads with zeros, and return how many bytes these were."""
    cleared = 0
    for start, end in fat_sections(library):
        at = start
        while at + 16 <= end:
            magic, _, header_size, size = struct.unpack_from("<IHHQ", library, at)
            if magic != MAGIC:
                at += 8  # between two fat binaries
                continue
            cleared += _clear(library, at + header_size, at + header_size + size)
            at += header_size + size
    return cleared


def _clear(library: bytearray, start: int, end: int) -> int:
    entries = []
    while start < end:
        kind, _, header_size, size = struct.unpack_from("<HHIQ", library, start)
        (architecture,) = struct.unpack_from("<I", library, start + 28)
        entries.append((kind, architecture, start + header_size, size))
        start += header_size + size
    has_hopper = any(kind == MACHINE_CODE and architecture == HOPPER for kind, architecture, _, _ in entries)
    cleared = 0
    for kind, architecture, payload, size in entries:
        keeps = architecture == HOPPER if kind == MACHINE_CODE else not has_hopper
        if not keeps:
            library[payload : payload + size] = bytes(size)
            cleared += size
    return cleared


def main() -> int:
    for name in sys.argv[1:]:
        path = Path(name)
        library = bytearray(path.read_bytes())
        cleared = keep_hopper(library)
        path.write_bytes(library)
        print(f"{path.name}: {cleared / 1e6:.1f} of {len(library) / 1e6:.1f} MB are zeros now")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
