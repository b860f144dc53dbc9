"""Keys whose hashes collide by design are refused before they take quadratic time; keys that people write are read."""

from __future__ import annotations

import collections
import pickle
import random
import time
from pathlib import Path
from typing import Any

import pytest

from mmfsdp.checkpoint.pickles.unpickling import read_pickle
from mmfsdp.errors import CorruptCheckpointError

PRIME = 2**61 - 1
COUNT = 150_000
NUMBERS = [i * PRIME for i in range(1, COUNT)]


def tuples(count: int) -> list[Any]:
    return [(i, "x") for i in range(count)]


@pytest.mark.parametrize("protocol", [0, 1, 2, 4, 5])
@pytest.mark.parametrize(
    "make",
    [
        lambda: {"a": dict.fromkeys(NUMBERS[:2000])},
        lambda: [{-number: 0 for number in NUMBERS[:2000]}],
        lambda: collections.OrderedDict.fromkeys(NUMBERS[:2000]),
        lambda: set(NUMBERS[:2000]),
        lambda: frozenset(NUMBERS[:2000]),
        lambda: dict.fromkeys(tuples(20_000)),
        lambda: set(tuples(20_000)),
        lambda: frozenset(tuples(20_000)),
        lambda: dict.fromkeys(frozenset([i]) for i in range(20_000)),
        lambda: dict.fromkeys(complex(i, 1) for i in range(20_000)),
        lambda: [dict.fromkeys(tuples(200)) for _ in range(100)],
    ],
)
def test_what_collides_is_refused(make: Any, protocol: int) -> None:
    data = pickle.dumps(make(), protocol)
    began = time.process_time()
    with pytest.raises(CorruptCheckpointError, match=r"is refused: it (holds|uses|hashes) more than"):
        read_pickle(data, file=Path("x.pkl"))
    assert time.process_time() - began < 20


def test_many_numbers_are_refused_at_once() -> None:
    """A dict of them cannot even be made here, so its opcodes are written by hand."""
    longs = b"".join(b"\x8a\x0a" + number.to_bytes(10, "little") + b"N" for number in NUMBERS)
    began = time.process_time()
    with pytest.raises(CorruptCheckpointError, match="integers with the same hash"):
        read_pickle(b"\x80\x02}(" + longs + b"u.", file=Path("x.pkl"))
    assert time.process_time() - began < 10


@pytest.mark.parametrize("protocol", [0, 1, 2, 4, 5])
def test_what_people_save_is_read(protocol: int) -> None:
    generator = random.Random(0)
    content: dict[str, Any] = {
        "ids": [generator.getrandbits(64) for _ in range(20_000)],
        "by id": dict.fromkeys(generator.getrandbits(64) for _ in range(20_000)),
        "same": [2**63 - 1] * 20_000,
        "few": dict.fromkeys(NUMBERS[:500]),
        "epochs": dict.fromkeys(range(50_000)),
        "pairs": dict.fromkeys(tuples(2000)),
        "floats": dict.fromkeys(i / 7 for i in range(50_000)),
        "state": generator.getstate(),
        "set": {"a", 1, (2, 3)},
        "ordered": collections.OrderedDict(a=1),
        "complex": [1j, 2 + 1j],
        "shapes": [(i, 2) for i in range(50_000)],
    }
    assert read_pickle(pickle.dumps(content, protocol), file=Path("x.pkl")) == content
