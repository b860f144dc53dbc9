"""What a policy chooses equals what torch's own auto-wrapping wraps, on random trees and for every form of policy."""

import functools
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp._wrap_utils import _auto_wrap
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    _or_policy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from torch.nn.modules.batchnorm import _BatchNorm

from mmfsdp.basics.text import compile_pattern
from mmfsdp.config import (
    AllOf,
    AnyOf,
    ModuleClassWrap,
    ModuleNameWrap,
    NoWrap,
    PrecisionConfig,
    ReferenceWrap,
    SizeWrap,
)
from mmfsdp.errors import PolicyError, PolicyNotFoundError
from mmfsdp.planning.policies.matching import resolve_policy, select_modules
from mmfsdp.planning.policies.patterns import match_classes
from mmfsdp.planning.precision.unit_dtypes import full_precision_classes
from mmfsdp.testing import single_rank


class Block(nn.Module):
    """A module of the user's own, with a parameter beside its children."""

    def __init__(self, children: list[nn.Module], width: int = 0) -> None:
        super().__init__()
        for index, child in enumerate(children):
            self.add_module(f"part{index}", child)
        if width:
            self.scale = nn.Parameter(torch.empty(width, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class SubBlock(Block):
    """A subclass: policies by class must find it too."""


CLASSES: list[type[nn.Module]] = [
    Block,
    SubBlock,
    nn.Linear,
    nn.MultiheadAttention,
    nn.Sequential,
    nn.ModuleList,
    _BatchNorm,
]


@st.composite
def trees(draw: st.DrawFn, *, sharing: bool = True, device: str = "meta") -> nn.Module:
    """A random model: nested containers and blocks, shared modules, tied parameters."""
    made: list[nn.Module] = []

    def leaf() -> nn.Module:
        width = draw(st.sampled_from([4, 8, 16]))
        make: Callable[[], nn.Module] = draw(
            st.sampled_from(
                [
                    lambda: nn.Linear(width, 4, device=device),
                    lambda: nn.Linear(width, 4, device=device),
                    lambda: nn.MultiheadAttention(8, 2, device=device),
                    lambda: nn.BatchNorm1d(width, device=device),
                    lambda: nn.LayerNorm(width, device=device),
                    lambda: nn.ReLU(),
                ]
            )
        )
        return make()

    def subtree(depth: int) -> nn.Module:
        if sharing and made and draw(st.integers(0, 6)) == 0:
            return draw(st.sampled_from(made))
        if depth == 0 or draw(st.integers(0, 2)) == 0:
            module = leaf()
        else:
            children = [subtree(depth - 1) for _ in range(draw(st.integers(1, 3)))]
            kind = draw(st.sampled_from(["Block", "SubBlock", "Sequential", "ModuleList", "ModuleDict"]))
            if kind == "Sequential":
                module = nn.Sequential(*children)
            elif kind == "ModuleList":
                module = nn.ModuleList(children)
            elif kind == "ModuleDict":
                module = nn.ModuleDict({f"key{index}": child for index, child in enumerate(children)})
            else:
                module = (Block if kind == "Block" else SubBlock)(children, draw(st.sampled_from([0, 0, 8])))
        made.append(module)
        return module

    root = Block([subtree(3) for _ in range(draw(st.integers(1, 4)))], draw(st.sampled_from([0, 4])))
    linears = [module for module in root.modules() if isinstance(module, nn.Linear)]
    if sharing and len(linears) > 1:
        for _ in range(draw(st.integers(0, 2))):
            one, other = draw(st.sampled_from(linears)), draw(st.sampled_from(linears))
            one.weight = other.weight
    return root


def torch_wraps(
    root: nn.Module,
    policy: Any,
    ignored_modules: set[nn.Module],
    mixed_precision: MixedPrecision | None = None,
) -> list[nn.Module]:
    """The modules that torch's auto-wrapping hands to its wrapper, each once, in its order; nothing is replaced."""
    wrapped: dict[int, nn.Module] = {}

    def record(module: nn.Module, **kwargs: Any) -> nn.Module:
        wrapped[id(module)] = module
        return module

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that batch norm is overridden
        _auto_wrap(
            root,
            policy,
            {module for top in ignored_modules for module in top.modules()},
            {param for module in ignored_modules for param in module.parameters()},
            {"mixed_precision": mixed_precision, "use_orig_params": True},
            record,
        )
    return list(wrapped.values())


def chosen(
    root: nn.Module, policy: Any, ignored_modules: set[nn.Module] | None = None, also: Any = None
) -> list[nn.Module]:
    ignored = ignored_modules or set()
    matches = resolve_policy(
        root,
        policy,
        ignored_modules=ignored,
        ignored_params=[param for module in ignored for param in module.parameters()],
        also=also,
    )
    names = {id(module): fqn for fqn, module in root.named_modules()}
    assert all(match.fqn == names[id(match.module)] for match in matches)
    assert all(match.reason for match in matches)
    return [match.module for match in matches]


# Every signature that users have. Each asks for the same: modules that hold at least `least` parameters.


def torch2(module: nn.Module, recurse: bool, nonwrapped_numel: int, least: int = 40) -> bool:
    return recurse or nonwrapped_numel >= least


def torch1(module: nn.Module, recurse: bool, unwrapped_params: int, min_num_params: int = 40) -> bool:
    return recurse or unwrapped_params >= min_num_params


def keywords_in_any_order(nonwrapped_numel: int, recurse: bool, module: nn.Module) -> bool:
    return recurse or nonwrapped_numel >= 40


def positional_only(module: nn.Module, recurse: bool, nonwrapped_numel: int, /) -> bool:
    return recurse or nonwrapped_numel >= 40


def keyword_only(*, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or nonwrapped_numel >= 40


def old_keyword_only(*, module: nn.Module, recurse: bool, unwrapped_params: int) -> bool:
    return recurse or unwrapped_params >= 40


def other_names(m: nn.Module, r: bool, n: int) -> bool:
    return r or n >= 40


def any_arguments(*args: Any, **kwargs: Any) -> bool:
    return kwargs["recurse"] or kwargs["nonwrapped_numel"] >= 40


def any_keywords(**kwargs: Any) -> bool:
    return kwargs["recurse"] or kwargs["nonwrapped_numel"] >= 40


def any_positions(*args: Any) -> bool:
    return args[1] or args[2] >= 40


def rest_of_keywords(module: nn.Module, recurse: bool, **kwargs: Any) -> bool:
    return recurse or kwargs["nonwrapped_numel"] >= 40


def with_defaults(module: nn.Module, recurse: bool = True, nonwrapped_numel: int = 0) -> bool:
    return recurse or nonwrapped_numel >= 40


def needs_least(module: nn.Module, recurse: bool, nonwrapped_numel: int, least: int) -> bool:
    return recurse or nonwrapped_numel >= least


class Judge:
    def __call__(self, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return recurse or nonwrapped_numel >= 40

    def method(self, module: nn.Module, recurse: bool, unwrapped_params: int) -> bool:
        return recurse or unwrapped_params >= 40


SIGNATURES = [
    torch1,
    keywords_in_any_order,
    positional_only,
    keyword_only,
    old_keyword_only,
    other_names,
    any_arguments,
    any_keywords,
    any_positions,
    rest_of_keywords,
    with_defaults,
    functools.partial(needs_least, least=40),
    functools.partial(functools.partial(torch2, least=3), least=40),
    Judge(),
    functools.partial(Judge()),
    Judge().method,
]


def is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


def is_block_or_given(module: nn.Module, cls: type = Block, verbose: bool = False) -> bool:
    return isinstance(module, cls)


@pytest.fixture(scope="module", autouse=True)
def _importable() -> Iterator[None]:
    """What dotted references of these tests point to, under a name that does not depend on how tests are imported."""
    module = types.ModuleType("policies_of_a_user")
    module.__dict__.update(
        torch1=torch1,
        needs_least=needs_least,
        is_block=is_block,
        blocks=ModuleWrapPolicy({Block}),
        word="not callable",
        Policy=ModuleWrapPolicy,
    )
    sys.modules[module.__name__] = module
    yield
    del sys.modules[module.__name__]


def _sizes() -> st.SearchStrategy[int]:
    return st.sampled_from([1, 9, 40, 41, 100, 300, 1000])


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Any, Any]:
    """A policy as users of torch write it, and an equal one as we are given it (often the same object)."""
    size, classes = draw(_sizes()), set(draw(st.lists(st.sampled_from(CLASSES), min_size=1, max_size=3)))

    def custom(module: nn.Module) -> bool | dict[str, Any]:
        if isinstance(module, tuple(classes)):
            return {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
        return isinstance(module, nn.MultiheadAttention)

    by_size = functools.partial(size_based_auto_wrap_policy, min_num_params=size)
    odd_size = functools.partial(
        size_based_auto_wrap_policy, min_num_params=size, force_leaf_modules=set(), exclude_wrap_modules={nn.Linear}
    )
    by_class = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)
    by_lambda = functools.partial(lambda_auto_wrap_policy, lambda_fn=is_block)
    both = functools.partial(_or_policy, policies=[by_size, by_class])
    # Modules that the model lacks are an error of ours; torch wraps nothing then.
    declared = [
        (by_size, SizeWrap(min_num_params=size)),
        (odd_size, SizeWrap(min_num_params=size, force_leaf_classes=[], exclude_classes=["Linear"])),
        (by_lambda, is_block),
        (by_lambda, is_block_or_given),
        (
            by_lambda,
            ReferenceWrap(
                target="torch.distributed.fsdp.wrap:lambda_auto_wrap_policy", kwargs={"lambda_fn": "x"}
            ).model_copy(update={"kwargs": {"lambda_fn": is_block}}),
        ),
        (always_wrap_policy, "torch.distributed.fsdp.wrap:always_wrap_policy"),
        (always_wrap_policy, ReferenceWrap(target="torch.distributed.fsdp.wrap.always_wrap_policy")),
        (
            by_size,
            ReferenceWrap(
                target="torch.distributed.fsdp.wrap:size_based_auto_wrap_policy", kwargs={"min_num_params": size}
            ),
        ),
        (ModuleWrapPolicy({Block}), "policies_of_a_user:blocks"),
        (torch2, ReferenceWrap(target="policies_of_a_user:torch1")),
        (
            functools.partial(torch2, least=size),
            ReferenceWrap(target="policies_of_a_user:needs_least", kwargs={"least": size}),
        ),
        (both, functools.partial(_or_policy, policies=[by_size, ModuleWrapPolicy(classes)])),
        (
            functools.partial(_or_policy, policies=[by_size, by_lambda]),
            AnyOf(policies=[SizeWrap(min_num_params=size), "size"]).model_copy(
                update={
                    "policies": (SizeWrap(min_num_params=size), ReferenceWrap(target="policies_of_a_user:is_block"))
                }
            ),
        ),
    ]
    same = [
        by_size,
        odd_size,
        by_class,
        by_lambda,
        both,
        always_wrap_policy,
        ModuleWrapPolicy(classes),
        CustomPolicy(custom),
    ]
    return draw(
        st.sampled_from(
            [*declared, *((policy, policy) for policy in same), *((torch2, policy) for policy in SIGNATURES)]
        )
    )


class TestEqualsTorch:
    @settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
    @given(trees(), pairs(), st.data())
    def test_any_policy_on_any_tree(self, root: nn.Module, pair: tuple[Any, Any], data: st.DataObject) -> None:
        theirs, ours = pair
        below = [module for module in root.modules() if module is not root]
        ignored = set(data.draw(st.lists(st.sampled_from(below), max_size=2, unique=True), label="ignored"))
        expected = torch_wraps(root, theirs, ignored)
        assert [id(module) for module in chosen(root, ours, ignored)] == [id(module) for module in expected]

    @settings(deadline=None, max_examples=75, suppress_health_check=[HealthCheck.too_slow])
    @given(trees(), st.sets(st.sampled_from(CLASSES), min_size=1, max_size=3), st.data())
    def test_classes_by_name(self, root: nn.Module, classes: set[type[nn.Module]], data: st.DataObject) -> None:
        present = {cls for cls in classes if any(isinstance(module, cls) for module in root.modules())}
        assume(present)
        spelling = data.draw(st.sampled_from(["bare", "dotted", "colon", "type"]), label="spelling")
        names = [
            {
                "bare": cls.__name__,
                "dotted": f"{cls.__module__}.{cls.__qualname__}",
                "colon": f"{cls.__module__}:{cls.__qualname__}",
                "type": cls,
            }[spelling]
            for cls in present
        ]
        expected = torch_wraps(root, ModuleWrapPolicy(present), set())
        assert {*map(id, chosen(root, ModuleClassWrap(classes=names)))} == {*map(id, expected)}

    @settings(deadline=None, max_examples=75, suppress_health_check=[HealthCheck.too_slow])
    @given(trees(), st.data())
    def test_names(self, root: nn.Module, data: st.DataObject) -> None:
        fqns = [fqn for fqn, _ in root.named_modules(remove_duplicate=False) if fqn]
        wanted = data.draw(st.lists(st.sampled_from(fqns), min_size=1, max_size=3), label="names")
        modules = {root.get_submodule(fqn) for fqn in wanted}
        policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=modules.__contains__)
        assert {*map(id, chosen(root, ModuleNameWrap(patterns=wanted)))} == {*map(id, torch_wraps(root, policy, set()))}

    @settings(deadline=None, max_examples=75, suppress_health_check=[HealthCheck.too_slow])
    @given(trees(), pairs())
    def test_batch_norm_under_mixed_precision(self, root: nn.Module, pair: tuple[Any, Any]) -> None:
        theirs, ours = pair
        full = full_precision_classes(root, PrecisionConfig(preset="bf16"))
        expected = torch_wraps(root, theirs, set(), MixedPrecision(param_dtype=torch.bfloat16))
        assert {*map(id, chosen(root, ours, also=full))} == {*map(id, expected)}

    @settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
    @given(trees(sharing=False, device="cpu"), pairs(), st.booleans())
    def test_real_fully_sharded_data_parallel(self, root: nn.Module, pair: tuple[Any, Any], mixed: bool) -> None:
        theirs, ours = pair
        precision = MixedPrecision(param_dtype=torch.bfloat16) if mixed else None
        for module in root.modules():
            for name, param in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(torch.zeros(param.shape)))
        full = full_precision_classes(root, PrecisionConfig(preset="bf16")) if mixed else None
        expected = {match.fqn for match in resolve_policy(root, ours, also=full)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = FullyShardedDataParallel(
                root,
                auto_wrap_policy=theirs,
                mixed_precision=precision,
                use_orig_params=True,
                device_id=torch.device("cpu"),
                cpu_offload=CPUOffload(offload_params=False),
            )
        units = {fqn for fqn, module in model.named_modules() if isinstance(module, FullyShardedDataParallel) and fqn}
        assert {fqn.replace("_fsdp_wrapped_module", "").replace("..", ".").strip(".") for fqn in units} == expected


@pytest.fixture(scope="module", autouse=True)
def _world() -> Iterator[None]:
    with single_rank():
        yield


@pytest.fixture
def model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(
            nn.Linear(4, 4), Block([nn.Linear(4, 8), nn.BatchNorm1d(8)]), SubBlock([nn.Linear(8, 2)]), nn.ModuleList()
        )


class TestForms:
    @pytest.mark.parametrize("policy", [None, "none", NoWrap()])
    def test_nothing(self, model: nn.Module, policy: Any) -> None:
        assert resolve_policy(model, policy) == []

    def test_children_before_parents_with_reasons(self, model: nn.Module) -> None:
        matches = resolve_policy(model, ModuleClassWrap(classes=["Linear", "Block"]))
        assert [(match.fqn, match.reason) for match in matches] == [
            ("0", "class: Linear"),
            ("1.part0", "class: Linear"),
            ("1", "class: Block"),
            ("2.part0", "class: Linear"),
            ("2", "class: Block"),
        ]

    def test_selection_is_in_the_order_of_modules(self, model: nn.Module) -> None:
        assert select_modules(model, ModuleClassWrap(classes=["Linear", "Block"])) == [
            "0",
            "1",
            "1.part0",
            "2",
            "2.part0",
        ]

    def test_the_root_is_never_chosen(self, model: nn.Module) -> None:
        assert [match.fqn for match in resolve_policy(model, ModuleClassWrap(classes="Sequential"))] == []

    def test_custom_policy_settings(self, model: nn.Module) -> None:
        policy = CustomPolicy(
            lambda module: {"reshard_after_forward": False} if isinstance(module, SubBlock) else is_block(module)
        )
        matches = resolve_policy(model, policy)
        assert [(match.fqn, match.settings) for match in matches] == [
            ("1", {}),
            ("2", {"reshard_after_forward": False}),
        ]

    def test_a_class_by_its_second_home(self, model: nn.Module) -> None:
        expected = select_modules(model, ModuleClassWrap(classes="Linear"))
        assert expected == ["0", "1.part0", "2.part0"]
        assert select_modules(model, ModuleClassWrap(classes="torch.nn.Linear")) == expected
        assert select_modules(model, ModuleClassWrap(classes="torch.nn:Linear")) == expected

    def test_class_names_import_nothing(self, model: nn.Module) -> None:
        assert match_classes(["wave.Wave_read"], dict(model.named_modules()), must_match=False) == {}
        assert "wave" not in sys.modules

    def test_all_of(self, model: nn.Module) -> None:
        policy = AllOf(policies=[ModuleClassWrap(classes="Block"), ModuleNameWrap(patterns="2")])
        matches = resolve_policy(model, policy)
        assert [(match.fqn, match.reason) for match in matches] == [("2", "class: Block and name: 2")]

    def test_any_of_gives_the_first_reason(self, model: nn.Module) -> None:
        policy = AnyOf(policies=[ModuleNameWrap(patterns="2"), ModuleClassWrap(classes="Block")])
        assert [(match.fqn, match.reason) for match in resolve_policy(model, policy)] == [
            ("1", "class: Block"),
            ("2", "name: 2"),
        ]

    def test_a_shared_module_goes_by_all_of_its_names(self) -> None:
        shared = nn.Linear(2, 2)
        model = Block([Block([shared]), Block([shared])])
        for pattern in ("part0.part0", "part1.part0", "part*.part0"):
            assert select_modules(model, ModuleNameWrap(patterns=pattern)) == ["part0.part0"]

    @pytest.mark.parametrize(
        ("policy", "name"),
        [
            (torch2, "torch2"),
            (functools.partial(torch2, least=3), "torch2"),
            (Judge(), "Judge"),
            (functools.partial(Judge()), "Judge"),
            (Judge().method, "method"),
            (lambda module: True, "<lambda>"),
        ],
    )
    def test_reasons_hold_no_addresses(self, model: nn.Module, policy: Any, name: str) -> None:
        assert {match.reason for match in resolve_policy(model, policy)} == {f"policy: {name}"}

    def test_nothing_is_changed(self, model: nn.Module) -> None:
        before = [(fqn, id(module)) for fqn, module in model.named_modules()]
        resolve_policy(model, always_wrap_policy)
        resolve_policy(model, ModuleWrapPolicy({Block}))
        assert [(fqn, id(module)) for fqn, module in model.named_modules()] == before


class TestPatterns:
    @pytest.mark.parametrize(
        ("pattern", "yes", "no"),
        [
            ("blocks.*", ["blocks.0", "blocks.10"], ["blocks", "blocks.0.mlp", "xblocks.0"]),
            ("blocks.**", ["blocks.0", "blocks.0.mlp"], ["blocks", "block.0"]),
            ("**.mlp", ["a.mlp", "a.b.mlp"], ["mlp", "a.mlp2"]),
            ("blocks.?", ["blocks.0"], ["blocks.10", "blocks.."]),
            ("blocks.[0-2]", ["blocks.0", "blocks.2"], ["blocks.3"]),
            ("blocks.[!0]", ["blocks.1"], ["blocks.0"]),
            ("a+b", ["a+b"], ["aab"]),
            (r"re:blocks\.\d+", ["blocks.0", "blocks.10"], ["blocks.0.mlp", "blocks.x"]),
            ("re:a|b", ["a", "b"], ["ab", "ac"]),
        ],
    )
    def test_matches(self, pattern: str, yes: list[str], no: list[str]) -> None:
        regex = compile_pattern(pattern)
        assert [name for name in yes + no if regex.fullmatch(name)] == yes


class TestMistakes:
    @pytest.mark.parametrize(
        ("policy", "message"),
        [
            (
                ModuleNameWrap(patterns="1.prt0"),
                "Pattern '1.prt0' matches no module. Did you mean '1.part0' or '2.part0' or '1.part1'? "
                "[config='wrap.patterns']",
            ),
            (
                ModuleNameWrap(patterns=["0", "zzz"]),
                "Pattern 'zzz' matches no module. There are: '0', '1', '1.part0', '1.part1', '2', '2.part0', '3'. "
                "[config='wrap.patterns']",
            ),
            (
                ModuleClassWrap(classes=["Linear", "Blok"]),
                "No module of the model is a 'Blok'. Did you mean 'Block' or 'SubBlock'? [config='wrap.classes']",
            ),
            (
                ModuleClassWrap(classes="my.models:Zzz"),
                "No module of the model is a 'my.models:Zzz'. The model has: 'BatchNorm1d', 'Block', 'Linear', "
                "'ModuleList', 'Sequential', 'SubBlock'. [config='wrap.classes']",
            ),
            (
                ModuleClassWrap(classes="[Block, SubBlock]"),
                '\'[Block, SubBlock]\' is not a class. Write several as a list: ["Block", "SubBlock"]. '
                "[config='wrap.classes']",
            ),
            (
                3,
                "A wrapping policy must be a config, a callable, a dotted reference or None, got 3 (type int).",
            ),
            (
                ModuleWrapPolicy,
                "A wrapping policy must be callable, but ModuleWrapPolicy is a class. Pass an instance.",
            ),
            (
                ReferenceWrap(target="policies_of_a_user:Policy"),
                "A wrapping policy must be callable, but ModuleWrapPolicy is a class. Pass an instance.",
            ),
            (
                ReferenceWrap(target="policies_of_a_user:needs_least", kwargs={"last": 3}),
                "'policies_of_a_user:needs_least' does not accept these kwargs: got an unexpected keyword "
                "argument 'last'. [config='wrap.kwargs']",
            ),
            (
                ReferenceWrap(target="policies_of_a_user:word", kwargs={"least": 3}),
                "'policies_of_a_user:word' is not callable and accepts no kwargs. [config='wrap.kwargs']",
            ),
            (
                lambda module, recurse: True,
                "Policy '<lambda>' has the signature (module, recurse). Accepted: (module), (module, "
                "recurse, nonwrapped_numel) or (module, recurse, unwrapped_params), more arguments with defaults or "
                "bound by functools.partial.",
            ),
            (
                needs_least,
                "Policy 'needs_least' has the signature (module: torch.nn.modules.module.Module, recurse: bool, "
                "nonwrapped_numel: int, least: int) -> bool. Accepted: (module), (module, recurse, nonwrapped_numel) "
                "or (module, recurse, unwrapped_params), more arguments with defaults or bound by functools.partial.",
            ),
        ],
    )
    def test_whole_message(self, model: nn.Module, policy: Any, message: str) -> None:
        with pytest.raises(PolicyError) as caught:
            resolve_policy(model, policy)
        assert str(caught.value) == message

    @pytest.mark.parametrize(
        ("target", "message"),
        [
            (
                "no_such_package:policy",
                "'no_such_package:policy' cannot be resolved: no module named 'no_such_package'.",
            ),
            (
                "torch.distributed.fsdp.wrap:size_based_policy",
                "'torch.distributed.fsdp.wrap:size_based_policy' cannot be resolved: 'torch.distributed.fsdp.wrap' has "
                "no attribute 'size_based_policy'. Did you mean 'size_based_auto_wrap_policy'",
            ),
        ],
    )
    def test_references(self, model: nn.Module, target: str, message: str) -> None:
        for policy in (target, ReferenceWrap(target=target)):
            with pytest.raises(PolicyNotFoundError) as caught:
                resolve_policy(model, policy)
            assert str(caught.value).startswith(message)

    @pytest.mark.parametrize("answer", [None, 1, 0, "yes", torch.tensor(True), [True]])
    def test_an_answer_that_is_no_decision(self, model: nn.Module, answer: object) -> None:
        def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> Any:
            return answer if isinstance(module, Block) and not recurse else True

        shown = f"{answer!r} (type {type(answer).__name__})"
        with pytest.raises(PolicyError) as caught:
            resolve_policy(model, policy)
        assert str(caught.value) == (
            f"Policy 'policy' must return True or False, but for module '1' with recurse=False it "
            f"returned {shown}. [fqn='1']"
        )
        with pytest.raises(PolicyError, match="for module '0' with recurse=True it returned"):
            resolve_policy(model, lambda module, recurse, numel: answer if isinstance(module, nn.Linear) else True)
        with pytest.raises(PolicyError, match="for module '1' with recurse=False it returned"):
            resolve_policy(model, lambda module: answer if isinstance(module, Block) else True)

    @pytest.mark.parametrize("answer", [None, 1, "yes"])
    def test_custom_policy_names_the_module(self, model: nn.Module, answer: object) -> None:
        policy = CustomPolicy(lambda module: answer if isinstance(module, SubBlock) else False)
        with pytest.raises(PolicyError) as caught:
            resolve_policy(model, policy)
        assert str(caught.value) == (
            "CustomPolicy fails for module '2': The lambda_fn passed to CustomPolicy should return False/True or a "
            f"kwarg dict, but it returned {answer} [fqn='2']"
        )

    def test_an_error_inside_a_policy_is_the_users_own(self, model: nn.Module) -> None:
        def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
            raise ZeroDivisionError("mine")

        with pytest.raises(ZeroDivisionError, match="mine"):
            resolve_policy(model, policy)
