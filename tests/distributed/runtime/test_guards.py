"""Uses that torch accepts and that train nothing, or the wrong thing: each is mended or refused.

Every test here fails without its guard: the controls show what torch does alone, and each guard was switched off once
by hand to see its test fail.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.models import BLOCKS, adamw, batches, build, difference, train
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import mmfsdp
from mmfsdp.errors import ConfigError, MeshError, MmfsdpError, ShardStateError
from mmfsdp.testing import RankError, run_ranks, single_rank

X = torch.arange(8)


class BoomError(Exception):
    pass


def disturb(model: nn.Module, how: str) -> None:
    """What happens before the optimizer is built."""
    if how in ("no_grad", "inference_mode"):
        with getattr(torch, how)():
            model(X)
    elif how == "grad":
        model(X)
    else:

        def fail(*_: Any) -> None:
            raise BoomError

        handle = model.get_submodule(how).register_forward_pre_hook(fail)
        with pytest.raises(BoomError):
            model(X)
        handle.remove()


def after_disturbance(rank: int, how: str, config: dict[str, Any]) -> tuple[list[Any], bool]:
    model = mmfsdp.shard(build("Attention"), {"wrap": BLOCKS, **config})
    disturb(model, how)
    optimizer = adamw(model)
    sharded = all(isinstance(param, DTensor) for group in optimizer.param_groups for param in group["params"])
    return train(model, optimizer, steps=2), sharded


@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "grad", "block", "head", "attention"])
@pytest.mark.parametrize("config", [{}, {"sharding": "SHARD_GRAD_OP"}, {"sharding": "NO_SHARD"}], ids=str)
def test_forward_or_failure_before_the_optimizer_is_built(how: str, config: dict[str, Any]) -> None:
    """Fails if the root's `named_parameters` yields what is gathered, or a failed forward is not recovered from.

    Or if what is gathered under inference_mode() keeps to that mode.
    """
    single = build("Attention")
    reference = train(single, adamw(single), steps=2, sharded=False)
    for curve, sharded in run_ranks(after_disturbance, 2, how, config):
        assert sharded
        assert difference(curve, reference) <= 1e-5


def gradients(model: nn.Module, rank: int, world_size: int, between: Callable[[], None]) -> dict[str, torch.Tensor]:
    """Those of two micro-batches of the global batch, with something between them."""
    for place, (x, y) in enumerate(batches(0, rank, world_size, accumulate=2)):
        nn.functional.cross_entropy(model(x), y).backward()
        if not place:
            between()
    found = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items()}


def after_skipped_batch(rank: int, hold: bool, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    model = mmfsdp.shard(build("Attention"), {"wrap": BLOCKS, **config})
    holding = contextlib.ExitStack()
    if hold:
        holding.enter_context(mmfsdp.no_sync(model))

    def fail() -> None:
        disturb(model, "head")
        holding.close()

    return gradients(model, rank, dist.get_world_size(), fail)


@pytest.mark.parametrize("hold", [False, True], ids=["reduced", "no_sync"])
@pytest.mark.parametrize("config", [{}, {"precision": {"reduce_dtype": "float64"}}], ids=str)
def test_a_failed_forward_keeps_the_gradients_of_earlier_micro_batches(hold: bool, config: dict[str, Any]) -> None:
    """Fails if `discard_iteration` lets torch 2.15 reset them: the batch would count with half its samples."""
    expected = gradients(build("Attention"), 0, 1, lambda: None)
    for found in run_ranks(after_skipped_batch, 2, hold, config):
        assert found.keys() == expected.keys()
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad, msg=name)


@pytest.mark.parametrize("how", ["no_grad", "grad", "head"])
def test_control_torch_alone_leaves_the_root_untrained(how: str) -> None:
    assert run_ranks(control_root_moves, 2, "") == [True, True]
    assert run_ranks(control_root_moves, 2, how) == [False, False]


def control_root_moves(rank: int, how: str) -> bool:
    model: Any = fully_shard(build("Attention"))
    before = model.head.weight.full_tensor().clone()
    if how:
        disturb(model, how)
    optimizer = adamw(model)
    for _ in range(2):
        nn.functional.cross_entropy(model(X), X).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.reshard()
    return not torch.equal(before, model.head.weight.full_tensor())


def optimizer_of_a_submodule(rank: int, strategy: str) -> str:
    model: Any = mmfsdp.shard(build(), {"sharding": strategy, "wrap": BLOCKS})
    loss = model(X).sum()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    loss.backward()
    with pytest.raises(ShardStateError) as caught:
        optimizer.step()
    return caught.value.message


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_optimizer_from_a_submodule_between_forward_and_backward(strategy: str) -> None:
    """Fails if guards._check_first_step does not ask for stale parameters: the step passes and trains nothing."""
    message = (
        "SGD holds gathered copies of sharded parameters: it was built from a submodule between a forward and its "
        "backward, and would train nothing. Build it from the sharded model's parameters(), best before the first "
        "forward."
    )
    assert run_ranks(optimizer_of_a_submodule, 2, strategy) == [message] * 2


def optimizer_from_before(rank: int, config: dict[str, Any], on_meta: bool) -> list[str]:
    with torch.device("meta" if on_meta else "cpu"):
        plain = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = adamw(plain)
    model = mmfsdp.shard(plain, config)
    model(torch.ones(2, 4)).sum().backward()
    uses: list[Callable[[], Any]] = [optimizer.step, lambda: mmfsdp.optim_state_dict(model, optimizer)]
    uses.append(lambda: mmfsdp.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0))
    messages = []
    for use in uses:
        with pytest.raises(ShardStateError) as caught:
            use()
        messages.append(caught.value.message)
    return messages


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("config", [{}, {"engine": "fsdp1", "sharding": {"use_orig_params": False}}], ids=str)
def test_optimizer_from_before_the_model_was_sharded(config: dict[str, Any], on_meta: bool) -> None:
    """Fails if ShardedModel forgets what it replaced: the steps pass and train nothing."""
    rest = (
        " holds 4 of the parameters that the model had before it was sharded. Sharding has replaced them, so training "
        "them would change nothing. Build the optimizer from the sharded model's parameters(), after shard()."
    )
    expected = [name + rest for name in ("AdamW", "AdamW", "The list given to clip_grad_norm_()")]
    assert run_ranks(optimizer_from_before, 2, config, on_meta) == [expected] * 2


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
@pytest.mark.parametrize("config", [{}, {"engine": "replicate"}, {"engine": "fsdp1"}], ids=str)
def test_gradient_hooks_that_are_never_called(config: dict[str, Any]) -> None:
    """They mask gradients, or log them. Those of ignored modules are called, and those that follow the reduction."""
    called: list[str] = []
    with single_rank():
        for register in (nn.Parameter.register_hook, nn.Parameter.register_post_accumulate_grad_hook):
            plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
            register(plain[0].weight, lambda grad: None)
            with pytest.raises(ShardStateError, match=r"'0.weight' has gradient hooks that sharding would never"):
                mmfsdp.shard(plain, config)
            mmfsdp.shard(plain, {**config, "sharding": {"ignored_modules": ["0"]}})
        model = mmfsdp.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), config)
        optimizer = adamw(model)
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda param: called.append("after"))
        model(torch.ones(2, 4)).sum().backward()
        if config.get("engine") == "fsdp1":
            with pytest.raises(ShardStateError, match="have gradient hooks"):
                optimizer.step()
            return
        optimizer.step()
        assert called == ["after"] * 4
        for param in model.parameters():
            param.register_hook(lambda grad: called.append("before"))
        with pytest.raises(ShardStateError, match="have gradient hooks"):
            adamw(model).step()


def penalised(rank: int, config: dict[str, Any] | None) -> list[torch.Tensor]:
    """Gradients of a gradient penalty: on two ranks, each with its own inputs, or on all of them without sharding."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(4, 4, requires_grad=True)
    if config is not None:
        model, x = mmfsdp.shard(model, config), x[rank::2].detach().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (grad.norm(dim=1) - 1).square().mean().backward()
    return [param.grad for param in model.parameters() if param.grad is not None]


def test_modules_that_are_differentiated_twice() -> None:
    """Whole modules train as in one process. Sharded ones are refused; without that, the process may even die."""
    expected = penalised(0, None)
    for grads in run_ranks(penalised, 2, {"sharding": {"ignored_modules": ["0", "1", "2"]}}):
        torch.testing.assert_close(grads, expected)
    message = (
        r"A backward with create_graph=True, as in a gradient penalty, reached the shard unit '\(root\)': .* list them "
        r"in sharding\.ignored_modules\."
    )
    with pytest.raises(RankError, match=message):
        run_ranks(penalised, 2, {})


def misplaced(rank: int) -> list[str]:
    """Values that shard() and the sharded model do not take."""
    plain = nn.Linear(4, 4)
    whole = plain.state_dict()
    uses: list[Callable[[], Any]] = [lambda: mmfsdp.shard(nn.Linear(4, 4), {}, (1, 2))]
    model = mmfsdp.shard(plain, {})
    uses.append(lambda: model.load_state_dict(whole))
    uses.append(lambda: model.load_state_dict(whole, assign=True))
    uses.append(lambda: mmfsdp.load_model_state_dict(model, None if rank else whole))  # type: ignore[arg-type]
    messages = []
    for use in uses:
        with pytest.raises(MmfsdpError) as caught:
            use()
        messages.append(caught.value.message.removeprefix("Rank 1 failed: "))
    model(torch.ones(1, 4))
    model.double()
    with pytest.raises(RuntimeError) as converted:
        model(torch.ones(1, 4).double())
    assert not any(param.grad is not None for param in model.parameters())
    return [*messages, *converted.value.__notes__]


def test_what_a_sharded_model_does_not_take() -> None:
    """Without the checks: an AttributeError, mixed tensors, a model that is whole again, a rank that waits, a dtype."""
    takes_shards = (
        "load_state_dict() of a sharded model takes shards, and 'weight' is a whole tensor. Use "
        "mmfsdp.load_model_state_dict(model, state_dict) on every rank; with from_rank0=True only the first rank needs "
        "the tensors."
    )
    expected = [
        "mesh must be a DeviceMesh, a pair of them (the second for experts), named axes such as {'replicate': 2, "
        "'shard': 4}, a process group, a (replicate, "
        "shard) pair of process groups, or None for all ranks, got (1, 2) (type tuple). Leave it out; to shard in "
        "groups of n ranks, set sharding.strategy to 'HYBRID_SHARD' and sharding.shard_size to n.",
        *[takes_shards] * 2,
        "A state dict must be a mapping of names to tensors, got a NoneType. If only the first rank has read it, pass "
        "from_rank0=True on every rank.",
        "mmfsdp: 'weight' was sharded in float32 and has been converted to torch.float64 since, which torch allows "
        "only before the first forward. Convert the model before shard(), or set precision.storage_dtype.",
    ]
    assert run_ranks(misplaced, 2) == [expected] * 2


def unreduced(rank: int, engine: str) -> list[str]:
    model = mmfsdp.shard(build(), {"engine": engine, "wrap": BLOCKS})
    optimizer = adamw(model)
    with mmfsdp.no_sync(model):
        loss = model(X).sum()
    loss.backward()
    messages = []
    clips = [lambda: mmfsdp.clip_grad_norm_(model, 1.0), lambda: mmfsdp.clip_grad_norm_(model.parameters(), 1.0)]
    for use in (*clips, optimizer.step):
        with pytest.raises(ShardStateError) as caught:
            use()
        messages.append(caught.value.message.partition(",")[0])
    # The last micro-batch, outside, makes all of it right again.
    model(X).sum().backward()
    assert float(mmfsdp.clip_grad_norm_(model, 1.0)) > 0
    optimizer.step()
    return messages


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", "replicate"])
def test_clipping_or_stepping_unreduced_gradients(engine: str) -> None:
    """Fails if check_reduced does nothing: torch clips to a norm of 0 or of this rank's own, and steps."""
    for messages in run_ranks(unreduced, 2, engine):
        assert messages == ["Gradients are about to be clipped"] * 2 + ["AdamW is about to step"]


def control_unreduced(rank: int) -> float:
    model: Any = fully_shard(build("Attention"))
    model.set_requires_gradient_sync(False)
    nn.functional.cross_entropy(model(X), X).backward()
    return float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))


def test_control_torch_alone_clips_nothing() -> None:
    assert run_ranks(control_unreduced, 2) == [0.0, 0.0]


def flat_clip_of_parameters(rank: int) -> str:
    model = mmfsdp.shard(build(), {"engine": "fsdp1"})
    model(X).sum().backward()
    with pytest.raises(ShardStateError) as caught:
        mmfsdp.clip_grad_norm_(model.parameters(), 1.0)
    return caught.value.message


def test_flat_parameters_alone_have_no_norm() -> None:
    """Fails if clip_grad_norm_ does not ask for the engine: each rank would clip by its own shard's norm."""
    message = (
        "With engine 'fsdp1' a rank's parameters are pieces of flat parameters, so their norm is not the model's. Pass "
        "the model itself to clip_grad_norm_()."
    )
    assert run_ranks(flat_clip_of_parameters, 2) == [message] * 2


def hybrid_of_one(rank: int, engine: str) -> None:
    with pytest.raises(ConfigError, match=r"sharding\.shard_size=1 shards nothing"):
        mmfsdp.shard(build(), {"engine": engine, "sharding": {"strategy": "HYBRID_SHARD", "shard_size": 1}})
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1))
    with pytest.raises(MeshError, match="a shard group of one rank shards nothing"):
        mmfsdp.shard(build(), {"engine": engine, "sharding": "HYBRID_SHARD"}, mesh)


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
def test_a_hybrid_shard_group_of_one_is_refused(engine: str) -> None:
    """Fails if mesh_spec lets it pass: FSDP1 then trains without averaging gradients."""
    run_ranks(hybrid_of_one, 2, engine)


def grads_everywhere(rank: int) -> float:
    """Inside the loop of a sharded model an unsharded one trains as ever."""
    mmfsdp.shard(build(), {"precision": "fp16"})
    plain = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(torch.ones(1, 2)).sum().backward()
    before = plain.weight.detach().clone()
    optimizer.step()
    return float((plain.weight - before).abs().sum())


def test_optimizers_of_other_models_are_left_alone() -> None:
    assert all(moved > 0 for moved in run_ranks(grads_everywhere, 2))


def test_micro_batches_cover_the_global_batch() -> None:
    """The harness itself: all ranks' batches together are the single process's."""
    whole = [x for x, _ in batches(3, 0, 1, 2)]
    for place, batch in enumerate(whole):
        shards = [list(batches(3, rank, 4, 2))[place][0] for rank in range(4)]
        assert torch.equal(torch.cat(shards), batch)
