"""What users get wrong stops all ranks before the first step, with an error that says what to write instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.nn as nn
from mmengine.registry import FUNCTIONS
from tests.mmengine_adapter.toy import ToyModel

from mmfsdp.errors import (
    ConfigError,
    FrozenParametersError,
    GradScalerError,
    MeshError,
    PolicyError,
    PolicyNotFoundError,
    RankMismatchError,
)
from mmfsdp.testing import run_ranks
from mmfsdp_mmengine import FSDPStrategy
from mmfsdp_mmengine.configs.arguments import state_dict_settings

SGD = {"optimizer": {"type": "SGD", "lr": 0.1}}


@FUNCTIONS.register_module(force=True)
def counting_policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> Any:
    return nonwrapped_numel


class Frozen(ToyModel):
    """Half of its first block is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].fc1.requires_grad_(False)


def prepare(rank: int, folder: Path, case: str) -> tuple[type, str]:
    wrapper, changes = CASES[case][:2]
    model: Any = {"type": "ToyModel"}
    if case == "frozen":
        model = Frozen()
    if case == "ranks differ":
        model = ToyModel(width=16 + 4 * rank)
    try:
        strategy = FSDPStrategy(work_dir=str(folder), model_wrapper=wrapper, **changes.get("strategy", {}))
        strategy.prepare(model, optim_wrapper=changes.get("optim", SGD))
    except Exception as error:
        return type(error), str(error)
    raise AssertionError("nothing was wrong")


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], list[str]]] = {
    "unknown policy": (
        {"auto_wrap_policy": "counting_polcy"},
        {},
        PolicyNotFoundError,
        [
            "auto_wrap_policy 'counting_polcy' was not found.",
            "Looked in mmfsdp_mmengine::fsdp wrap policy, mmengine::function",
            "Did you mean 'counting_policy'",
            "Register it with @FUNCTIONS.register_module()",
        ],
    ),
    "unknown reference": (
        {"auto_wrap_policy": {"type": "torch.distributed.fsdp.wrap.size_auto_wrap_policy"}},
        {},
        PolicyNotFoundError,
        ["has no attribute 'size_auto_wrap_policy'", "Did you mean 'size_based_auto_wrap_policy'"],
    ),
    "unknown init function": (
        {"param_init_fn": {"type": "init_wieghts"}},
        {},
        PolicyNotFoundError,
        ["param_init_fn 'init_wieghts' was not found."],
    ),
    "unknown check_fn": (
        {},
        {"strategy": {"activation_checkpointing": {"check_fn": "is_blok"}}},
        PolicyNotFoundError,
        ["activation_checkpointing.check_fn 'is_blok' was not found."],
    ),
    "unknown class": (
        {"auto_wrap_policy": {"type": "ModuleWrapPolicy", "module_classes": ["Blokc"]}},
        {},
        PolicyError,
        ["No module of the model is a 'Blokc'.", "Did you mean 'Block'?"],
    ),
    "policy without type": (
        {"auto_wrap_policy": {"min_num_params": 5}},
        {},
        ConfigError,
        ["auto_wrap_policy as a dict needs a 'type'", "The keys given are 'min_num_params'."],
    ),
    "policy argument": (
        {"auto_wrap_policy": {"type": "size_based_auto_wrap_policy", "min_params": 5}},
        {},
        ConfigError,
        ["size_based_auto_wrap_policy(", "unexpected keyword argument 'min_params'"],
    ),
    "policy returns a number": (
        {"auto_wrap_policy": "counting_policy"},
        {},
        PolicyError,
        ["Policy 'counting_policy' must return True or False", "(type int)"],
    ),
    "misspelt strategy": (
        {"sharding_strategy": "FULL_SHRAD"},
        {},
        ConfigError,
        ["'FULL_SHRAD' is not accepted.", "Did you mean 'FULL_SHARD'"],
    ),
    "dtype that does not exist": (
        {"mixed_precision": {"param_dtype": "float17"}},
        {},
        ConfigError,
        ["mixed_precision.param_dtype: 'float17' is not a dtype.", "Did you mean 'float16'"],
    ),
    "misspelt argument": (
        {"sharding_stratgy": "FULL_SHARD"},
        {},
        ConfigError,
        ["MMFullyShardedDataParallel has no argument 'sharding_stratgy'.", "Did you mean 'sharding_strategy'"],
    ),
    "name of fully_shard": (
        {"mp_policy": "bf16"},
        {},
        ConfigError,
        ["MMFullyShardedDataParallel has no argument 'mp_policy'. Write mixed_precision='bf16', or"],
    ),
    "name of DeepSpeed": (
        {"gradient_clipping": 1.0},
        {},
        ConfigError,
        ["has no argument 'gradient_clipping'. Write optim_wrapper = dict(..., clip_grad=dict(max_norm=1.0))."],
    ),
    "frozen": (
        {"use_orig_params": False, "auto_wrap_policy": {"type": "ModuleWrapPolicy", "module_classes": "Block"}},
        {},
        FrozenParametersError,
        ["unit 'blocks.0' has frozen parameters", "blocks.0.fc1.weight", "Set use_orig_params=True"],
    ),
    "flat parameter in two groups": (
        {"use_orig_params": False},
        {"optim": {**SGD, "paramwise_cfg": {"bias_lr_mult": 2.0}}},
        ConfigError,
        ["use_orig_params=False makes one flat parameter of shard unit '(root)'", "Set use_orig_params=True."],
    ),
    "float16 without a scaler": (
        {"mixed_precision": {"param_dtype": "float16"}},
        {},
        GradScalerError,
        ["mixed_precision computes in float16, but the OptimWrapper has no gradient scaler", "AmpOptimWrapper"],
    ),
    "mesh of another size": (
        {"sharding_strategy": "HYBRID_SHARD", "config": {"sharding": {"shard_size": 4}}},
        {},
        MeshError,
        ["A world of 2 ranks cannot be divided into shard groups of 4."],
    ),
    "argument of DDP": (
        {"find_unused_parameters": True},
        {},
        ConfigError,
        ["has no argument 'find_unused_parameters'. It belongs to MMDistributedDataParallel.", "Remove it."],
    ),
    "another argument of DDP": (
        {"static_graph": True},
        {},
        ConfigError,
        ["no argument 'static_graph'. It belongs to MMDistributedDataParallel; sharding does not need it. Remove it."],
    ),
    "argument of the strategy": (
        {},
        {"strategy": {"model_wraper": {}}},
        ConfigError,
        ["FSDPStrategy has no argument 'model_wraper'. Did you mean 'model_wrapper'"],
    ),
    "policy's misspelt argument": (
        {"auto_wrap_policy": {"type": "ModuleWrapPolicy", "module_class": ["Block"]}},
        {},
        ConfigError,
        ["got an unexpected keyword argument 'module_class'. Did you mean 'module_classes'?"],
    ),
    "device_mesh for more ranks": (
        {"sharding_strategy": "HYBRID_SHARD", "device_mesh": {"mesh_shape": [2, 2]}},
        {},
        MeshError,
        ["mesh_shape (2, 2) is for 4 ranks, but 2 were started.", "write a shape for 2: (2,)"],
    ),
    "device_mesh for fewer ranks": (
        {"device_mesh": {"mesh_shape": (1,)}},
        {},
        MeshError,
        ["mesh_shape (1,) is for 1 ranks, but 2 were started."],
    ),
    "device_mesh's misspelt argument": (
        {"device_mesh": {"shape": (2,)}},
        {},
        ConfigError,
        ["device_mesh has no argument 'shape'. Did you mean 'mesh_shape'?"],
    ),
    "device_mesh of a number": (
        {"device_mesh": {"mesh_shape": 2}},
        {},
        ConfigError,
        ["device_mesh.mesh_shape must be a tuple of numbers of ranks, such as (2, 8), got 2."],
    ),
    "device_mesh with too few names": (
        {"device_mesh": {"mesh_shape": (1, 2), "mesh_dim_names": ("replicate",)}},
        {},
        ConfigError,
        ["mesh_dim_names must name the 2 dimensions of mesh_shape (1, 2), got ('replicate',)."],
    ),
    "process_group without a rank": (
        {"process_group": {"ranks": [0]}},
        {},
        MeshError,
        ["process_group leaves out the ranks [1], which were started too. Remove process_group"],
    ),
    "clip_grad's misspelt argument": (
        {},
        {"optim": {**SGD, "clip_grad": {"max_norm": 1, "nrom_type": 1}}},
        ConfigError,
        ["clip_grad has no argument 'nrom_type'. Did you mean 'norm_type'"],
    ),
    "clip_grad without a norm": (
        {},
        {"optim": {**SGD, "clip_grad": {"norm_type": 1}}},
        ConfigError,
        ["clip_grad lacks 'max_norm', which clip_grad_norm_ needs. Write clip_grad=dict(max_norm=...)."],
    ),
    "an optimizer as wrapper": (
        {},
        {"optim": {"type": "SGD", "lr": 0.1}},
        ConfigError,
        ["optim_wrapper is the config of an optimizer.", "optimizer=dict(type='SGD', ...))"],
    ),
    "several optimizers without constructor": (
        {},
        {"optim": {"head": SGD, "blocks": SGD}},
        ConfigError,
        ["optim_wrapper has 'head', 'blocks' and no 'optimizer'.", "for several optimizers constructor=..."],
    ),
    "ranks differ": ({}, {}, RankMismatchError, ["Ranks 0 and 1 were given different models", "patch.weight"]),
    "other wrapper": (
        {"type": "MMDistributedDataParallel"},
        {},
        ConfigError,
        ["FSDPStrategy needs MMFullyShardedDataParallel or a class derived from it as model_wrapper"],
    ),
    "checkpointing set twice": (
        {"activation_checkpointing": "full"},
        {"strategy": {"activation_checkpointing": "full"}},
        ConfigError,
        ["activation_checkpointing is set in strategy and in strategy.model_wrapper. Set it in one of them."],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_stops_every_rank_with_its_own_error(tmp_path: Path, case: str) -> None:
    *_, error, parts = CASES[case]
    for kind, message in run_ranks(prepare, 2, tmp_path, case):
        assert kind is error, message
        for part in parts:
            assert part in message


class TestStateDictConfig:
    @pytest.mark.parametrize(
        ("given", "kind"),
        [
            ("full", "full"),
            ("local", "local"),
            ({}, "local"),
            ({"state_dict_type": "FULL_STATE_DICT"}, "full"),
            ({"state_dict_type": "SHARDED_STATE_DICT"}, "sharded"),
            ({"state_dict_config": {"type": "FullStateDictConfig", "offload_to_cpu": True}}, "full"),
            (
                {
                    "state_dict_type": "FULL_STATE_DICT",
                    "state_dict_config": {"type": "FullStateDictConfig", "offload_to_cpu": True},
                    "optim_state_dict_config": {"type": "FullOptimStateDictConfig", "offload_to_cpu": True},
                },
                "full",
            ),
        ],
    )
    def test_forms(self, given: Any, kind: str) -> None:
        assert state_dict_settings(given).kind == kind

    def test_torch_s_own_objects(self) -> None:
        from torch.distributed.fsdp import FullOptimStateDictConfig, LocalStateDictConfig, StateDictType

        given = {
            "state_dict_type": StateDictType.FULL_STATE_DICT,
            "optim_state_dict_config": FullOptimStateDictConfig(),
        }
        assert state_dict_settings(given).state_dict_type is StateDictType.FULL_STATE_DICT
        assert state_dict_settings({"state_dict_config": LocalStateDictConfig}).kind == "local"

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ("ful", r"'full', 'local', 'sharded' or a dict, got 'ful'\. Did you mean 'full'\?"),
            (3, r"got 3 \(type int\)"),
            ({"state_dict_typ": "FULL"}, r"has no argument 'state_dict_typ'\. Did you mean 'state_dict_type'"),
            ({"state_dict_type": "FULL"}, r"state_dict_cfg.state_dict_type 'FULL' is not known"),
            ({"state_dict_config": {"type": "FullConfig"}}, r"state_dict_config 'FullConfig' is not known"),
            (
                {"state_dict_type": "LOCAL_STATE_DICT", "state_dict_config": {"type": "FullStateDictConfig"}},
                "contradicts itself: state_dict_type is LOCAL, state_dict_config is FULL",
            ),
        ],
    )
    def test_what_is_not_accepted(self, given: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            state_dict_settings(given)
