"""What stock MMEngine's own FSDPStrategy writes as a `local` checkpoint is read without torch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

import mmfsdp
from mmfsdp.checkpoint import convert, open_layout
from mmfsdp.errors import IncompleteCheckpointError
from mmfsdp.testing import run_ranks


class Model(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.head = nn.Linear(5, 3)

    def forward(self, inputs: torch.Tensor, data_samples: object = None, mode: str = "loss") -> torch.Tensor:
        return self.head(self.conv(inputs).mean((2, 3)))


def save(rank: int, directory: Path, use_orig_params: bool, channels_last: bool) -> None:
    from mmengine._strategy.fsdp import FSDPStrategy

    torch.manual_seed(0)
    model: nn.Module = Model()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    if rank == 0:
        torch.save({"state_dict": model.state_dict()}, directory / "start.pth")
    sharded = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=use_orig_params)
    optim_wrapper = OptimWrapper(torch.optim.AdamW(sharded.parameters(), lr=0.1))
    sharded(torch.randn(2, 3, 8, 8)).sum().backward()
    optim_wrapper.step()
    with FullyShardedDataParallel.state_dict_type(sharded, StateDictType.FULL_STATE_DICT):
        truth = sharded.state_dict()
        if rank == 0:
            torch.save({"state_dict": truth}, directory / "truth.pth")

    strategy = object.__new__(FSDPStrategy)
    strategy._init_state_dict_cfg("local")
    FullyShardedDataParallel.set_state_dict_type(
        sharded, strategy.state_dict_type, strategy.state_dict_config, strategy.optim_state_dict_config
    )
    scheduler = SimpleNamespace(state_dict=lambda: {"last_step": 1})
    vars(strategy).update(
        model=sharded, optim_wrapper=optim_wrapper, param_schedulers=[scheduler], _seed=1, _scheduler_state_dict={}
    )
    # Torch refuses to shard optimizer state in channels-last order.
    meta = {"epoch": 1, "iter": 5}
    strategy.save_checkpoint(
        str(directory / "epoch_1.pth"), save_optimizer=not channels_last, extra_ckpt={"meta": meta}
    )
    dist.barrier()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_the_stock_strategy(tmp_path: Path, use_orig_params: bool) -> None:
    run_ranks(save, 2, tmp_path, use_orig_params, False)
    layout = open_layout(tmp_path / "epoch_1.pth")
    assert (layout.format, layout.tree["param_schedulers"]) == ("mmengine_local", [{"last_step": 1}])
    assert (layout.tree["meta"]["iter"], layout.tree["meta"]["seed"]) == (5, 1)
    convert(tmp_path / "epoch_1.pth", tmp_path / "out.pth")
    found, truth = (torch.load(tmp_path / name)["state_dict"] for name in ("out.pth", "truth.pth"))
    assert {*found} == {*truth}
    for name, tensor in truth.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_channels_last_weights_take_their_order_from_a_reference(tmp_path: Path, use_orig_params: bool) -> None:
    run_ranks(save, 2, tmp_path, use_orig_params, True)
    convert(tmp_path / "epoch_1.pth", tmp_path / "out.pth", reference=tmp_path / "start.pth")
    found, truth = (torch.load(tmp_path / name)["state_dict"] for name in ("out.pth", "truth.pth"))
    assert not torch.load(tmp_path / "start.pth")["state_dict"]["conv.weight"].is_contiguous()
    assert torch.equal(found["conv.weight"], truth["conv.weight"])
    if use_orig_params:
        for loaded in run_ranks(load, 2, tmp_path):
            assert torch.equal(loaded, truth["conv.weight"])


def load(rank: int, directory: Path) -> torch.Tensor:
    model = mmfsdp.shard(Model())
    # The model's shapes alone do not tell the order: a guess could be wrong.
    with pytest.raises(IncompleteCheckpointError, match=r"conv\.weight"):
        mmfsdp.load_checkpoint(directory / "epoch_1.pth", model)
    mmfsdp.load_checkpoint(directory / "epoch_1.pth", model, reference=directory / "start.pth")
    return mmfsdp.model_state_dict(model, rank0_only=False)["conv.weight"]


def resume(rank: int, directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any], int]:
    from mmfsdp_mmengine import FSDPStrategy

    strategy = FSDPStrategy(work_dir=str(directory), model_wrapper={})
    strategy.prepare(Model(), optim_wrapper={"optimizer": {"type": "AdamW", "lr": 1.0}}, param_scheduler=None)
    content = strategy.resume(str(directory / "epoch_1.pth"), resume_param_scheduler=False)
    optimizer = strategy.optim_wrapper.optimizer
    weights = mmfsdp.model_state_dict(strategy.model, rank0_only=False)
    state = mmfsdp.optim_state_dict(strategy.model, optimizer, rank0_only=False, by_name=True)
    assert optimizer.param_groups[0]["lr"] == 0.1
    return weights, state["state"], content["meta"]["iter"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_resumes_from_them(tmp_path: Path, use_orig_params: bool) -> None:
    run_ranks(save, 2, tmp_path, use_orig_params, False)
    truth = torch.load(tmp_path / "truth.pth")["state_dict"]
    weights, state, done = run_ranks(resume, 3, tmp_path)[0]
    assert done == 5
    assert weights.keys() == truth.keys()
    for name, tensor in truth.items():
        assert torch.equal(weights[name], tensor), name
        assert state[name]["exp_avg"].shape == tensor.shape
        assert state[name]["exp_avg"].any()
