"""Plans that compile shard units, and plans of models that the user compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mmfsdp
from mmfsdp.errors import ConfigError, PlanError
from mmfsdp.rehearsal import rehearse

WRAP = {"kind": "module_class", "classes": "Block"}


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.fc(x))


def net() -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(3)), nn.Linear(4, 2))


def plan(model: nn.Module | None = None, **settings: Any) -> mmfsdp.ShardPlan:
    return mmfsdp.plan(model or net(), {"wrap": WRAP, **settings}, 2)


def test_units_below_the_root_are_compiled() -> None:
    made = plan(compile={"mode": "max-autotune", "dynamic": False})
    assert made.compile is not None
    assert made.compile.model_dump() == {
        "fqns": ("0", "1", "2"),
        "backend": "inductor",
        "mode": "max-autotune",
        "fullgraph": False,
        "dynamic": False,
    }
    assert "compiled" in made.table()
    assert "compiled" not in plan().table()
    assert mmfsdp.ShardPlan.from_json(made.to_json()) == made
    assert plan(compile=True).diff(plan(compile=False)).startswith("~ compile: fqns=('0', '1', '2')")


def test_what_the_user_compiled_is_shown_and_left() -> None:
    model = net()
    model[0].compile(backend="eager")
    model[1] = torch.compile(model[1], backend="eager")
    made = plan(model, compile=True)
    assert made.compiled_already == ("0", "1")
    assert made.compile is not None
    assert made.compile.fqns == ("2",)
    assert made.table(every_unit=True).count("already") == 2
    # torch gathers in hooks of a call, which must not be compiled: the unit is what is compiled.
    assert [unit.fqn for unit in made.units] == ["0", "1", "2", ""]


def test_units_inside_of_compiled_ones() -> None:
    wrap = {"kind": "module_class", "classes": ["Block", "LayerNorm"]}
    with pytest.raises(PlanError, match=r"fullgraph=True needs units that are one graph, but '0', '1', '2' contain"):
        plan(wrap=wrap, compile={"fullgraph": True})
    [note] = [note for note in plan(wrap=wrap, compile=True).notes if note.kind == "compile"]
    assert note.fqns == ("0", "1", "2")
    with pytest.raises(PlanError, match="no shard unit below the root to compile"):
        plan(wrap="none", compile=True)
    assert plan(wrap="none", compile={"root": True, "fullgraph": True}).compile.fqns == ("",)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compile": "yes"}, "compile: expected true, false or a mapping, got 'yes'"),
        ({"compile": True, "sharding": {"use_orig_params": False}}, "compiles nothing that has flat parameters"),
        ({"compile": True, "activation_checkpointing": {"offload": True}}, "offload does not work in compiled units"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(**settings)


def test_with_another_backend_a_rehearsal_is_of_the_eager_model() -> None:
    model = net()
    model[0].compile(backend="eager")
    model[1] = torch.compile(model[1], backend="eager")
    step = rehearse(plan(model, compile={"backend": "eager"}), model, torch.randn(2, 4))
    eager = rehearse(plan(), net(), torch.randn(2, 4))
    assert step.peak.nbytes == eager.peak.nbytes
    assert "this rehearsal ran them eagerly" in str(step)
    assert "eagerly" not in str(eager)
