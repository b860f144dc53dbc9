"""What each opcode of a pickle does to the stack, as far as tuples are concerned, and how long its argument is.

Opcodes: https://docs.python.org/3/library/pickletools.html
"""

from __future__ import annotations

import enum

__all__ = ["LINE", "OPCODES", "TWO_LINES", "Effect"]

LINE, TWO_LINES = -10, -20
"""In place of the length of an argument that ends with a newline, or with a second one."""


class Effect(enum.IntEnum):
    """What happens to the stack and the memo."""

    PUSH = 0
    """A value that is no tuple comes on top."""
    GET = 1
    """A value of the memo comes on top."""
    PUT = 2
    """The topmost value is stored in the memo."""
    MARK = 3
    """A mark is set."""
    TUPLE = 4
    """What lies above the mark becomes a tuple."""
    TUPLES = 5
    """So many of the topmost values become a tuple."""
    POP = 6
    """So many of the topmost values go; or, below zero, so many and one more are replaced by one that is no tuple."""
    TO_MARK = 7
    """What lies above the mark goes."""
    REPLACE_MARKED = 8
    """What lies above the mark is replaced by a value that is no tuple."""
    NOTHING = 9
    """The stack stays as it is."""
    DUP = 10
    """The topmost value comes on top once more."""
    EXTENSION = 11
    """What the reading process has registered under a number comes on top, whatever that is."""


def _table() -> list[tuple[int, int, int] | None]:
    table: list[tuple[int, int, int] | None] = [None] * 256

    def define(opcodes: bytes, effect: Effect, argument: int = 0, number: int = 0) -> None:
        for opcode in opcodes:
            table[opcode] = (int(effect), argument, number)

    define(b"N\x88\x89})]\x8f\x97", Effect.PUSH)
    define(b"K", Effect.PUSH, 1)
    define(b"M", Effect.PUSH, 2)
    define(b"J", Effect.PUSH, 4)
    define(b"G", Effect.PUSH, 8)
    define(b"ISVLFP", Effect.PUSH, LINE)
    define(b"c", Effect.PUSH, TWO_LINES)
    define(b"\x82", Effect.EXTENSION, 1)
    define(b"\x83", Effect.EXTENSION, 2)
    define(b"\x84", Effect.EXTENSION, 4)
    define(b"\x8c\x8aUC", Effect.PUSH, -1)
    define(b"X\x8bTB", Effect.PUSH, -4)
    define(b"\x8d\x8e\x96", Effect.PUSH, -8)
    define(b"h", Effect.GET, 1)
    define(b"j", Effect.GET, 4)
    define(b"g", Effect.GET, LINE)
    define(b"q", Effect.PUT, 1)
    define(b"r", Effect.PUT, 4)
    define(b"p", Effect.PUT, LINE)
    define(b"\x94", Effect.PUT)
    define(b"(", Effect.MARK)
    define(b"\x85", Effect.TUPLES, 0, 1)
    define(b"\x86", Effect.TUPLES, 0, 2)
    define(b"\x87", Effect.TUPLES, 0, 3)
    define(b"t", Effect.TUPLE)
    define(b"0ab", Effect.POP, 0, 1)  # of BUILD and APPEND the object stays
    define(b"s", Effect.POP, 0, 2)
    define(b"eu1\x90", Effect.TO_MARK)
    define(b"ldo\x91", Effect.REPLACE_MARKED)
    define(b"i", Effect.REPLACE_MARKED, TWO_LINES)
    define(b"\x80", Effect.NOTHING, 1)
    define(b"\x95", Effect.NOTHING, 8)
    define(b"\x98", Effect.NOTHING)
    define(b"2", Effect.DUP)
    define(b"R\x81\x93", Effect.POP, 0, -1)  # two become one
    define(b"\x92", Effect.POP, 0, -2)
    define(b"Q", Effect.POP, 0, 0)
    return table


OPCODES = _table()
"""By opcode: its effect, the bytes of its argument (or, below zero, of the argument's length), and a number of values;
``None`` for STOP and for what is no opcode."""
