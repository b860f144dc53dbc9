"""Recognises what large checkpoints consist of: entries of dicts that describe tensors, one after another.

Following every opcode of a hundred thousand of them takes seconds in Python; a regular expression takes milliseconds.
What it recognises does no harm: tuples within are small, and hold nothing from the memo but what is known to be no
tuple.
"""

from __future__ import annotations

import functools
import mmap
import re
from collections.abc import Collection
from dataclasses import dataclass

__all__ = ["WEIGHT", "Run", "Runs"]

WEIGHT = (40, 2)
"""At most so many elements, all told, has a tuple within what is recognised, and is so deeply nested."""


@dataclass(frozen=True, slots=True)
class Run:
    """Entries of a dict, one after another."""

    end: int
    """Where what follows them begins, in bytes."""
    closed: bool
    """Whether the dict takes the entries, and the mark below them; otherwise they lie on the stack."""
    memoized: int
    """How many places of the memo they take one after another, without naming them."""


class Runs:
    """Recognises runs of entries in a pickle.

    Args:
        implicit: Whether values are stored at the next place of the memo, without naming it (``MEMOIZE``).
        plain: Places of the memo whose values are no tuples.
        taken: How many places are taken. Entries that store to one of these are not recognised.
    """

    def __init__(self, implicit: bool, plain: Collection[int], taken: int) -> None:
        entry = _entry(_places(plain), rb"\x94?" if implicit else rb"(?:r" + _above(taken) + rb")?", implicit)
        self._implicit = implicit
        self._run = re.compile(rb"(?:" + entry + rb")++(?:(u)|(?!s))", re.DOTALL)

    def at(self, data: bytes | mmap.mmap, begin: int) -> Run | None:
        """Return the run of entries that begins at a place of the pickle, if one does."""
        found = self._run.match(data, begin)
        if found is None:
            return None
        memoized = len(_memoized().findall(data, begin, found.end())) if self._implicit else 0
        return Run(found.end(), found[1] is not None, memoized)


_NAME = 128  # bytes; entries with longer names are not recognised
_GOT = rb"(?:h.|j.{4})"
_INT = rb"(?:K.|M..|J.{4}|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}))"
_CONSTANT = rb"[N\x88\x89]|G.{8}"


def _entry(plain: bytes, put: bytes, implicit: bool) -> bytes:
    """Return what matches an entry of a dict: a key, and a value that may be a description of a tensor.

    Every piece leaves one value on the stack. Picklers may store what they have made in the memo, or not.
    """
    ints = rb"(?:\)|" + _INT + rb"\x85|" + _INT + rb"{2}\x86|" + _INT + rb"{3}\x87|\(" + _INT + rb"{0,9}+t)" + put
    simple = _GOT + rb"|" + _INT + rb"|" + _CONSTANT

    def attributes(value: bytes) -> bytes:
        return rb"\)\x81" + put + rb"}" + put + rb"\((?:" + _GOT + rb"(?:" + value + rb")){1,9}+ub"

    # What follows a class from the memo: the sizes of a torch.Size, the tuple that restores an object, or a dict.
    size = rb"(?:" + ints + rb"\x85|\(" + ints + rb"t)" + put + rb"R" + put
    slots = rb"\)\x81" + put + rb"\((?:" + plain + rb"|" + _INT + rb"|" + _CONSTANT + rb"){0,15}+t" + put + rb"b"
    number = _GOT + rb"(?:" + size + rb")?|" + _INT + rb"|" + _CONSTANT
    box = _GOT + attributes(number)
    items = rb"\]" + put + rb"(?:\((?:" + box + rb"|" + simple + rb")++e|(?:" + box + rb"|" + simple + rb")a)?"
    part = _GOT + rb"(?:" + size + rb"|" + slots + rb")?|" + items + rb"|" + _INT + rb"|" + _CONSTANT
    place = number + rb"|" + _text(implicit, _NAME) + put
    tensor = plain + rb"\(\(" + plain * 2 + _text(implicit, 8) + put + plain + _INT + rb"t" + put + rb"Q" + _INT
    tensor += ints * 2 + rb"[\x88\x89]" + plain + rb"\)R" + put + rb"t" + put + rb"R" + put
    item = _GOT + rb"(?:" + tensor + rb"|" + part + rb")"
    mapping = rb"}" + put + rb"(?:\((?:" + item + rb"){1,9}+u|" + item + rb"s)"
    key = _text(implicit, _NAME) + put + rb"|" + _INT + rb"|" + _GOT + rb"(?:" + attributes(place) + rb")?"
    value = tensor + rb"|" + _GOT + rb"(?:" + attributes(place) + rb"|" + attributes(part) + rb")|" + mapping
    return rb"(?:" + key + rb")(?:" + value + rb")"


def _places(plain: Collection[int]) -> bytes:
    """Return what matches that one of some places of the memo comes on the stack."""
    low = b"".join(rb"\x%02x" % place for place in plain if place < 256)
    high = [re.escape(b"j" + place.to_bytes(4, "little")) for place in plain if place >= 256]
    return rb"(?:" + b"|".join([rb"h[" + low + rb"]" if low else rb"(?!)", *high]) + rb")"


def _above(taken: int) -> bytes:
    """Return what matches four bytes of a number that is larger, but not so large that room for it matters."""
    page = taken >> 8
    if page < 0xFF:
        return rb".(?:[\x%02x-\xff]\0|.[\x01-\x3f])\0" % (page + 1)
    return rb"..[\x%02x-\x3f]\0" % ((page >> 8) + 1) if page < 0x3F00 else rb"(?!)"


def _text(implicit: bool, below: int) -> bytes:
    """Return what matches a text of fewer than so many bytes."""
    zeros = 0 if implicit else 3  # of the four bytes of the length
    lengths = b"|".join(rb"\x%02x.{%d}" % (size, size + zeros) for size in range(below))
    return (rb"\x8c(?:" if implicit else rb"X(?=.\0{3})(?:") + lengths + rb")"


@functools.cache
def _memoized() -> re.Pattern[bytes]:
    """Return what matches a part of a run up to where a value is stored in the memo."""
    other = rb"[)\x81}(\]uReabt\x85-\x87Q]|" + _GOT + rb"|" + _INT + rb"|" + _CONSTANT + rb"|" + _text(True, _NAME)
    return re.compile(rb"(?:" + other + rb")*+\x94", re.DOTALL)
