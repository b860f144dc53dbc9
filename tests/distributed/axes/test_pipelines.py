"""Pipeline stages under torch's schedules, each a sharded model, train, save and resume as one process does."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from tests.distributed.axes.staged_models import (
    CONFIG,
    SCHEDULES,
    Pipeline,
    batch_of,
    loss_of,
    make_net,
    stage_of,
    train_alone,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import mmfsdp
from mmfsdp.basics.torch_releases import KEEPS_ROOT_MESH, torch_has
from mmfsdp.checkpoint import TargetExistsError, convert
from mmfsdp.errors import (
    ConfigError,
    GradScalerError,
    MeshError,
    RankMismatchError,
    ShardStateError,
    StateDictError,
    UnsupportedCallError,
)
from mmfsdp.testing import run_ranks, single_rank

Steps = list[tuple[float, float]]


def make_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "shard"))


def train(rank: int, folder: str, truth: Steps) -> None:
    mesh = make_mesh()
    for name in SCHEDULES:
        pipeline = Pipeline(mesh, name)
        for step in range(5):
            assert pipeline.train(step) == pytest.approx(truth[step], rel=1e-6, abs=1e-6), (name, step)
        extra = {"steps": 5, "seen": torch.ones(3)}
        mmfsdp.save_stages(f"{folder}/{name}", pipeline.stages, pipeline.optimizers, mesh=mesh, extra=extra)
    for saved, name in (("interleaved", "1f1b"), ("gpipe", "interleaved")):
        pipeline = Pipeline(mesh, name)
        for stage, optimizer in zip(pipeline.stages, pipeline.optimizers, strict=True):
            rest, _ = mmfsdp.load_checkpoint(f"{folder}/{saved}", stage, optimizer, part=True)
            assert (rest["steps"], rest["seen"].tolist()) == (5, [1, 1, 1])
        for step in range(5, 8):
            assert pipeline.train(step) == pytest.approx(truth[step], rel=1e-5, abs=1e-5), (saved, name, step)
    model = mmfsdp.shard(make_net(), CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mmfsdp.load_checkpoint(f"{folder}/interleaved", model, optimizer)
    for step in range(5, 8):
        tokens = batch_of(step).chunk(4)[rank]
        loss_of(model(tokens), tokens).backward()
        assert float(mmfsdp.clip_grad_norm_(model, 0.3)) == pytest.approx(truth[step][1], rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    mmfsdp.save_checkpoint(f"{folder}/whole", model, optimizer)
    part = mmfsdp.shard(stage_of(make_net(), mesh.get_local_rank("pipe"), 2), CONFIG, mesh)
    mmfsdp.load_checkpoint(f"{folder}/whole", part, torch.optim.AdamW(part.parameters(), lr=1e-2), part=True)
    with pytest.raises(StateDictError):
        mmfsdp.load_checkpoint(f"{folder}/whole", part)


def test_stages_train_and_resume_as_one_process_with_three_schedules(tmp_path: Path) -> None:
    run_ranks(train, 4, str(tmp_path), train_alone(8)[0])
    _, model, optimizer = train_alone(5)
    moments = optimizer.state_dict()["state"]
    for name in SCHEDULES:
        convert(tmp_path / name, target := tmp_path / f"{name}.safetensors")
        found = load_file(target)
        assert found.keys() == model.state_dict().keys()
        content: dict[str, Any] = {"state_dict": {fqn: torch.zeros_like(value) for fqn, value in found.items()}}
        with single_rank():
            dcp.load(content, checkpoint_id=tmp_path / name)
        for fqn, value in model.state_dict().items():
            torch.testing.assert_close(found[fqn], value, rtol=1e-5, atol=1e-6)
            assert torch.equal(found[fqn], content["state_dict"][fqn])
        convert(tmp_path / name, target := tmp_path / f"{name}.pth", keep="all")
        saved = torch.load(target, weights_only=True)["optimizer"]
        (group,) = saved["param_groups"]
        pairs = zip(group["param_names"], group["params"], strict=True)
        rows = {fqn: saved["state"].get(index) for fqn, index in pairs}
        for index, (fqn, _) in enumerate(model.named_parameters()):
            if "spare" in fqn:
                assert rows[fqn] is None
                assert index not in moments
                continue
            torch.testing.assert_close(rows[fqn]["exp_avg"], moments[index]["exp_avg"], rtol=1e-4, atol=1e-6)


def refused(rank: int, folder: str) -> None:
    mesh = make_mesh()
    pipeline = Pipeline(mesh, "1f1b")
    stage = pipeline.stages[0]
    pipeline.run(0)
    with pytest.raises(ConfigError, match="a stage of a pipeline, as its mesh says"):
        mmfsdp.clip_grad_norm_(pipeline.params, 1.0)
    with pytest.raises(ConfigError, match=r"the ranks \[\d\], which this model is sharded over"):
        mmfsdp.clip_grad_norm_(pipeline.params, 1.0, groups=mesh.get_group("shard"))
    with pytest.raises(RankMismatchError, match=r"rank 0 with max_norm=1\.0, rank 1 with max_norm=2\.0"):
        mmfsdp.clip_grad_norm_(pipeline.params, 1.0 + mesh.get_local_rank("pipe"), groups=pipeline.group)
    largest = torch.stack(
        [
            param.grad.to_local().abs().max()
            for param in pipeline.params
            if param.grad is not None and param.grad.to_local().numel()
        ]
    ).max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    assert float(mmfsdp.clip_grad_norm_(stage, 9.0, math.inf, groups=[pipeline.group])) == float(largest)
    own = mmfsdp.clip_grad_norm_(stage, 9.0, groups=())
    both = own.square()
    dist.all_reduce(both, group=pipeline.group)
    assert float(mmfsdp.clip_grad_norm_(stage, 9.0, groups=pipeline.group)) == pytest.approx(float(both.sqrt()))

    # Backwards that keep gradients, and one that reduces them: nobody called no_sync().
    tokens = torch.randint(0, 24, (2, 5)) if stage.embed is not None else torch.randn(2, 5, 24)
    losses = [stage(tokens).square().mean() for _ in range(2)]
    stage.set_requires_gradient_sync(False)
    losses[0].backward()
    with pytest.raises(ShardStateError, match="no_sync"):
        pipeline.optimizers[0].step()
    stage.set_requires_gradient_sync(True)
    losses[1].backward()
    pipeline.optimizers[0].step()

    mmfsdp.save_stages(f"{folder}/one", [stage], mesh=mesh)
    with pytest.raises(TargetExistsError):
        mmfsdp.save_stages(f"{folder}/one", [stage], mesh=mesh)
    with pytest.raises(ConfigError, match="1 stages and 2 optimizers"):
        mmfsdp.save_stages(f"{folder}/two", [stage], pipeline.optimizers * 2, mesh=mesh)
    twin = mmfsdp.shard(stage_of(make_net(), 0, 2), CONFIG, mesh)
    with pytest.raises(StateDictError, match=r"Two stages hold '(embed|blocks)\..*one stage and under its own name"):
        mmfsdp.save_stages(f"{folder}/two", [twin], mesh=mesh)
    if not torch.__version__.startswith("2.9."):  # it cannot run all stages on one rank
        alone = init_device_mesh("cpu", (1, 4), mesh_dim_names=("pipe", "shard"))
        with pytest.raises(UnsupportedCallError, match=r"of the shard unit '.+'.*reshard_after_forward=False"):
            Pipeline(alone, "zero bubble").run(0)
    pipeline.optimizers[0].param_groups[0]["lr"] = 1.0 + rank // 2
    with pytest.raises(StateDictError, match=r"have lr=1\.0 and 2\.0 in param group 0"):
        mmfsdp.save_stages(f"{folder}/two", [stage], pipeline.optimizers, mesh=mesh)
    assert [found.name for found in Path(folder).iterdir()] == ["one"]


def test_mistakes_with_stages_are_named(tmp_path: Path) -> None:
    run_ranks(refused, 4, str(tmp_path))


def apart(rank: int, truth: Steps, used: Steps) -> None:
    mesh = make_mesh()
    for name in SCHEDULES:
        for spare, expected in ((False, truth), (True, used)):
            pipeline = Pipeline(mesh, name, ("blocks.1.norm", "head"), spare=spare)
            for step in range(3):
                assert pipeline.train(step) == pytest.approx(expected[step], rel=1e-6, abs=1e-6), (name, spare, step)
    for whole in ((), ("blocks.1.norm", "head")):
        pipeline = Pipeline(mesh, "zero bubble", whole, free=False)
        for step in range(3):
            assert pipeline.train(step) == pytest.approx(truth[step], rel=1e-6, abs=1e-6), (whole, step)


def test_whole_parameters_and_those_of_some_ranks_are_averaged_in_stages() -> None:
    run_ranks(apart, 4, train_alone(3)[0], train_alone(3, spare=True)[0])


def on_axes(rank: int, folder: str, truth: Steps) -> None:
    """Stages that are divided, or replicated by a name of the mesh or by a strategy, save and resume on each other."""
    meshes: dict[str, DeviceMesh] = {}
    if torch_has(KEEPS_ROOT_MESH):
        meshes["divided"] = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pipe", "shard", "tensor"))
    hybrid = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pipe", "replicate", "shard"))
    meshes |= {"FULL_SHARD": hybrid, "NO_SHARD": hybrid}
    for name, mesh in meshes.items():
        strategy = name.replace("divided", "FULL_SHARD")
        pipeline = Pipeline(mesh, "interleaved" if name == "divided" else "1f1b", strategy=strategy)
        for step in range(3):
            assert pipeline.train(step) == pytest.approx(truth[step], rel=1e-6, abs=1e-6), (name, step)
        mmfsdp.save_stages(f"{folder}/{name}", pipeline.stages, pipeline.optimizers, mesh=mesh)
    for saved, name in zip(meshes, [*meshes][1:] + [*meshes][:1], strict=True):
        pipeline = Pipeline(meshes[name], "gpipe")
        mmfsdp.load_checkpoint(f"{folder}/{saved}", pipeline.stages[0], pipeline.optimizers[0], part=True)
        assert pipeline.train(3) == pytest.approx(truth[3], rel=1e-5, abs=1e-5), (saved, name)
    with pytest.raises(MeshError, match=r"shards nothing.*Use 'NO_SHARD'"):
        Pipeline(hybrid, "1f1b", strategy="HYBRID_SHARD")


@pytest.mark.exhaustive
def test_stages_that_are_divided_or_replicated_train_and_resume_as_one_process(tmp_path: Path) -> None:
    run_ranks(on_axes, 4, str(tmp_path), train_alone(4)[0])
    _, model, _ = train_alone(3)
    for saved in tmp_path.iterdir():
        convert(saved, target := saved / "all.safetensors")
        found = load_file(target)
        assert found.keys() == model.state_dict().keys()
        for fqn, value in model.state_dict().items():
            torch.testing.assert_close(found[fqn], value, rtol=1e-5, atol=1e-6)


def alone(rank: int, folder: str) -> None:
    """Each stage is a model of its own, which saves in the background and resumes from a directory of its own."""
    mesh = make_mesh()
    own = f"{folder}/{mesh.get_local_rank('pipe')}"
    pipeline, again = Pipeline(mesh, "1f1b"), Pipeline(mesh, "1f1b")
    with mmfsdp.CheckpointManager(f"{own}/run", pipeline.stages[0], pipeline.optimizers[0], every_steps=1) as manager:
        pipeline.train(0)
        manager.step(1)
        save = mmfsdp.save_checkpoint(
            f"{own}/local", pipeline.stages[0], pipeline.optimizers[0], kind="local", blocking=False
        )
        rest = [pipeline.train(step) for step in (1, 2)]
        save.result()
    with mmfsdp.CheckpointManager(f"{own}/run", again.stages[0], again.optimizers[0], every_steps=1) as manager:
        assert manager.resume() == 1
    assert [again.train(step) for step in (1, 2)] == rest
    mmfsdp.load_checkpoint(f"{own}/local", again.stages[0], again.optimizers[0])
    assert [again.train(step) for step in (1, 2)] == rest
    for scaler in (mmfsdp.GradScaler("cpu"), torch.amp.GradScaler("cpu")):
        again = Pipeline(mesh, "1f1b")
        scaler.scale(torch.ones(()))
        again.run(3)
        with pytest.raises(GradScalerError, match=r"a stage of a pipeline.*'bf16'"):
            scaler.step(again.optimizers[0])

    if torch_has(KEEPS_ROOT_MESH):
        whole = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pipe", "shard", "tensor"))
        pipeline = Pipeline(whole, "gpipe")
        pipeline.data_rank, pipeline.data_ranks = rank, 4  # as of a sampler that knows no tensor group
        with pytest.raises(RuntimeError) as caught:
            pipeline.run(0)
        assert isinstance(caught.value.__cause__, RankMismatchError)
        assert "were given different batches" in str(caught.value.__cause__)


def test_a_stage_saves_alone_and_its_mistakes_are_named(tmp_path: Path) -> None:
    run_ranks(alone, 4, str(tmp_path))
