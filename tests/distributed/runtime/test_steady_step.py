"""What a training step costs beyond torch's own: work per parameter, waiting for the device, and guards that leave."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
import torch
from tests.distributed.measured import Issued
from tests.distributed.models import BLOCKS, build
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.overrides import TorchFunctionMode

import mmfsdp
from mmfsdp.errors import ShardStateError
from mmfsdp.runtime.sharded_model import find_sharded_model
from mmfsdp.runtime.torch_fsdp2.gathering import stays_gathered
from mmfsdp.runtime.torch_fsdp2.observing import Subscriber
from mmfsdp.testing import RankError, run_ranks, single_rank

X = torch.arange(8)


def calls_of(act: Any) -> int:
    """Count the Python calls that are made within mmfsdp and torch."""
    count = 0

    def see(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(see)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def clipping_calls(rank: int) -> dict[int, tuple[int, int]]:
    found = {}
    for layers in (20, 80):
        model = mmfsdp.shard(nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers))))
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        mmfsdp.clip_grad_norm_(model, 1.0)
        ours = calls_of(lambda model=model: mmfsdp.clip_grad_norm_(model, 1.0))
        theirs = calls_of(lambda model=model: nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True))
        found[2 * layers] = ours, theirs
    return found


@pytest.mark.exhaustive
def test_clipping_is_linear_and_calls_less_than_torch() -> None:
    """Fails if a parameter is compared with every entry of every group: that was quadratic."""
    for found in run_ranks(clipping_calls, 2):
        for ours, theirs in found.values():
            assert ours < theirs
        few, many = found[40][0], found[160][0]
        assert many < 4.4 * few


SYNCS = ("item", "cpu", "tolist", "numpy", "__bool__", "__float__", "__int__", "nonzero", "is_nonzero", "synchronize")


class Blocking(TorchFunctionMode):
    """Counts what would make a host wait for its device, where mmfsdp asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        copies = name == "copy_" and isinstance(args[1], torch.Tensor) and args[0].device != args[1].device
        if (name in SYNCS or copies) and not kwargs.get("non_blocking") and self._is_ours():
            self.found[name] += 1
        return func(*args, **kwargs)

    def _is_ours(self) -> bool:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and "/torch/" in frame.f_code.co_filename:
            frame = frame.f_back
        return frame is not None and "/mmfsdp/" in frame.f_code.co_filename


def blocking_calls(rank: int, config: dict[str, Any]) -> dict[str, int]:
    model = mmfsdp.shard(build(), {"wrap": BLOCKS, **config})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    blocking = Blocking()

    def step() -> None:
        with mmfsdp.no_sync(model):
            model(X).square().mean().backward()
        model(X).square().mean().backward()
        mmfsdp.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    with blocking:
        for _ in range(3):
            step()
    return dict(blocking.found)


CONFIGS: list[dict[str, Any]] = [{}, {"sharding": {"ignored_parameters": ["head.*"]}}, {"sharding": "NO_SHARD"}]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_no_step_waits_for_the_device(config: dict[str, Any]) -> None:
    """Accumulation, backward, clipping and stepping, once the first step is over."""
    assert run_ranks(blocking_calls, 2, config) == [{}, {}]


def test_what_waits_is_counted() -> None:
    with single_rank():
        model = mmfsdp.shard(nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        with Blocking() as blocking:
            mmfsdp.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
        assert blocking.found


def collectives_of(rank: int) -> tuple[list[Any], list[Any]]:
    found = []
    for shard in (
        lambda model: mmfsdp.shard(model, {"wrap": {"kind": "module_class", "classes": "Sequential"}}),
        by_hand,
    ):
        layers = [nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(3)]
        model, issued = shard(nn.Sequential(*layers, nn.Linear(8, 2))), Issued()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            issued.found.clear()
            with issued:
                model(torch.ones(2, 8)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append([(name, nbytes) for name, nbytes, _ in issued.found])
    return found[0], found[1]


def by_hand(model: Any) -> Any:
    for block in model[:-1]:
        fully_shard(block)
    return fully_shard(model)


def test_a_step_sends_what_torch_sends_and_one_small_message() -> None:
    for ours, theirs in run_ranks(collectives_of, 2):
        assert len(ours) == len(theirs) + 1
        [added] = (Counter(ours) - Counter(theirs)).elements()
        assert added[0].startswith("c10d::allreduce")
        assert added[1] < 1000


def subscribers_of(rank: int, steps: int, how: str) -> list[str]:
    model: Any = mmfsdp.shard(build(), {"wrap": BLOCKS})
    state = find_sharded_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(X).square().mean().backward()
        if how == "optimizer":
            optimizer.step()
        elif how == "own":
            with torch.no_grad():
                for param in model.parameters():
                    param -= 0.1 * param.grad
        model.zero_grad()
    # Groups that stay gathered are watched for settings.
    freed = [group for group in state.groups if not stays_gathered(group)]
    watched = {name for group in freed for name in vars(group) if callable(vars(group)[name])}
    assert (state.lost_writes is None) == ("_to_sharded" not in watched)
    return sorted(watched)


@pytest.mark.parametrize(("steps", "how"), [(1, "optimizer"), (9, "own")])
def test_the_comparison_of_gathered_copies_leaves(steps: int, how: str) -> None:
    """Fails if what is written in a forward is looked for in every step, as without an optimizer of torch it was."""
    for watched in run_ranks(subscribers_of, 2, steps, how):
        assert not {"_to_sharded", "_to_unsharded", "_to_sharded_post_forward"} & set(watched)


def kept_bytes(rank: int) -> list[int]:
    model: Any = mmfsdp.shard(build(), {"wrap": BLOCKS})
    lost_writes: Any = find_sharded_model(model).lost_writes
    found = []
    for _ in range(6):
        model(X).square().mean().backward()
        tensors = [flags for _, flags in lost_writes._changed.values()]
        found.append(sum(flags.numel() for flags in tensors))
        model.zero_grad()
    return found


def test_the_comparison_keeps_one_flag_per_parameter() -> None:
    count = len([param for param in build().parameters() if param.dim()])
    for found in run_ranks(kept_bytes, 2):
        assert found == [count] * 6


class Writing(nn.Module):
    """Writes its weight in forward, where a copy is gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.inner.weight.add_(1.0)
        return self.inner(x)


def own_loop(rank: int) -> int:
    model = mmfsdp.shard(
        nn.Sequential(Writing(), nn.Linear(8, 8)), {"wrap": {"kind": "module_class", "classes": "Writing"}}
    )
    for step in range(20):
        model(torch.ones(2, 8)).sum().backward()
        model.zero_grad()
        assert step < 10
    return 0


def test_a_loop_without_an_optimizer_of_torch_hears_of_lost_writes() -> None:
    with pytest.raises(RankError, match=r"'0.inner.weight' was written in a forward"):
        run_ranks(own_loop, 2)


class Order(Subscriber):
    """Notes its turn."""

    def __init__(self, turn: Any, seen: list[str]) -> None:
        self.turn, self.seen = turn, seen

    def before_gather(self, group: Any) -> None:
        self.seen.append(f"before {self.turn.name}")

    def gathered(self, group: Any) -> None:
        self.seen.append(f"after {self.turn.name}")


def test_subscribers_are_called_in_the_written_order_and_leave_nothing() -> None:
    from mmfsdp.runtime.torch_fsdp2.observing import Turn, subscribe, unsubscribe

    with single_rank():
        model: Any = fully_shard(nn.Linear(2, 2))
        from mmfsdp.runtime.torch_fsdp2.param_groups import groups_of

        seen: list[str] = []
        groups = groups_of([model])
        late, early = Order(Turn.COMPARING, seen), Order(Turn.MEASURING, seen)
        for subscriber in (late, early):
            subscribe(subscriber, groups)
        model(torch.ones(1, 2))
        assert seen == ["before MEASURING", "before COMPARING", "after COMPARING", "after MEASURING"]
        unsubscribe(late, groups)
        unsubscribe(early, groups)
        assert "_to_unsharded" not in vars(groups[0])


def own_setting(rank: int) -> tuple[str, float]:
    torch.manual_seed(0)
    plain = nn.Linear(4, 2)
    model: Any = mmfsdp.shard(nn.Linear(4, 2))
    mmfsdp.load_model_state_dict(model, plain.state_dict())
    x = [torch.full((1, 4), float(step)) for step in (1, 2)]
    model.set_requires_gradient_sync(False)
    model(x[0]).square().sum().backward()
    with pytest.raises(ShardStateError) as caught:
        mmfsdp.clip_grad_norm_(model, 1.0)
    model.set_requires_gradient_sync(True)
    model(x[1]).square().sum().backward()
    norm = mmfsdp.clip_grad_norm_(model, 1e9)
    for part in x:
        plain(part).square().sum().backward()
    return caught.value.message, abs(float(norm) / float(nn.utils.clip_grad_norm_(plain.parameters(), 1e9)) - 1)


def test_the_setting_of_fully_shard_is_the_user_s() -> None:
    """Fails if each forward sets `set_requires_gradient_sync` anew."""
    for message, difference in run_ranks(own_setting, 2):
        assert "its gradients were not reduced over ranks" in message
        assert difference < 1e-6


def in_no_grad(rank: int) -> bool:
    model = mmfsdp.shard(build(), {"wrap": BLOCKS})
    seen: list[bool] = []
    original = torch.Tensor.copy_

    class Modes(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is original:
                seen.append(torch.is_grad_enabled())
            return func(*args, **(kwargs or {}))

    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), Modes():
            model(X)
    return any(seen)


def test_gathering_does_not_record_gradients_within_no_grad() -> None:
    assert run_ranks(in_no_grad, 2) == [False, False]
