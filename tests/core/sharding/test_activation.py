"""Activation checkpointing: what is recomputed, kept and moved, and that nothing else about the model changes."""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import io
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from mmfsdp.errors import ConfigError, PlanError, PlanMismatchError, ShardStateError
from mmfsdp.sharding.activation import DEFAULT_SAVE_OPS, apply_activation_checkpointing


@dataclasses.dataclass(frozen=True)
class Plan:
    fqns: tuple[str, ...] = ("blocks.0", "blocks.1")
    mode: str = "full"
    save_ops: tuple[str, ...] = ()
    offload: bool = False
    preserve_rng_state: bool = True
    use_reentrant: bool = False
    early_stop: bool = True
    determinism_check: str = "default"


ALL_KINDS = [
    Plan(),
    Plan(mode="ops"),
    Plan(offload=True),
    Plan(mode="ops", offload=True),
    Plan(use_reentrant=True),
    Plan(early_stop=False, determinism_check="none"),
]
kinds = pytest.mark.parametrize("plan", ALL_KINDS, ids=lambda plan: _name(plan))


def _name(plan: Plan) -> str:
    changed = [f.name for f in dataclasses.fields(plan) if getattr(plan, f.name) != f.default]
    return "-".join(changed) or "full"


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make(plan: Plan | None = None, build: Callable[[], nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    model = build()
    if plan is not None:
        apply_activation_checkpointing(model, plan)  # type: ignore[arg-type]
    return model


def batch() -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(1))


def grads(model: nn.Module, *args: Any, seed: int = 2, **kwargs: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    if not args and not kwargs:
        args = (batch(),)
    model(*args, **kwargs).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


class Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def backward_operators(model: nn.Module, *args: Any) -> Counter[str]:
    loss = model(*(args or (batch(),))).sum()
    with Operators() as operators:
        loss.backward()
    return operators.count


class TestRecomputation:
    @kinds
    def test_gradients_are_bit_equal(self, plan: Plan) -> None:
        assert_same(grads(make(plan)), grads(make()))

    def test_full_recomputes_every_listed_operator_once(self) -> None:
        assert backward_operators(make())["aten::gelu"] == 0
        count = backward_operators(make(Plan(("blocks.1",), early_stop=False)))
        assert (count["aten::gelu"], count["aten::addmm"], count["aten::native_layer_norm"]) == (1, 2, 1)

    def test_full_costs_one_more_forward_in_flops(self) -> None:
        def flops(model: nn.Module) -> tuple[int, int]:
            with FlopCounterMode(display=False) as forward:
                loss = model(batch()).sum()
            with FlopCounterMode(display=False) as backward:
                loss.backward()
            return forward.get_total_flops(), backward.get_total_flops()

        forward, backward = flops(make())
        assert flops(make(Plan(("",), early_stop=False))) == (forward, backward + forward)
        assert flops(make(Plan(("",), mode="ops", early_stop=False))) == (forward, backward)

    def test_early_stop_spares_what_backward_does_not_need(self) -> None:
        early, late = Plan(("blocks.0",)), Plan(("blocks.0",), early_stop=False)
        assert backward_operators(make(early))["aten::addmm"] < backward_operators(make(late))["aten::addmm"]

    @pytest.mark.parametrize("offload", [False, True])
    def test_ops_recomputes_the_rest_only(self, offload: bool) -> None:
        count = backward_operators(make(Plan(mode="ops", offload=offload, early_stop=False)))
        assert count["aten::addmm"] == 0
        assert count["aten::gelu"] == 2

    def test_listed_operators_replace_the_default_list(self) -> None:
        plan = Plan(mode="ops", save_ops=("aten.gelu", "aten.native_layer_norm.default"), early_stop=False)
        count = backward_operators(make(plan))
        assert (count["aten::addmm"], count["aten::gelu"], count["aten::native_layer_norm"]) == (4, 0, 0)

    @pytest.mark.parametrize("offload", [False, True])
    def test_default_list_covers_convolution_and_attention(self, offload: bool) -> None:
        class Attention(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv = nn.Conv1d(16, 16, 1)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                q = self.conv(x.t()[None]).transpose(1, 2).reshape(1, 4, 2, 8).transpose(1, 2).contiguous()
                return F.scaled_dot_product_attention(q, q, q).cos()

        def operators(plan: Plan) -> Counter[str]:
            model = make(plan, Attention)
            with Operators() as forward:
                loss = model(batch()).sum()
            with Operators() as backward:
                loss.backward()
            expensive = [n for n in forward.count if "attention" in n or n == "aten::convolution" or n == "aten::bmm"]
            assert len(expensive) == 2
            return Counter({name: backward.count[name] for name in expensive})

        assert set(operators(Plan(("",), early_stop=False)).values()) == {1}
        assert set(operators(Plan(("",), "ops", offload=offload, early_stop=False)).values()) == {0}

    def test_every_default_operator_exists_in_some_torch(self) -> None:
        known = {each.split(".")[0].replace("::", ".") for each in torch._C._dispatch_get_all_op_names()}
        assert len([name for name in DEFAULT_SAVE_OPS if name in known]) > len(DEFAULT_SAVE_OPS) // 2

    @pytest.mark.parametrize(
        "plan", [Plan(), Plan(mode="ops"), Plan(mode="ops", offload=True), Plan(use_reentrant=True)]
    )
    def test_nested_regions(self, plan: Plan) -> None:
        nested = dataclasses.replace(plan, fqns=("", "blocks.0", "blocks.0.up"))
        assert_same(grads(make(nested)), grads(make()))

    def test_nesting_trades_a_third_forward(self) -> None:
        assert backward_operators(make(Plan(("", "blocks.0"), early_stop=False)))["aten::gelu"] == 3
        assert backward_operators(make(Plan(("", "blocks.0"), "ops", early_stop=False)))["aten::addmm"] == 0

    @pytest.mark.parametrize("state", ["eval", "no_grad"])
    def test_without_training_forward_runs_plainly(self, state: str) -> None:
        model = make(Plan(use_reentrant=True))
        if state == "eval":
            assert backward_operators(model.eval())["aten::gelu"] == 0
        else:
            with torch.no_grad():
                assert not model(batch()).requires_grad


class TestMemory:
    def saved_bytes(self, model: nn.Module) -> int:
        sizes: dict[int, int] = {}
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if (pointer := tensor.untyped_storage().data_ptr()) not in parameters:
                sizes[pointer] = tensor.untyped_storage().nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            kept = model(batch())
        assert kept.requires_grad
        return sum(sizes.values())

    def test_only_the_inputs_of_regions_are_saved(self) -> None:
        inputs = 4 * 16 * 4  # bytes of one activation between blocks
        # The inputs of two blocks and of the head.
        assert self.saved_bytes(make(Plan())) == 3 * inputs
        assert self.saved_bytes(make()) > 12 * inputs

    def test_a_region_holds_nothing_but_what_autograd_saved(self) -> None:
        held: list[weakref.ref[torch.Tensor]] = []

        class Outer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.region = nn.Linear(16, 16), KeywordOnly()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                hidden, extra = self.first(x), self.first(x + 1)
                held.extend([weakref.ref(hidden), weakref.ref(extra)])
                return self.region(hidden, extra={"deep": [extra]})

        model = make(Plan(("region",), offload=True), Outer)
        # On a CPU save_on_cpu need not copy. A hook below the region's own copies in its place, so the originals
        # must be gone unless the region itself still refers to them.
        real = torch.Tensor.cpu
        try:
            torch.Tensor.cpu = lambda tensor: real(tensor).clone()  # type: ignore[method-assign]
            loss = model(batch()).sum()
        finally:
            torch.Tensor.cpu = real  # type: ignore[method-assign]
        assert [reference() for reference in held] == [None, None]
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())

    def test_offload_packs_each_region_input_to_cpu(self) -> None:
        class Moves(TorchFunctionMode):
            def __init__(self) -> None:
                self.pointers: list[int] = []

            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func is torch.Tensor.cpu and args[0].numel():  # empty: until 2.12, what anchors a region
                    self.pointers.append(args[0].data_ptr())
                return func(*args, **(kwargs or {}))

        def moved(plan: Plan) -> bool:
            inputs: list[int] = []
            model = make(plan)
            for block in model.blocks:
                block.register_forward_pre_hook(lambda _, args: inputs.append(args[0].data_ptr()))
            with Moves() as moves:
                model(batch())
            assert moves.pointers in ([], inputs)
            return bool(moves.pointers)

        assert moved(Plan(offload=True))
        assert moved(Plan(mode="ops", offload=True))
        assert not moved(Plan())

    def test_offloaded_results_are_copies(self) -> None:
        # In-place work on a kept result is an error with torch's own contexts, and harmless for a copy. ELU: applied
        # twice, it shows.
        def build() -> nn.Module:
            return nn.Sequential(nn.Linear(16, 16), nn.ELU(inplace=True), nn.Linear(16, 1))

        with pytest.raises(RuntimeError, match="has been mutated"):
            grads(make(Plan(("",), "ops"), build))
        assert_same(grads(make(Plan(("",), "ops", offload=True), build)), grads(make(build=build)))

    @pytest.mark.parametrize("plan", [p for p in ALL_KINDS if p.mode == "full" or p.offload], ids=_name)
    def test_second_backward_through_a_kept_graph(self, plan: Plan) -> None:
        model = make(plan)
        model.zero_grad()
        loss = model(batch()).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        want = grads(make())
        assert all(torch.equal(p.grad, 2 * want[name]) for name, p in model.named_parameters())

    def test_second_backward_is_refused_where_torch_keeps_the_results(self) -> None:
        loss = make(Plan(mode="ops"))(batch()).sum()
        loss.backward(retain_graph=True)
        # Until torch 2.12 the message is that of a recomputation with other results.
        with pytest.raises(RuntimeError, match=r"backward an extra time|Recomputed values .* have different metadata"):
            loss.backward()

    def test_offload_notices_another_number_of_operators(self) -> None:
        class Growing(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear, self.calls = nn.Linear(16, 16), 0

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.calls += 1
                with torch.no_grad():
                    steps = [self.linear(x).sum() for _ in range(self.calls)]
                return self.linear(x).cos() * sum(steps)

        with pytest.raises(RuntimeError, match=r"addmm\.default runs more often in the recomputation"):
            grads(make(Plan(("",), "ops", offload=True), Growing))

    def test_model_is_freed_without_garbage_collection(self) -> None:
        model = make(Plan())
        block = weakref.ref(model.blocks[0])
        gc.collect()
        gc.disable()
        try:
            del model
            assert block() is None
        finally:
            gc.enable()

    @pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
    @pytest.mark.parametrize("plan", ALL_KINDS, ids=_name)
    def test_keyword_inputs_and_dropout(self, plan: Plan, device: str) -> None:
        class Outer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList(Block(0.5) for _ in range(2))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.blocks[1](x=self.blocks[0](x=x))

        want = grads(make(build=Outer).to(device), batch().to(device))
        got = grads(make(plan, Outer).to(device), batch().to(device))
        for name in want:
            torch.testing.assert_close(got[name], want[name])


class KeywordOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, *, extra: dict[str, Any]) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * torch.sin(extra["deep"][0])


class TestInputsAndOutputs:
    @kinds
    def test_structures_in_keywords_get_their_gradients(self, plan: Plan) -> None:
        def run(model: nn.Module) -> dict[str, torch.Tensor]:
            x, deep = batch().requires_grad_(), batch().requires_grad_()
            result = grads(model, x=x, extra={"deep": [deep], "flag": None, "word": "kept"})
            assert x.grad is not None
            assert deep.grad is not None
            return {**result, "x": x.grad, "deep": deep.grad}

        plan = dataclasses.replace(plan, fqns=("",))
        assert_same(run(make(plan, KeywordOnly)), run(make(build=KeywordOnly)))

    @kinds
    def test_results_may_be_structures(self, plan: Plan) -> None:
        class Structured(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(16, 16)

            def forward(self, x: torch.Tensor) -> dict[str, Any]:
                y = self.linear(x).cos()
                return {"loss": y.sum(), "more": [y, (y.argmax(),)], "name": "seven", "number": 7, "none": None}

        model = make(dataclasses.replace(plan, fqns=("",)), Structured)
        out, want = model(batch()), make(build=Structured)(batch())
        assert (out["name"], out["number"], out["none"]) == ("seven", 7, None)
        assert torch.equal(out["more"][1][0], want["more"][1][0])
        (out["loss"] + out["more"][0].sum()).backward()
        (want["loss"] * 2).backward()
        assert model.linear.weight.grad is not None
        reference = torch.autograd.grad(Structured.forward(model, batch())["loss"] * 2, model.linear.weight)[0]
        torch.testing.assert_close(model.linear.weight.grad, reference)

    def test_default_hands_the_callers_own_containers_to_the_module(self) -> None:
        class Collecting(nn.Linear):
            def forward(self, x: torch.Tensor, seen: list[str]) -> torch.Tensor:  # type: ignore[override]
                seen.append("ran")
                return super().forward(x).cos()

        torch.manual_seed(0)
        model, seen = Collecting(16, 16), []
        apply_activation_checkpointing(model, Plan(("",)))  # type: ignore[arg-type]
        model(batch(), seen=seen)
        assert seen == ["ran"]

    def test_reentrant_trains_though_no_input_wants_a_gradient(self) -> None:
        model = make(Plan(use_reentrant=True))
        assert not batch().requires_grad
        assert_same(grads(model), grads(make()))

    def test_reentrant_leaves_frozen_regions_out_of_the_graph(self) -> None:
        model = make(Plan(use_reentrant=True))
        model.blocks.requires_grad_(False)
        assert not model.blocks[0](batch()).requires_grad
        assert grads(model).keys() == {"head.weight", "head.bias"}

    @kinds
    def test_shared_module_is_one_region(self, plan: Plan) -> None:
        def build() -> nn.Module:
            shared = Block()
            return nn.Sequential(shared, nn.Tanh(), shared)

        model = make(dataclasses.replace(plan, fqns=("0", "2")), build)
        assert_same(grads(model), grads(make(build=build)))


class TestSideEffects:
    @pytest.mark.parametrize("plan", ALL_KINDS, ids=_name)
    def test_dropout_masks_repeat(self, plan: Plan) -> None:
        def build() -> nn.Module:
            return Net(dropout=0.5)

        assert_same(grads(make(plan, build)), grads(make(build=build)))

    def test_dropout_masks_differ_without_rng_state(self) -> None:
        def build() -> nn.Module:
            return Net(dropout=0.5)

        got, want = grads(make(Plan(preserve_rng_state=False), build)), grads(make(build=build))
        assert any(not torch.equal(got[name], want[name]) for name in want)

    @kinds
    def test_running_statistics_are_updated_once(self, plan: Plan) -> None:
        def build() -> nn.Module:
            return nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.BatchNorm1d(8, momentum=None))

        plan = dataclasses.replace(plan, fqns=("",), early_stop=False)
        model, reference = make(plan, build), make(build=build)
        identities = [id(buffer) for buffer in model.buffers()]
        for seed in range(3):
            assert_same(grads(model, seed=seed), grads(reference, seed=seed))
        assert_same(dict(model.named_buffers()), dict(reference.named_buffers()))
        assert [id(buffer) for buffer in model.buffers()] == identities

    def test_accumulation(self) -> None:
        model, reference = make(Plan()), make()
        for each in (model, reference):
            for micro in batch().split(2):
                each(micro).sum().backward()
        for got, want in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(got.grad, want.grad)

    def test_nondeterminism_is_found_unless_the_check_is_off(self) -> None:
        class Growing(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear, self.calls = nn.Linear(16, 16), 0

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.calls += 1
                return self.linear(x[: self.calls]).cos()

        with pytest.raises(RuntimeError, match="different metadata"):
            grads(make(Plan(("",)), Growing))
        with pytest.raises(RuntimeError, match=r"(?i)size|shape"):  # torch's engine stumbles over it later
            grads(make(Plan(("",), determinism_check="none"), Growing))


class TestTheModelStaysItself:
    @kinds
    def test_names_and_classes(self, plan: Plan) -> None:
        model, plain = make(dataclasses.replace(plan, fqns=("", "blocks.0"))), make()
        for names in ("named_parameters", "named_buffers", "named_modules"):
            assert [n for n, _ in getattr(model, names)()] == [n for n, _ in getattr(plain, names)()]
        assert list(model.state_dict()) == list(plain.state_dict())
        assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
        assert repr(model) == repr(plain)
        assert inspect.signature(model.blocks[0].forward) == inspect.signature(plain.blocks[0].forward)

    @kinds
    def test_deepcopy_runs_the_copys_own_weights(self, plan: Plan) -> None:
        model = make(plan)
        clone = copy.deepcopy(model)
        for parameter in model.parameters():
            nn.init.constant_(parameter, float("nan"))
        assert_same(grads(clone), grads(make()))
        if plan.mode == "full":
            assert backward_operators(clone)["aten::gelu"] == 2
        assert all(p.grad is None for p in model.parameters())

    @kinds
    def test_pickling_keeps_the_checkpointing(self, plan: Plan) -> None:
        file = io.BytesIO()
        torch.save(make(plan), file)
        file.seek(0)
        model = torch.load(file, weights_only=False)
        assert_same(grads(model), grads(make()))
        assert backward_operators(model)["aten::gelu"] == 2

    def test_somebody_elses_instance_forward_keeps_working(self) -> None:
        model = make()
        block = model.blocks[0]
        block.forward = lambda x: 2 * Block.forward(block, x)
        want = grads(model)
        apply_activation_checkpointing(model, Plan())  # type: ignore[arg-type]
        assert_same(grads(model), want)
        assert backward_operators(model)["aten::gelu"] == 2

    def test_hooks_run_once(self) -> None:
        model, calls = make(Plan()), []
        model.blocks[0].register_forward_hook(lambda *_: calls.append("forward"))
        grads(model)
        assert calls == ["forward"]


class TestTransforms:
    @pytest.mark.sample("ops-eager")
    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    @pytest.mark.parametrize("mode", ["full", "ops"])
    def test_compiles_into_one_graph(self, backend: str, mode: str) -> None:
        torch.compiler.reset()
        compiled = torch.compile(make(Plan(mode=mode)), backend=backend, fullgraph=True)
        got, want = grads(compiled), grads(make())
        for name, value in want.items():
            torch.testing.assert_close(got[f"_orig_mod.{name}"], value)

    @pytest.mark.parametrize("plan", [Plan(offload=True), Plan(use_reentrant=True)], ids=_name)
    def test_compile_refuses_what_it_cannot_honour(self, plan: Plan) -> None:
        torch.compiler.reset()
        with pytest.raises(ConfigError, match=r"does not work under torch\.compile"):
            torch.compile(make(plan), backend="eager")(batch())

    @kinds
    def test_functional_call(self, plan: Plan) -> None:
        model, other = make(plan), {name: torch.full_like(p, 0.1) for name, p in make().named_parameters()}
        with torch.no_grad():
            got = torch.func.functional_call(model, other, batch())
            assert torch.equal(got, torch.func.functional_call(make(), other, batch()))

    @kinds
    def test_functional_call_then_backward_is_refused_rather_than_wrong(self, plan: Plan) -> None:
        other = {name: torch.full_like(p, 0.1).requires_grad_() for name, p in make().named_parameters()}
        loss = torch.func.functional_call(make(plan), other, batch()).sum()
        with pytest.raises(ShardStateError, match="was replaced between forward and backward") as caught:
            loss.backward()
        assert caught.value.context["fqn"] == "blocks.1"


class TestErrors:
    @pytest.mark.parametrize(
        ("plan", "error", "words"),
        [
            (Plan(("blocks.7",)), PlanMismatchError, "no module 'blocks.7'. Did you mean 'blocks."),
            (Plan(("blocks.0", "block.1")), PlanMismatchError, "Did you mean 'blocks.1'"),
            (Plan(("blocks",)), PlanError, "A ModuleList has no forward to recompute"),
            (Plan(("head", "head")), PlanError, "listed twice"),
            (Plan(mode="op"), ConfigError, "mode='op' is not known. Did you mean 'ops'?"),
            (Plan(determinism_check="strict"), ConfigError, "Accepted: 'default', 'none'"),
            (
                Plan(mode="ops", save_ops=("aten.mm", "aten.convolutoin")),
                ConfigError,
                "Did you mean 'aten.convolution'",
            ),
            (Plan(mode="ops", save_ops=("aten.mm.defualt",)), ConfigError, "Did you mean 'aten.mm.default'"),
            (Plan(mode="ops", save_ops=("mm",)), ConfigError, "'mm' is not an operator"),
            (Plan(mode="ops", save_ops=("aten.relu_",)), ConfigError, "writes into its arguments"),
            (Plan(save_ops=("aten.mm",)), ConfigError, "save_ops is only used with mode='ops'"),
            (Plan(mode="ops", use_reentrant=True), ConfigError, "cannot be combined with mode='ops'"),
            (Plan(offload=True, use_reentrant=True), ConfigError, "cannot be combined with offload=True"),
        ],
    )
    def test_refusals_leave_the_model_untouched(self, plan: Plan, error: type[Exception], words: str) -> None:
        model = make()
        with pytest.raises(error) as caught:
            apply_activation_checkpointing(model, plan)  # type: ignore[arg-type]
        assert words in str(caught.value)
        assert backward_operators(model)["aten::gelu"] == 0

    def test_applying_twice_names_the_module(self) -> None:
        model = make(Plan(("blocks.1",)))
        with pytest.raises(PlanError, match="already applied") as caught:
            apply_activation_checkpointing(model, Plan())  # type: ignore[arg-type]
        assert caught.value.context == {"fqn": "blocks.1"}
        assert backward_operators(model)["aten::gelu"] == 1
