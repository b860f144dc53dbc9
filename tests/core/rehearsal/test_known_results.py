"""What a rehearsal remembers of operators on fake tensors: results as torch gives them for real ones, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import mmfsdp
from mmfsdp.rehearsal import Rehearsal
from mmfsdp.rehearsal.fakes.fake import CANNOT_BE_FAKED, fake_tensors
from mmfsdp.rehearsal.recording import known_results
from mmfsdp.rehearsal.recording.known_results import KnownResults

ATEN = torch.ops.aten

Call = tuple[Any, Callable[[], tuple[Any, ...]]]
"""An operator, and a function that makes its arguments."""

REMEMBERED: dict[str, Call] = {
    "new": (ATEN.mm.default, lambda: (torch.zeros(3, 4), torch.zeros(4, 5))),
    "promoted": (ATEN.add.Tensor, lambda: (torch.zeros(3, dtype=torch.bfloat16), torch.zeros(2, 3))),
    "number": (ATEN.mul.Scalar, lambda: (torch.zeros(3, dtype=torch.int64), 2.5)),
    "whole number": (ATEN.mul.Scalar, lambda: (torch.zeros(3, dtype=torch.int64), 2)),
    "view": (ATEN.slice.Tensor, lambda: (torch.zeros(6, 4), 0, 2, 5)),
    "view of a view": (ATEN.view.default, lambda: (torch.zeros(6, 4)[2:], [2, 8])),
    "transposed": (ATEN.t.default, lambda: (torch.zeros(6, 4),)),
    "expanded": (ATEN.expand.default, lambda: (torch.zeros(6, 1), [6, 5])),
    "in place": (ATEN.add_.Tensor, lambda: (torch.zeros(3), torch.zeros(3))),
    "into": (ATEN.add.out, lambda: (torch.zeros(3), torch.zeros(3))),
    "views": (ATEN.split.Tensor, lambda: (torch.zeros(7, 2), 3)),
    "several": (ATEN.native_layer_norm.default, lambda: (torch.zeros(3, 4), [4], torch.ones(4), None, 1e-5)),
    "lists": (ATEN._foreach_mul.Scalar, lambda: ([torch.zeros(3), torch.zeros(2, 2)], 2.0)),
    "lists with numbers": (
        ATEN._foreach_addcdiv.ScalarList,
        lambda: (*([torch.zeros(size) for size in (3, 2, 3)] for _ in "abc"), [1, 2.0, 3]),
    ),
    "norms": (ATEN._foreach_norm.Scalar, lambda: ([torch.zeros(3), torch.zeros(2), torch.zeros(3)], 2)),
    "lists in place": (
        ATEN._foreach_add_.List,
        lambda: ([torch.zeros(3) for _ in "abc"], [torch.zeros(3) for _ in "abc"]),
    ),
    "joined": (ATEN.cat.default, lambda: ([torch.zeros(2, 3), torch.zeros(4, 3)],)),
    "permuted": (ATEN.clone.default, lambda: (torch.zeros(4, 6).t(),)),
    "copied": (ATEN._to_copy.default, lambda: (torch.zeros(3),)),
    "empty": (ATEN.sum.default, lambda: (torch.zeros(0, 3),)),
    "made": (ATEN.new_zeros.default, lambda: (torch.zeros(3), [2, 5])),
}

FORGOTTEN: dict[str, Call] = {
    "the values decide": (ATEN._local_scalar_dense.default, lambda: (torch.zeros(()),)),
    "how many are not zero": (ATEN.nonzero.default, lambda: (torch.zeros(3),)),
    "a view of another dtype": (ATEN.view.dtype, lambda: (torch.zeros(4), torch.int32)),
    "complex numbers": (ATEN.add.Tensor, lambda: (torch.zeros(3, dtype=torch.complex64), 1)),
    "twice the same": (ATEN.add_.Tensor, lambda: (one := torch.zeros(3), one)),
    "another shape of an argument": (ATEN.t_.default, lambda: (torch.zeros(3, 4),)),
}


@pytest.fixture
def mode() -> Iterator[Any]:
    with fake_tensors() as mode:
        yield mode


def look(values: Any, given: tuple[Any, ...]) -> list[Any]:
    """Return what is known of results without values, and which arguments share memory with them."""
    parts = [*values] if isinstance(values, list | tuple) else [values]
    tensors = [part for value in given for part in (value if isinstance(value, list) else [value])]
    tensors = [part for part in tensors if isinstance(part, torch.Tensor)]
    found: list[Any] = [type(values)] if isinstance(values, list | tuple) else []
    for part in parts:
        if not isinstance(part, torch.Tensor):
            found.append(part)
            continue
        shared = [part.untyped_storage() is tensor.untyped_storage() for tensor in tensors]
        same = [part is tensor for tensor in tensors]
        size = part.untyped_storage().nbytes()
        found.append((part.shape, part.stride(), part.storage_offset(), part.dtype, size, shared, same))
    return found


def keywords(name: str) -> dict[str, Any]:
    if name == "copied":
        return {"dtype": torch.float64}
    return {"out": torch.zeros(3)} if name == "into" else {}


class TestRun:
    @pytest.mark.parametrize("name", REMEMBERED)
    def test_result_is_as_that_of_real_tensors(self, name: str) -> None:
        operator, arguments = REMEMBERED[name]
        given, named = arguments(), keywords(name)
        expected = look(operator(*given, **named), (*given, *named.values()))
        with fake_tensors() as mode:
            results = KnownResults(mode)
            for times in range(3):
                given, named = arguments(), keywords(name)
                result, recipe = results.run(operator, given, named)
                assert look(result, (*given, *named.values())) == expected
                assert (recipe is None) == (times == 0)

    @pytest.mark.parametrize("name", FORGOTTEN)
    def test_result_may_depend_on_more(self, name: str, mode: Any) -> None:
        operator, arguments = FORGOTTEN[name]
        results = KnownResults(mode)
        for _ in range(3):
            with suppress(*CANNOT_BE_FAKED):
                assert results.run(operator, arguments(), {})[1] is None

    def test_numbers_of_other_types_are_others(self, mode: Any) -> None:
        results = KnownResults(mode)
        tensor = torch.zeros(3, dtype=torch.int64)
        for number, dtype in ((1, torch.int64), (1.0, torch.float32), (True, torch.int64)):
            for _ in range(2):
                assert results.run(ATEN.mul.Scalar, (tensor, number), {})[0].dtype == dtype

    def test_dtype_by_default_matters(self, mode: Any) -> None:
        results = KnownResults(mode)
        assert results.run(ATEN.div.Tensor, (torch.zeros(2, dtype=torch.int64), 2), {})[0].dtype == torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert results.run(ATEN.div.Tensor, (torch.zeros(2, dtype=torch.int64), 2), {})[0].dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)

    def test_freed_storage(self, mode: Any) -> None:
        # A view of what is not there cannot be made again as one of what is.
        results = KnownResults(mode)
        for size in (48, 48, 0):
            tensor = torch.zeros(12)
            tensor.untyped_storage().resize_(size)
            result, recipe = results.run(ATEN.view.default, (tensor, [3, 4]), {})
            assert result.untyped_storage() is tensor.untyped_storage()
        assert recipe is None

    def test_argument_that_is_resized(self, mode: Any) -> None:
        results = KnownResults(mode)
        for _ in range(3):
            result = torch.zeros(0)
            found, recipe = results.run(ATEN.add.out, (torch.zeros(3), torch.zeros(3)), {"out": result})
            assert (found.shape, recipe) == (result.shape, None)
            assert result.shape == (3,)

    def test_gradients_that_are_wanted_are_others(self, mode: Any) -> None:
        results = KnownResults(mode)
        wanted = torch.zeros(3, requires_grad=True)
        results.run(ATEN.detach.default, (torch.zeros(3),), {})
        assert results.run(ATEN.detach.default, (wanted,), {})[1] is None

    def test_while_it_is_active(self, mode: Any) -> None:
        with KnownResults(mode):
            model = nn.Linear(3, 4)
            for _ in range(2):
                model(torch.zeros(2, 3)).sum().backward()
        assert model.weight.grad is not None
        assert model.weight.grad.shape == (4, 3)
        assert model.weight.device.type == "cpu"


SMALL = {"precision": "bf16", "activation_checkpointing": "full"}


class Mixed(nn.Module):
    """Convolutions, a recurrent network, attention, an index of bools, and weights that are used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, 8)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(image)).relu().flatten(2).transpose(1, 2)
        x, _ = self.recurrent(x)
        for block in self.blocks:
            x = block(x)
        x = x * torch.arange(8).eq(3).logical_not()
        return self.head(self.head(x))


class TestRehearsal:
    @pytest.mark.sample("fsdp1-h100-config3")
    @pytest.mark.parametrize(
        ("engine", "device", "config"),
        [
            ("fsdp2", "cpu", {}),
            ("fsdp2", "h100", SMALL),
            ("fsdp1", "cpu", SMALL),
            ("fsdp1", "h100", {}),
            ("replicate", "h100", {"precision": "bf16"}),
        ],
    )
    def test_records_are_those_of_torch(
        self, engine: str, device: str, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings = {**config, "engine": engine, "wrap": {"kind": "module_class", "classes": "TransformerEncoderLayer"}}

        def rehearsed() -> Rehearsal:
            torch.manual_seed(0)
            where = {"device_type": "cpu"} if device == "cpu" else {"device": device}
            return mmfsdp.rehearse(settings, Mixed(), (torch.zeros(2, 3, 8, 8),), mesh=4, max_norm=1.0, **where)

        remembered = rehearsed()
        monkeypatch.setattr(known_results, "_is_sure", lambda func: False)
        every = rehearsed()
        for name in ("allocations", "operators", "collectives", "phases", "calls"):
            assert getattr(remembered, name) == getattr(every, name), name
