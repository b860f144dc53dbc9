"""Each finding of the diagnosis appears where it should, and nowhere else: configs as real ones are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mmengine.config import Config

import mmfsdp
from mmfsdp.errors import ConfigError
from mmfsdp.frontends.config_readers import read_config
from mmfsdp.frontends.findings import Diagnosis

HEAD = """
custom_imports = dict(imports=['mmfsdp_mmengine', 'tests.mmengine_adapter.diagnosed'], allow_failed_imports=False)
runner_type = 'FlexibleRunner'
env_cfg = dict(dist_cfg=dict(backend='nccl'))
"""
BLOCKS = "auto_wrap_policy=dict(type='ModuleWrapPolicy', module_classes=['Block'])"
STRATEGY = f"strategy = dict(type='FSDPStrategy', model_wrapper=dict({BLOCKS}))\n"
POLICY = ("changed", "strategy.model_wrapper.auto_wrap_policy")
ADAMW = "optim_wrapper = dict(optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.05))\n"

CONFIGS: dict[str, tuple[str, set[tuple[str, str]]]] = {
    "deit": (
        HEAD
        + STRATEGY
        + """
model = dict(type='Transformer')
optim_wrapper = dict(
    optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.05),
    paramwise_cfg=dict(norm_decay_mult=0, custom_keys={'.cls_token': dict(decay_mult=0)}),
    clip_grad=dict(max_norm=1.0))
""",
        {
            POLICY,
            ("changed", "optim_wrapper.clip_grad"),
            ("changed", "optim_wrapper.paramwise_cfg"),
            ("warning", "optim_wrapper.paramwise_cfg.custom_keys['.cls_token']"),
        },
    ),
    "swin": (
        HEAD
        + """
model = dict(type='Pyramid', batch_norm=True)
strategy = dict(
    type='mmengine.FSDPStrategy',
    sync_bn='torch',
    activation_checkpointing=dict(check_fn='is_block'),
    state_dict_cfg=dict(state_dict_type='FULL_STATE_DICT'),
    model_wrapper=dict(
        type='MMFullyShardedDataParallel',
        mixed_precision=dict(type='MixedPrecision', param_dtype='bfloat16'),
        auto_wrap_policy=dict(kind='module_name', patterns=['stages'])))
"""
        + ADAMW,
        {
            ("changed", "strategy.model_wrapper.auto_wrap_policy"),
            ("changed", "strategy.model_wrapper.mixed_precision"),
            ("changed", "strategy.activation_checkpointing"),
            ("changed", "strategy.state_dict_cfg"),
            ("changed", "strategy.sync_bn"),
            ("changed", "model"),
        },
    ),
    "convnext with EMA": (
        HEAD
        + STRATEGY
        + ADAMW
        + """
model = dict(type='Pyramid', batch_norm=True)
custom_hooks = [dict(type='EMAHook', ema_type='ExponentialMovingAverige', momentum=4e-5, priority='ABOVE_NORMAL')]
resume = True
""",
        {
            POLICY,
            ("warning", "model"),
            ("changed", "resume"),
            ("changed", "custom_hooks[0]"),
            ("error", "custom_hooks[0].ema_type"),
        },
    ),
    "MAE fine-tuning": (
        HEAD.replace("runner_type = 'FlexibleRunner'", "")
        + """
model = dict(type='Transformer')
load_from = 'https://example.org/mae_vit.pth'
optim_wrapper = dict(
    type='AmpOptimWrapper',
    dtype='bfloat16',
    accumulative_counts=4,
    optimizer=dict(type='AdamW', lr=2e-3, weight_decay=0.05),
    constructor='LayerDecay',
    paramwise_cfg=dict(layer_decay_rate=0.65))
strategy = dict(
    type='FSDPStrategy',
    model_wrapper=dict(use_orig_params=False, auto_wrap_policy=dict(type='size_based_auto_wrap_policy',
        min_num_params=300)))
default_hooks = dict(checkpoint=dict(type='CheckpointHook', interval=1, published_keys=['state_dict', 'meta']))
""",
        {
            POLICY,
            ("warning", "runner_type"),
            ("warning", "strategy.model_wrapper.use_orig_params"),
            ("error", "strategy.model_wrapper.use_orig_params"),
            ("changed", "load_from"),
            ("changed", "optim_wrapper.type"),
            ("changed", "optim_wrapper.accumulative_counts"),
            ("changed", "optim_wrapper.constructor"),
            ("changed", "optim_wrapper.paramwise_cfg"),
            ("changed", "default_hooks.checkpoint.published_keys"),
        },
    ),
    "LoRA": (
        HEAD
        + ADAMW
        + """
model = dict(type='Transformer', lora=True)
strategy = dict(type='FSDPStrategy', skip_init_weights=True, model_wrapper=dict(
    sharding_strategy='HYBRID_SHARD', ignored_parameters=['cls_token'], mixed_precision='fp16'))
""",
        {
            ("ok", "model"),
            ("error", "strategy.skip_init_weights"),
            ("error", "optim_wrapper.type"),
            ("warning", "strategy.model_wrapper.sharding_strategy"),
            ("warning", "strategy.model_wrapper.auto_wrap_policy"),
            ("changed", "strategy.model_wrapper.ignored_parameters"),
            ("changed", "strategy.model_wrapper"),
        },
    ),
    "GPT-2 tied": (
        HEAD
        + ADAMW
        + """
model = dict(type='Transformer', tied=True)
strategy = dict(type='FSDPStrategy', model_wrapper=dict(
    auto_wrap_policy=dict(kind='module_name', patterns=['embed', 'head'])))
""",
        {("changed", "model"), POLICY},
    ),
    "every argument wrong": (
        HEAD
        + ADAMW
        + """
model = dict(type='Transformer')
sync_bn = None
strategy = dict(
    type='FSDPStrategy',
    state_dict_cfg=dict(state_dict_type='FULL_STATE_DICT', state_dict_config=dict(type='LocalStateDictConfig')),
    activation_checkpointing=dict(check_fn='is_blok'),
    skip_init_weight=True,
    kind='full',
    model_wrapper=dict(
        sharding_strategy='FULL_SHARDED',
        backward_prefech='BACKWARD_PRE',
        backward_prefetch='early',
        mixed_precision=dict(type='MixedPrecision', param_dtyp='bfloat16'),
        auto_wrap_policy=dict(type='ModuleWrapPolicy', module_classes=['Blok']),
        param_init_fn='nothing'))
""",
        {
            ("error", "strategy.state_dict_cfg"),
            ("error", "strategy.activation_checkpointing.check_fn"),
            ("error", "strategy.skip_init_weight"),
            ("error", "strategy.kind"),
            ("error", "strategy.model_wrapper.sharding_strategy"),
            ("error", "strategy.model_wrapper.backward_prefech"),
            ("error", "strategy.model_wrapper.backward_prefetch"),
            ("error", "strategy.model_wrapper.mixed_precision"),
            ("error", "strategy.model_wrapper.auto_wrap_policy"),
            ("error", "strategy.model_wrapper.param_init_fn"),
            ("changed", "strategy.model_wrapper.mixed_precision"),
            ("changed", "strategy.activation_checkpointing"),
            POLICY,
        },
    ),
    "GAN": (
        HEAD
        + STRATEGY
        + """
model = dict(type='Gan')
optim_wrapper = dict(
    constructor='PerNetwork',
    generator=dict(type='OptimWrapper', optimizer=dict(type='Adam', lr=2e-4), clip_grad=dict(max_norm=1)),
    discriminator=dict(type='OptimWrapper', optimizer=dict(type='Adam', lr=2e-4)))
""",
        {
            POLICY,
            ("changed", "model"),
            ("changed", "optim_wrapper"),
            ("changed", "optim_wrapper.constructor"),
            ("changed", "optim_wrapper.generator.clip_grad"),
        },
    ),
    "plain Runner with DDP": (
        """
custom_imports = dict(imports=['tests.mmengine_adapter.diagnosed'])
model = dict(type='Transformer')
model_wrapper_cfg = dict(type='MMDistributedDataParallel', find_unused_parameter=True)
"""
        + ADAMW,
        {("warning", "strategy"), ("error", "model_wrapper_cfg.find_unused_parameter")},
    ),
    "plain Runner with FSDP": (
        f"""
custom_imports = dict(imports=['tests.mmengine_adapter.diagnosed', 'mmfsdp_mmengine'], allow_failed_imports=True)
model = dict(type='Transformer')
model_wrapper_cfg = dict(type='MMFullyShardedDataParallel', {BLOCKS})
state_dict_cfg = 'sharded'
"""
        + ADAMW,
        {
            ("warning", "custom_imports.imports"),
            ("warning", "custom_imports.allow_failed_imports"),
            ("warning", "launcher"),
            ("changed", "model_wrapper_cfg"),
            ("changed", "model_wrapper_cfg.auto_wrap_policy"),
            ("changed", "state_dict_cfg"),
        },
    ),
    "without the import": (
        HEAD.replace("'mmfsdp_mmengine', ", "") + STRATEGY + ADAMW + "model = dict(type='Transformer')\n",
        {POLICY, ("error", "custom_imports.imports")},
    ),
    "names that nothing has": (
        HEAD
        + """
model = dict(type='Transfomer')
strategy = dict(type='FSDPStrategi')
optim_wrapper = dict(type='OptimWraper', optimizer=dict(type='AdanW'))
custom_hooks = [dict(type='SyncBufferHook')]
""",
        {
            ("error", "model.type"),
            ("error", "strategy.type"),
            ("error", "optim_wrapper.type"),
            ("error", "optim_wrapper.optimizer.type"),
            ("error", "custom_hooks[0].type"),
        },
    ),
}


def diagnosis(tmp_path: Path, text: str, mesh: int | tuple[int, int] | None = None) -> Diagnosis:
    (tmp_path / "config.py").write_text(text)
    return read_config(tmp_path / "config.py").diagnose(mesh)


@pytest.mark.parametrize("name", CONFIGS)
def test_findings(tmp_path: Path, name: str) -> None:
    text, expected = CONFIGS[name]
    found = diagnosis(tmp_path, text)
    assert {(item.level, item.path) for item in found.findings} == expected
    assert found.ok == all(level != "error" for level, _ in expected)


SIMPLE = HEAD + STRATEGY + ADAMW + "model = dict(type='Transformer')\n"
WRAPPER = "strategy['model_wrapper']"


@pytest.mark.parametrize(
    ("line", "added"),
    [
        ("", set()),
        ("param_scheduler = [object()]", {("changed", "param_scheduler")}),
        ("compile = True", {("changed", "compile")}),
        ("del env_cfg", {("changed", "env_cfg")}),
        ("model_wrapper_cfg = dict(type='MMDistributedDataParallel')", {("warning", "model_wrapper_cfg")}),
        (
            "model_wrapper_cfg = dict(type='Nothing')",
            {("warning", "model_wrapper_cfg"), ("error", "model_wrapper_cfg.type")},
        ),
        (f"{WRAPPER}['type'] = 'MMFullShardedDataParallel'", {("error", "strategy.model_wrapper.type")}),
        (f"{WRAPPER}['sharding_strategy'] = 'no_shard'", {("changed", "strategy.model_wrapper.sharding_strategy")}),
        (f"{WRAPPER}['cpu_offload'] = dict(offload_param=True)", {("error", "strategy.model_wrapper.cpu_offload")}),
        (f"{WRAPPER}['fsdp_auto_wrap_policy'] = {WRAPPER}.pop('auto_wrap_policy')", "old name"),
        ("strategy['sync_bn'] = 'torch'", {("changed", "strategy.sync_bn")}),
        ("strategy['state_dict_cfg'] = 'sharded'", {("changed", "strategy.state_dict_cfg")}),
        ("strategy['state_dict_cfg'] = 'shared'", {("error", "strategy.state_dict_cfg")}),
        ("load_from = 'work_dirs/epoch_3'", {("changed", "load_from"), ("warning", "load_from")}),
        ("optim_wrapper['optimizer'] = dict(type='LBFGS', lr=1)", {("warning", "optim_wrapper.optimizer.type")}),
        ("optim_wrapper['optimizer']['lrr'] = 1", {("error", "optim_wrapper")}),
        ("optim_wrapper['type'] = 'ApexOptimWrapper'", {("warning", "optim_wrapper.type")}),
        ("optim_wrapper['clip_grad'] = dict(type='value', clip_value=1)", set()),
        ("custom_hooks = [dict(type='EMAHook', ema_type='StochasticWeightAverage')]", {("changed", "custom_hooks[0]")}),
        ("model['depht'] = 3", {("error", "model")}),
        (
            f"optim_wrapper = dict(type='AmpOptimWrapper', dtype='float16', **optim_wrapper); "
            f"{WRAPPER}['mixed_precision'] = 'bf16'",
            {("changed", "optim_wrapper.type"), ("warning", "optim_wrapper.dtype")},
        ),
        (
            "optim_wrapper = dict(blocks=optim_wrapper, head=optim_wrapper)",
            {("changed", "optim_wrapper"), ("error", "optim_wrapper.constructor"), ("error", "optim_wrapper")},
        ),
        (
            "optim_wrapper = dict(constructor='PerNetwork', blocks=dict(**optim_wrapper), "
            "again=dict(of='blocks', **optim_wrapper))",
            {("changed", "optim_wrapper"), ("error", "optim_wrapper.again")},
        ),
    ],
)
def test_one_change_adds_its_findings_only(tmp_path: Path, line: str, added: set[tuple[str, str]] | str) -> None:
    found = {(item.level, item.path) for item in diagnosis(tmp_path, f"{SIMPLE}{line}\n").findings}
    if added == "old name":
        assert found == {("ok", "strategy.model_wrapper.fsdp_auto_wrap_policy")}
    else:
        assert found == {POLICY, *added}


def test_classes_given_as_objects(tmp_path: Path) -> None:
    text = f"""
from mmengine._strategy import FSDPStrategy
from mmengine.hooks import EMAHook
from tests.mmengine_adapter.diagnosed import Transformer

{HEAD}
model = dict(type=Transformer)
strategy = dict(type=FSDPStrategy, model_wrapper=dict({BLOCKS}))
custom_hooks = [dict(type=EMAHook)]
"""
    found = {(item.level, item.path) for item in diagnosis(tmp_path, text).findings}
    # mmengine.hooks.EMAHook is ours once the package is imported
    assert found == {POLICY, ("changed", "custom_hooks[0]"), ("error", "strategy.type")}


def test_a_hook_derived_from_the_stock_one(tmp_path: Path) -> None:
    text = SIMPLE + "custom_hooks = [dict(type='OldAverages')]\n"
    found = {(item.level, item.path) for item in diagnosis(tmp_path, text).findings}
    assert found == {POLICY, ("error", "custom_hooks[0].type")}


def of(tmp_path: Path, text: str, path: str) -> str:
    [finding] = [item for item in diagnosis(tmp_path, text).findings if item.path == path]
    return f"{finding.here} | {finding.stock} | {finding.advice}"


def test_findings_say_what_and_what_to_write(tmp_path: Path) -> None:
    assert "Did you mean 'cls_token'?" in of(
        tmp_path, CONFIGS["deit"][0], "optim_wrapper.paramwise_cfg.custom_keys['.cls_token']"
    )
    names = CONFIGS["names that nothing has"][0]
    assert "Did you mean 'Transformer'?" in of(tmp_path, names, "model.type")
    assert "Did you mean 'FSDPStrategy'" in of(tmp_path, names, "strategy.type")
    assert "Did you mean 'AdamW'" in of(tmp_path, names, "optim_wrapper.optimizer.type")
    advice = of(tmp_path, CONFIGS["plain Runner with DDP"][0], "strategy").rpartition(" | ")[2]
    advised = diagnosis(tmp_path, CONFIGS["plain Runner with DDP"][0].partition("model_wrapper_cfg")[0] + ADAMW)
    assert advised.suggested
    assert advised.plan is not None
    assert [unit.fqn for unit in advised.plan.units] == ["blocks.0", "blocks.1", "embed", ""]
    changed = "custom_imports['imports'] += ['tests.mmengine_adapter.diagnosed']\nenv_cfg = dict()\n"
    after = diagnosis(tmp_path, f"{advice}\n{changed}model = dict(type='Transformer')\n{ADAMW}")
    assert after.plan == advised.plan  # what is advised can be pasted
    assert [item for item in after.findings if item.level in ("error", "warning")] == []


def test_groups_are_counted(tmp_path: Path) -> None:
    text = CONFIGS["MAE fine-tuning"][0].replace("use_orig_params=False, ", "")
    model = read_config(tmp_path / "config.py").model() if diagnosis(tmp_path, text) else None
    assert model is not None
    count = len(list(model.parameters()))
    assert f"param groups are those of the whole model: {count} here" in of(tmp_path, text, "optim_wrapper.constructor")


def test_the_plan_is_that_of_the_wrapper(tmp_path: Path) -> None:
    found = diagnosis(tmp_path, CONFIGS["swin"][0], 16)
    config = read_config(tmp_path / "config.py")
    settings = {
        "wrap": {"kind": "module_name", "patterns": ["stages"]},
        "precision": {"param_dtype": "bfloat16"},
        "activation_checkpointing": {"mode": "selective", "check_fn": "tests.mmengine_adapter.diagnosed:is_block"},
    }
    assert found.plan == mmfsdp.plan(config.model(), settings, 16)
    hybrid = CONFIGS["LoRA"][0]
    for ranks, text, shape in (
        (None, hybrid, (1, 8)),
        ((2, 4), hybrid, (2, 4)),
        (None, hybrid.replace("mixed", "device_mesh=dict(mesh_shape=(2, 3)), mixed"), (2, 3)),
    ):
        plan = diagnosis(tmp_path, text, ranks).plan
        assert plan is not None
        assert (plan.mesh.replicate, plan.mesh.shard) == shape


def test_unreadable_configs(tmp_path: Path) -> None:
    for text, message in (
        ("model = dict(", r"config\.py cannot be read: SyntaxError"),
        (
            "custom_imports = dict(imports=['nowhere'])",
            "A module in custom_imports of config.py cannot be imported: .*nowhere",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            diagnosis(tmp_path, text)


def test_a_config_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text(CONFIGS["swin"][0])
    config = read_config(tmp_path / "config.py")
    before = Config.fromfile(tmp_path / "config.py").to_dict()
    config.diagnose(None)
    assert vars(config)["content"].keys() == before.keys()
    assert json.dumps(vars(config)["content"], default=str) == json.dumps(before, default=str)


KEPT = """
custom_imports = dict(imports=['tests.mmengine_adapter.diagnosed'], allow_failed_imports=False)
model = dict(type='Pyramid', batch_norm=True)
custom_hooks = [dict(type='EMAHook', momentum=2e-4, priority='ABOVE_NORMAL')]
"""


@pytest.mark.parametrize("style", ["one file", "_base_"])
def test_pasted_lines_lose_nothing_of_the_config(style: str, tmp_path: Path) -> None:
    text = KEPT + ADAMW
    if style == "_base_":
        (tmp_path / "base.py").write_text(text)
        text = "_base_ = ['base.py']\n"
    (shards,) = (item for item in diagnosis(tmp_path, text).findings if item.path == "strategy")
    text += f"{shards.advice}\n"
    (statistics,) = (item for item in diagnosis(tmp_path, text).findings if item.path == "model" and item.advice)
    text += f"{statistics.advice}\n"
    found = diagnosis(tmp_path, text)
    assert found.ok
    assert not [item for item in found.findings if item.level == "warning"]
    settings = read_config(tmp_path / "config.py").content
    assert settings["custom_imports"]["imports"] == ["mmfsdp_mmengine", "tests.mmengine_adapter.diagnosed"]
    assert settings["custom_hooks"] == [
        {"type": "EMAHook", "momentum": 2e-4, "priority": "ABOVE_NORMAL"},
        {"type": "SyncBuffersHook"},
    ]


def test_keys_are_suggested_only_if_they_are_alike(tmp_path: Path) -> None:
    model, wrapper = "model = dict(type='Transformer')\n", "optimizer=dict(type='AdamW')"
    keys = "optim_wrapper = dict(paramwise_cfg=dict(custom_keys={'pos_block': dict(lr_mult=0.1), 'blocs': {}}), "
    text = HEAD + STRATEGY + model + keys + wrapper + ")\n"
    found = {item.path: item.here for item in diagnosis(tmp_path, text).findings if "custom_keys" in item.path}
    assert found["optim_wrapper.paramwise_cfg.custom_keys['pos_block']"] == "no parameter name contains this key."
    assert "Did you mean 'blocks'" in found["optim_wrapper.paramwise_cfg.custom_keys['blocs']"]


def test_what_concerns_sharding_is_said_only_of_what_is_sharded(tmp_path: Path) -> None:
    text = "model = dict(type='Transformer')\nfind_unused_parameters = True\noptim_wrapper = dict("
    text += "accumulative_counts=2, clip_grad=dict(max_norm=1.0), optimizer=dict(type='AdamW'))\n"
    imports = "custom_imports = dict(imports=['tests.mmengine_adapter.diagnosed'])\n"
    paths = {"find_unused_parameters", "optim_wrapper.clip_grad", "optim_wrapper.accumulative_counts"}
    assert not paths & {item.path for item in diagnosis(tmp_path, imports + text).findings}
    found = {item.path: item for item in diagnosis(tmp_path, HEAD + STRATEGY + text).findings}
    assert paths <= found.keys()
    assert found["find_unused_parameters"].level == "changed"
    assert "may differ from step to step" in found["find_unused_parameters"].here
