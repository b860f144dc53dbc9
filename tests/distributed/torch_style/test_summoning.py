"""`summon_full_params` and `apply` show what torch's own show, on every engine and for every argument."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.models import Block
from tests.distributed.torch_class import ENGINES, TorchFSDP, adamw, close, ours, plain, step, torch_settles, torchs
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import mmfsdp
from mmfsdp.errors import LostRankError, ShardStateError, UnsupportedCallError
from mmfsdp.testing import close_ranks, run_ranks

FSDP: Any = mmfsdp.FullyShardedDataParallel


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for name, p in model.named_parameters()}


def grads(model: nn.Module) -> dict[str, torch.Tensor | None]:
    names = {name.replace("_fsdp_wrapped_module.", ""): param.grad for name, param in model.named_parameters()}
    return {name: None if grad is None else grad.detach().clone() for name, grad in names.items()}


def shows_what_torch_shows(rank: int, name: str) -> None:
    with torch_settles():
        reference = torchs(use_orig_params=True)
        step(reference, adamw(reference))
        step(reference, None, 1)
        with TorchFSDP.summon_full_params(reference, writeback=False, with_grads=True):
            want, want_grads = values(reference), grads(reference)
    model = ours(name)
    step(model, adamw(model))
    step(model, None, 1)
    has_grads = name != "fsdp1-flat"
    for summon in (
        FSDP.summon_full_params(model, writeback=False),
        model.summon_full_params(writeback=False),  # as a method, as torch 1.11 had it
        model.summon_full_params(model, True, False, with_grads=has_grads),
        FSDP.summon_full_params(nn.ModuleList([model]), writeback=False, offload_to_cpu=True),
        mmfsdp.full_params(model, writeback=False),
    ):
        with summon:
            close(values(model), want)
            assert [key for key, _ in model.named_parameters()] == [key for key, _ in plain().named_parameters()]
            assert [key for key, _ in model.named_buffers()] == [key for key, _ in plain().named_buffers()]
            close(model.state_dict(), {**want, "head.weight": want["embed.weight"]})
    if has_grads:
        with model.summon_full_params(writeback=False, with_grads=True):
            close(grads(model), want_grads)
        assert model.module.head.weight.grad is not None  # still there
    else:
        with (
            pytest.raises(UnsupportedCallError, match="needs use_orig_params=True"),
            model.summon_full_params(with_grads=True),
        ):
            pass
    # Nothing has changed.
    close(model.state_dict(), {**want, "head.weight": want["embed.weight"]})


def edits(rank: int, name: str) -> None:
    model: Any = ours(name)
    optimizer = adamw(model)
    want = {key: value.detach().clone() for key, value in plain().named_parameters()}
    with model.summon_full_params():  # before the first forward
        for param in model.parameters():
            param.data.add_(1)
    with model.summon_full_params(writeback=False):
        for param in model.parameters():
            param.data.add_(1)
    for value in want.values():
        value.add_(1)
    with model.summon_full_params(writeback=False):
        close(values(model), want)
    step(model, optimizer)  # it trains on

    step(model, None, 1)
    if name != "fsdp1-flat":
        with model.summon_full_params(with_grads=True):
            for param in model.parameters():
                param.grad.fill_(2)
        with model.summon_full_params(writeback=False, with_grads=True):
            assert all(bool((param.grad == 2).all()) for param in model.parameters())
            for param in model.parameters():
                param.grad.fill_(3)
        with model.summon_full_params(writeback=False, with_grads=True):
            assert all(bool((param.grad == 2).all()) for param in model.parameters())
    optimizer.step()


def parts(rank: int, name: str) -> None:
    model: Any = ours(name)
    step(model, None)
    want = dict(plain().named_parameters())
    root_owns = {"embed.weight", "scale"}

    def shown() -> set[str]:
        """Return the names whose values are whole; both halves of a parameter are non-empty here."""
        found = dict(model.named_parameters())
        return {
            key
            for key, param in found.items()
            if type(param) is nn.Parameter and key in want and param.shape == want[key].shape
        }

    if name != "fsdp1-flat":  # its names inside differ from unit to unit
        with model.summon_full_params(recurse=False, writeback=False):
            inside = shown()
        assert root_owns <= inside
        if name in ("fsdp2", "replicate"):
            assert inside == root_owns
    block = model.module.blocks[0]
    with FSDP.summon_full_params(block, writeback=False):
        for key, value in block.named_parameters():
            close(value.detach(), want[f"blocks.0.{key.replace('_fsdp_wrapped_module.', '')}"].detach())
        assert "blocks.1.up.weight" not in shown()
    with FSDP.summon_full_params(block, recurse=False), model.summon_full_params(recurse=False):
        close(block.up.weight.detach(), want["blocks.0.up.weight"].detach())
    with FSDP.summon_full_params(plain()):  # nothing sharded in it
        pass
    step(model, None)


def first_rank_only(rank: int, name: str) -> None:
    model: Any = ours(name)
    step(model, None)
    with model.summon_full_params(rank0_only=True, writeback=False, offload_to_cpu=True):
        if rank == 0:  # alone
            close(values(model), {key: value.detach() for key, value in plain().named_parameters()})
            close(model.state_dict(), plain().state_dict())
    with model.summon_full_params(rank0_only=True, writeback=False):
        assert bool(model.state_dict()) == (rank == 0)
    step(model, None)
    with (
        pytest.raises(UnsupportedCallError, match=r"Pass writeback=False") as caught,
        model.summon_full_params(rank0_only=True),
    ):
        pass
    assert isinstance(caught.value, NotImplementedError)  # what torch raises


class Summons(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.whole: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.whole is not None:
            with (
                pytest.raises(ShardStateError, match="while a forward or backward is running"),
                self.whole.summon_full_params(),
            ):
                pass
        return self.inner(x)


def wrong_times(rank: int, name: str) -> None:
    inner = Summons(plain())
    model: Any = FSDP(inner, **ENGINES[name])
    object.__setattr__(inner, "whole", model)
    model(torch.arange(4)).sum().backward()
    inner.whole = None
    with model.summon_full_params(), pytest.raises(ShardStateError, match="whole already"), model.summon_full_params():
        pass
    with pytest.raises(ZeroDivisionError), model.summon_full_params():
        1 / 0  # noqa: B018
    with model.no_sync():
        model(torch.arange(4)).sum().backward()
    if name != "fsdp1-flat":
        with pytest.raises(ShardStateError, match="not reduced"), model.summon_full_params(with_grads=True):
            pass
    with pytest.raises(TypeError, match="recursive"):
        model.summon_full_params(recursive=True)
    model(torch.arange(4)).sum().backward()


def generates(rank: int, name: str) -> None:
    """Text generation of transformers shows the root's own parameters and runs forwards inside."""
    if name.startswith("fsdp1"):
        return  # torch's own may do it, or not
    model: Any = ours(name).eval()
    x = torch.arange(4)
    with torch.no_grad():
        want = plain().eval()(x)
        close(model(x), want)
        with model.summon_full_params(recurse=False, writeback=False):
            close(model(x), want)
            close(model.module(x), want)
        close(model(x), want)
    model.train()
    step(model, adamw(model))


def applies(rank: int, name: str) -> None:
    def double(module: nn.Module) -> None:
        seen.append(type(module).__name__)
        for param in module.parameters(recurse=False):
            with torch.no_grad():
                param.mul_(2)

    seen: list[str] = []
    with torch_settles():
        reference = torchs(use_orig_params=True)
        assert reference.apply(double) is reference
        with TorchFSDP.summon_full_params(reference, writeback=False):
            want = values(reference)
    model: Any = ours(name)
    seen.clear()
    assert model.apply(double) is model
    assert seen.count("Block") == 2
    assert seen.count("Linear") == 5
    with model.summon_full_params(writeback=False):
        close(values(model), want)
    step(model, adamw(model))


def alone(rank: int, what: str, told: str) -> None:
    os.environ["MMFSDP_TIMEOUT"] = "5"  # of messages between ranks
    group = dist.new_group([0, 1], timeout=timedelta(seconds=4))
    model: Any = FSDP(plain(), process_group=group, auto_wrap_policy=ModuleWrapPolicy({Block}))
    optimizer = adamw(model)
    step(model, optimizer)
    dist.barrier()
    calls = {
        "making parameters whole": lambda: model.summon_full_params().__enter__(),
        "gathering a state dict": model.state_dict,
        "gathering an optimizer's state": lambda: model.optim_state_dict(optimizer),
    }
    if rank == 0:
        with pytest.raises(LostRankError, match=told):
            calls[what]()
    dist.barrier()


@pytest.mark.exhaustive
def test_one_rank_alone_is_told() -> None:
    close_ranks()  # a mesh of theirs would be taken, with a group that waits longer
    for what in ("making parameters whole", "gathering a state dict"):
        run_ranks(alone, 2, what, f"did not take part while this rank was {what}")
    run_ranks(alone, 2, "gathering an optimizer's state", "A rank did not answer while the ranks agreed")
    close_ranks()  # these have lost a group


def all_of_them(rank: int, name: str) -> None:
    for function in (shows_what_torch_shows, edits, parts, first_rank_only, wrong_times, generates, applies):
        function(rank, name)


@pytest.mark.sample("fsdp2", "fsdp1-flat")
@pytest.mark.parametrize("name", ENGINES)
def test_summoning(name: str) -> None:
    """All in one call, because worlds start slowly; the trace names the function that failed."""
    run_ranks(all_of_them, 2, name)
