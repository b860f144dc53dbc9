"""Follows the opcodes of a pickle before they are run, to refuse what would exhaust the machine that reads it.

Python's unpickler makes room in its memo for as many values as an opcode says; a tuple that holds another many times
over takes for ever to hash as a key, and one that is nested very deeply ends the process then. Opcodes:
https://docs.python.org/3/library/pickletools.html
"""

from __future__ import annotations

import functools
import itertools
import mmap
import re
from pathlib import Path

from mmfsdp.errors import CorruptCheckpointError

__all__ = ["check_limits"]

_NESTING = 100  # tuples within tuples
_NUMBER = 1000  # bytes of an integer
_REPEATS = 1_000_000  # elements of tuples that are referred to again

# What an opcode does to the stack: push a value that is no tuple, replace the topmost ones by one such, and so on.
_PUSH, _PUT, _GET, _MARK, _TUPLE, _TUPLES, _POP, _TO_MARK, _NOTHING, _DUP, _REPLACE_MARKED = range(11)
_LINE, _TWO_LINES = -10, -20  # in place of the length of an argument; -1, -4 and -8 are the bytes of a length

_OPCODES: dict[int, tuple[int, int, int]] = {}  # opcode to what it does, the bytes of its argument, and a number


def _define(opcodes: bytes, effect: int, argument: int = 0, number: int = 0) -> None:
    _OPCODES.update(dict.fromkeys(opcodes, (effect, argument, number)))


_define(b"N\x88\x89})]\x8f\x97", _PUSH)
_define(b"K", _PUSH, 1)
_define(b"M", _PUSH, 2)
_define(b"J", _PUSH, 4)
_define(b"G", _PUSH, 8)
_define(b"ISVLFP", _PUSH, _LINE)
_define(b"c", _PUSH, _TWO_LINES)
_define(b"\x82", _PUSH, 1)
_define(b"\x83", _PUSH, 2)
_define(b"\x84", _PUSH, 4)
_define(b"\x8c\x8aUC", _PUSH, -1)
_define(b"X\x8bTB", _PUSH, -4)
_define(b"\x8d\x8e\x96", _PUSH, -8)
_define(b"h", _GET, 1)
_define(b"j", _GET, 4)
_define(b"g", _GET, _LINE)
_define(b"q", _PUT, 1)
_define(b"r", _PUT, 4)
_define(b"p", _PUT, _LINE)
_define(b"\x94", _PUT)
_define(b"(", _MARK)
_define(b"\x85", _TUPLES, 0, 1)
_define(b"\x86", _TUPLES, 0, 2)
_define(b"\x87", _TUPLES, 0, 3)
_define(b"t", _TUPLE)
_define(b"0ab", _POP, 0, 1)  # of BUILD and APPEND the object stays
_define(b"s", _POP, 0, 2)
_define(b"eu1\x90", _TO_MARK)
_define(b"ldo\x91", _REPLACE_MARKED)
_define(b"i", _REPLACE_MARKED, _TWO_LINES)
_define(b"\x80", _NOTHING, 1)
_define(b"\x95", _NOTHING, 8)
_define(b"\x98", _NOTHING)
_define(b"2", _DUP)
_define(b"R\x81\x93", _POP, 0, -1)  # two become one
_define(b"\x92", _POP, 0, -2)
_define(b"Q", _POP, 0, 0)
_TABLE = [_OPCODES.get(opcode) for opcode in range(256)]

# What checkpoints consist of is skipped at once, since it leaves values on the stack that are no tuples. A tensor as
# torch.save describes it: the tuples within that can hold others are noted as ones that may not be referred to again
# (the groups), which nobody does.
_GOT = rb"(?:h.|j.{4})"
_INT = rb"(?:K.|M..|J.{4})"
_INTS = rb"(?:\)|" + _INT + rb"\x85|" + _INT + rb"{2}\x86|" + _INT + rb"{3}\x87|\(" + _INT + rb"{0,9}t)"
_KEY = rb"X(?:\x01\0{3}.|\x02\0{3}..|\x03\0{3}.{3}|\x04\0{3}.{4}|\x05\0{3}.{5})"
_AT = rb"(?:q.|r..[\0-\x3f]\0)"  # places so low that room for them is no matter
_AGAIN = rb"(?:q(.)|r(..[\0-\x3f]\0))"
_SAVED = re.compile(
    _GOT + rb"\(\(" + _GOT * 2 + _KEY + _AT + _GOT + _INT + b"t" + _AGAIN + b"Q" + _INT
    + (_INTS + _AT + b"?") * 2 + rb"[\x88\x89]" + _GOT + rb"\)R" + _AT + b"t" + _AGAIN + b"R" + _AT,
    re.DOTALL,
)  # fmt: skip
_FORBIDDEN = (_REPEATS + 1) << 10
_MANY = 1 << 16  # bytes from which on objects are skipped, too
_SMALL = 100 << 10  # while all in the memo are smaller, for what these objects take from there is not counted
_UNCOUNTED = -1  # in the memo: there are places in use that are not in it
_SKIPPED = 13 << 10 | 2  # at most what stands in a place of the memo that was not looked at: a few numbers


@functools.cache
def _objects() -> tuple[re.Pattern[bytes], re.Pattern[bytes]]:
    """Return what matches objects with attributes one after another, as DCP describes where the boxes of tensors lie.

    The other expression finds in such a match where an object is complete and where one takes a place of the memo.
    """
    texts = (re.escape(bytes([size])) + b"%b.{%d}" % (zeros, size) for zeros in (b"", rb"\0{3}") for size in range(256))
    short, long = b"|".join(itertools.islice(texts, 256)), b"|".join(texts)
    simple = _GOT + rb"|N|" + _INT + rb"|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7})"
    text = rb"\x8c(?:" + short + rb")|X(?:" + long + rb")"
    size = _GOT + rb"(?:" + _INTS + rb"\x94?\x85|\(" + _INTS + rb"t)\x94?R"
    attributes = rb"\((?:" + _GOT + rb"(?:(?:" + size + rb"|" + text + rb")\x94?|" + simple + rb")){1,9}ub"
    return (
        re.compile(rb"(?:" + _GOT + rb"\)\x81\x94?}\x94?" + attributes + rb")++", re.DOTALL),
        re.compile(rb"(?:[)\x81}(uRt\x85-\x87]|" + simple + rb"|" + text + rb")*+([b\x94])", re.DOTALL),
    )


def check_limits(data: bytes | mmap.mmap, file: Path, begin: int = 0) -> None:
    """Raise if running a pickle would be out of proportion to its size; whether it is valid is for others to say.

    Args:
        data: Bytes that hold the pickle; what follows its end is not looked at.
        file: Where it comes from, for messages.
        begin: Where the pickle begins.

    Raises:
        CorruptCheckpointError: It was made to exhaust the machine that reads it.
    """
    try:
        reason = _excess(data, begin)
    except (IndexError, ValueError):
        return  # it ends early, or makes no sense: the unpickler says so
    if reason is not None:
        message, at = reason
        raise CorruptCheckpointError(
            f"The pickle in {file.name} is refused: {message}. No checkpoint does this; it was made to exhaust the "
            "machine that reads it.",
            file=str(file),
            offset=at,
        )


def _excess(data: bytes | mmap.mmap, at: int) -> tuple[str, int] | None:
    # A value on the stack is 0, or for a tuple its elements all told, times 1024, plus how deep it is nested.
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[int, int] = {}
    repeats, size, table = 0, len(data), _TABLE
    skipped = 0  # places of the memo in use that are not in it
    many = size > _MANY
    while True:
        found = table[data[at]]
        if found is None:  # STOP, or no opcode
            return None
        effect, length, number = found
        begin = at + 1
        if length >= 0:
            at = begin + length
        elif length > _LINE:
            count = int.from_bytes(data[begin : begin - length], "little")
            at = begin - length + count
            if count > _NUMBER and data[begin - 1] == 0x8B:
                return f"it holds a number of {count} bytes", begin - 1
        else:
            at = data.find(b"\n", begin) + 1
            if length == _TWO_LINES and at:
                at = data.find(b"\n", at) + 1
            if not at:
                return None
        if (
            effect == _GET
            and many
            and data[at : at + 2] == b")\x81"
            and (objects := _objects()[0].match(data, begin - 1))
        ):
            at = objects.end()
            events = _objects()[1].findall(data, begin - 1, at)
            stack.extend([0] * events.count(b"b"))
            skipped += events.count(b"\x94")
        elif effect == _GET and data[at] == 0x28 and (saved := _SAVED.match(data, begin - 1)):
            at = saved.end()
            memo.update((int.from_bytes(place, "little"), _FORBIDDEN) for place in saved.groups() if place is not None)
            memo[_UNCOUNTED], many = 0, False
            stack.append(0)
        elif effect == _PUSH:
            stack.append(0)
        elif effect == _PUT:
            index = len(memo) + skipped if length == 0 else _index(data, begin, at, length)
            if (length == 0 and _UNCOUNTED in memo) or (length != 0 and skipped):
                return "it numbers the places of its memo in two ways", begin - 1
            if index > size:
                return f"it stores a value at place {index} of its memo, but has only {size} bytes", begin - 1
            value = memo[index] = stack[-1]
            many = many and value < _SMALL
        elif effect in (_GET, _DUP):
            value = stack[-1] if effect == _DUP else memo.get(_index(data, begin, at, length), _SKIPPED)
            repeats += value >> 10
            if repeats > _REPEATS:
                return f"its tuples hold each other so often that they have over {_REPEATS} elements", begin - 1
            stack.append(value)
        elif effect == _MARK:
            marks.append(len(stack))
        elif effect in (_TUPLE, _TUPLES):
            first = len(stack) - number if effect == _TUPLES else marks.pop()
            items = stack[first:]
            del stack[first:]
            value = (1 + len(items)) << 10 | 1
            if any(items):
                value += sum(item >> 10 for item in items) << 10
                value += max(item & 1023 for item in items)
                if value & 1023 > _NESTING:
                    return f"its tuples are nested more than {_NESTING} deep", begin - 1
            stack.append(value)
        elif effect == _POP:
            if number > 0:
                del stack[-number:]
            else:
                del stack[number - 1 :]
                stack.append(0)
        elif effect in (_TO_MARK, _REPLACE_MARKED):
            del stack[marks.pop() :]
            if effect == _REPLACE_MARKED:
                stack.append(0)


def _index(data: bytes | mmap.mmap, begin: int, end: int, length: int) -> int:
    return int(data[begin : end - 1]) if length == _LINE else int.from_bytes(data[begin:end], "little")
