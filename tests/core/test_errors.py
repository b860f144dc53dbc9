"""Errors are of the built-in kinds that the API page gives, also after they have travelled between processes."""

from __future__ import annotations

import builtins
import pickle
import re
from pathlib import Path

import pytest

from mmfsdp import errors

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "api.md"
ROWS = re.findall(r"^- `(\w+)`: (`.*)$", PAGE.read_text(), re.M)
KINDS = [(kind, name) for kind, names in ROWS for name in re.findall(r"`(\w+)`", names)]


@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_errors_are_of_built_in_kinds_too(kind: str, name: str) -> None:
    error = getattr(errors, name)("it fails", file="model.pth")
    with pytest.raises(getattr(builtins, kind), match="it fails") as caught:
        raise pickle.loads(pickle.dumps(error))
    assert type(caught.value) is type(error)
    assert isinstance(caught.value, errors.MmfsdpError)
    assert caught.value.context == {"file": "model.pth"}


def test_every_error_but_a_base_is_of_a_built_in_kind() -> None:
    named = tuple(getattr(errors, name) for _, name in KINDS)
    known = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert [error.__name__ for error in known if not issubclass(error, named)] == ["MmfsdpError", "MissingTorchError"]
