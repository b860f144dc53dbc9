"""MMFullyShardedDataParallel: every form of every argument, and steps that honour the model's own."""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from mmengine._strategy.fsdp import FSDPStrategy as MMEngineStrategy
from mmengine.config import ConfigDict
from mmengine.model import is_model_wrapper
from mmengine.optim import AmpOptimWrapper as MMEngineAmp
from mmengine.optim import OptimWrapper
from mmengine.registry import FUNCTIONS, HOOKS, MODEL_WRAPPERS, MODELS, OPTIM_WRAPPERS, STRATEGIES
from tests.mmengine_adapter.toy import Block, ToyModel
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
)

from mmfsdp.errors import ConfigError
from mmfsdp.runtime.sharded_model import find_sharded_model
from mmfsdp.testing import run_ranks, single_rank
from mmfsdp.torch_style import translate_arguments
from mmfsdp_mmengine import (
    FSDP_WRAP_POLICIES,
    AmpOptimWrapper,
    EMAHook,
    FSDPStrategy,
    MMDistributedDataParallel,
    MMFullyShardedDataParallel,
)
from mmfsdp_mmengine.configs.arguments import wrapper_arguments
from mmfsdp_mmengine.registry import ours_for

MMEngineEMAHook = EMAHook.__mro__[1]
BLOCKS = ["blocks.0", "blocks.1"]


@FUNCTIONS.register_module(force=True)
def toy_policy(module: nn.Module, recurse: bool, nonwrapped_numel: int, cls: type = Block) -> bool:
    return recurse or isinstance(module, cls)


@FSDP_WRAP_POLICIES.register_module(force=True)
def old_policy(module: nn.Module, recurse: bool, unwrapped_params: int, min_num_params: int = 1000) -> bool:
    return unwrapped_params >= min_num_params


@FUNCTIONS.register_module(force=True)
def is_block(module: nn.Module, kind: str = "Block") -> bool:
    return type(module).__name__ == kind


@FUNCTIONS.register_module(force=True)
def init_constant(module: nn.Module, value: float = 0.25) -> None:
    for param in module.parameters(recurse=False):
        nn.init.constant_(param, value)


def make_group(world: int) -> dist.ProcessGroup:
    group = dist.new_group(list(range(world)))
    assert group is not None
    return group


LAMBDA = functools.partial(size_based_auto_wrap_policy, min_num_params=1000)
POLICIES: dict[str, Any] = {
    "registered": "toy_policy",
    "scoped": "mmengine.toy_policy",
    "registered-1.11": "old_policy",
    "dotted": "tests.mmengine_adapter.test_wrapper.toy_policy",
    "colon": "tests.mmengine_adapter.test_wrapper:toy_policy",
    "callable": toy_policy,
    "partial": LAMBDA,
    "dict": {"type": "old_policy", "min_num_params": 1000},
    "dict-callable": {"type": toy_policy, "cls": Block},
    "size": {"type": "size_based_auto_wrap_policy", "min_num_params": 1000},
    "size-torch-1.11": {"type": "default_auto_wrap_policy", "min_num_params": 1000},
    "transformer": {
        "type": "torch.distributed.fsdp.wrap.transformer_auto_wrap_policy",
        "transformer_layer_cls": {"Block"},
    },
    "transformer-class": {"type": "transformer_auto_wrap_policy", "transformer_layer_cls": {Block}},
    "module-class": {"type": "ModuleWrapPolicy", "module_classes": ["tests.mmengine_adapter.toy.Block"]},
    "one-class": {"type": ModuleWrapPolicy, "module_classes": "Block"},
    "custom": {"type": "CustomPolicy", "lambda_fn": "is_block"},
    "custom-nested": {"type": CustomPolicy, "lambda_fn": {"type": "is_block", "kind": "Block"}},
    "object": ModuleWrapPolicy({Block}),
    "or": {"type": "or_policy", "policies": ["toy_policy", {"type": "size_based_auto_wrap_policy"}]},
    "declared": {"kind": "module_name", "patterns": "blocks.*"},
}


def units(rank: int, name: str) -> tuple[list[str], bool]:
    policy = POLICIES[name]
    before = copy.deepcopy(policy)
    found = []
    for _ in range(2):  # a config is built from more than once
        config = {"type": "MMFullyShardedDataParallel", "auto_wrap_policy": policy}
        model = MODEL_WRAPPERS.build(config, default_args={"module": ToyModel()})
        found.append([unit.fqn for unit in model.plan.units if unit.fqn])
        assert [name for name, part in model.module.named_modules() if name and isinstance(part, FSDPModule)] == found[
            0
        ]
    assert found[0] == found[1]
    same = isinstance(policy, ModuleWrapPolicy) or repr(policy) == repr(before)
    return found[0], same


class TestPolicies:
    @pytest.mark.exhaustive
    def test_every_form_gives_the_same_units_and_is_not_changed(self) -> None:
        for name in POLICIES:
            assert run_ranks(units, 2, name) == [(BLOCKS, True)] * 2, name


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # arguments, and what the plan must say
    "defaults": ({}, {"strategy": "FULL_SHARD", "engine": "fsdp2", "backward_prefetch": "pre", "cpu_offload": False}),
    "strategy-name": ({"sharding_strategy": "SHARD_GRAD_OP"}, {"strategy": "SHARD_GRAD_OP"}),
    "strategy-enum": (
        {"sharding_strategy": ShardingStrategy.NO_SHARD},
        {"strategy": "NO_SHARD", "engine": "replicate"},
    ),
    "prefetch-post": ({"backward_prefetch": "post"}, {"backward_prefetch": "post"}),
    "prefetch-name": ({"backward_prefetch": "BACKWARD_POST"}, {"backward_prefetch": "post"}),
    "prefetch-enum": ({"backward_prefetch": BackwardPrefetch.BACKWARD_POST}, {"backward_prefetch": "post"}),
    "prefetch-none": ({"backward_prefetch": None}, {"backward_prefetch": "none"}),
    "offload-bool": ({"cpu_offload": True}, {"cpu_offload": True}),
    "offload-object": ({"cpu_offload": CPUOffload(offload_params=True)}, {"cpu_offload": True}),
    "offload-dict": ({"cpu_offload": {"type": "CPUOffload", "offload_params": True}}, {"cpu_offload": True}),
    "precision-dict": (
        {"mixed_precision": {"param_dtype": "bfloat16", "reduce_dtype": "float32", "buffer_dtype": "float32"}},
        {"buffer_dtype": "float32"},
    ),
    "precision-type": (
        {"mixed_precision": {"type": "MixedPrecision", "param_dtype": torch.bfloat16, "buffer_dtype": "fp32"}},
        {"buffer_dtype": "float32"},
    ),
    "precision-object": ({"mixed_precision": MixedPrecision(buffer_dtype=torch.float32)}, {"buffer_dtype": "float32"}),
    "precision-classes": (
        {"mixed_precision": {"param_dtype": "bfloat16", "_module_classes_to_ignore": ["LayerNorm"]}},
        {"engine": "fsdp2"},
    ),
    "group-dict": ({"process_group": {"ranks": [0, 1]}}, {"engine": "fsdp2"}),
    "group-type": ({"process_group": {"type": make_group, "world": 2}}, {"engine": "fsdp2"}),
    "mesh-dict": ({"device_mesh": {"mesh_shape": (2,)}}, {"engine": "fsdp2"}),
    "flat": ({"use_orig_params": False}, {"engine": "fsdp1", "use_orig_params": False}),
    "engine": ({"engine": "fsdp1"}, {"engine": "fsdp1"}),
    "ignored": ({"ignored_parameters": ["head.bias"], "ignored_modules": ["patch"]}, {"engine": "fsdp2"}),
    "checkpointing": ({"activation_checkpointing": {"check_fn": {"type": "is_block", "kind": "Block"}}}, {}),
    "device-id": ({"device_id": 0, "limit_all_gathers": True, "forward_prefetch": True}, {"forward_prefetch": 1}),
}


def others(rank: int, name: str) -> dict[str, Any]:
    arguments, expected = OTHERS[name]
    before = repr(arguments)
    model = MMFullyShardedDataParallel(ToyModel(), auto_wrap_policy="toy_policy", **arguments)
    assert repr(arguments) == before
    found = {key: getattr(model.plan, key) for key in expected}
    batch = {"inputs": torch.ones(2, 3, 8, 8), "labels": torch.zeros(2, dtype=torch.long)}
    optim = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    loss = model.train_step(batch, optim)["loss"]
    assert torch.isfinite(loss)
    if name == "ignored":
        assert {param.fqn for param in model.plan.ignored_params} == {"head.bias", "patch.weight", "patch.bias"}
    if name == "checkpointing":
        assert list(model.plan.activation_checkpointing.fqns) == BLOCKS
    if name == "precision-classes":
        assert "blocks.0.norm" in {unit.fqn for unit in model.plan.units}
    if name.startswith("precision-dict"):
        assert model.plan.units[0].precision.param_dtype == "bfloat16"
    return found


def init_functions(rank: int) -> list[float]:
    found = []
    for given in ("init_constant", init_constant, {"type": "init_constant", "value": 0.25}):
        before = copy.deepcopy(given)
        with torch.device("meta"):
            inner = Block(4)
        model = MMFullyShardedDataParallel(inner, param_init_fn=given)
        assert given == before
        found.append(float(next(iter(model.parameters())).full_tensor().mean()))
    return found


class TestArguments:
    @pytest.mark.exhaustive
    def test_every_form_of_the_others(self) -> None:
        for name, (_, expected) in OTHERS.items():
            assert run_ranks(others, 2, name) == [expected] * 2, name

    def test_param_init_fn(self) -> None:
        assert run_ranks(init_functions, 2) == [[0.25] * 3] * 2


class TestRegistered:
    @pytest.mark.parametrize("scope", ["", "mmengine.", "mmfsdp_mmengine."])
    def test_in_place_of_the_stock_classes(self, scope: str) -> None:
        assert STRATEGIES.get(f"{scope}FSDPStrategy") is FSDPStrategy
        assert MODEL_WRAPPERS.get(f"{scope}MMFullyShardedDataParallel") is MMFullyShardedDataParallel
        assert MODEL_WRAPPERS.get(f"{scope}MMDistributedDataParallel") is MMDistributedDataParallel
        assert OPTIM_WRAPPERS.get(f"{scope}AmpOptimWrapper") is AmpOptimWrapper

    def test_stock_classes_as_objects(self) -> None:
        replaced = MMEngineStrategy, MMEngineEMAHook, MMEngineAmp
        assert [ours_for(cls) for cls in replaced] == [FSDPStrategy, EMAHook, AmpOptimWrapper]
        given = ConfigDict(type=MMEngineEMAHook, momentum=0.1)
        assert type(HOOKS.build(given)) is EMAHook
        assert given == {"type": MMEngineEMAHook, "momentum": 0.1}
        derived = type("Own", (MMEngineAmp,), {})
        assert ours_for(derived) is derived


def identities(rank: int, engine: str) -> dict[str, Any]:
    model = MMFullyShardedDataParallel(ToyModel(), auto_wrap_policy="toy_policy", engine=engine)
    return {
        "wrapper": isinstance(model, MMFullyShardedDataParallel) and is_model_wrapper(model),
        "torch": isinstance(model, FullyShardedDataParallel),
        "units": sum(isinstance(part, FullyShardedDataParallel) for part in model.modules()),
        "module": isinstance(model.module, ToyModel),
        "names": [name for name, _ in model.named_parameters()],
        "passes": model.drop_rates,
    }


class TestIdentity:
    @pytest.mark.parametrize(("engine", "is_torch", "units"), [("fsdp2", False, 0), ("fsdp1", True, 3)])
    def test_instances_and_names(self, engine: str, is_torch: bool, units: int) -> None:
        for found in run_ranks(identities, 2, engine):
            assert found == {
                "wrapper": True,
                "torch": is_torch,
                "units": units,
                "module": True,
                "names": [name for name, _ in ToyModel().named_parameters()],
                "passes": ToyModel().drop_rates,
            }


@MODELS.register_module(force=True)
class OwnSteps(ToyModel):
    """Has steps of its own, which call the model as unsharded ones do."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, torch.Tensor]:
        with optim_wrapper.optim_context(self):
            losses = self._run_forward(self.data_preprocessor(data, True), mode="loss")
        loss, log_vars = self.parse_losses({"loss": 2 * losses["loss"]})
        optim_wrapper.update_params(loss)
        return {**log_vars, "own": torch.tensor(1.0)}

    def val_step(self, data: Any) -> Any:
        return ["own", *super().val_step(data)]

    def test_step(self, data: Any) -> Any:
        return ["test", *super().test_step(data)]


def gradients_are_reduced(model: nn.Module) -> bool:
    """Whether the last backward communicated gradients."""
    if not isinstance(model, MMDistributedDataParallel):
        return not find_sharded_model(model).unreduced
    grad = model.module.head.weight.grad
    if grad is None:  # stepped
        return True
    largest, least = grad.clone(), grad.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return torch.equal(largest, least)


def own_steps(rank: int, wrapper: str, cls: str, engine: str | None) -> dict[str, Any]:
    """Train two accumulating rounds and compare with the model alone on the whole batch."""
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(4, 3, 8, 8, generator=generator) for _ in range(4)]
    labels = torch.tensor([0, 1, 2, 3])
    alone = MODELS.build({"type": cls})
    arguments: dict[str, Any] = {} if engine is None else {"engine": engine, "auto_wrap_policy": "toy_policy"}
    model = MODEL_WRAPPERS.build({"type": wrapper, "module": copy.deepcopy(alone), **arguments})

    def optim_of(module: nn.Module) -> OptimWrapper:
        return OptimWrapper(torch.optim.SGD(module.parameters(), lr=0.1), accumulative_counts=2)

    mine, reference = optim_of(model), optim_of(alone)
    logged, expected, reduced = [], [], []
    before = {**vars(model.module)}
    for inputs in batches:
        part = slice(2 * rank, 2 * rank + 2)
        logs = model.train_step({"inputs": inputs[part], "labels": labels[part]}, mine)
        reduced.append(gradients_are_reduced(model))
        loss = logs["loss"].detach().clone()
        dist.all_reduce(loss)
        logged.append(loss.item() / 2)
        expected.append(alone.train_step({"inputs": inputs, "labels": labels}, reference)["loss"].item())
    batch = {"inputs": batches[0], "labels": labels}
    return {
        "close": logged == pytest.approx(expected, rel=1e-5),
        "changed": expected[0] != expected[-1],
        "own": "own" in logs,
        "reduced": reduced,
        "val": model.val_step(batch)[:1] == ["own"],
        "test": model.test_step(batch)[:1] == ["test"],
        "left": [name for name in ("forward", "no_sync") if vars(model.module).get(name) is not before.get(name)],
    }


class TestSteps:
    @pytest.mark.parametrize("cls", ["ToyModel", "OwnSteps"])
    @pytest.mark.parametrize(
        ("wrapper", "engine"),
        [
            ("MMFullyShardedDataParallel", "fsdp2"),
            ("MMFullyShardedDataParallel", "fsdp1"),
            ("MMDistributedDataParallel", None),
        ],
    )
    def test_equal_the_unsharded_model_s(self, wrapper: str, engine: str | None, cls: str) -> None:
        own = cls == "OwnSteps"
        for found in run_ranks(own_steps, 2, wrapper, cls, engine):
            assert found == {
                "close": True,
                "changed": True,
                "own": own,
                "reduced": [False, True, False, True],  # every second step ends an accumulation
                "val": own,
                "test": own,
                "left": [],
            }

    @pytest.mark.parametrize("as_type", ["dict", "list", "tuple"])
    def test_batches_of_every_type(self, as_type: str) -> None:
        assert run_ranks(batch_of, 2, as_type) == ["trained 2 predicted 2"] * 2

    def test_batch_of_another_type(self) -> None:
        message = (
            "The data_preprocessor of MMFullyShardedDataParallel must return a dict, list or tuple, but it returned "
            "set."
        )
        assert run_ranks(batch_of, 2, "set") == [message] * 2


def batch_of(rank: int, as_type: str) -> str:
    model = MMFullyShardedDataParallel(ToyModel(as_type=as_type))
    batch = {"inputs": torch.ones(2, 3, 8, 8), "labels": torch.zeros(2, dtype=torch.long)}
    optim = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        for _ in range(2):
            model.train_step(batch, optim)
    except TypeError as error:
        return str(error)
    return f"trained 2 predicted {len(model.val_step(batch))}"


def partially(**bound: Any) -> Any:
    return functools.partial(checkpoint_wrapper, **bound)


OF_TORCH: dict[str, dict[str, Any]] = {
    "wrapper": {"checkpoint_wrapper_fn": checkpoint_wrapper, "check_fn": is_block},
    "reentrant": {
        "checkpoint_wrapper_fn": partially(checkpoint_impl=CheckpointImpl.REENTRANT, preserve_rng_state=False),
        "check_fn": is_block,
    },
    "not reentrant": {
        "checkpoint_wrapper_fn": functools.partial(
            partially(checkpoint_impl=CheckpointImpl.NO_REENTRANT), determinism_check="none", early_stop=False
        ),
        "check_fn": is_block,
    },
    "policy": {"auto_wrap_policy": ModuleWrapPolicy({Block}), "check_fn": is_block},
    "policy of a size": {
        "auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=600),
        "check_fn": None,
    },
    "policy with lambda": {
        "auto_wrap_policy": functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda part: isinstance(part, Block)),
        "checkpoint_wrapper_fn": partially(checkpoint_impl=CheckpointImpl.REENTRANT),
    },
}


@pytest.mark.filterwarnings("ignore:Please specify CheckpointImpl:FutureWarning")  # torch 2.9, of its own default
@pytest.mark.parametrize("name", OF_TORCH)
def test_activation_checkpointing_takes_what_torch_takes(name: str) -> None:
    """MMEngine's documentation says that other fields are passed on to apply_activation_checkpointing."""
    given = OF_TORCH[name]
    torchs = nn.Sequential(ToyModel())
    known = {key: value for key, value in given.items() if value is not None}
    apply_activation_checkpointing(torchs, **known)
    wrapped = [part for part in torchs.modules() if isinstance(part, CheckpointWrapper)]
    inner = {id(part._checkpoint_wrapped_module) for part in wrapped}
    names = [
        path.replace("._checkpoint_wrapped_module", "")[2:]
        for path, part in torchs.named_modules()
        if id(part) in inner
    ]
    with single_rank():
        before = dict(given)
        model = MMFullyShardedDataParallel(ToyModel(), auto_wrap_policy="none", activation_checkpointing=given)
        assert given == before
        plan = model.plan.activation_checkpointing
        assert plan is not None
        assert {*plan.fqns} == {*names}
        assert plan.use_reentrant == (wrapped[0].checkpoint_impl is CheckpointImpl.REENTRANT)
        bound = getattr(given.get("checkpoint_wrapper_fn"), "keywords", {})
        for key in ("preserve_rng_state", "determinism_check", "early_stop"):
            if key in bound:
                assert getattr(plan, key) == bound[key]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"checkpoint_wrapper_fn": offload_wrapper}, "'offload_wrapper' cannot be used: .*offload=True"),
        ({"checkpoint_wrapper_fn": partially(context_fn=is_block)}, r"binds context_fn=.*save_ops=\[...\]"),
        (
            {"checkpoint_wrapper_fn": partially(checkpoint_fn=is_block)},
            "binds checkpoint_fn=.*It may bind",
        ),
        ({"checkpoint_wrapper_fn": partially(checkpoint_impl="BOTH")}, "binds checkpoint_impl='BOTH'"),
        ({"checkpoint_wrapper_fn": functools.partial(checkpoint_wrapper, None)}, "binds the positional arguments"),
        (
            {"checkpoint_wrapper_fn": is_block},
            "'is_block' cannot be used.*Use mode, save_ops",
        ),
        ({"auto_wrap_policy": "old_polcy"}, "activation_checkpointing.auto_wrap_policy 'old_polcy' was not found"),
    ],
)
def test_what_activation_checkpointing_refuses(value: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        wrapper_arguments(ToyModel(), activation_checkpointing={"check_fn": is_block, **value})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"backward_prefetch": "early"},
            "backward_prefetch must be 'BACKWARD_PRE', 'BACKWARD_POST', a",
        ),
        ({"backward_prefetch": "BACKWARD_PRIOR"}, "Did you mean 'BACKWARD_PRE' or 'BACKWARD_POST'?"),
        (
            {"sharding_strategy": "FULL_SHRAD"},
            "sharding_strategy: 'FULL_SHRAD' is not accepted. Did you mean 'FULL",
        ),
        ({"mixed_precision": {"param_dtype": "float17"}}, "mixed_precision.param_dtype: 'float17' is not a dtype."),
        (
            {"mixed_precision": {"param_dtyp": "bf16"}},
            "mixed_precision.param_dtyp: unknown setting 'param_dtyp'. Did",
        ),
        ({"mixed_precision": {"_module_classes_to_ignore": 3}}, "mixed_precision._module_classes_to_ignore: expected"),
        (
            {"cpu_offload": {"offload_param": True}},
            "cpu_offload has no field 'offload_param'. Did you mean 'offload_params",
        ),
        ({"forward_prefetch": -1}, "forward_prefetch: Input should be greater than or equal to 0, got -1"),
        ({"use_orig_params": False, "engine": "fsdp2"}, "use_orig_params=False needs engine 'fsdp1', not 'fsdp2'."),
        ({"auto_wrap_policy": {"kind": "siz"}}, "auto_wrap_policy.kind: 'siz' is not accepted. Did you mean 'size'?"),
    ],
)
def test_mistakes_are_told_in_words_of_torch(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        translate_arguments(**wrapper_arguments(ToyModel(), **given))
    said = str(caught.value)
    assert not any(word in said for word in ("ShardConfig", "sharding.strategy", "prefetch.", "[config='precision"))
