"""Reads the tokens of SentencePiece's models, such as ``tokenizer.model`` of Llama 2.

The file is a protocol buffer, ``src/sentencepiece_model.proto`` of https://github.com/google/sentencepiece, encoded as
https://protobuf.dev/programming-guides/encoding/ says.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["SentencePiece", "read_pieces"]

_LIMIT = 200_000_000  # bytes
# Numbers of fields: of the model, of its trainer_spec, and of a piece.
_PIECES, _TRAINER = 1, 2
_MODEL_TYPE = 3
_TEXT, _SCORE, _KIND = 1, 2, 3
_BPE = 2


class SentencePiece(NamedTuple):
    """A token."""

    text: str
    """Its text; a space is U+2581."""
    score: float
    """The higher, the earlier it is merged."""
    kind: int
    """1: normal, 2: unknown, 3: control, 4: of the user, 5: unused, 6: a byte."""


def read_pieces(path: Path) -> list[SentencePiece] | None:
    """Return the tokens of a model that merges pairs, in order; ``None`` if the file is not such a model."""
    if not path.is_file() or path.stat().st_size > _LIMIT:
        return None
    pieces, kind = [], 0
    try:
        for number, value in _fields(path.read_bytes()):
            if number == _PIECES and isinstance(value, bytes):
                found = dict(_fields(value))
                text, score = bytes(found[_TEXT]).decode(), found.get(_SCORE, b"\0\0\0\0")
                own = found.get(_KIND, 1)
                pieces.append(SentencePiece(text, struct.unpack("<f", score)[0], int(own)))  # type: ignore[arg-type]
            elif number == _TRAINER and isinstance(value, bytes):
                kind = int(dict(_fields(value)).get(_MODEL_TYPE, 1))
    except (IndexError, KeyError, ValueError, TypeError, struct.error):  # something else under this name
        return None
    return pieces if kind == _BPE and pieces else None


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field of a message: an integer, or its bytes.

    Raises:
        IndexError, ValueError: It is not a message.
    """
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            number, at = _varint(data, at)
            yield key >> 3, number
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"wire type {wire}")
        length, at = _varint(data, at) if wire == 2 else (8 if wire == 1 else 4, at)
        if at + length > len(data):
            raise ValueError("a field ends after the message")
        yield key >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("an integer is too long")
