"""A model in pipeline stages of torch, each of them the model's own modules, and what one process makes of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

import mmfsdp

__all__ = ["CONFIG", "SCHEDULES", "Net", "Pipeline", "batch_of", "loss_of", "make_net", "stage_of", "train_alone"]

CONFIG: dict[str, Any] = {"wrap": {"kind": "module_class", "classes": "Block"}}
SCHEDULES: dict[str, tuple[Callable[..., Any], int]] = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
}
"""Schedules of torch, each with the number of stages per rank."""
_SPLIT = {"zero bubble": (ScheduleInterleavedZeroBubble, 2)}
_BLOCKS = 4
_WORDS, _WIDTH, _MICROBATCHES = 31, 24, 4


class Block(nn.Module):
    """A layer, with a buffer that is saved, and with parameters that only some ranks use, if any."""

    uses_spare = False

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(_WIDTH, _WIDTH)
        self.norm = nn.LayerNorm(_WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 50), nn.Linear(50, _WIDTH)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))
        return x + self.spare(x) if self.uses_spare else x


class Net(nn.Module):
    """An embedding, layers and a head, of which a stage has some."""

    def __init__(self) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Embedding(_WORDS, _WIDTH)
        self.blocks = nn.ModuleDict({str(index): Block() for index in range(_BLOCKS)})
        self.head: nn.Module | None = nn.Linear(_WIDTH, _WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def make_net(*, spare: bool = False) -> Net:
    """Return the model, the same in every process, whose second block uses its spare parameters if asked."""
    torch.manual_seed(3)
    model = Net()
    model.blocks["1"].uses_spare = spare
    return model


def stage_of(model: Net, index: int, count: int) -> Net:
    """Return a copy of a model with the modules of one of its stages, under their own names."""
    stage = copy.deepcopy(model)
    per = _BLOCKS // count
    for number in range(_BLOCKS):
        if number // per != index:
            del stage.blocks[str(number)]
    if index:
        stage.embed = None
    if index < count - 1:
        stage.head = None
    return stage


def batch_of(step: int) -> torch.Tensor:
    """Return the tokens of a step for all ranks together: 16 rows."""
    return torch.randint(0, _WORDS, (16, 7), generator=torch.Generator().manual_seed(50 + step))


def loss_of(output: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of a batch."""
    return cross_entropy(output.flatten(0, 1), tokens.flatten())


class Pipeline:
    """The stages of this rank, sharded, with an optimizer for each and one of torch's schedules."""

    def __init__(
        self,
        mesh: DeviceMesh,
        name: str,
        whole: tuple[str, ...] = (),
        *,
        spare: bool = False,
        free: bool = True,
        strategy: str = "FULL_SHARD",
    ) -> None:
        schedule, per_rank = (SCHEDULES | _SPLIT)[name]
        self.group = mesh.get_group("pipe")
        self.mesh, rank, ranks = mesh, mesh.get_local_rank("pipe"), mesh["pipe"].size()
        self.data_rank, self.data_ranks = mmfsdp.data_parallel_rank(mesh), mmfsdp.data_parallel_size(mesh)
        count = ranks * per_rank
        self.indices = [rank + ranks * turn for turn in range(per_rank)]
        self.stages = []
        for index in self.indices:
            stage = stage_of(make_net(spare=spare and self.data_rank == 0), index, count)
            if "tensor" in (mesh.mesh_dim_names or ()):
                parallelize_module(stage, mesh["tensor"], _styles_of(stage))
            ignored = [name for name, _ in stage.named_modules() if name in whole]
            sharding = {"strategy": strategy, "ignored_modules": ignored, "reshard_after_forward": free}
            self.stages.append(mmfsdp.shard(stage, {**CONFIG, "sharding": sharding}, mesh))
        self.params = [param for stage in self.stages for param in stage.parameters()]
        self.optimizers = [torch.optim.AdamW(stage.parameters(), lr=1e-2) for stage in self.stages]
        device = torch.device("cpu")
        parts = [
            PipelineStage(stage, index, count, device, group=self.group)
            for stage, index in zip(self.stages, self.indices, strict=True)
        ]
        if torch.__version__.startswith("2.9."):  # its greetings between stages fail over gloo: 8 bytes into 4
            for part in parts:
                part._get_init_p2p_neighbors_ops = lambda: []  # type: ignore[method-assign]
        self.schedule = schedule(parts if per_rank > 1 else parts[0], _MICROBATCHES, loss_fn=loss_of)
        self.has_first, self.has_last = 0 in self.indices, count - 1 in self.indices

    def run(self, step: int) -> float:
        """Run forward and backward of a step, and return the loss of all ranks."""
        tokens = batch_of(step).chunk(self.data_ranks)[self.data_rank]
        losses: list[torch.Tensor] = []
        given = {"target": tokens, "losses": losses} if self.has_last else {}
        self.schedule.step(*([tokens] if self.has_first else []), **given)
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.all_reduce(loss)
        return float(loss) * self.mesh["pipe"].size() / self.mesh.size()

    def train(self, step: int) -> tuple[float, float]:
        """Train a step, and return the loss of all ranks and the norm of the gradients."""
        loss = self.run(step)
        norm = mmfsdp.clip_grad_norm_(self.params, 0.3, groups=self.group)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss, float(norm)


def _styles_of(stage: Net) -> dict[str, Any]:
    """Return torch's styles of the modules that a stage has."""
    styles: dict[str, Any] = {}
    for number in stage.blocks:
        styles |= {f"blocks.{number}.up": ColwiseParallel(), f"blocks.{number}.down": RowwiseParallel()}
    if stage.head is not None:
        styles["head"] = ColwiseParallel(output_layouts=Replicate())
    return styles


def train_alone(steps: int, *, spare: bool = False) -> tuple[list[tuple[float, float]], Net, torch.optim.Optimizer]:
    """Train in one process, and return losses and norms, the model, and its optimizer.

    With ``spare`` the first half of each batch uses the spare parameters, as on one of two ranks.
    """
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(steps):
        first, second = batch_of(step).chunk(2)
        model.blocks["1"].uses_spare = spare
        loss = loss_of(model(first), first)
        model.blocks["1"].uses_spare = False
        loss = (loss + loss_of(model(second), second)) / 2
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(loss.detach()), float(norm)))
    return found, model, optimizer
