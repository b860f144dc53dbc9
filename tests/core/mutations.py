"""Damage for checkpoints: random changes of bytes, most of them where metadata is, and archives made valid again."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

from hypothesis import strategies as st

__all__ = ["NASTY", "mutate", "mutations", "repaired"]

# What decoders trip over: lengths, opcodes of pickles, JSON, paths.
NASTY = [
    *(struct.pack("<q", number) for number in (-1, 1 << 62, (1 << 63) - 1, 1 << 32, 0)),
    *(struct.pack("<i", number) for number in (-1, (1 << 31) - 1, 0)),
    *(struct.pack("<H", number) for number in (0xFFFF, 0)),
    *(b"\x80\x02", b"2", b"0", b"1", b".", b"(", b"]", b"}", b")", b"t", b"\x85", b"\x86", b"\x87", b"u", b"s", b"b"),
    *(b"R", b"Q", b"N", b"h\x00", b"q\x00", b"j\xff\xff\xff\x7f", b"r\xff\xff\xff\x3f", b"p999999999\n", b"\x94"),
    *(b"e", b"a", b"l", b"d", b"o", b"i", b"\x81", b"\x91", b"\x8f", b"\x90", b"\x8a\xff", b"\x8b\xff\xff\xff\x7f"),
    *(b"X\xff\xff\xff\xff", b"\x8d" + b"\xff" * 7 + b"\x7f", b"\x96" + b"\xff" * 7 + b"\x00", b"\x95" + b"\xff" * 8),
    *(b"cbuiltins\nset\n", b"ccollections\nOrderedDict\n", b"ctorch\nSize\n", b"c_codecs\nencode\n"),
    *(b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nFloatStorage\n", b"cbuiltins\ngetattr\n", b"cos\nsystem\n"),
    *(b"-1", b"1e999", b"NaN", b"null", b"[]", b"{}", b'""', b'"../x"', b"9" * 30, b"[" * 40, b'"a":', b"\\ud800"),
    *(b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07", b"\0", b"\xff", b"/", b"..", b"\xc3"),
]


@st.composite
def mutations(draw: st.DrawFn) -> list[tuple[str, float, float, int, int, bytes]]:
    """Draw changes: a kind, two places as fractions of the file, a length, a bit, and bytes."""
    place = st.one_of(st.floats(0, 1), st.floats(0, 0.1), st.floats(0.9, 1))
    kind = st.sampled_from(["flip", "insert", "replace", "delete", "truncate", "splice", "swap", "number"])
    one = st.tuples(
        kind,
        place,
        place,
        st.integers(1, 40),
        st.integers(0, 7),
        st.one_of(st.sampled_from(NASTY), st.binary(max_size=8)),
    )
    return draw(st.lists(one, min_size=1, max_size=4))


def mutate(data: bytes, changes: list[tuple[str, float, float, int, int, bytes]], other: bytes) -> bytes:
    """Apply changes to the content of a file; ``other`` is that of another file, to splice in."""
    raw = bytearray(data)
    for kind, first, second, length, bit, value in changes:
        at, to = int(first * len(raw)), int(second * len(raw))
        if kind == "flip" and at < len(raw):
            raw[at] ^= 1 << bit
        elif kind == "insert":
            raw[at:at] = value
        elif kind == "replace":
            raw[at : at + len(value)] = value
        elif kind == "number" and at < len(raw):
            raw[at] = (raw[at] + length - 20) % 256
        elif kind == "delete":
            del raw[at : at + length]
        elif kind == "truncate":
            del raw[at:]
        elif kind == "splice":
            raw[at:] = other[int(second * len(other)) :]
        elif kind == "swap":
            one, two = bytes(raw[at : at + length]), bytes(raw[to : to + length])
            raw[at : at + len(two)], raw[to : to + len(one)] = two, one
    return bytes(raw)


def repaired(path: Path, changes: list[tuple[str, float, float, int, int, bytes]], other: bytes) -> bytes | None:
    """Return an archive of ``torch.save`` whose pickle is changed and whose checksums are right; None for others."""
    if not zipfile.is_zipfile(path):
        return None
    result = path.with_suffix(".repaired")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(result, "w") as target:
        if not any(name.endswith("data.pkl") for name in source.namelist()):
            return None
        for name in source.namelist():
            data = source.read(name)
            target.writestr(name, mutate(data, changes, other) if name.endswith("data.pkl") else data)
    data = result.read_bytes()
    result.unlink()
    return data
