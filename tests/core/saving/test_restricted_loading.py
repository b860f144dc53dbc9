"""What `restricted_load` makes of a pickle: times, and numpy's arrays of numbers and text in any spelling, are data."""

from __future__ import annotations

import datetime
import io
import pickle
import zipfile
from typing import Any

import numpy as np
import pytest
import torch

from mmfsdp.errors import CorruptCheckpointError, UnsafePickleError
from mmfsdp.saving.reading.content import restricted_load

RECONSTRUCT = np.empty(0).__reduce__()[0]


class Reduced:
    """Pickled as a call of numpy's constructor of arrays, with a state."""

    def __init__(self, arguments: tuple[Any, ...], *state: Any) -> None:
        self._reduced = (RECONSTRUCT, arguments, *state)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


def load(data: bytes) -> Any:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for name, content in (("data.pkl", data), ("byteorder", b"little"), ("version", b"3\n")):
            file.writestr(f"archive/{name}", content)
    archive.seek(0)
    return restricted_load(archive, "given.pth", ())


@pytest.mark.parametrize("core", [b"numpy.core.", b"numpy._core."])
def test_arrays_of_numbers_and_text(core: bytes) -> None:
    arrays = [np.ones(3).astype(code) for code in "?bBhHiIlLqQefdFD"]
    arrays += [np.array(["a", "bc"]), np.array([b"a"]), np.asfortranarray(np.ones((2, 3))), np.float32(2), np.empty(0)]
    for array in arrays:
        found = load(pickle.dumps(array, protocol=2).replace(b"numpy._core.", core).replace(b"numpy.core.", core))
        assert found.dtype == array.dtype
        assert np.array_equal(found, array)
    state = np.random.RandomState(1).get_state()
    found = load(pickle.dumps(state, protocol=2))
    assert found[0] == state[0]
    assert np.array_equal(found[1], state[1])


def test_times_and_versions() -> None:
    """As Composer 0.32 saves them."""
    zone = datetime.timezone(datetime.timedelta(hours=1))
    day = datetime.datetime(2026, 1, 2, 3, 4, 5, 6, zone)
    given = [day, day.date(), day.time(), day - day.replace(day=1), zone, torch.__version__]
    assert load(pickle.dumps(given, protocol=2)) == given


@pytest.mark.parametrize(
    "given",
    [
        np.array([{}], dtype=object),
        Reduced((np.ndarray, (0,), b"b"), (1, (2,), np.dtype("O"), False, b"1" * 16)),
    ],
)
def test_arrays_of_objects_are_not_data(given: Any) -> None:
    with pytest.raises(UnsafePickleError, match=r"given\.pth holds numpy\.dtypes\.ObjectDType, which is neither"):
        load(pickle.dumps(given, protocol=2))


@pytest.mark.parametrize(
    "given",
    [
        Reduced((np.ndarray, (2**50,), b"d")),
        Reduced((np.ndarray, (-1,), b"d")),
        Reduced((np.ndarray, (0,), b"b"), (1, (10,), np.dtype("f8"), False, b"12")),
        Reduced((np.ndarray, (0,), b"b"), 5),
    ],
)
def test_malformed_arrays(given: Any) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"given\.pth cannot be read"):
        load(pickle.dumps(given, protocol=2))
