"""Saving, resuming and loading: exact, whole or not at all, on any number of ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import MODELS
from tests.mmengine_adapter.toy import POLICY, UNSHARDED, config, run, runner_of, strategy, train

from mmfsdp.checkpoint import open_layout
from mmfsdp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    FormatError,
    PolicyNotFoundError,
    ShardStateError,
    StateDictError,
)
from mmfsdp.testing import RankError, run_ranks
from mmfsdp_mmengine import FSDPStrategy
from mmfsdp_mmengine.checkpoints.live_content import safe_globals
from mmfsdp_mmengine.configs.lookup import UnknownNameError

SAFE = safe_globals()


class TestResume:
    @pytest.mark.sample("local", "full", "local-flat")
    @pytest.mark.parametrize(
        ("kind", "world_size", "wrapper"),
        [
            ("full", 2, {}),
            ("local", 2, {"ignored_parameters": ["head.bias"], "ignored_modules": ["patch"]}),
            ("local", 2, {"use_orig_params": False}),
            ("local", 2, {"sharding_strategy": "NO_SHARD"}),
            ("local", 2, {"cpu_offload": True}),
            ("local", 4, {"sharding_strategy": "HYBRID_SHARD", "device_mesh": {"mesh_shape": [2, 2]}}),
            ("local", 2, {"engine": "fsdp1"}),
        ],
        ids=[
            "full",
            "local",
            "local-flat",
            "local-replicate",
            "local-offload",
            "local-hybrid",
            "local-fsdp1",
        ],
    )
    def test_equals_not_having_stopped(
        self, tmp_path: Path, kind: str, world_size: int, wrapper: dict[str, Any]
    ) -> None:
        settings = {"strategy": strategy(kind, **wrapper), "model": {"type": "ToyModel", "scale": True}}
        whole = run_ranks(train, world_size, tmp_path / "whole", world_size, settings)[0]
        saved = tmp_path / "whole" / "epoch_1.pth"
        assert saved.is_file() if kind == "full" else saved.is_dir()
        changes = {**settings, "load_from": str(saved), "resume": True}
        resumed = run_ranks(train, world_size, tmp_path / "again", world_size, changes)
        assert all(result == resumed[0] for result in resumed)
        assert resumed[0]["losses"] == whole["losses"][4:]
        assert resumed[0]["norms"] == whole["norms"][-4:]
        assert resumed[0]["metrics"] == whole["metrics"][1:]
        assert len(resumed[0]["losses"]) == len(resumed[0]["norms"]) == 4

    @pytest.mark.exhaustive
    def test_on_other_world_sizes_and_other_kind(self, tmp_path: Path) -> None:
        [whole, _] = run_ranks(train, 2, tmp_path / "whole", 2, {"strategy": strategy("local")})
        saved = tmp_path / "whole" / "epoch_1.pth"
        assert sorted(path.name for path in saved.iterdir() if path.suffix == ".pth") == ["rank0.pth", "rank1.pth"]
        for world_size in (1, 4):
            changes = {"strategy": strategy("full"), "load_from": str(saved), "resume": True}
            resumed = run_ranks(train, world_size, tmp_path / str(world_size), world_size, changes)[0]
            assert resumed["losses"] == pytest.approx(whole["losses"][4:], rel=1e-5)

    @pytest.mark.exhaustive
    def test_finds_the_last_checkpoint(self, tmp_path: Path) -> None:
        settings = {
            "strategy": strategy("local"),
            "train_cfg": {"by_epoch": True, "max_epochs": 3, "val_interval": 1},
            "default_hooks": {"checkpoint": {"type": "CheckpointHook", "interval": 1, "max_keep_ckpts": 2}},
        }
        [whole, _] = run_ranks(train, 2, tmp_path, 2, settings)
        assert sorted(path.name for path in tmp_path.glob("*.pth")) == ["epoch_2.pth", "epoch_3.pth"]
        shutil.rmtree(tmp_path / "epoch_3.pth")
        (tmp_path / "last_checkpoint").write_text(str(tmp_path / "epoch_2.pth"))
        [resumed, _] = run_ranks(train, 2, tmp_path, 2, {**settings, "resume": True})
        assert resumed["losses"] == whole["losses"][8:]

    def test_between_unsharded_and_sharded(self, tmp_path: Path) -> None:
        stock, ours = {"strategy": UNSHARDED}, {"strategy": strategy("full")}
        [plain] = run_ranks(train, 1, tmp_path / "plain", 1, stock)
        [sharded, _] = run_ranks(train, 2, tmp_path / "sharded", 2, ours)
        there = {"load_from": str(tmp_path / "plain" / "epoch_1.pth"), "resume": True}
        back = {"load_from": str(tmp_path / "sharded" / "epoch_1.pth"), "resume": True}
        [from_plain, _] = run_ranks(train, 2, tmp_path / "there", 2, {**ours, **there})
        [from_sharded] = run_ranks(train, 1, tmp_path / "back", 1, {**stock, **back})
        assert from_plain["losses"] == pytest.approx(plain["losses"][4:], rel=1e-5)
        assert from_sharded["losses"] == pytest.approx(sharded["losses"][4:], rel=1e-5)


def prepared(work_dir: Path, kind: str = "full", optim: Any = None, **changes: Any) -> FSDPStrategy:
    made = FSDPStrategy(
        work_dir=str(work_dir),
        model_wrapper={"auto_wrap_policy": POLICY},
        state_dict_cfg=kind,
        env_kwargs={"randomness": {"seed": 5}},
        **changes,
    )
    made.prepare({"type": "ToyModel", "batch_norm": True}, optim_wrapper=optim)
    return made


def failing(rank: int, work: str, folder: Path) -> tuple[type, str]:
    try:
        globals()[work](rank, folder)
    except Exception as error:
        return type(error), str(error)
    raise AssertionError(f"{work} did not fail")


class TestFull:
    def test_is_what_plain_pytorch_and_mmengine_load(self, tmp_path: Path) -> None:
        run_ranks(train, 2, tmp_path, 2, {"strategy": strategy("full")})
        with torch.serialization.safe_globals(SAFE):
            content = torch.load(tmp_path / "epoch_2.pth", weights_only=True)
        assert {"state_dict", "optimizer", "param_schedulers", "message_hub", "meta", "progress"} == {*content}
        assert {"seed", "epoch", "iter", "cfg", "mmengine"} <= {*content["meta"]}
        model = MODELS.build({"type": "ToyModel"})
        model.load_state_dict(content["state_dict"])
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.load_state_dict(content["optimizer"])
        for param, state in optimizer.state.items():
            assert state["exp_avg"].shape == param.shape
        assert len(optimizer.state) == len(list(model.parameters()))
        # The torch-free half of core reads it as well.
        assert "state_dict/head.weight" in open_layout(tmp_path / "epoch_2.pth", trust=True).tensors


def save_with_callback(rank: int, folder: Path, kind: str) -> int:
    calls = []

    def callback(content: dict[str, Any]) -> None:
        calls.append(sorted(content))
        content["meta"]["note"] = "added"

    made = prepared(folder, kind)
    extra = {"meta": {"epoch": 1}}
    made.save_checkpoint(str(folder / "saved.pth"), extra_ckpt=extra, callback=callback)
    assert extra == {"meta": {"epoch": 1}}, "the caller's dict was changed"
    content = made.load_checkpoint(str(folder / "saved.pth"))
    assert content["meta"]["note"] == "added"
    return len(calls)


def fail_in_callback(rank: int, folder: Path) -> None:
    made = prepared(folder)
    (folder / "saved.pth").write_text("the old one") if rank == 0 else None

    def callback(content: dict[str, Any]) -> None:
        raise StateDictError("the callback gives up")

    made.save_checkpoint(str(folder / "saved.pth"), callback=callback)


def fail_to_write(rank: int, folder: Path) -> None:
    prepared(folder).save_checkpoint(str(folder / "file" / "saved.pth"))


def save_deep(rank: int, folder: Path) -> bool:
    place = folder / "no" / "such" / "folder" / "saved.pth"
    prepared(folder).save_checkpoint(str(place))
    return place.is_file()


class TestSaving:
    @pytest.mark.parametrize(("kind", "calls"), [("full", [1, 0]), ("local", [1, 1])])
    def test_callback_is_called_once_on_the_assembled_content(
        self, tmp_path: Path, kind: str, calls: list[int]
    ) -> None:
        assert run_ranks(save_with_callback, 2, tmp_path, kind) == calls

    def test_failure_of_one_rank_stops_all_and_leaves_the_old_file(self, tmp_path: Path) -> None:
        first, second = run_ranks(failing, 2, "fail_in_callback", tmp_path)
        assert first == (StateDictError, "the callback gives up")
        assert second[0] is StateDictError
        assert "Rank 0 failed: the callback gives up" in second[1]
        assert (tmp_path / "saved.pth").read_text() == "the old one"

    def test_folder_that_is_not_there_is_made(self, tmp_path: Path) -> None:
        assert run_ranks(save_deep, 2, tmp_path) == [True, True]

    def test_folder_that_is_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        results = run_ranks(failing, 2, "fail_to_write", tmp_path)
        assert all(issubclass(kind, CheckpointError) for kind, _ in results)


def weights(strategy: FSDPStrategy) -> dict[str, torch.Tensor]:
    from mmfsdp import model_state_dict

    return model_state_dict(strategy.model, rank0_only=False)


def load_variants(rank: int, folder: Path) -> dict[str, Any]:
    """Load the same weights from files of many kinds into a model that starts elsewhere."""
    made = prepared(folder)
    source = {name: value + 1 if value.is_floating_point() else value for name, value in weights(made).items()}
    source = {name: value for name, value in source.items() if "num_batches" not in name}
    if rank == 0:
        torch.save(source, folder / "bare.pth")
        torch.save({"state_dict": {f"module.{name}": value for name, value in source.items()}}, folder / "module.pth")
        torch.save({"state_dict": {f"old.{name}": value for name, value in source.items()}}, folder / "old.pth")
        torch.save({"state_dict": {**source, "extra": torch.ones(1)}}, folder / "extra.pth")
    torch.distributed.barrier()
    equal = {}
    for name, arguments in {
        "bare": {"strict": True},
        "module": {"strict": True},
        "old": {"strict": True, "revise_keys": [("^old", "new"), (r"^new\.", "")]},
        "extra": {"callback": lambda content: content["state_dict"].pop("extra"), "strict": True},
    }.items():
        for param in made.model.parameters():
            torch.nn.init.zeros_(param)
        made.load_checkpoint(str(folder / f"{name}.pth"), **arguments)
        loaded = weights(made)
        equal[name] = all(torch.equal(loaded[key], value) for key, value in source.items())
    return equal


def load_strictly(rank: int, folder: Path) -> None:
    made = prepared(folder)
    before = weights(made)
    state = {name: value + 1 for name, value in before.items() if name != "head.bias"}
    state |= {"other": torch.ones(1), "head.weight": torch.ones(2, 2)}
    if rank == 0:
        torch.save(state, folder / "other.pth")
    torch.distributed.barrier()
    try:
        made.load_checkpoint(str(folder / "other.pth"), strict=True)
    finally:
        assert all(torch.equal(value, before[name]) for name, value in weights(made).items()), "partly loaded"


def load_loosely(rank: int, folder: Path) -> str:
    made = prepared(folder)
    state = {name: value + 1 for name, value in weights(made).items() if name != "head.bias"}
    state |= {"other": torch.ones(1), "head.weight": torch.ones(2, 2)}
    lines: list[str] = []
    made.logger.warning = lines.append  # type: ignore[method-assign]
    made.load_model_state_dict(state)
    assert torch.equal(weights(made)["patch.weight"], state["patch.weight"])
    return "\n".join(lines)


def load_nothing(rank: int, folder: Path) -> None:
    prepared(folder).load_checkpoint(str(folder / "epoch_9.pth"))


def load_text(rank: int, folder: Path) -> None:
    if rank == 0:
        (folder / "text.pth").write_text("no checkpoint")
    torch.distributed.barrier()
    prepared(folder).load_checkpoint(str(folder / "text.pth"))


def resume_weights(rank: int, folder: Path) -> None:
    made = prepared(folder, optim={"optimizer": {"type": "SGD", "lr": 0.1}})
    held = weights(made)
    if rank == 0:
        torch.save({"state_dict": held}, folder / "weights.pth")
    torch.distributed.barrier()
    made.resume(str(folder / "weights.pth"))


def resume_without_optimizer(rank: int, folder: Path) -> tuple[str, bool, int]:
    made = prepared(folder, optim={"optimizer": {"type": "SGD", "lr": 0.1}})
    before = weights(made)
    made.save_checkpoint(str(folder / "saved.pth"), save_optimizer=False, extra_ckpt={"meta": {"iter": 4}})
    made.load_model_state_dict({name: value + 1 for name, value in before.items()})
    lines: list[str] = []
    made.logger.warning = lines.append  # type: ignore[method-assign]
    content = made.resume(str(folder / "saved.pth"))
    same = all(torch.equal(value, before[name]) for name, value in weights(made).items())
    return "\n".join(lines), same, content["meta"]["iter"]


class TestLoading:
    def test_files_of_many_kinds(self, tmp_path: Path) -> None:
        assert run_ranks(load_variants, 2, tmp_path) == [dict.fromkeys(("bare", "module", "old", "extra"), True)] * 2

    def test_strict_raises_on_every_rank_and_changes_nothing(self, tmp_path: Path) -> None:
        for kind, message in run_ranks(failing, 2, "load_strictly", tmp_path):
            assert kind is StateDictError
            assert "1 missing: head.bias" in message
            assert "1 unexpected: other" in message
            assert "head.weight: (2, 2) in the state dict, (5, 16) in the model" in message

    def test_what_does_not_match_is_logged_as_mmengine_does(self, tmp_path: Path) -> None:
        for text in run_ranks(load_loosely, 2, tmp_path):
            assert "The model and loaded state dict do not match exactly" in text
            assert "unexpected key in source state_dict: other" in text
            assert "missing keys in source state_dict: head.bias" in text
            assert "size mismatch for head.weight: (2, 2) in the state dict, (5, 16) in the model" in text

    def test_path_that_is_not_there(self, tmp_path: Path) -> None:
        for kind, message in run_ranks(failing, 2, "load_nothing", tmp_path):
            assert kind is CheckpointNotFoundError
            assert "epoch_9.pth" in message

    def test_file_that_is_no_checkpoint(self, tmp_path: Path) -> None:
        for kind, message in run_ranks(failing, 2, "load_text", tmp_path):
            assert issubclass(kind, CheckpointError)
            assert "text.pth" in message

    def test_resuming_from_weights_alone(self, tmp_path: Path) -> None:
        for kind, message in run_ranks(failing, 2, "resume_weights", tmp_path):
            assert kind is FormatError
            assert (
                "has no 'meta', which says where training stopped. To start from its weights, use load_from" in message
            )

    def test_resuming_without_the_optimizers_state(self, tmp_path: Path) -> None:
        for warning, same, iteration in run_ranks(resume_without_optimizer, 2, tmp_path):
            assert "has no 'optimizer', as with save_optimizer=False" in warning
            assert "Training continues after iteration 4" in warning
            assert (same, iteration) == (True, 4)

    def test_errors_are_also_those_that_users_catch(self) -> None:
        assert issubclass(CheckpointNotFoundError, FileNotFoundError)
        assert issubclass(StateDictError, RuntimeError)
        assert issubclass(PolicyNotFoundError, ValueError)
        assert issubclass(UnknownNameError, KeyError)


def skip_init(rank: int, folder: Path, engine: str) -> dict[str, Any]:
    changes = {"strategy": {**strategy("full", engine=engine), "skip_init_weights": True}}
    runner = runner_of(config(folder, 2, **changes, load_from=str(folder / "epoch_2.pth")))
    return runner.val()


def skip_init_without_weights(rank: int, folder: Path) -> None:
    run(config(folder, 2, strategy={**strategy("local"), "skip_init_weights": True}))


def skip_init_with_too_few_weights(rank: int, folder: Path) -> None:
    made = prepared(folder, skip_init_weights=True)
    made.load_model_state_dict({"patch.weight": torch.ones(16, 3, 4, 4)})


def skip_init_is_on_meta(rank: int, folder: Path) -> tuple[bool, bool, float]:
    made = FSDPStrategy(work_dir=str(folder), skip_init_weights=True)
    model = made.build_model({"type": "ToyModel", "batch_norm": True})
    buffers = {name: buffer.is_meta for name, buffer in model.named_buffers()}
    return all(param.is_meta for param in model.parameters()), any(buffers.values()), float(model.data_preprocessor.std)


class TestSkipInitWeights:
    def test_weights_come_from_the_checkpoint(self, tmp_path: Path) -> None:
        trained = run_ranks(train, 2, tmp_path, 2, {"strategy": strategy("local")})
        for engine in ("fsdp2", "fsdp1"):
            metrics = run_ranks(skip_init, 2, tmp_path, engine)
            assert metrics == [trained[0]["metrics"][-1]] * 2

    def test_only_parameters_are_on_meta(self, tmp_path: Path) -> None:
        assert run_ranks(skip_init_is_on_meta, 2, tmp_path) == [(True, False, 2.0)] * 2

    def test_training_without_weights_is_refused(self, tmp_path: Path) -> None:
        for kind, message in run_ranks(failing, 2, "skip_init_without_weights", tmp_path):
            assert kind is ShardStateError
            assert "Set load_from or resume to a checkpoint, or set skip_init_weights=False." in message

    def test_weights_that_the_checkpoint_lacks(self, tmp_path: Path) -> None:
        for kind, message in run_ranks(failing, 2, "skip_init_with_too_few_weights", tmp_path):
            assert kind is StateDictError
            assert "it lacks 17 of them: blocks.0.fc1.bias" in message


def two_optimizers(rank: int, folder: Path, kind: str) -> list[Any]:
    """Step two optimizers once, save, and load into fresh ones."""

    def make() -> tuple[FSDPStrategy, OptimWrapperDict]:
        model = MODELS.build({"type": "ToyModel", "scale": True})
        body = OptimWrapper(torch.optim.AdamW(model.blocks.parameters(), lr=0.1))
        head = OptimWrapper(torch.optim.SGD(model.head.parameters(), lr=0.2, momentum=0.9))
        made = FSDPStrategy(work_dir=str(folder), model_wrapper={"auto_wrap_policy": POLICY}, state_dict_cfg=kind)
        made.prepare(model, optim_wrapper=OptimWrapperDict(body=body, head=head))
        assert made.optim_wrapper["body"] is body
        return made, made.optim_wrapper

    made, optim = make()
    made.model(torch.ones(2, 3, 8, 8), torch.zeros(2, dtype=torch.long), mode="loss")["loss"].backward()
    for wrapper in optim.values():
        wrapper.step()
    made.save_checkpoint(str(folder / f"{kind}.pth"), extra_ckpt={"meta": {"iter": 1}})
    again, loaded = make()
    again.resume(str(folder / f"{kind}.pth"))
    return [
        torch.equal(mine[param][key].to_local(), theirs[other][key].to_local())
        for name, key in (("body", "exp_avg"), ("head", "momentum_buffer"))
        for mine, theirs in [(optim[name].optimizer.state, loaded[name].optimizer.state)]
        for param, other in zip(mine, theirs, strict=True)
    ]


class TestOptimWrapperDict:
    @pytest.mark.parametrize("kind", ["full", "local"])
    def test_is_saved_and_loaded(self, tmp_path: Path, kind: str) -> None:
        [equal, _] = run_ranks(two_optimizers, 2, tmp_path, kind)
        assert equal == [True] * 14


def test_a_rank_error_names_the_rank(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="CheckpointNotFoundError"):
        run_ranks(load_nothing, 2, tmp_path)
