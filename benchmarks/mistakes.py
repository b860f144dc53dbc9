"""Makes twelve mistakes with `fully_shard`, accelerate and mmfsdp on two ranks: the table of docs/explanation/why.md.

``python -m benchmarks.mistakes`` runs them over gloo in a minute. Each trains three steps. An outcome is *right* if
the weights are those of one process, *wrong* if they are not and nothing was said, or the error that was raised.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import mmfsdp
from mmfsdp.testing import run_ranks

__all__ = ["MISTAKES", "PAGE", "outcomes", "table"]

PAGE = Path(__file__).resolve().parents[1] / "docs" / "explanation" / "why.md"
RANKS, STEPS = 2, 3


class Net(nn.Module):
    """Two units and a layer of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(16, 8), nn.Tanh())
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x)))


def by_torch(model: nn.Module, **settings: object) -> nn.Module:
    """Shard as the tutorial of `fully_shard` does: the blocks, then the model."""
    for unit in (model.first, model.second):
        fully_shard(unit, **settings)
    return fully_shard(model, **settings)


def by_accelerate(model: nn.Module, **settings: object) -> nn.Module:
    """Shard the same units with accelerate's FSDP2 plugin, which prepares a model together with its optimizer."""
    if settings.pop("ignored_params", None):
        settings["ignored_modules"] = [model.head]
    if "mp_policy" in settings:
        settings["mixed_precision_policy"] = settings.pop("mp_policy")
    accelerator = Accelerator(cpu=True)
    # On the CPU, `prepare` leaves the plugin out and makes a DistributedDataParallel. A GPU sets these attributes.
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Sequential"],  # a function here is ignored
        **settings,
    )
    optimizer = OPTIMIZERS.pop(model, None) or torch.optim.SGD(model.parameters(), lr=0.1)
    model, prepared = accelerator.prepare(model, optimizer)
    OPTIMIZERS[model] = prepared
    return model


def by_mmfsdp(model: nn.Module, **settings: object) -> nn.Module:
    """Shard the same units."""
    return mmfsdp.shard(model, wrap={"kind": "module_name", "patterns": ["first", "second"]}, **settings)


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))


OPTIMIZERS: WeakKeyDictionary[nn.Module, torch.optim.Optimizer] = WeakKeyDictionary()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that accelerate prepared with the model, or build one."""
    return OPTIMIZERS.setdefault(model, torch.optim.SGD(model.parameters(), lr=0.1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> nn.Module:
    for step in range(STEPS):
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def expected() -> dict[str, torch.Tensor]:
    """Return the weights of one process that trains on the batches of all ranks."""
    model = net()
    optimizer = sgd(model)
    for step in range(STEPS):
        model(torch.cat([batch(rank, step) for rank in range(RANKS)])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


Shard = Callable[..., nn.Module]


def optimizer_first(shard: Shard, rank: int) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    return train(shard(model), optimizer, rank)


def forward_first(shard: Shard, rank: int) -> nn.Module:
    model = shard(net())
    with torch.no_grad():
        model(batch(rank, 0))
    return train(model, sgd(model), rank)


def inference_first(shard: Shard, rank: int) -> nn.Module:
    model = shard(net())
    optimizer = sgd(model)
    with torch.inference_mode():
        model(batch(rank, 0))
    return train(model, optimizer, rank)


def other_weights(shard: Shard, rank: int) -> nn.Module:
    model = shard(net(seed=rank))
    return train(model, sgd(model), rank)


def clip_unsynchronised(shard: Shard, rank: int) -> nn.Module:
    model = shard(net())
    optimizer = sgd(model)
    if shard is not by_mmfsdp:
        model.set_requires_gradient_sync(False)
        model(batch(rank, 0)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        model.set_requires_gradient_sync(True)
    else:
        with mmfsdp.no_sync(model):
            model(batch(rank, 0)).square().mean().backward()
        mmfsdp.clip_grad_norm_(model, 1.0)
    optimizer.step()
    return model


def ignored(shard: Shard, rank: int) -> nn.Module:
    model = net()
    own = {*model.head.parameters()}
    model = shard(model, ignored_params=own)
    return train(model, sgd(model), rank)


def head_later(shard: Shard, rank: int) -> nn.Module:
    model = shard(net())
    torch.manual_seed(5)
    model.head = nn.Linear(8, 4)
    return train(model, sgd(model), rank)


def drawn_in_shards(shard: Shard, rank: int) -> nn.Module:
    """Initialise from meta, with one seed for all ranks. Right means that the shards differ."""
    with torch.device("meta"):
        model = Net()
    model = shard(model)
    if shard is not by_mmfsdp:
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().normal_()
    whole = whole_weights(model)["first.0.weight"]
    if torch.equal(whole[:8], whole[8:]):
        raise SilentError
    raise HarmlessError


def uninitialised(shard: Shard, rank: int) -> nn.Module:
    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(4))

    with torch.device("meta"):
        model = Scaled()
    model = shard(model)
    model.to_empty(device="cpu")
    raise SilentError


def half_without_scaler(shard: Shard, rank: int) -> nn.Module:
    """Train on a small loss. Right means that not all gradients are zero, as in float32."""
    if shard is not by_mmfsdp:
        model = shard(net(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    else:
        model = shard(net(), precision="fp16")
    optimizer = sgd(model)
    (1e-9 * model(batch(rank, 0)).float().square().mean()).backward()
    optimizer.step()
    raise HarmlessError if any(parameter.grad.to_local().any() for parameter in model.parameters()) else SilentError


def hooked(shard: Shard, rank: int) -> nn.Module:
    """Mask a gradient with a hook. Right means that the hook was called."""
    called = []
    model = net()
    model.head.weight.register_hook(called.append)
    model = shard(model)
    train(model, sgd(model), rank)
    raise HarmlessError if called else SilentError


def from_outside(shard: Shard, rank: int) -> nn.Module:
    model = shard(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        hidden = model.first[1](model.first[0](batch(rank, step)))  # a loss or a decoder does so
        model.head(model.second(hidden)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


class HarmlessError(Exception):
    """The mistake did no harm."""


class SilentError(Exception):
    """Nothing was said, and the result is wrong."""


MISTAKES: dict[str, Callable[[Shard, int], nn.Module]] = {
    "build the optimizer before sharding": optimizer_first,
    "run a forward before building the optimizer": forward_first,
    "validate under `inference_mode` before the first step": inference_first,
    "start ranks from different weights": other_weights,
    "clip and step after a backward without synchronisation": clip_unsynchronised,
    "ignore parameters that are trained": ignored,
    "replace the head after sharding": head_later,
    "draw weights in shards, with one seed": drawn_in_shards,
    "leave a parameter on meta uninitialised": uninitialised,
    "train in float16 without a gradient scaler": half_without_scaler,
    "mask a gradient with a hook": hooked,
    "call a layer of a unit from outside": from_outside,
}


TOOLS: dict[str, Shard] = {"`fully_shard`": by_torch, "accelerate": by_accelerate, "mmfsdp": by_mmfsdp}


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()
        for name, tensor in model.state_dict().items()
    }


def outcomes(rank: int, tool: str) -> dict[str, str]:
    """Return the outcome of each mistake. Collective: every rank calls it."""
    warnings.simplefilter("ignore")
    wanted = expected()
    found = {}
    for name, mistake in MISTAKES.items():
        try:
            weights = whole_weights(mistake(TOOLS[tool], rank))
            same = all(torch.allclose(weights[key], wanted[key], atol=1e-5) for key in wanted)
            found[name] = "right" if same else "**wrong, nothing said**"
        except HarmlessError:
            found[name] = "right"
        except SilentError:
            found[name] = "**wrong, nothing said**"
        except Exception as error:  # the outcome is the error
            found[name] = f"`{type(error).__name__}`"
    return found


def table() -> str:
    """Return the table: a row for each mistake."""
    columns = [run_ranks(outcomes, RANKS, tool, timeout=240)[0] for tool in TOOLS]
    lines = [f"| mistake | {' | '.join(TOOLS)} |", "|---" * (len(TOOLS) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(column[name] for column in columns)} |" for name in MISTAKES]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the table between its marks."""
    text = PAGE.read_text(encoding="utf-8")
    marked = re.compile(r"(<!-- mistakes -->\n\n).*?(\n<!-- end of mistakes -->)", re.DOTALL)
    made = table()
    print(made)
    PAGE.write_text(marked.sub(lambda match: match[1] + made + match[2], text), encoding="utf-8")


if __name__ == "__main__":
    main()
