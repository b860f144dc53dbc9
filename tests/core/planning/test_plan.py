"""`plan()` is pure, says why, groups what belongs together and refuses what cannot be sharded."""

import copy
import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, always_wrap_policy

from mmfsdp import ShardConfig, ShardPlan, plan
from mmfsdp.errors import ConfigError, FrozenParametersError, MeshError, PlanError, PolicyError
from mmfsdp.planning import MeshSpec, ShardUnit, UnitPrecision
from mmfsdp.planning.fingerprints import fingerprint

LINEARS = {"wrap": {"kind": "module_class", "classes": "torch.nn.Linear"}}
MLPS = {"wrap": {"kind": "module_class", "classes": "Mlp"}}


class Mlp(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc1(x).relu())

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc1(x)


class Net(nn.Module):
    def __init__(self, depth: int = 2, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(3, width)
        self.norm = nn.BatchNorm1d(width)
        self.blocks = nn.ModuleList(Mlp(width) for _ in range(depth))
        self.head = nn.Linear(width, 5)
        self.register_buffer("steps", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def fqns(plan: ShardPlan) -> list[tuple[str, ...]]:
    return [unit.fqns for unit in plan.units]


def unit_of(plan: ShardPlan, fqn: str) -> ShardUnit:
    return next(unit for unit in plan.units if fqn in unit.fqns)


def owned(plan: ShardPlan) -> dict[str, list[str]]:
    return {unit.fqn: [param.fqn for param in unit.params] for unit in plan.units}


def notes(plan: ShardPlan, kind: str) -> list[tuple[tuple[str, ...], str]]:
    return [(note.fqns, note.text) for note in plan.notes if note.kind == kind]


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


EVERYTHING: dict[str, Any] = {
    "sharding": {
        "strategy": "HYBRID_SHARD",
        "shard_size": 2,
        "ignored_parameters": "head.bias",
        "forward_methods": "encode",
    },
    "wrap": {
        "kind": "any_of",
        "policies": [{"kind": "module_class", "classes": "Mlp"}, {"kind": "module_name", "patterns": "embed"}],
    },
    "precision": {
        "preset": "fp16",
        "buffer_dtype": "fp16",
        "overrides": [{"modules": "blocks.0", "param_dtype": "fp32"}],
    },
    "activation_checkpointing": "full",
    "cpu_offload": True,
    "prefetch": {"backward": "post", "forward": 2},
    "init": {"seed": 3},
}


class TestPurity:
    def test_the_model_is_left_alone(self) -> None:
        model = Net()
        state = copy.deepcopy(model.state_dict())
        modules = [(fqn, type(module), id(module)) for fqn, module in model.named_modules()]
        params = [(fqn, id(param)) for fqn, param in model.named_parameters()]
        attributes = [{key: copy.copy(value) for key, value in vars(module).items()} for module in model.modules()]
        generator = torch.get_rng_state()
        config = copy.deepcopy(EVERYTHING)
        plan(model, config, 4)
        assert config == EVERYTHING
        assert torch.equal(torch.get_rng_state(), generator)
        assert [(fqn, type(module), id(module)) for fqn, module in model.named_modules()] == modules
        assert [(fqn, id(param)) for fqn, param in model.named_parameters()] == params
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        for module, before in zip(model.modules(), attributes, strict=True):
            assert vars(module).keys() == before.keys()
            assert {key: value for key, value in vars(module).items() if "hook" in key} == {
                key: value for key, value in before.items() if "hook" in key
            }

    @pytest.mark.parametrize("config", [None, LINEARS, EVERYTHING])
    def test_equal_inputs_give_equal_plans(self, config: Any) -> None:
        mesh = 4
        first = plan(Net(), config, mesh)
        assert first == plan(Net(), config, mesh)
        assert first == plan(on_meta(Net), config, mesh)
        assert first == plan(Net(), ShardConfig.from_dict(config or {}), mesh)
        assert ShardPlan.from_json(first.to_json()) == first
        assert ShardPlan.from_json(first.to_json(indent=None)) == first
        assert ShardPlan.model_validate(first.to_dict()) == first
        assert first.diff(plan(Net(), config, mesh)) == ""

    def test_a_plan_is_frozen(self) -> None:
        with pytest.raises(ValueError, match="frozen"):
            plan(Net(), None, 1).engine = "fsdp1"  # type: ignore[misc]

    def test_text_that_is_no_plan(self) -> None:
        with pytest.raises(PlanError, match=r"^The text is not a plan: Invalid JSON"):
            ShardPlan.from_json("{")
        data = plan(Net(), None, 1).to_dict()
        with pytest.raises(PlanError) as caught:
            ShardPlan.from_json(plan(Net(), None, 1).to_json().replace('"schema_version": 1', '"schema_version": 9'))
        assert str(caught.value) == "The text is not a plan: schema_version: Input should be 1."
        assert data["schema_version"] == 1

    @pytest.mark.parametrize(
        ("change", "differs"),
        [
            (lambda net: None, False),
            (lambda net: net.embed.weight.data.fill_(3), False),
            (lambda net: setattr(net, "heads", net.__dict__["_modules"].pop("head")), True),
            (lambda net: setattr(net, "head", nn.Linear(4, 6)), True),
            (lambda net: net.half(), True),
            (lambda net: net.head.requires_grad_(False), True),
            (lambda net: setattr(net, "norm", nn.BatchNorm2d(4)), True),
            (lambda net: setattr(net.blocks[1].fc1, "weight", net.blocks[0].fc1.weight), True),
            (lambda net: net.register_buffer("extra", torch.zeros(1)), True),
            (lambda net: net.head.register_parameter("bias", None), True),
        ],
        ids=["nothing", "values", "name", "shape", "dtype", "requires_grad", "class", "tie", "buffer", "gone"],
    )
    def test_fingerprint(self, change: Callable[[Net], object], differs: bool) -> None:
        net = Net()
        change(net)
        assert (fingerprint(net) != fingerprint(Net())) == differs
        assert (plan(net, None, 2).fingerprint != plan(Net(), None, 2).fingerprint) == differs

    @pytest.mark.parametrize("model", [3, None, torch.zeros(3), Net])
    def test_what_is_no_model(self, model: Any) -> None:
        with pytest.raises(ConfigError, match=r"^plan\(\) needs an nn\.Module, got "):
            plan(model)

    def test_what_is_no_config(self) -> None:
        with pytest.raises(ConfigError) as caught:
            plan(Net(), "FULL_SHARD")  # type: ignore[arg-type]
        assert str(caught.value) == (
            "A config must be a ShardConfig or a mapping, got 'FULL_SHARD' (type str). Write a dict such as "
            "{'sharding': 'FULL_SHARD', 'wrap': 'auto'}, or read a file: ShardConfig.from_file('shard.toml')."
        )

    def test_settings_as_keywords(self) -> None:
        assert plan(Net(), None, 2, precision="bf16", wrap=Mlp) == plan(Net(), {"precision": "bf16", "wrap": Mlp}, 2)
        config = ShardConfig(precision="bf16", sharding="SHARD_GRAD_OP")
        replaced = plan(Net(), config, 2, precision="fp16")
        assert replaced == plan(Net(), {"precision": "fp16", "sharding": "SHARD_GRAD_OP"}, 2)
        assert config.precision.param_dtype == "bfloat16"
        given = {"precision": "bf16"}
        plan(Net(), given, 2, precision="fp16")
        assert given == {"precision": "bf16"}
        for name, hint in (("precison", "'precision'"), ("polcy", "'policy'"), ("meshh", "'mesh'")):
            with pytest.raises(
                ConfigError, match=f"'{name}' is neither an argument nor a setting. Did you mean {hint}"
            ):
                plan(Net(), None, 2, **{name: 1})  # type: ignore[arg-type]

    def test_names_of_classes(self) -> None:
        expected = plan(Net(), {"wrap": {"kind": "module_class", "classes": ["Mlp"]}}, 2)
        assert plan(Net(), {"wrap": "Mlp"}, 2) == plan(Net(), {"wrap": ["Mlp"]}, 2) == expected
        assert [unit.fqns for unit in plan(Net(), {"wrap": {Mlp}}, 2).units] == [unit.fqns for unit in expected.units]
        for wrong, hint in (("Mlpp", "Mlp"), ("atuo", "auto")):
            with pytest.raises(PolicyError, match=f"^No module of the model is a '{wrong}'. Did you mean '{hint}'"):
                plan(Net(), {"wrap": wrong}, 2)

    def test_lazy_modules(self) -> None:
        with pytest.raises(PlanError) as caught:
            plan(nn.Sequential(nn.LazyLinear(3)), None, 2)
        assert str(caught.value) == (
            "Parameter '0.weight' has no shape yet. Run one batch through lazy modules first. [fqn='0.weight']"
        )


class TestUnits:
    def test_every_parameter_once_children_first_root_last(self) -> None:
        result = plan(Net(), {"wrap": {"kind": "any_of", "policies": [MLPS["wrap"], LINEARS["wrap"]]}}, 2)
        assert fqns(result) == [
            ("embed",),
            ("blocks.0.fc1",),
            ("blocks.0.fc2",),
            ("blocks.1.fc1",),
            ("blocks.1.fc2",),
            ("head",),
            ("",),
        ]
        assert sorted(param.fqn for param in result.all_params()) == sorted(
            name for name, _ in Net().named_parameters()
        )
        assert owned(result)[""] == ["norm.weight", "norm.bias"]
        assert result.root.matched_by == "the whole model"

    def test_units_keep_what_no_unit_below_holds(self) -> None:
        class Scaled(Mlp):
            def __init__(self) -> None:
                super().__init__()
                self.scale = nn.Parameter(torch.ones(4))

        result = plan(nn.Sequential(Scaled()), {"wrap": {"kind": "module_class", "classes": ["Mlp", "Linear"]}}, 2)
        assert fqns(result) == [("0.fc1",), ("0.fc2",), ("0",), ("",)]
        assert owned(result)["0"] == ["0.scale"]
        assert owned(result)[""] == []

    def test_buffers(self) -> None:
        result = plan(Net(), None, 2)
        assert [(b.fqn, b.shape, b.dtype, b.persistent) for b in result.buffers] == [
            ("steps", (2,), "float32", False),
            ("norm.running_mean", (4,), "float32", True),
            ("norm.running_var", (4,), "float32", True),
            ("norm.num_batches_tracked", (), "int64", True),
        ]

    def test_containers_are_replaced_by_their_children(self) -> None:
        result = plan(Net(), {"wrap": {"kind": "module_name", "patterns": "blocks"}}, 2)
        assert fqns(result) == [("blocks.0",), ("blocks.1",), ("",)]
        assert unit_of(result, "blocks.1").matched_by == "name: blocks (in blocks)"
        assert notes(result, "container") == [
            (("blocks",), "ModuleList has no forward of its own, so its children are shard units in its place.")
        ]

    def test_nested_and_empty_containers(self) -> None:
        model = nn.Sequential(
            nn.ModuleDict({"a": nn.ModuleList([Mlp(), nn.ModuleList()])}), nn.ParameterList([torch.ones(2)])
        )
        result = plan(model, {}, 2, policy=ModuleWrapPolicy({nn.ModuleDict, nn.ParameterList}))
        assert fqns(result) == [("0.a.0",), ("",)]
        assert [names for names, _ in notes(result, "container")] == [("0",), ("0.a",), ("0.a.1",), ("1",)]
        assert notes(result, "container")[3][1] == "ParameterList has no forward of its own, so it is no shard unit."
        assert owned(result)[""] == ["1.0"]

    def test_attention_keeps_its_projection(self) -> None:
        model = nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(4, 4))
        result = plan(model, {}, 2, policy=always_wrap_policy)
        assert fqns(result) == [("0",), ("1",), ("",)]
        assert owned(result)["0"] == ["0.in_proj_weight", "0.in_proj_bias", "0.out_proj.weight", "0.out_proj.bias"]
        assert notes(result, "other") == [
            (("0.out_proj",), "MultiheadAttention uses its parameters without calling it; they stay in the unit above.")
        ]

    def test_scalars_stay_whole(self) -> None:
        model = Net()
        model.temperature = nn.Parameter(torch.tensor(1.0))
        model.blocks[0].gain = nn.Parameter(torch.tensor(2.0))
        result = plan(model, MLPS, 4)
        assert [param.fqn for param in result.ignored_params] == ["temperature", "blocks.0.gain"]
        assert notes(result, "scalar") == [
            (
                ("temperature", "blocks.0.gain"),
                "a scalar has no dimension to shard: held whole on every rank, gradients averaged.",
            )
        ]
        assert "temperature" not in owned(result)[""]

    def test_parameters_without_elements_stay_whole(self) -> None:
        model = Net()
        model.blocks[0].none = nn.Embedding(0, 3)
        result = plan(model, MLPS, 4)
        assert [param.fqn for param in result.ignored_params] == ["blocks.0.none.weight"]
        text = "a parameter without elements, whose gradient torch cannot reduce: held by every rank."
        assert notes(result, "empty") == [(("blocks.0.none.weight",), text)]

    def test_a_module_without_parameters_is_no_unit(self) -> None:
        assert fqns(plan(nn.Sequential(nn.ReLU(), Mlp()), {}, 2, policy=always_wrap_policy))[-2:] == [("1.fc2",), ("",)]

    def test_ignored_by_pattern_and_by_object(self) -> None:
        net = Net()
        config = {**MLPS, "sharding": {"ignored_modules": ["blocks.0"], "ignored_parameters": ["head.*"]}}
        result = plan(net, config, 2, ignored_modules=[net.norm], ignored_params=[net.embed.bias])
        assert {param.fqn for param in result.ignored_params} == {
            "embed.bias",
            "norm.weight",
            "norm.bias",
            *(f"blocks.0.{name}" for name, _ in Mlp().named_parameters()),
            "head.weight",
            "head.bias",
        }
        assert fqns(result) == [("blocks.1",), ("",)]

    def test_ignoring_what_is_not_there(self) -> None:
        with pytest.raises(PolicyError) as caught:
            plan(Net(), {"sharding": {"ignored_modules": "hed"}}, 2)
        assert str(caught.value) == (
            "Pattern 'hed' matches no module. Did you mean 'head' or 'embed'? [config='sharding.ignored_modules']"
        )
        with pytest.raises(
            PolicyError, match=r"^Pattern 'head\.wieght' matches no parameter\. Did you mean 'head\.weight'"
        ):
            plan(Net(), {"sharding": {"ignored_parameters": "head.wieght"}}, 2)
        with pytest.raises(PlanError) as other:
            plan(Net(), {}, 2, ignored_modules=[nn.Linear(1, 1)])
        assert str(other.value) == "ignored_modules holds Linear objects that are not part of the model."
        with pytest.raises(
            PlanError, match=r"^ignored_params holds Parameter objects that are not part of the model\.$"
        ):
            plan(Net(), {}, 2, ignored_params=[nn.Parameter(torch.ones(1))])


def tied(*ties: tuple[str, str], model: nn.Module | None = None) -> nn.Module:
    """A model whose first-named parameter is replaced by the second."""
    model = model or nn.Sequential(Mlp(), Mlp(), Mlp())
    for one, other in ties:
        path, _, name = one.rpartition(".")
        setattr(model.get_submodule(path), name, model.get_parameter(other))
    return model


class TestTies:
    def test_side_by_side_units_become_one(self) -> None:
        result = plan(tied(("2.fc1.weight", "0.fc1.weight")), MLPS, 2)
        assert fqns(result) == [("0", "2"), ("1",), ("",)]
        assert notes(result, "tied") == [(("0", "2"), "share '0.fc1.weight', so they are one shard unit.")]
        shared = unit_of(result, "2").params[0]
        assert (shared.fqn, shared.aliases) == ("0.fc1.weight", ("2.fc1.weight",))
        assert len(unit_of(result, "2").params) == 7
        assert unit_of(result, "0").matched_by == "class: Mlp"

    def test_fsdp1_hoists(self) -> None:
        result = plan(tied(("2.fc1.weight", "0.fc1.weight")), {**MLPS, "engine": "fsdp1"}, 2)
        assert fqns(result) == [("1",), ("",)]
        text = "shares '0.fc1.weight' with another unit; its parameters move to the unit above."
        assert notes(result, "tied") == [(("0",), text), (("2",), text)]
        assert len(owned(result)[""]) == 7

    def test_tied_with_the_root(self) -> None:
        model = Net()
        model.head.weight = model.embed.weight = nn.Parameter(torch.ones(5, 4))
        for engine in ("fsdp2", "fsdp1"):
            result = plan(model, {"engine": engine, "wrap": {"kind": "module_name", "patterns": "head"}}, 2)
            assert fqns(result) == [("",)]
            assert [names for names, _ in notes(result, "tied")] == [("head",)]

    def test_a_unit_inside_another_gives_way(self) -> None:
        model = nn.Sequential(nn.Sequential(Mlp(), nn.Linear(4, 4)), Mlp())
        model[0].extra = model[0][0].fc1.weight
        config = {"wrap": {"kind": "module_name", "patterns": ["0", "0.0", "1"]}}
        for engine in ("fsdp2", "fsdp1"):
            result = plan(model, {**config, "engine": engine}, 2)
            assert fqns(result) == [("0",), ("1",), ("",)]
            assert [names for names, _ in notes(result, "tied")] == [("0.0",)]

    def test_a_shared_module_under_two_units(self) -> None:
        model = nn.Sequential(Mlp(), Mlp(), Mlp())
        model[1].fc1 = model[0].fc1
        assert fqns(plan(model, MLPS, 2)) == [("0", "1"), ("2",), ("",)]
        assert fqns(plan(model, {**MLPS, "engine": "fsdp1"}, 2)) == [("2",), ("",)]
        both = {"wrap": {"kind": "module_class", "classes": ["Mlp", "Linear"]}}
        result = plan(model, both, 2)
        assert unit_of(result, "0.fc1").fqns == ("0.fc1",), "a shared module that is a unit is shared by nobody"
        assert notes(result, "tied") == []

    def test_three_ways(self) -> None:
        result = plan(tied(("1.fc1.weight", "0.fc1.weight"), ("2.fc1.weight", "0.fc1.weight")), MLPS, 2)
        assert fqns(result) == [("0", "1", "2"), ("",)]

    def test_a_chain_of_ties(self) -> None:
        result = plan(tied(("1.fc1.weight", "0.fc1.weight"), ("2.fc2.weight", "1.fc2.weight")), MLPS, 2)
        assert fqns(result) == [("0", "1", "2"), ("",)]
        assert sum(len(names) for names in owned(result).values()) == 10

    def test_a_chain_into_the_root(self) -> None:
        model = tied(("1.fc1.weight", "0.fc1.weight"))
        model.extra = model[1].fc2.weight
        assert fqns(plan(model, MLPS, 2)) == [("2",), ("",)]

    def test_across_levels(self) -> None:
        model = nn.Sequential(nn.Sequential(Mlp(), nn.Linear(4, 4)), Mlp())
        tied(("1.fc1.weight", "0.0.fc1.weight"), model=model)
        config = {"wrap": {"kind": "module_name", "patterns": ["0", "0.0", "1"]}}
        result = plan(model, config, 2)
        assert fqns(result) == [("0.0", "1"), ("0",), ("",)]
        assert fqns(plan(model, {**config, "engine": "fsdp1"}, 2)) == [("",)]

    def test_a_group_whose_member_lies_inside_the_third_owner(self) -> None:
        model = nn.Sequential(nn.Sequential(Mlp(), nn.Linear(4, 8)), Mlp(), Mlp())
        # 0.0 and 1 share a weight; then unit 0, which holds 0.0, shares another with 1.
        tied(("1.fc1.weight", "0.0.fc1.weight"), ("0.1.weight", "1.fc2.weight"), model=model)
        result = plan(model, {"wrap": {"kind": "module_name", "patterns": ["0", "0.0", "1", "2"]}}, 2)
        assert fqns(result) == [("0", "1"), ("2",), ("",)]
        assert sum(len(names) for names in owned(result).values()) == len(list(model.parameters()))

    @pytest.mark.parametrize("extra", [False, True])
    def test_circles(self, extra: bool) -> None:
        def outer() -> nn.Module:
            module = nn.Sequential(Mlp(), nn.Linear(4, 4))
            module.own = nn.Parameter(torch.ones(3))
            module.also = nn.Parameter(torch.ones(3))
            module[0].inner = nn.Parameter(torch.ones(3))
            return module

        model = nn.Sequential(outer(), outer())
        model[1][0].inner = model[0].own
        model[0][0].inner = model[1].own
        config = {"wrap": {"kind": "module_name", "patterns": ["0", "1", "*.0"]}}
        if extra:
            model[1].also = model[0].also
            result = plan(model, config, 2)
            assert fqns(result) == [("0", "1"), ("",)]
            assert len(owned(result)["0"]) == len(list(model.parameters()))
        else:
            with pytest.raises(
                PlanError, match=r"^Tied parameters tie these shard units into a circle: .*'0'.*Wrap a module"
            ):
                plan(model, config, 2)
        assert fqns(plan(model, {**config, "engine": "fsdp1"}, 2)) == [("",)]

    def test_ignored_ties_tie_nothing(self) -> None:
        model = tied(("2.fc1.weight", "0.fc1.weight"))
        result = plan(model, {**MLPS, "sharding": {"ignored_parameters": "2.fc1.weight"}}, 2)
        assert fqns(result) == [("0",), ("1",), ("2",), ("",)]
        assert [(param.fqn, param.aliases) for param in result.ignored_params] == [("0.fc1.weight", ("2.fc1.weight",))]

    @settings(deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=6), st.sampled_from(["fsdp2", "fsdp1"]))
    def test_any_ties(self, pairs: list[tuple[int, int]], engine: str) -> None:
        model = on_meta(lambda: nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(3)]))
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        for one, other in pairs:
            linears[one].weight = linears[other].weight
        result = plan(model, {**LINEARS, "engine": engine}, 2)
        managed = [param.fqn for param in result.all_params()]
        assert sorted(managed) == sorted(name for name, _ in model.named_parameters())
        seen: dict[int, tuple[str, ...]] = {}
        for unit in result.units:
            for fqn in unit.fqns:
                for param in model.get_submodule(fqn).parameters() if fqn else ():
                    assert seen.setdefault(id(param), unit.fqns) == unit.fqns, "no parameter is under two units"


class TestRefusals:
    def test_sparse_gradients(self) -> None:
        model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2))
        with pytest.raises(PlanError, match=r"^0 is an Embedding with sparse=True\..* Set sparse=False") as caught:
            plan(model, None, 2)
        assert caught.value.context["fqn"] == "0"
        with pytest.raises(PlanError, match="sparse=True"):
            plan(model, {"sharding": {"ignored_parameters": ["0.*"]}}, 2)  # all-reduced, which torch cannot do either
        assert plan(model, {"sharding": {"ignored_parameters": ["0.*"]}}, 1).ignored_params
        model[0].requires_grad_(False)
        assert not plan(model, None, 2).ignored_params

    def test_mixed_dtypes_in_one_unit(self) -> None:
        model = Net()
        model.head.bfloat16()
        with pytest.raises(PlanError) as caught:
            plan(model, MLPS, 2)
        assert str(caught.value) == (
            "Shard unit '(root)' mixes parameters of several dtypes (bfloat16: 'head.weight', 'head.bias'; float32: "
            "'embed.weight', 'embed.bias', 'norm.weight' and 1 more), which cannot be gathered together. Wrap the "
            "modules of one dtype as units of their own, ignore those parameters, or set precision.storage_dtype."
        )
        assert plan(model, {"precision": {"storage_dtype": "float32"}}, 2).root.params[-1].dtype == "float32"
        apart = plan(model, {"wrap": {"kind": "module_name", "patterns": "head"}}, 2)
        assert unit_of(apart, "head").params[0].dtype == "bfloat16"

    def test_a_frozen_odd_dtype_hurts_only_flat_parameters(self) -> None:
        model = Net()
        model.head.bfloat16().requires_grad_(False)
        assert fqns(plan(model, {"wrap": "none"}, 2)) == [("",)]
        with pytest.raises(PlanError, match="mixes parameters of several dtypes"):
            plan(model, {"engine": "fsdp1"}, 2)

    def test_frozen_beside_trained_without_original_parameters(self) -> None:
        model = Net(depth=3)
        model.blocks[1].fc1.requires_grad_(False)
        config = {**MLPS, "sharding": {"use_orig_params": False}}
        with pytest.raises(FrozenParametersError) as caught:
            plan(model, config, 2)
        assert str(caught.value) == (
            "use_orig_params=False puts all parameters of a shard unit into one flat parameter, but unit 'blocks.1' "
            "has frozen parameters ('blocks.1.fc1.weight', 'blocks.1.fc1.bias') as well as trained ones "
            "('blocks.1.fc2.weight', 'blocks.1.fc2.bias'). Set use_orig_params=True, or wrap the frozen modules "
            "as units of their own. [fqn='blocks.1']"
        )
        model.blocks[1].requires_grad_(False)
        assert [param.requires_grad for param in unit_of(plan(model, config, 2), "blocks.1").params] == [False] * 4

    def test_forward_methods(self) -> None:
        config = {**MLPS, "sharding": {"forward_methods": ["encode"]}}
        result = plan(Net(), config, 2)
        assert [(unit.fqn, unit.forward_methods) for unit in result.units] == [
            ("blocks.0", ("encode",)),
            ("blocks.1", ("encode",)),
            ("", ()),
        ]
        with pytest.raises(ConfigError) as caught:
            plan(Net(), {**MLPS, "sharding": {"forward_methods": ["encode", "decode"]}}, 2)
        assert str(caught.value) == (
            "No shard unit has a method 'decode'. Remove it, or wrap the module that has it. "
            "[config='sharding.forward_methods']"
        )


class TestEngine:
    @pytest.mark.parametrize(
        ("config", "engine", "reason"),
        [
            ({}, "fsdp2", "the default"),
            ({"engine": "fsdp2"}, "fsdp2", "asked for"),
            ({"engine": "fsdp1"}, "fsdp1", "asked for"),
            ({"engine": "replicate"}, "replicate", "asked for"),
            ({"sharding": "NO_SHARD"}, "replicate", "NO_SHARD replicates"),
            (
                {"sharding": {"use_orig_params": False}},
                "fsdp1",
                "use_orig_params=False keeps flat parameters, which only fsdp1 has",
            ),
            (
                {"precision": {"param_dtype": "bf16", "keep_low_precision_grads": True}},
                "fsdp1",
                "keep_low_precision_grads is something only fsdp1 can do",
            ),
        ],
    )
    def test_choice(self, config: Any, engine: str, reason: str) -> None:
        result = plan(Net(), config, 4)
        assert (result.engine, result.engine_reason) == (engine, reason)
        assert (result.strategy == "NO_SHARD") == (engine == "replicate")

    def test_replicate_reshards_nothing(self) -> None:
        result = plan(Net(), {**MLPS, "engine": "replicate"}, 4)
        assert {unit.reshard_after_forward for unit in result.units} == {False}
        settings = {"reshard_after_forward": True, "sharding_strategy": "FULL_SHARD"}
        policy = CustomPolicy(lambda module: settings if isinstance(module, Mlp) else False)
        config = {"engine": "replicate", "sharding": {"reshard_after_forward": 2}}
        assert {unit.reshard_after_forward for unit in plan(Net(), config, 4, policy=policy).units} == {False}
        assert result.mesh == MeshSpec(replicate=4, shard=1)
        assert result.param_bytes(3) == sum(param.nbytes for param in result.all_params())

    @pytest.mark.parametrize(
        ("sharding", "expected"),
        [
            ("FULL_SHARD", True),
            ("SHARD_GRAD_OP", False),
            ({"strategy": "SHARD_GRAD_OP", "reshard_after_forward": True}, True),
            ({"reshard_after_forward": 2}, 2),
        ],
    )
    def test_resharding(self, sharding: Any, expected: bool | int) -> None:
        assert {unit.reshard_after_forward for unit in plan(Net(), {**MLPS, "sharding": sharding}, 4).units} == {
            expected
        }

    def test_notes(self) -> None:
        config = {
            "engine": "fsdp2",
            "sharding": {"strategy": "NO_SHARD", "limit_all_gathers": False},
            "prefetch": "post",
            "precision": "fp16",
        }
        result = plan(Net(), config, 2)
        assert [note.kind for note in result.notes] == [
            "engine",
            "prefetch",
            "prefetch",
            "precision",
            "wrap",
            "buffers",
        ]
        assert result.needs_grad_scaler
        assert not plan(Net(), {"precision": "bf16"}, 2).needs_grad_scaler


class TestPrecision:
    def test_presets_reach_every_unit(self) -> None:
        result = plan(Net(), {**MLPS, "precision": "bf16"}, 2)
        half = UnitPrecision(param_dtype="bfloat16", reduce_dtype="float32")
        assert unit_of(result, "blocks.0").precision == result.root.precision == half
        assert unit_of(result, "norm").precision == UnitPrecision(cast_forward_inputs=False, full_precision=True)
        assert unit_of(result, "norm").matched_by == "full precision: _BatchNorm"

    @pytest.mark.parametrize("precision", ["fp32", {"buffer_dtype": "bf16"}, {"reduce_dtype": "bf16"}])
    def test_batch_norm_is_a_unit_only_where_something_computes_in_less(self, precision: Any) -> None:
        assert ("norm",) not in fqns(plan(Net(), {**MLPS, "precision": precision}, 2))

    def test_ignore_classes(self) -> None:
        config = {"wrap": "none", "precision": {"preset": "bf16", "ignore_classes": []}}
        assert fqns(plan(Net(), config, 2)) == [("",)]
        config = {"wrap": "none", "precision": {"preset": "bf16", "ignore_classes": ["torch.nn.Linear"]}}
        assert len(fqns(plan(Net(), config, 2))) == 7

    @pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
    def test_reduce_dtype_is_always_set(self, dtype: str) -> None:
        policy = CustomPolicy(lambda m: {"mixed_precision": {"param_dtype": dtype}} if isinstance(m, Mlp) else False)
        config = {"precision": {"param_dtype": dtype, "overrides": [{"modules": "embed", "param_dtype": dtype}]}}
        for unit in plan(Net(), config, 2, policy=policy).units:
            assert unit.precision.full_precision or unit.precision.reduce_dtype == unit.precision.param_dtype
            assert unit.precision.reduce_dtype is not None or unit.fqn == "norm"

    def test_overrides(self) -> None:
        config = {
            **MLPS,
            "precision": {
                "preset": "bf16",
                "output_dtype": "fp32",
                "overrides": [
                    {
                        "modules": "blocks.1",
                        "param_dtype": "fp16",
                        "reduce_dtype": "fp32",
                        "cast_forward_inputs": False,
                    },
                    {"modules": ["head", "Mlp"], "param_dtype": "fp32"},
                ],
            },
        }
        result = plan(Net(), config, 2)
        assert unit_of(result, "blocks.1").precision == UnitPrecision(
            param_dtype="float16", reduce_dtype="float32", cast_forward_inputs=False
        )
        full = UnitPrecision(param_dtype="float32", reduce_dtype="float32", full_precision=True)
        assert unit_of(result, "blocks.0").precision == unit_of(result, "head").precision == full
        assert unit_of(result, "head").matched_by == "precision override"
        assert [unit.precision.output_dtype for unit in result.units] == [None] * (len(result.units) - 1) + ["float32"]
        assert result.needs_grad_scaler

    def test_an_override_of_a_container_goes_to_its_children(self) -> None:
        result = plan(
            Net(), {"precision": {"preset": "bf16", "overrides": [{"modules": "blocks", "param_dtype": "fp16"}]}}, 2
        )
        assert {unit.fqn: unit.precision.param_dtype for unit in result.units} == {
            "norm": None,
            "blocks.0": "float16",
            "blocks.1": "float16",
            "": "bfloat16",
        }

    def test_an_override_that_matches_nothing(self) -> None:
        with pytest.raises(PolicyError) as caught:
            plan(Net(), {"precision": {"overrides": [{"modules": "hed", "param_dtype": "bf16"}]}}, 2)
        assert str(caught.value) == (
            "Pattern 'hed' matches no module or class. Did you mean 'head' or 'embed'? [config='precision.overrides']"
        )

    @pytest.mark.parametrize(
        ("given_policy", "expected"),
        [
            (None, UnitPrecision(cast_forward_inputs=False, full_precision=True)),
            ({"param_dtype": torch.float16}, UnitPrecision(param_dtype="float16", reduce_dtype="float16")),
            (
                MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32),
                # torch's FSDP1 casts inputs at the root only, unless told otherwise.
                UnitPrecision(param_dtype="float16", reduce_dtype="float32", cast_forward_inputs=False),
            ),
            (
                MixedPrecisionPolicy(param_dtype=torch.float16, cast_forward_inputs=False),
                UnitPrecision(param_dtype="float16", reduce_dtype="float16", cast_forward_inputs=False),
            ),
        ],
    )
    def test_settings_of_a_custom_policy(self, given_policy: Any, expected: UnitPrecision) -> None:
        policy = CustomPolicy(lambda m: {"mixed_precision": given_policy} if isinstance(m, Mlp) else False)
        result = plan(Net(), {"precision": "bf16"}, 2, policy=policy)
        assert unit_of(result, "blocks.0").precision == expected

    @pytest.mark.parametrize(
        ("given_settings", "reshard"),
        [
            ({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, False),
            ({"sharding_strategy": "FULL_SHARD"}, True),
            ({"reshard_after_forward": False}, False),
            ({"reshard_after_forward": 2}, 2),
        ],
    )
    def test_resharding_of_a_custom_policy(self, given_settings: Any, reshard: bool | int) -> None:
        result = plan(Net(), {}, 4, policy=CustomPolicy(lambda m: given_settings if isinstance(m, Mlp) else False))
        assert [unit.reshard_after_forward for unit in result.units] == [reshard, reshard, True]

    @pytest.mark.parametrize("engine", ["fsdp2", "replicate"])
    @pytest.mark.parametrize(
        ("given_settings", "message"),
        [
            (
                {"cpu_offload": True},
                "The policy gives module 'blocks.0' the setting 'cpu_offload', which a shard unit does not have. "
                "Accepted: sharding_strategy, mixed_precision, reshard_after_forward.",
            ),
            (
                {"reshard_after_forward": "yes"},
                "The policy gives module 'blocks.0' reshard_after_forward='yes'; expected True, False or a group size "
                "of at least 2.",
            ),
            (
                {"sharding_strategy": ShardingStrategy.NO_SHARD},
                "The policy gives module 'blocks.0' the strategy 'NO_SHARD'; one unit of a sharded model can have "
                "'FULL_SHARD' or 'SHARD_GRAD_OP'. To keep a module whole, list it in sharding.ignored_modules.",
            ),
            (
                {"mixed_precision": "bf16"},
                "The policy gives module 'blocks.0' mixed_precision='bf16' (type str); expected torch's "
                "MixedPrecision or MixedPrecisionPolicy, a dict of their fields, or None.",
            ),
            (
                {"mixed_precision": {"param_dtyp": "bf16"}},
                "The policy gives module 'blocks.0' the mixed_precision setting 'param_dtyp', which a shard unit does "
                "not have. Accepted: param_dtype, reduce_dtype, cast_forward_inputs.",
            ),
        ],
    )
    def test_wrong_settings(self, given_settings: Any, message: str, engine: str) -> None:
        with pytest.raises(PolicyError) as caught:
            plan(
                Net(),
                {"engine": engine},
                4,
                policy=CustomPolicy(lambda m: given_settings if isinstance(m, Mlp) else False),
            )
        assert caught.value.message == message
        assert caught.value.context == {"fqn": "blocks.0"}


NO_MESH = (
    "A mesh must be a world size, a (replicate, shard) pair, named axes such as {'shard': 4, 'tensor': 2}, or a "
    "DeviceMesh, got"
)


class TestMesh:
    @pytest.mark.parametrize(
        ("mesh", "sharding", "expected"),
        [
            (4, "FULL_SHARD", (1, 4)),
            ([4], "FULL_SHARD", (1, 4)),
            ((1, 4), "SHARD_GRAD_OP", (1, 4)),
            (MeshSpec(shard=4), "FULL_SHARD", (1, 4)),
            (8, {"strategy": "HYBRID_SHARD", "shard_size": 2}, (4, 2)),
            ((2, 4), "HYBRID_SHARD", (2, 4)),
            ((2, 4), {"strategy": "_HYBRID_SHARD_ZERO2", "shard_size": 4}, (2, 4)),
            (MeshSpec(replicate=2, shard=4), "HYBRID_SHARD", (2, 4)),
            (MeshSpec(replicate=2, shard=4), "SHARD_GRAD_OP", (2, 4)),
            ({"replicate": 2, "shard": 4}, "FULL_SHARD", (2, 4)),
            ((2, 4), "NO_SHARD", (8, 1)),
            (None, "FULL_SHARD", (1, 1)),
        ],
    )
    def test_shapes(self, mesh: Any, sharding: Any, expected: tuple[int, int]) -> None:
        spec = plan(Net(), {"sharding": sharding}, mesh).mesh
        assert (spec.replicate, spec.shard) == expected
        assert spec.world_size == math.prod(expected)

    @pytest.mark.parametrize(
        ("mesh", "sharding", "message"),
        [
            (
                (2, 4),
                "FULL_SHARD",
                "Strategy 'FULL_SHARD' shards over one mesh dimension, but the mesh is 2 x 4. Name the dimensions "
                "'replicate' and 'shard', or use 'HYBRID_SHARD' for a (replicate, shard) mesh, or give a 1-D mesh. A "
                "dimension for tensor parallelism is named 'tensor'. "
                "[config='sharding.strategy']",
            ),
            (
                8,
                "HYBRID_SHARD",
                "Strategy 'HYBRID_SHARD' needs the number of ranks that shard together. Set sharding.shard_size "
                "(usually the devices of one node), or give the mesh as a (replicate, shard) pair. "
                "[config='sharding.shard_size']",
            ),
            (
                8,
                {"strategy": "HYBRID_SHARD", "shard_size": 3},
                "A world of 8 ranks cannot be divided into shard groups of 3. Divisors of 8: [2, 4, 8]. "
                "[config='sharding.shard_size']",
            ),
            (
                (3, 4),
                {"strategy": "HYBRID_SHARD", "shard_size": 2},
                "sharding.shard_size=2 contradicts the mesh, whose shard dimension has 4 ranks. Remove one of the two. "
                "[config='sharding.shard_size']",
            ),
            (
                (2, 4),
                {"strategy": "HYBRID_SHARD", "shard_size": 2},
                "sharding.shard_size=2 contradicts the mesh, whose shard dimension has 4 ranks. The pair is swapped: "
                "give (replicate, shard) = (4, 2). [config='sharding.shard_size']",
            ),
            (
                (4, 1),
                "HYBRID_SHARD",
                "Strategy 'HYBRID_SHARD' with a shard group of one rank shards nothing (FSDP1 would not even average "
                "gradients). Use 'NO_SHARD' to replicate, or a shard group of at least 2 ranks. "
                "[config='sharding.shard_size']",
            ),
            (
                "4",
                "FULL_SHARD",
                f"{NO_MESH} '4'.",
            ),
            (
                True,
                "FULL_SHARD",
                f"{NO_MESH} True.",
            ),
            (
                (2, 2, 2),
                "FULL_SHARD",
                "A mesh must have one dimension (shard) or two (replicate, shard) of at least one rank each, "
                "got (2, 2, 2).",
            ),
            (
                0,
                "FULL_SHARD",
                "A mesh must have one dimension (shard) or two (replicate, shard) of at least one rank each, got (0,).",
            ),
        ],
    )
    def test_errors(self, mesh: Any, sharding: Any, message: str) -> None:
        with pytest.raises(MeshError) as caught:
            plan(Net(), {"sharding": sharding}, mesh)
        assert str(caught.value) == message

    @pytest.mark.parametrize("rank", [-1, 4])
    def test_a_rank_that_is_not_there(self, rank: int) -> None:
        with pytest.raises(MeshError, match=f"^Rank {rank} is not in 4 ranks.$"):
            plan(Net(), {}, 4).param_bytes(rank)


def checkpointed(config: Any, **kwargs: Any) -> tuple[str, ...]:
    settings = {**MLPS, "activation_checkpointing": config}
    activation = plan(Net(depth=4), settings, 2, **kwargs).activation_checkpointing
    assert activation is not None
    return activation.fqns


class TestActivationCheckpointing:
    BLOCKS = ("blocks.0", "blocks.1", "blocks.2", "blocks.3")

    def test_none(self) -> None:
        assert plan(Net(), MLPS, 2).activation_checkpointing is None

    def test_full_takes_the_outermost_units(self) -> None:
        assert checkpointed("full") == self.BLOCKS
        net = Net()
        for block in net.blocks:
            block.scale = nn.Parameter(torch.ones(4))  # else its Linear units hold all that it has
        both = {"kind": "module_class", "classes": ["Mlp", "Linear"]}
        config = {"wrap": both, "activation_checkpointing": "full", "precision": "bf16"}
        activation = plan(net, config, 2).activation_checkpointing
        assert activation is not None
        assert activation.fqns == ("embed", "blocks.0", "blocks.1", "head"), "no unit inside another, no batch norm"

    def test_every_n(self) -> None:
        assert checkpointed("every_n") == ("blocks.0", "blocks.2")
        assert checkpointed({"mode": "every_n", "n": 3}) == ("blocks.0", "blocks.3")

    def test_selective(self) -> None:
        by_name = {"kind": "module_name", "patterns": ["blocks.1", "head"]}
        assert checkpointed({"mode": "selective", "modules": by_name}) == ("blocks.1", "head")
        assert checkpointed({"mode": "full", "modules": by_name}) == ("blocks.1", "head")
        assert checkpointed(
            {"mode": "selective"}, check_fn=lambda m: isinstance(m, nn.Linear) and m.out_features == 5
        ) == ("head",)
        assert checkpointed(None, check_fn=lambda module: isinstance(module, Mlp)) == self.BLOCKS
        assert (
            checkpointed({"mode": "selective", "check_fn": "inspect:ismodule"}, check_fn=lambda m: isinstance(m, Mlp))
            == self.BLOCKS
        )

    def test_a_plan_shows_what_recomputes_and_is_no_unit(self) -> None:
        units = plan(Net(depth=4), {**MLPS, "activation_checkpointing": "full"}, 2)
        assert "AC also" not in units.table()
        below = {"modules": {"kind": "module_name", "patterns": ["blocks.*.fc1", "head"]}}
        within = plan(Net(depth=4), {**MLPS, "activation_checkpointing": below}, 2)
        for shown in (within.table(), within.tree()):
            assert "AC also recomputes 5 modules that are not units: blocks.{0..3}.fc1, head" in shown

    def test_containers_are_not_recomputed(self) -> None:
        with pytest.raises(PolicyError, match="selects no module"):
            checkpointed({"modules": {"kind": "module_name", "patterns": "blocks"}})

    def test_ops_and_options_travel(self) -> None:
        config = {"mode": "ops", "save_ops": ["aten.mm"], "offload": True, "preserve_rng_state": False}
        activation = plan(Net(), {**MLPS, "activation_checkpointing": config}, 2).activation_checkpointing
        assert activation is not None
        assert (activation.mode, activation.save_ops, activation.offload) == ("ops", ("aten.mm",), True)
        assert not activation.preserve_rng_state
        assert plan(Net(), {**MLPS, "activation_checkpointing": "every_n"}, 2).activation_checkpointing.mode == "full"  # type: ignore[union-attr]

    def test_nothing_selected(self) -> None:
        with pytest.raises(PolicyError) as caught:
            plan(Net(), {"wrap": "none", "activation_checkpointing": "full"}, 2)
        assert str(caught.value) == (
            "Activation checkpointing selects no module. Give activation_checkpointing.modules a policy that matches, "
            "or a wrap policy that makes shard units. [config='activation_checkpointing']"
        )

    def test_selective_without_a_choice(self) -> None:
        with pytest.raises(ConfigError) as caught:
            checkpointed("selective")
        assert str(caught.value) == (
            "Mode 'selective' needs modules (a policy) or check_fn to select by. [config='activation_checkpointing']"
        )

    def test_two_choices(self) -> None:
        with pytest.raises(ConfigError) as caught:
            checkpointed({"modules": "size"}, check_fn=lambda module: True)
        assert str(caught.value) == (
            "Both a check_fn and modules select what to checkpoint. Give one. [config='activation_checkpointing']"
        )


class TestBytes:
    @settings(deadline=None)
    @given(
        st.lists(st.lists(st.integers(1, 13), min_size=1, max_size=3), min_size=1, max_size=4),
        st.integers(1, 7),
        st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    )
    def test_rows_per_rank(self, shapes: list[list[int]], world: int, dtype: torch.dtype) -> None:
        model = nn.Module()
        for index, shape in enumerate(shapes):
            model.register_parameter(f"p{index}", nn.Parameter(torch.empty(shape, device="meta", dtype=dtype)))
        result = plan(model, {}, world)
        per_rank = [result.param_bytes(rank) for rank in range(world)]
        assert sum(per_rank) == sum(param.nbytes for param in model.parameters())
        for rank, held in enumerate(per_rank):
            chunks = [param.chunk(world) for param in model.parameters()]
            assert held == sum(chunk[rank].nbytes for chunk in chunks if rank < len(chunk))

    @settings(deadline=None)
    @given(st.integers(1, 4), st.integers(2, 4))
    def test_replicas_hold_the_same(self, replicate: int, shard: int) -> None:
        result = plan(on_meta(Net), {**MLPS, "sharding": "HYBRID_SHARD"}, (replicate, shard))
        once = plan(on_meta(Net), MLPS, shard)
        assert [result.param_bytes(rank) for rank in range(replicate * shard)] == replicate * [
            once.param_bytes(rank) for rank in range(shard)
        ]

    def test_ignored_parameters_are_held_whole(self) -> None:
        result = plan(Net(), {"sharding": {"ignored_modules": "head"}}, 2)
        head = 4 * (5 * 4 + 5)
        rest = sum(param.nbytes for param in result.all_params()) - head
        assert result.param_bytes(0) + result.param_bytes(1) == rest + 2 * head

    def test_storage_dtype_counts(self) -> None:
        whole, half = plan(Net(), {}, 2), plan(Net(), {"precision": "bf16-pure"}, 2)
        assert half.param_bytes() * 2 == whole.param_bytes()


class TestText:
    def test_table(self) -> None:
        result = plan(Net(), {**MLPS, "precision": "bf16", "activation_checkpointing": "full"}, 4)
        text = result.table(every_unit=True)
        lines = text.splitlines()
        assert lines[0] == "ShardPlan: fsdp2 (the default), FULL_SHARD, 4 ranks, device auto"
        assert " ".join(lines[2].split()) == "unit class params bytes bytes/rank dtypes reshard AC matched by"
        rows = {line.split()[0]: " ".join(line.split()) for line in lines[4:8]}
        assert rows["blocks.0"] == "blocks.0 Mlp 76 304 B 76 B bfloat16/float32 true yes class: Mlp"
        assert rows["norm"] == "norm BatchNorm1d 8 32 B 8 B full true - full precision: _BatchNorm"
        assert rows["(root)"] == "(root) Net 41 164 B 56 B bfloat16/float32 true - the whole model"
        assert "4 shard units, 201 parameters, 804 B; per rank of 4: 216 B (last: 176 B)" in text
        assert all(line == line.rstrip() for line in lines)

    def test_equal_layers_share_a_row(self) -> None:
        result = plan(Net(), {**MLPS, "precision": "bf16", "activation_checkpointing": "full"}, 4)
        assert str(result) == result.table()
        rows = [" ".join(line.split()) for line in result.table().splitlines()]
        assert "blocks.{0..1} 2 Mlp 76 304 B 76 B bfloat16/float32 true yes class: Mlp" in rows
        assert "norm 1 BatchNorm1d 8 32 B 8 B full true - full precision: _BatchNorm" in rows
        assert "Where a row stands for several units, its sizes are those of one." in rows
        assert max(map(len, result.table(width=80).splitlines())) <= 80

    def test_notes_and_ties_are_told(self) -> None:
        result = plan(tied(("2.fc1.weight", "0.fc1.weight")), MLPS, 2)
        assert "0 + 2" in result.table()
        for text in (result.table(), result.tree()):
            assert text.endswith("note (tied): '0', '2': share '0.fc1.weight', so they are one shard unit.")

    def test_tree(self) -> None:
        result = plan(Net(), {**MLPS, "sharding": {"ignored_modules": "head"}}, 2)
        assert "    └── {0..1} (2 ×)  [Mlp, 304 B, 152 B/rank]" in result.tree().splitlines()
        lines = result.tree(every_unit=True).splitlines()
        assert lines[2:-1] == [
            "(root)  [Net, 96 B, 48 B/rank]",
            "└── blocks",
            "    ├── 0  [Mlp, 304 B, 152 B/rank]",
            "    └── 1  [Mlp, 304 B, 152 B/rank]",
            "",
            "3 shard units, 201 parameters, 804 B; per rank of 2: 452 B; 2 parameters held whole",
        ]
        assert lines[-1].startswith("note (buffers): 'norm.running_mean': training writes these buffers")

    def test_buffers_that_training_writes_are_named_where_ranks_differ(self) -> None:
        for config, ranks, expected in (({}, 2, True), ({}, 1, False), ({"broadcast_buffers": True}, 2, False)):
            notes = plan(Net(), {"sharding": {"broadcast_buffers": False, **config}}, ranks).notes
            assert [note.fqns for note in notes if note.kind == "buffers"] == [("norm.running_mean",)] * expected

    def test_diff(self) -> None:
        old = plan(Net(), MLPS, 2)
        new = plan(Net(), {**MLPS, "precision": "bf16", "sharding": "SHARD_GRAD_OP"}, 4)
        lines = old.diff(new).splitlines()
        assert "~ strategy: FULL_SHARD -> SHARD_GRAD_OP" in lines
        assert "~ mesh: 2 ranks -> 4 ranks" in lines
        assert "+ unit norm (full precision: _BatchNorm)" in lines
        assert "~ unit blocks.{0..1}.precision: - -> bfloat16/float32" in lines
        assert "~ unit blocks.{0..1}.reshard_after_forward: True -> False" in lines
        assert "~ unit (root).params: 49 -> 41 elements" in lines
        assert "~ bytes on rank 0: 412 B -> 216 B" in lines
        assert "- unit norm (full precision: _BatchNorm)" in new.diff(old).splitlines()
        assert len(lines) == len(new.diff(old).splitlines())


@pytest.mark.parametrize("use_cache", [True, False, None])
def test_a_cache_that_recomputation_would_fill_twice_is_noted(use_cache: bool | None) -> None:
    model = Net()
    if use_cache is not None:
        model.config = types.SimpleNamespace(use_cache=use_cache)
    recomputing = plan(model, {**MLPS, "activation_checkpointing": "full"}, 2)
    assert any("use_cache = False" in note.text for note in recomputing.notes) == (use_cache is True)
    assert not any("use_cache" in note.text for note in plan(model, MLPS, 2).notes)
