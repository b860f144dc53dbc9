"""Processor time of one rank: a training step through `mmfsdp.shard` over the same step with torch's own calls.

Wall time hides what Python costs while ranks wait for each other; on a GPU this time decides whether the device waits
for the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mmfsdp
from benchmarks.measuring import Ratio, sized, spread
from benchmarks.on_ranks import compared_on_ranks, device, finish

__all__ = ["main"]

WIDTH, UNITS, LAYERS = sized((64, 31, 8), (16, 3, 2))  # 8 layers have 16 parameters; 31 units and the root have 498
STEPS, PAIRS = sized((4, 15), (1, 2))
CLIPPED = sized((240, 1_000, 2_000, 10_000), (240,))
WRAP = {"kind": "module_class", "classes": "Block"}


class Block(nn.Module):
    """One shard unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def main() -> dict[str, Any]:
    """Measure on 2 ranks and return the ratios."""
    steps = {"a step": step, "a step, compiled blocks": compiled_step, "a step without clipping": step_without_clipping}
    clips = {f"clipping, {count:,} parameters": partial(clipping, count=count) for count in CLIPPED}
    return compared_on_ranks({**steps, **clips})


def step(rank: int) -> Ratio:
    """Forward, backward, clipping, AdamW."""
    return compare(lambda model: stepper(model, mmfsdp.clip_grad_norm_), lambda model: stepper(model, torch_clip))


def compiled_step(rank: int) -> Ratio:
    """The same with each block compiled before it is sharded."""
    return compare(
        lambda model: stepper(model, mmfsdp.clip_grad_norm_), lambda model: stepper(model, torch_clip), compiles=True
    )


def step_without_clipping(rank: int) -> Ratio:
    """Forward, backward, AdamW."""
    return compare(lambda model: stepper(model, None), lambda model: stepper(model, None))


def torch_clip(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Clip as a loop with ``fully_shard`` does."""
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm, foreach=True)


def build(compiles: bool) -> nn.Module:
    """Return the model with the weights of seed 0."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(UNITS)), nn.Linear(WIDTH, WIDTH)).to(device())
    for block in model if compiles else ():
        if isinstance(block, Block):
            block.compile(backend="aot_eager")
    return model


def stepper(model: nn.Module, clip: Callable[[nn.Module, float], torch.Tensor] | None) -> Callable[[], None]:
    """Return a function that takes one training step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(8, WIDTH, device=device())

    def run() -> None:
        model(inputs).square().mean().backward()
        if clip is not None:
            clip(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return run


def compare(
    ours: Callable[[nn.Module], Callable[[], None]],
    theirs: Callable[[nn.Module], Callable[[], None]],
    compiles: bool = False,
) -> Ratio:
    """Compare steps of the model sharded by `mmfsdp.shard` with those of the same units sharded by hand."""
    model = build(compiles)
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    for block in model:  # type: ignore[attr-defined]
        if isinstance(block, Block):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return processor_time(ours(mmfsdp.shard(build(compiles), {"wrap": WRAP})), theirs(model), STEPS, PAIRS)


def clipping(rank: int, count: int) -> Ratio:
    """Clip the gradients of ``count`` parameters, in units of 20."""
    units = [nn.Sequential(*(nn.Linear(4, 4) for _ in range(10))) for _ in range(count // 20)]
    model = nn.Sequential(*units).to(device())
    mmfsdp.shard(model, {"wrap": {"kind": "module_class", "classes": "Sequential"}})
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    return processor_time(lambda: mmfsdp.clip_grad_norm_(model, 1e-3), lambda: torch_clip(model, 1e-3), 1, PAIRS)


def processor_time(ours: Callable[[], object], theirs: Callable[[], object], calls: int, pairs: int) -> Ratio:
    """Return the processor seconds of this process per call, in turn; the first three calls of each do not count."""
    for _ in range(3):
        ours(), theirs()
    measured: list[tuple[float, float]] = []
    for _ in range(pairs):
        found = []
        for function in (ours, theirs):
            dist.barrier()
            began = time.process_time()
            for _ in range(calls):
                function()
            finish()
            found.append((time.process_time() - began) / calls)
        measured.append((found[0], found[1]))
    mine, other = ([pair[side] for pair in measured] for side in (0, 1))
    return Ratio(spread(mine), spread(other), spread([a / b for a, b in measured]))


if __name__ == "__main__":
    main()
