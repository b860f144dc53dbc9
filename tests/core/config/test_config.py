"""Settings round-trip, never change what users pass, and every mistake names its place and the way out."""

import ast
import copy
import inspect
import json
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy, fully_shard

import mmfsdp
from mmfsdp.config import (
    ActivationCheckpointingConfig,
    AllOf,
    AnyOf,
    AutoWrap,
    InitConfig,
    ModuleClassWrap,
    ModuleNameWrap,
    NoWrap,
    PrecisionConfig,
    PrefetchConfig,
    ReferenceWrap,
    ShardConfig,
    ShardingConfig,
    SizeWrap,
)
from mmfsdp.config.synonyms import SYNONYMS, Synonym, synonym_of
from mmfsdp.errors import ConfigError
from mmfsdp.torch_style import translate_arguments

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
DTYPES = ["float16", "bfloat16", "float32", "float64"]

_names = st.lists(st.from_regex(r"[A-Za-z_]{1,8}(\.[A-Za-z_]{1,8})?", fullmatch=True), min_size=1, max_size=3)
_references = st.sampled_from(["a.b:c", "torch.nn:Linear", "pkg.mod.fn"])
_dtypes = st.none() | st.sampled_from([*DTYPES, "bf16", "torch.float32", "half"])


def _record(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


def _kind(kind: str, required: dict[str, Any], **optional: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"kind": st.just(kind), **required}, optional=optional)


_wraps = st.recursive(
    st.sampled_from([None, "auto", "none", "size", {"kind": "none"}])
    | _kind(
        "size",
        {},
        min_num_params=st.integers(1, 10**9),
        exclude_classes=_names,
        force_leaf_classes=st.just([]) | _names,
    )
    | _kind("module_class", {"classes": _names})
    | _kind("module_name", {"patterns": st.lists(st.sampled_from(["a.*", "**", r"re:x\d+", "b[0-9]"]), min_size=1)})
    | _kind(
        "reference",
        {"target": _references},
        kwargs=st.dictionaries(
            st.text(min_size=1), st.integers() | st.text() | st.booleans() | st.lists(st.integers())
        ),
    ),
    lambda inner: st.sampled_from(["any_of", "all_of"]).flatmap(
        lambda kind: _kind(kind, {"policies": st.lists(inner, min_size=1, max_size=3)})
    ),
    max_leaves=4,
)
_precisions = st.sampled_from(["fp32", "bf16", "fp16", "bf16-pure"]) | _record(
    preset=st.sampled_from(["fp32", "bf16", "fp16", "bf16-pure"]),
    param_dtype=_dtypes,
    reduce_dtype=_dtypes,
    buffer_dtype=_dtypes,
    output_dtype=_dtypes,
    storage_dtype=_dtypes,
    cast_forward_inputs=st.booleans(),
    ignore_classes=_names | st.just([]),
    overrides=st.lists(
        st.fixed_dictionaries({"modules": _names}, optional={"param_dtype": _dtypes, "reduce_dtype": _dtypes}),
        max_size=2,
    ),
)
_activation = st.sampled_from([None, "full", "every_n", "ops"]) | (
    _record(n=st.integers(1, 9), modules=_wraps, offload=st.booleans(), preserve_rng_state=st.booleans())
    | st.fixed_dictionaries({"mode": st.just("ops"), "save_ops": st.just(["aten.mm"])})
    | st.fixed_dictionaries({"mode": st.just("selective"), "check_fn": _references})
)


@st.composite
def config_dicts(draw: st.DrawFn) -> dict[str, Any]:
    """What a user may write: any spelling, settings left out at will, nothing contradictory."""
    sharding: Any = draw(
        st.sampled_from([s.lower() for s in STRATEGIES])
        | _record(
            strategy=st.sampled_from(STRATEGIES),
            reshard_after_forward=st.none() | st.booleans() | st.integers(2, 8),
            ignored_modules=_names,
            ignored_parameters=_names,
            forward_methods=_names | st.text(min_size=1),
        )
    )
    if isinstance(sharding, dict) and "HYBRID" in sharding.get("strategy", ""):
        sharding["shard_size"] = draw(st.none() | st.integers(2, 64))
    config = draw(
        _record(
            wrap=_wraps,
            precision=_precisions,
            activation_checkpointing=_activation,
            cpu_offload=st.booleans() | _record(enabled=st.booleans(), pin_memory=st.booleans()),
            prefetch=st.sampled_from(["pre", "post", "none", "BACKWARD_POST"])
            | _record(backward=st.sampled_from(["pre", "post", "none"]), forward=st.integers(0, 4)),
            init=_record(sync_states=st.booleans(), seed=st.integers(0, 2**31), param_init_fn=st.none() | _references),
        )
    )
    config["sharding"] = sharding
    config["engine"] = draw(st.sampled_from(["auto", "fsdp2", "fsdp1"]))
    if draw(st.booleans()) and config["engine"] != "fsdp2" and isinstance(sharding, dict):
        sharding["use_orig_params"] = False
    if not sharding and draw(st.booleans()):
        config["engine"] = "replicate"
    return config


def _plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(type(key) is str and _plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(_plain(item) for item in value)
    return type(value) in (str, int, float, bool)


class TestRoundTrips:
    @settings(deadline=None)
    @given(config_dicts())
    def test_any_config(self, data: dict[str, Any]) -> None:
        before = copy.deepcopy(data)
        config = ShardConfig.from_dict(data)
        assert data == before
        written = config.to_dict()
        assert _plain(written), "fit for YAML and TOML: plain types, no nulls"
        assert ShardConfig.from_dict(written) == config
        assert ShardConfig.from_json(config.to_json()) == config
        assert ShardConfig(**written) == config
        assert json.loads(config.to_json(indent=None)) == written
        assert ShardConfig.from_dict(written).to_dict() == written
        assert _accepts(ShardConfig.json_schema(), written)

    def test_toml(self) -> None:
        text = """
        engine = "auto"
        precision = "bf16"
        activation_checkpointing = "full"
        cpu_offload = true

        [sharding]
        strategy = "hybrid_shard"
        shard_size = 4
        ignored_modules = "neck.*"

        [wrap]
        kind = "any_of"
        policies = [
            { kind = "module_class", classes = "Block" },
            { kind = "size", min_num_params = 1000 },
        ]
        """
        config = ShardConfig.from_dict(tomllib.loads(text))
        assert config.sharding == ShardingConfig(strategy="HYBRID_SHARD", shard_size=4, ignored_modules=("neck.*",))
        assert config.wrap == AnyOf(policies=(ModuleClassWrap(classes=("Block",)), SizeWrap(min_num_params=1000)))
        assert config.precision.param_dtype == "bfloat16"
        assert config.precision.reduce_dtype == "float32"
        assert config.activation_checkpointing == ActivationCheckpointingConfig(mode="full")
        assert config.cpu_offload.enabled

    def test_replicate_comes_back(self) -> None:
        config = ShardConfig(engine="replicate")
        assert config.sharding.strategy == "NO_SHARD"
        assert ShardConfig.from_dict(config.to_dict()) == config

    def test_defaults(self) -> None:
        config = ShardConfig()
        assert (config.engine, config.sharding.strategy, config.wrap) == ("auto", "FULL_SHARD", AutoWrap())
        assert config.precision == PrecisionConfig()
        assert not config.precision.is_mixed
        assert config.init.sync_states


class TestValues:
    def test_frozen(self) -> None:
        config = ShardConfig()
        with pytest.raises(ValidationError, match="Instance is frozen"):
            config.engine = "fsdp1"  # type: ignore[misc]
        with pytest.raises(ValidationError, match="Instance is frozen"):
            config.sharding.strategy = "NO_SHARD"  # type: ignore[misc]
        assert config == ShardConfig()

    def test_nested_user_objects_are_copied(self) -> None:
        kwargs = {"classes": ["a"]}
        config = ShardConfig.from_dict({"wrap": {"kind": "reference", "target": "a:b", "kwargs": kwargs}})
        kwargs["more"] = ["b"]
        assert config.wrap == ReferenceWrap(target="a:b", kwargs={"classes": ["a"]})

    def test_needs_no_torch(self) -> None:
        code = """
        import sys
        from mmfsdp.config import ShardConfig
        ShardConfig.from_dict(ShardConfig(wrap="size", precision="bf16").to_dict())
        ShardConfig.json_schema()
        assert "torch" not in sys.modules
        """
        subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)

    @pytest.mark.parametrize("spelling", ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16, "BFloat16"])
    def test_dtypes_in_any_spelling(self, spelling: object) -> None:
        config = ShardConfig(precision={"param_dtype": spelling})
        assert config.precision.param_dtype == config.precision.reduce_dtype == "bfloat16"
        assert config.to_dict()["precision"]["param_dtype"] == "bfloat16"

    @pytest.mark.parametrize("member", list(ShardingStrategy))
    def test_torch_strategies(self, member: ShardingStrategy) -> None:
        for spelling in (
            member,
            member.name,
            member.name.lower(),
            str(member),
            member.name.replace("_", "-").lstrip("-"),
        ):
            assert ShardConfig(sharding={"strategy": spelling}).sharding.strategy == member.name
            assert ShardConfig(sharding=spelling).sharding.strategy == member.name

    @pytest.mark.parametrize(
        "spelling", [BackwardPrefetch.BACKWARD_POST, "BACKWARD_POST", "post", "BackwardPrefetch.BACKWARD_POST"]
    )
    def test_torch_prefetch(self, spelling: object) -> None:
        assert ShardConfig(prefetch=spelling).prefetch == PrefetchConfig(backward="post")

    @pytest.mark.parametrize(
        ("preset", "dtypes"),
        [
            ("fp32", (None, None, None)),
            ("bf16", ("bfloat16", "float32", None)),
            ("fp16", ("float16", "float32", None)),
            ("bf16-pure", ("bfloat16", "bfloat16", "bfloat16")),
        ],
    )
    def test_presets(self, preset: str, dtypes: tuple[str | None, ...]) -> None:
        precision = ShardConfig(precision=preset).precision
        assert (precision.param_dtype, precision.reduce_dtype, precision.storage_dtype) == dtypes
        assert precision == PrecisionConfig(preset=preset)
        assert precision.is_mixed == (preset != "fp32")

    def test_a_field_beside_a_preset_wins(self) -> None:
        precision = PrecisionConfig(preset="bf16", reduce_dtype="bf16")
        assert (precision.param_dtype, precision.reduce_dtype) == ("bfloat16", "bfloat16")

    def test_classes_stand_for_their_names(self) -> None:
        wrap = ModuleClassWrap(classes=[nn.Linear, "Block"])
        assert wrap.classes == ("torch.nn.modules.linear:Linear", "Block")
        assert ModuleClassWrap(classes=nn.Linear).classes == ("torch.nn.modules.linear:Linear",)
        assert PrecisionConfig(ignore_classes={nn.LayerNorm, nn.Linear}).ignore_classes == (
            "torch.nn.modules.linear:Linear",
            "torch.nn.modules.normalization:LayerNorm",
        )

    @pytest.mark.parametrize("none", [None, "none", "NONE", {"kind": "none"}, NoWrap()])
    def test_no_wrap(self, none: object) -> None:
        assert ShardConfig(wrap=none).wrap == NoWrap()

    def test_wrap_by_bare_kind(self) -> None:
        assert ShardConfig(wrap="size").wrap == SizeWrap()
        assert ShardConfig(wrap="auto").wrap == AutoWrap()
        assert AllOf(policies=["size", None]).policies == (SizeWrap(), NoWrap())

    def test_an_empty_list_is_an_answer(self) -> None:
        assert SizeWrap(exclude_classes=[]).exclude_classes == ()
        assert SizeWrap().exclude_classes is None


# Settings, part of the path, the whole message but for its context.
MISTAKES: list[tuple[Mapping[str, Any], str, str]] = [
    (
        {"sharding": {"strategy": "FULL_SHRAD"}},
        "sharding.strategy",
        "ShardConfig.sharding.strategy: 'FULL_SHRAD' is not accepted. Did you mean 'FULL_SHARD'",
    ),
    (
        {"sharding": "full_shrad"},
        "sharding",
        "ShardConfig.sharding: 'full_shrad' is not accepted. Did you mean 'FULL_SHARD' or 'NO_SHARD'? Accepted: "
        "'FULL_SHARD', 'SHARD_GRAD_OP', 'NO_SHARD', 'HYBRID_SHARD', '_HYBRID_SHARD_ZERO2'.",
    ),
    (
        {"sharding": {"strategy": 3}},
        "sharding.strategy",
        "ShardConfig.sharding.strategy: 3 is not accepted. Accepted: 'FULL_SHARD'",
    ),
    ({"shardin": {}}, "shardin", "ShardConfig.shardin: unknown setting 'shardin'. Did you mean 'sharding'?"),
    (
        {"zzz": 1},
        "zzz",
        "ShardConfig.zzz: unknown setting 'zzz'. Accepted: 'engine', 'sharding', 'wrap', 'parallel', 'precision', "
        "'activation_checkpointing', 'compile', 'optimizer', 'cpu_offload', 'prefetch', 'init'.",
    ),
    (
        {"precision": {"overrides": [{"modules": "x", "param_dtyp": "fp32"}]}},
        "precision.overrides.0.param_dtyp",
        "ShardConfig.precision.overrides.0.param_dtyp: unknown setting 'param_dtyp'. Did you mean 'param_dtype'",
    ),
    (
        {"wrap": {"kind": "any_of", "policies": [None, {"kind": "size", "min_num_param": 3}]}},
        "wrap.policies.1.min_num_param",
        "ShardConfig.wrap.policies.1.min_num_param: unknown setting 'min_num_param'. Did you mean 'min_num_params'?",
    ),
    (
        {"wrap": {"kind": "all_of", "policies": [{"kind": "any_of", "policies": [{"kind": "sise"}]}]}},
        "wrap.policies.0.policies.0",
        "ShardConfig.wrap.policies.0.policies.0.kind: 'sise' is not accepted. Did you mean 'size'? Accepted: 'auto', "
        "'none', 'size', 'module_class', 'module_name', 'reference', 'lambda', 'any_of', 'all_of'.",
    ),
    (
        {"wrap": 3},
        "wrap",
        "ShardConfig.wrap: expected 'auto', 'none', 'size', the name of a class, a list of names or a mapping with a "
        "'kind', got 3 (type int).",
    ),
    (
        {"precision": torch.float64},
        "precision",
        "ShardConfig.precision: 'torch.float64' is not accepted. Accepted: 'fp32', 'bf16', 'fp16', 'bf16-pure'.",
    ),
    (
        {"activation_checkpointing": {"modules": {"kind": "module_class", "clases": "B"}}},
        "activation_checkpointing.modules.clases",
        "ShardConfig.activation_checkpointing.modules.clases: unknown setting 'clases'. Did you mean 'classes'?",
    ),
    (
        {"wrap": {"min_num_params": 3}},
        "wrap",
        "ShardConfig.wrap: got {'min_num_params': 3} (type dict), expected a mapping with a 'kind'.",
    ),
    ({"wrap": {"kind": "module_class"}}, "wrap.classes", "ShardConfig.wrap.classes: this setting is required."),
    (
        {"wrap": {"kind": "module_class", "classes": []}},
        "wrap.classes",
        "ShardConfig.wrap.classes: expected at least one item, got ().",
    ),
    (
        {"wrap": {"kind": "module_class", "classes": 3}},
        "wrap.classes",
        "ShardConfig.wrap.classes: expected a name or a list of names, got 3 (type int).",
    ),
    (
        {"wrap": {"kind": "module_name", "patterns": ["re:("]}},
        "wrap.patterns.0",
        "ShardConfig.wrap.patterns.0: 're:(' is not a regular expression: missing ), "
        "unterminated subpattern at position 0.",
    ),
    (
        {"wrap": {"kind": "module_name", "patterns": ["a", ""]}},
        "wrap.patterns.1",
        "ShardConfig.wrap.patterns.1: expected a non-empty pattern, got '' (type str).",
    ),
    (
        {"wrap": {"kind": "reference", "target": "my policy"}},
        "wrap.target",
        "ShardConfig.wrap.target: 'my policy' is not a reference. Write 'package.module:attribute', for example "
        "'torch.distributed.fsdp.wrap:size_based_auto_wrap_policy'.",
    ),
    (
        {"precision": {"param_dtype": "bfloat17"}},
        "precision.param_dtype",
        "ShardConfig.precision.param_dtype: 'bfloat17' is not a dtype. Did you mean 'bfloat16'",
    ),
    (
        {"precision": {"buffer_dtype": torch.int8}},
        "precision.buffer_dtype",
        "ShardConfig.precision.buffer_dtype: torch.int8 is not a floating point dtype.",
    ),
    (
        {"precision": {"param_dtype": "int8"}},
        "precision.param_dtype",
        "ShardConfig.precision.param_dtype: 'int8' is not a floating point dtype.",
    ),
    (
        {"precision": "bf-16"},
        "precision",
        "ShardConfig.precision: 'bf-16' is not accepted. Did you mean 'bf16' or 'fp16' or 'bf16-pure'? "
        "Accepted: 'fp32', 'bf16', 'fp16', 'bf16-pure'.",
    ),
    (
        {"precision": {"preset": ["bf16"]}},
        "precision.preset",
        "ShardConfig.precision.preset: ['bf16'] is not accepted.",
    ),
    (
        {"precision": 16},
        "precision",
        "ShardConfig.precision: expected a preset, a dtype or a mapping, got 16 (type int).",
    ),
    (
        {"sharding": {"reshard_after_forward": 1}},
        "sharding.reshard_after_forward",
        "ShardConfig.sharding.reshard_after_forward: expected true, false or a group size of at least 2, got 1.",
    ),
    ({"prefetch": "middle"}, "prefetch", "ShardConfig.prefetch: 'middle' is not accepted."),
    ({"prefetch": {"forward": -1}}, "prefetch.forward", "greater than or equal to 0, got -1 (type int)."),
    (
        {"cpu_offload": "yes"},
        "cpu_offload",
        "ShardConfig.cpu_offload: expected true, false or a mapping, got 'yes' (type str).",
    ),
    (
        {"init": {"param_init_fn": "f g"}},
        "init.param_init_fn",
        "ShardConfig.init.param_init_fn: 'f g' is not a reference.",
    ),
    ({"init": {"device": "cud"}}, "init.device", "ShardConfig.init.device: 'cud' is not accepted. Did you mean 'cuda'"),
    ({"engine": "fsdp3"}, "engine", "ShardConfig.engine: 'fsdp3' is not accepted. Did you mean 'fsdp2' or 'fsdp1'?"),
    (
        {"activation_checkpointing": "fulll"},
        "activation_checkpointing",
        "ShardConfig.activation_checkpointing: 'fulll' is not accepted. Did you mean 'full'?",
    ),
    (
        {"activation_checkpointing": {"modules": "size", "check_fn": "a:b"}},
        "activation_checkpointing",
        "ShardConfig.activation_checkpointing: both modules and check_fn select what to checkpoint. Give one.",
    ),
    (
        {"activation_checkpointing": {"save_ops": "aten.mm"}},
        "activation_checkpointing",
        "ShardConfig.activation_checkpointing: save_ops is only used in mode 'ops', not 'full'. Set mode 'ops', or "
        "remove save_ops.",
    ),
    (
        {"activation_checkpointing": {"mode": "ops", "use_reentrant": True}},
        "activation_checkpointing",
        "ShardConfig.activation_checkpointing: use_reentrant=True cannot be combined with mode 'ops'. "
        "Set use_reentrant to False.",
    ),
]


NAMES_OF_OTHERS = [
    ("reshard_after_forward", "Write sharding={'reshard_after_forward': False}."),
    ("mp_policy", "Write precision='bf16'."),
    ("auto_wrap_policy", "Write wrap='LlamaDecoderLayer'. wrap='auto' is the default."),
    ("offload_policy", "Write cpu_offload=True."),
    ("fsdp_transformer_layer_cls_to_wrap", "Write wrap='LlamaDecoderLayer'."),
    ("fsdp_version", "Write engine='fsdp2'."),
    ("FSDP_Sharding_Strategy", "Write sharding='SHARD_GRAD_OP'."),
    ("mixed_precison", "Write precision='bf16'."),
    ("device_mesh", "Pass a DeviceMesh, a process group"),
    ("gradient_clipping", "Call mmfsdp.clip_grad_norm_(model, 1.0)"),
    ("zero_stage", "Write sharding='FULL_SHARD'. FULL_SHARD is ZeRO stage 3"),
]


class TestNamesOfOtherLibraries:
    @pytest.mark.parametrize(("name", "advice"), NAMES_OF_OTHERS)
    def test_advice(self, name: str, advice: str) -> None:
        said: dict[str, Any] = {name: 1}
        with pytest.raises(ConfigError, match=re.escape(f"{name!r} is neither an argument nor a setting. {advice}")):
            mmfsdp.plan(nn.Linear(2, 2), mesh=2, **said)
        as_mapping = "{'" + advice.removeprefix("Write ").partition("=")[0] if advice.startswith("Write") else advice
        with pytest.raises(ConfigError, match=re.escape(f"unknown setting {name!r}.")) as caught:
            ShardConfig.from_dict(said)
        assert as_mapping in str(caught.value)
        assert "Did you mean" not in str(caught.value)

    @pytest.mark.parametrize("synonym", {id(item): item for item in SYNONYMS.values()}.values())
    def test_examples_are_accepted(self, synonym: Synonym) -> None:
        """What a user pastes is a config, and each name that a note mentions exists."""
        ShardConfig.from_dict(synonym.settings)
        assert synonym.settings or synonym.note
        for name in re.findall(r"mmfsdp\.(\w+)", synonym.note):
            assert hasattr(mmfsdp, name)
        for name in re.findall(r"the argument (\w+)", synonym.note):
            assert name in inspect.signature(mmfsdp.shard).parameters

    def test_every_argument_of_torch_is_known(self) -> None:
        known = {*inspect.signature(mmfsdp.shard).parameters, *ShardConfig.model_fields, "module"}
        given = {*inspect.signature(fully_shard).parameters, *inspect.signature(FullyShardedDataParallel).parameters}
        assert {name for name in given - known if synonym_of(name) is None} == set()

    @pytest.mark.parametrize(
        ("path", "value", "message"),
        [
            ("sharding", {"mp_policy": 1}, "Write {'precision': 'bf16'}."),
            ("sharding", {"strateg": 1}, "Did you mean 'strategy'?"),
            ("prefetch", {"backward_prefetch": 1}, "Write {'prefetch': 'post'}."),
            ("wrap", "TRANSFORMER_BASED_WRAP", "'TRANSFORMER_BASED_WRAP' is a policy of accelerate. Write 'auto'"),
            ("wrap", lambda module: True, "Pass functions and policies of torch as the argument policy instead."),
        ],
    )
    def test_elsewhere(self, path: str, value: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=re.escape(message)):
            ShardConfig.from_dict({path: value})

    @pytest.mark.parametrize("given", [True, False])
    def test_activation_checkpointing_is_a_switch(self, given: bool) -> None:
        expected = ActivationCheckpointingConfig() if given else None
        assert ShardConfig(activation_checkpointing=given).activation_checkpointing == expected
        assert _accepts(ShardConfig.json_schema(), {"activation_checkpointing": given})
        wrapped = translate_arguments(activation_checkpointing=given).config
        assert wrapped.activation_checkpointing == expected

    @pytest.mark.parametrize(
        ("name", "advice"),
        [
            ("mp_policy", "Write mixed_precision='bf16', or a MixedPrecisionPolicy as mixed_precision."),
            ("reshard_after_forward", "Write sharding_strategy='SHARD_GRAD_OP', which does not reshard, or"),
            ("offload_policy", "Write cpu_offload=True."),
            ("wrap", "Write auto_wrap_policy={'kind': 'module_class', 'classes': 'LlamaDecoderLayer'}."),
            ("compile", "Write it in config, as in config={'compile': ...}."),
            ("fsdp_activation_checkpointing", "Write activation_checkpointing."),
            ("gradient_checkpointing", "Write activation_checkpointing='full'."),
            ("zero_hpz_partition_size", "Write config={'sharding': {'reshard_after_forward': 8}}."),
            ("bf16", "Write mixed_precision='bf16'."),
            ("max_grad_norm", "Call mmfsdp.clip_grad_norm_(model, 1.0)"),
            ("shardng_strategy", "Did you mean 'sharding_strategy'?"),
        ],
    )
    def test_the_wrapper_answers_in_its_own_words(self, name: str, advice: str) -> None:
        given: dict[str, Any] = {name: 1}
        with pytest.raises(ConfigError, match=re.escape(f"has no argument {name!r}. {advice}")):
            translate_arguments(**given)
        written = re.fullmatch(r"Write (\w+)=('.*'|True|\{.*\})(, .*)?\.", advice)
        if written is not None and "..." not in advice:
            translate_arguments(**{written[1]: ast.literal_eval(written[2])})


class TestShortForms:
    @pytest.mark.parametrize("spelling", ["bf16", "BF16", "bfloat16", "torch.bfloat16", "BFloat16", torch.bfloat16])
    def test_a_dtype_is_the_preset_of_its_name(self, spelling: Any) -> None:
        expected = ShardConfig.from_dict({"precision": {"preset": "bf16"}})
        assert expected.precision.reduce_dtype == "float32"
        assert ShardConfig(precision=spelling) == ShardConfig(precision={"preset": spelling}) == expected
        assert PrecisionConfig(preset=spelling) == expected.precision

    def test_other_dtypes(self) -> None:
        assert ShardConfig(precision=torch.float16) == ShardConfig(precision="fp16")
        assert ShardConfig(precision="float32") == ShardConfig(precision=torch.float32) == ShardConfig()

    @pytest.mark.parametrize("given", [nn.Linear, [nn.Linear], {nn.Linear}, "torch.nn.modules.linear:Linear"])
    def test_classes_to_wrap(self, given: Any) -> None:
        assert ShardConfig(wrap=given).wrap == ModuleClassWrap(classes=nn.Linear)
        assert AnyOf(policies=[given]).policies == (ModuleClassWrap(classes=nn.Linear),)

    def test_words_in_any_case(self) -> None:
        config = ShardConfig.from_dict({"engine": "FSDP2", "activation_checkpointing": "Full", "prefetch": "Post"})
        assert config == ShardConfig(engine="fsdp2", activation_checkpointing="full", prefetch="post")
        assert ShardConfig.from_dict({"init": {"device": "CPU"}}).init.device == "cpu"


class TestMistakes:
    @pytest.mark.parametrize(("data", "path", "message"), MISTAKES, ids=[path for _, path, _ in MISTAKES])
    def test_says_where_and_what(self, data: Mapping[str, Any], path: str, message: str) -> None:
        before = copy.deepcopy(data)
        with pytest.raises(ConfigError) as caught:
            ShardConfig.from_dict(data)
        assert message in str(caught.value)
        assert caught.value.context == {"config": path}
        assert data == before

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (
                {"sharding": {"shard_size": 2}},
                "ShardConfig: sharding.shard_size=2 needs a hybrid strategy, not 'FULL_SHARD'. Set "
                "sharding.strategy to 'HYBRID_SHARD', or remove shard_size.",
            ),
            (
                {"sharding": {"strategy": "HYBRID_SHARD", "shard_size": 1}},
                "ShardConfig: sharding.shard_size=1 shards nothing, and FSDP1 would not even average gradients. Use "
                "strategy 'NO_SHARD' to replicate.",
            ),
            (
                {"engine": "fsdp2", "sharding": {"use_orig_params": False}},
                "ShardConfig: sharding.use_orig_params=False needs engine 'fsdp1', not 'fsdp2'.",
            ),
            (
                {
                    "engine": "replicate",
                    "sharding": {"use_orig_params": False},
                    "precision": {"keep_low_precision_grads": True},
                },
                "ShardConfig: sharding.use_orig_params=False and precision.keep_low_precision_grads=True needs engine "
                "'fsdp1', not 'replicate'.",
            ),
            (
                {"engine": "replicate", "sharding": "FULL_SHARD"},
                "ShardConfig: engine 'replicate' holds everything on every rank; sharding.strategy 'FULL_SHARD' "
                "contradicts it. Set strategy 'NO_SHARD', or engine 'fsdp2'.",
            ),
        ],
    )
    def test_contradictions(self, data: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError) as caught:
            ShardConfig.from_dict(data)
        assert str(caught.value) == message

    def test_all_mistakes_at_once_unknown_names_first(self) -> None:
        with pytest.raises(ConfigError) as caught:
            ShardConfig.from_dict({"engine": "fsdp3", "sharding": {"stratgy": "FULL_SHARD"}})
        assert str(caught.value) == (
            "2 settings are wrong:\n"
            "  - ShardConfig.sharding.stratgy: unknown setting 'stratgy'. Did you mean 'strategy'?\n"
            "  - ShardConfig.engine: 'fsdp3' is not accepted. Did you mean 'fsdp2' or 'fsdp1'? Accepted: 'auto', "
            "'fsdp2', 'fsdp1', 'replicate'. [config='sharding.stratgy']"
        )

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (
                lambda: SizeWrap(min_num_params=0),
                "SizeWrap.min_num_params: Input should be greater than 0, got 0 (type int).",
            ),
            (
                lambda: SizeWrap(min_num_parms=3),
                "SizeWrap.min_num_parms: unknown setting 'min_num_parms'. Did you mean",
            ),
            (
                lambda: SizeWrap(kind="sise"),
                "SizeWrap.kind: 'sise' is not accepted. Did you mean 'size'? Accepted: 'size'.",
            ),
            (lambda: ModuleNameWrap(), "ModuleNameWrap.patterns: this setting is required."),
            (
                lambda: ModuleNameWrap(patterns=[None]),
                "ModuleNameWrap.patterns.0: Input should be a valid string, got None",
            ),
            (lambda: AnyOf(policies=[]), "AnyOf.policies: expected at least one item, got []."),
            (lambda: ReferenceWrap(target=None), "ReferenceWrap.target: Input should be a valid string, got None"),
            (
                lambda: InitConfig(seed=-1),
                "InitConfig.seed: Input should be greater than or equal to 0, got -1 (type int).",
            ),
            (
                lambda: PrecisionConfig(param_dtype="fp17"),
                "PrecisionConfig.param_dtype: 'fp17' is not a dtype. Did you mean 'fp16'",
            ),
            (
                lambda: PrecisionConfig(overrides=[{"modules": []}]),
                "PrecisionConfig.overrides.0.modules: expected at least one",
            ),
        ],
    )
    def test_parts_on_their_own(self, make: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=re.escape(message)):
            make()

    @pytest.mark.parametrize("text", ["", "{", "nonsense"])
    def test_text_that_is_not_json(self, text: str) -> None:
        with pytest.raises(ConfigError, match=r"^ShardConfig: Invalid JSON: "):
            ShardConfig.from_json(text)

    @pytest.mark.parametrize("data", [5, None, ["sharding"], "FULL_SHARD"])
    def test_what_is_no_mapping(self, data: Any) -> None:
        with pytest.raises(ConfigError, match=r"^ShardConfig: Input should be a valid dictionary"):
            ShardConfig.from_dict(data)

    def test_a_failed_config_leaves_nothing_behind(self) -> None:
        with pytest.raises(ConfigError, match=r"^ShardConfig\.wrap"):
            ShardConfig(wrap={"kind": "size", "min_num_params": "many"})
        with pytest.raises(ConfigError, match=r"^SizeWrap\.min_num_params"):
            SizeWrap(min_num_params="many")


def _accepts(schema: Mapping[str, Any], value: Any, root: Mapping[str, Any] | None = None) -> bool:
    """Whether a JSON schema accepts a value: the keywords that ours uses, and no other is passed over."""
    root = root or schema
    json_types = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None), "number": float}
    for word, rule in schema.items():
        match word:
            case "$ref":
                ok = _accepts(root["$defs"][rule.rpartition("/")[2]], value, root)
            case "anyOf":
                ok = any(_accepts(option, value, root) for option in rule)
            case "oneOf":
                ok = sum(_accepts(option, value, root) for option in rule) == 1
            case "type" if rule == "integer":
                ok = isinstance(value, int) and not isinstance(value, bool)
            case "type":
                ok = isinstance(value, json_types[rule])
            case "enum":
                ok = value in rule
            case "const":
                ok = value == rule
            case "required":
                ok = not isinstance(value, dict) or all(name in value for name in rule)
            case "properties":
                ok = not isinstance(value, dict) or all(
                    _accepts(rule[k], v, root) for k, v in value.items() if k in rule
                )
            case "additionalProperties" if rule is False:
                ok = not isinstance(value, dict) or not value.keys() - schema.get("properties", {}).keys()
            case "additionalProperties":
                ok = rule is True or all(_accepts(rule, v, root) for v in value.values())
            case "items":
                ok = not isinstance(value, list) or all(_accepts(rule, item, root) for item in value)
            case "minItems":
                ok = not isinstance(value, list) or len(value) >= rule
            case "minimum":
                ok = not isinstance(value, int) or value >= rule
            case "exclusiveMinimum":
                ok = not isinstance(value, int) or value > rule
            case "$schema" | "$defs" | "title" | "description" | "default" | "discriminator":
                ok = True
            case _:
                raise AssertionError(f"keyword {word!r} is not known here")
        if not ok:
            return False
    return True


class TestJsonSchema:
    def test_describes_itself(self) -> None:
        schema = ShardConfig.json_schema()
        assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
        assert schema["title"] == "ShardConfig"
        assert schema["properties"].keys() == ShardConfig.model_fields.keys()
        json.dumps(schema)
        assert (
            "Shards and optimizer keep the model"
            in schema["$defs"]["PrecisionConfig"]["properties"]["param_dtype"]["description"]
        )

    @pytest.mark.parametrize(
        "data",
        [
            {},
            {"sharding": "NO_SHARD", "precision": "bf16", "cpu_offload": True, "activation_checkpointing": "full"},
            {"wrap": "none"},
            {"wrap": None},
            {"wrap": {"kind": "module_class", "classes": "Block"}},
            {"wrap": {"kind": "any_of", "policies": [{"kind": "module_name", "patterns": "a.*"}, None]}},
            {"prefetch": "post", "sharding": {"ignored_modules": "neck"}},
        ],
    )
    def test_accepts_what_the_config_accepts(self, data: dict[str, Any]) -> None:
        ShardConfig.from_dict(data)
        assert _accepts(ShardConfig.json_schema(), data)

    @pytest.mark.parametrize(
        "data",
        [
            {"shardin": {}},
            {"sharding": "FULL_SHRAD"},
            {"wrap": {"kind": "sise"}},
            {"wrap": {"kind": "any_of", "policies": []}},
            {"precision": "bf17"},
            {"prefetch": {"forward": -1}},
            {"engine": "fsdp3"},
        ],
    )
    def test_refuses_what_the_config_refuses(self, data: dict[str, Any]) -> None:
        with pytest.raises(ConfigError):
            ShardConfig.from_dict(data)
        assert not _accepts(ShardConfig.json_schema(), data)
