"""Checkpoints with the state of whole-matrix optimizers are converted, inspected, compared and verified as others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from tests.cli.support import invoke
from tests.distributed.optimizers.test_matrix_optimizer import OPTIMIZER, Deep, Net, set_and_step, soap
from tests.distributed.recorded import Loop

import mmfsdp
from mmfsdp.checkpoint import convert, diff, open_layout, verify
from mmfsdp.testing import run_ranks

KINDS = {"sharded": "", "local": "", "full": ".pth"}
MATRICES = "optimizer/state/layers.0.weight/matrices/0"


def trained(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer: Muon with AdamW, or a function with a state of its own."""
    if name == "muon":
        model: nn.Module = mmfsdp.shard(Deep(), {"wrap": "Block", "optimizer": OPTIMIZER})
        return model, mmfsdp.build_optimizer(model)
    model = mmfsdp.shard(Net())
    return model, mmfsdp.matrix_optimizer(model, soap, lr=0.02)


def save(rank: int, folder: str) -> dict[str, dict[str, torch.Tensor]]:
    """Save after two steps; return the weights two steps later."""
    found = {}
    for name in ("muon", "soap"):
        model, optimizer = trained(name)
        set_and_step(model, [optimizer], range(2))
        for kind, suffix in KINDS.items():
            mmfsdp.save_checkpoint(f"{folder}/{name}_{kind}{suffix}", model, optimizer, kind=kind)  # type: ignore[arg-type]
        set_and_step(model, [optimizer], range(2, 4))
        found[name] = mmfsdp.model_state_dict(model, rank0_only=False)
    return found


def resume(rank: int, paths: dict[str, list[str]]) -> dict[str, list[dict[str, torch.Tensor]]]:
    found: dict[str, list[dict[str, torch.Tensor]]] = {}
    for name, some in paths.items():
        for path in some:
            model, optimizer = trained(name)
            mmfsdp.load_checkpoint(path, model, optimizer)
            set_and_step(model, [optimizer], range(2, 4))
            found.setdefault(name, []).append(mmfsdp.model_state_dict(model, rank0_only=False))
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, torch.Tensor]]]:
    folder = tmp_path_factory.mktemp("matrices")
    return folder, run_ranks(save, 2, str(folder))[0]


def converted(folder: Path, name: str, kind: str, target: Path) -> list[Path]:
    """Return a checkpoint and what it becomes in each format."""
    source = folder / f"{name}_{kind}{KINDS[kind]}"
    made = {"pth": target / "made.pth", "dcp": target / "made_dcp", "local": target / "made_local"}
    for to, path in made.items():
        convert(source, path, to=to, keep="all")
    return [source, *made.values()]


@pytest.mark.sample("muon-full", "soap-sharded", "soap-local")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["muon", "soap"])
def test_every_conversion_is_the_same_for_diff(name: str, kind: str, saved: Any, tmp_path: Path) -> None:
    paths = converted(saved[0], name, kind, tmp_path)
    whole = saved[0] / f"{name}_full.pth"
    for path in paths:
        report = diff(whole, path)  # state by position, and by name in DCP
        assert report.same, report
        assert report.scope == "all"
        assert report.compared == len(open_layout(whole).tensors)
        assert verify(path).ok


def test_diff_names_what_differs(saved: Any, tmp_path: Path) -> None:
    content = torch.load(saved[0] / "soap_full.pth", weights_only=False)
    state, group = content["optimizer"]["state"], content["optimizer"]["param_groups"][0]
    state[0]["matrices"]["0"]["left"][1, 2] += 1
    state[0]["matrices"]["0"]["step"] = 7
    group["lr"] = 0.5
    torch.save(content, tmp_path / "changed.pth")
    report = diff(saved[0] / "soap_sharded", tmp_path / "changed.pth")
    assert [(item.name, item.differing) for item in report.values] == [(f"{MATRICES}/left", 1)]
    assert [(item.name, item.a, item.b) for item in report.other] == [
        (f"{MATRICES}/step", 2, 7),
        ("optimizer/param_groups/0/lr", 0.02, 0.5),
    ]
    assert report.only_in_a == report.only_in_b == ()


@pytest.mark.exhaustive
def test_resumes_from_what_was_converted(saved: Any, tmp_path: Path) -> None:
    folder, wanted = saved
    paths: dict[str, list[str]] = {}
    for name, kind in (("muon", "full"), ("soap", "sharded")):
        (tmp_path / name).mkdir()
        paths[name] = [str(path) for path in converted(folder, name, kind, tmp_path / name)]
    for answer in run_ranks(resume, 1, paths):
        for name, found in answer.items():
            assert len(found) == 4
            for weights in found:
                for key, value in wanted[name].items():
                    torch.testing.assert_close(weights[key], value, rtol=1e-5, atol=1e-6)


def test_the_command_line_reads_it(saved: Any) -> None:
    for kind, suffix in KINDS.items():
        shown = invoke("inspect", saved[0] / f"soap_{kind}{suffix}", "--limit", 0)
        assert shown.exit_code == 0, shown.output
        assert "matrices/0/left" in shown.output
        assert "momentum_buffer" in shown.output
    damaged = saved[0] / "soap_sharded"
    path = max(damaged.glob("*.distcp"))
    data = path.read_bytes()
    path.write_bytes(data[:-40] + bytes([data[-40] ^ 1]) + data[-39:])
    try:
        shown = invoke("verify", damaged)
        assert shown.exit_code != 0
        assert path.name in shown.output
    finally:
        path.write_bytes(data)


class MuonLoop(Loop):
    """The recorded loop with Muon and AdamW."""

    settings: dict[str, Any]

    def build(self) -> None:
        blocks = {"kind": "module_class", "classes": "Layer"}
        self.model = mmfsdp.shard(self.module, {"wrap": blocks, "optimizer": self.settings})
        mmfsdp.matrix_optimizer(self.model, soap)  # torch now runs hooks around the step() of its class, too
        self.optimizer = mmfsdp.build_optimizer(self.model)


def record(rank: int, folder: Path, seeds: tuple[int | None, ...], settings: dict[str, Any]) -> None:
    for seed in seeds:
        loop = MuonLoop("mmfsdp")
        loop.settings = {"lr": 0.01, "adamw": {"lr": 1e-2}, **settings}
        loop.build()
        target = folder if seed is None else folder.with_name(f"{folder.name}{seed}")
        with mmfsdp.recording(target, loop.model, loop.optimizer, perturb=seed) as recording:
            loop.run(recording, 2)


@pytest.mark.exhaustive
def test_recordings_compare(tmp_path: Path) -> None:
    run_ranks(record, 1, tmp_path / "one", (None, 1, 2, 3), {})
    perturbed = [tmp_path / f"one{seed}" for seed in (1, 2, 3)]
    run_ranks(record, 2, tmp_path / "two", (None,), {})
    found = mmfsdp.compare(tmp_path / "one", tmp_path / "two", perturbed=perturbed)
    assert found.same, str(found)
    assert any("momentum_buffer" in str(item.key) for item in found.compared)
    run_ranks(record, 2, tmp_path / "other", (None,), {"ns_steps": 2, "exclude": ["layers.1.up.weight"]})
    other = mmfsdp.compare(tmp_path / "one", tmp_path / "other", perturbed=perturbed)
    assert other.first is not None
    assert str(other.first.key).startswith("setting of layers.0.attend.q.weight[ns_steps]"), str(other)
    assert "the optimizer is set to 2, and to 5 in the reference" in other.first.why
