"""What a model says about its own parameters equals what a whole checkpoint of it says."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from mmfsdp.checkpoint import layout_of_model, open_layout
from mmfsdp.checkpoint.formats.fsdp1.flat_state_dicts import _memory_order, known_shapes
from mmfsdp.sharding.meta import parameters_on_meta


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.z = nn.Conv2d(3, 4, 2)
        self.z.to(memory_format=torch.channels_last)
        self.embed = nn.Embedding(5, 4).to(torch.bfloat16)
        self.a = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight


def test_names_shapes_ties_and_memory_order(tmp_path: Path) -> None:
    torch.save(Model().state_dict(), tmp_path / "whole.pth")
    whole = open_layout(tmp_path / "whole.pth")
    with parameters_on_meta():
        model = Model()
    assert all(param.is_meta for param in model.parameters())
    layout = layout_of_model(model)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert [*layout.tensors] == names == [name for name in whole.tensors if name in names]
    one, two = known_shapes({}, layout), known_shapes({}, whole)
    assert one.ordered
    for name in names:
        entry, other = layout.tensors[name], whole.tensors[name]
        assert (entry.dtype, entry.shape, entry.nbytes) == (other.dtype, other.shape, other.nbytes)
        assert _memory_order(name, one) == _memory_order(name, two)
        ties = [
            {n for n in names if look.tensors[n].chunks() == look.tensors[name].chunks()} for look in (layout, whole)
        ]
        assert ties[0] == ties[1]
    assert _memory_order("z.weight", one) == (0, 2, 3, 1)
