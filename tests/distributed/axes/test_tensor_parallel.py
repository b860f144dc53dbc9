"""Models that tensor parallelism has divided train, save and resume on any mesh as one process does."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from tests.distributed.axes.divided_models import (
    KINDS,
    MESHES,
    Steps,
    check_files,
    divide,
    make_llama,
    make_mesh,
    make_model,
    near,
    resume,
    train_alone,
    train_and_save,
    train_step,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import mmfsdp
from mmfsdp.basics.torch_releases import KEEPS_ROOT_MESH, torch_has
from mmfsdp.errors import ConfigError, MeshError, PlanError, RankMismatchError, ShardStateError
from mmfsdp.runtime import find_sharded_model
from mmfsdp.testing import run_ranks

CONFIG = {"wrap": {"kind": "module_name", "patterns": "*.layers.*"}}
CASES = [
    (saved, name, [*KINDS][(at + turn) % 3])
    for turn in range(3)
    for at, (saved, name) in enumerate(itertools.product(MESHES, MESHES))
]
"""Each pair of meshes with a kind of checkpoint, then with another, then with the third."""


def build(name: str, kind: str = "llama") -> tuple[DeviceMesh, nn.Module, torch.optim.Optimizer]:
    mesh = make_mesh(MESHES[name])
    divide(model := make_model(kind), mesh)
    model = mmfsdp.shard(model, CONFIG, mesh)
    return mesh, model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def everywhere(rank: int, folder: str, kind: str, truth: Steps, grads: dict[str, torch.Tensor], part: slice) -> None:
    for name in MESHES:
        mesh, model, optimizer = build(name, kind)
        divide(again := make_model(kind), mesh)
        plan = mmfsdp.plan(again, CONFIG, mesh)
        assert sum(param.to_local().nbytes for param in model.parameters()) == plan.param_bytes(rank)
        train_and_save((mesh, model, optimizer), f"{folder}/{name}", truth, grads)
    for saved, name, form in CASES[part]:
        resume(build(name, kind), f"{folder}/{saved}", form, truth)


@pytest.mark.sample("some-tied")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("part", "kind"),
    [(slice(1, 48, 13), "tied"), (slice(48), "llama"), (slice(16), "neox")],
    ids=["some-tied", "every-untied", "pairs-neox"],
)
def test_divided_models_train_and_resume_on_any_mesh(part: slice, kind: str, tmp_path: Path) -> None:
    truth, _, grads = train_alone(10, kind)
    run_ranks(everywhere, 4, str(tmp_path), kind, truth, grads, part, timeout=580)
    for name in MESHES:
        check_files(tmp_path / name)


def in_a_loop(rank: int, folder: str) -> None:
    """Weights come from a Hugging Face folder, a manager saves and resumes, and the weights go to such a folder."""
    mesh, model, optimizer = build("shard 2, tensor 2", "tied")
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    mmfsdp.load_pretrained(model, f"{folder}/hf")
    truth = make_model("tied")
    with mmfsdp.full_params(model):
        assert all(torch.equal(param, truth.get_parameter(name)) for name, param in model.named_parameters())
    with mmfsdp.CheckpointManager(f"{folder}/run", model, optimizer, every_steps=2) as manager:
        first = [train_step(model, optimizer, step, mesh) for step in range(2)]
        manager.step(1)
        manager.step(2)
    _, again, other = build("shard 2, tensor 2", "tied")
    with mmfsdp.CheckpointManager(f"{folder}/run", again, other, every_steps=2) as manager:
        assert manager.resume() == 2
    near([train_step(again, other, 2, mesh)], [train_step(model, optimizer, 2, mesh)])
    assert len(first) == 2
    mmfsdp.save_checkpoint(f"{folder}/out", model, kind="hf", like=f"{folder}/hf")
    torch.manual_seed(7)
    drawn = torch.nn.init.normal_(model.model.layers[0].mlp.up_proj.weight.detach())
    torch.manual_seed(7)
    assert torch.equal(drawn.full_tensor(), torch.nn.init.normal_(torch.empty(drawn.shape)))


def test_a_folder_in_a_manager_between_and_a_folder_out(tmp_path: Path) -> None:
    make_model("tied").save_pretrained(tmp_path / "hf")
    run_ranks(in_a_loop, 4, str(tmp_path))
    from transformers import AutoModelForCausalLM

    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    model = make_model("tied")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        train_step(model, optimizer, step)
    for name, param in trained.named_parameters():
        torch.testing.assert_close(param, model.get_parameter(name), rtol=1e-4, atol=1e-5)


def mistakes(rank: int, folder: str) -> None:
    mesh = make_mesh(MESHES["shard 2, tensor 2"])
    data = mmfsdp.data_parallel_rank(mesh)
    assert (data, mmfsdp.data_parallel_size(mesh)) == (rank // 2, 2)
    assert mmfsdp.accumulation_steps(16, 2, mmfsdp.data_parallel_size(mesh)) == 4
    tokens = torch.arange(24).reshape(2, 12) + 12 * rank
    _, model, _ = build("shard 2, tensor 2")
    with pytest.raises(RankMismatchError, match=r"are in one group of the axis 'tensor', and were given"):
        model(input_ids=tokens, labels=tokens)

    plain = make_llama()
    plain.model.layers[0].mlp.act_fn = nn.Sequential(plain.model.layers[0].mlp.act_fn, nn.Dropout(0.1))
    divide(plain, mesh)
    model = mmfsdp.shard(plain, CONFIG, mesh)
    own = torch.arange(24).reshape(2, 12) + 12 * data
    torch.manual_seed(rank)
    with pytest.raises(RankMismatchError, match=r"drew different random numbers in forward.*data_parallel_rank"):
        model(input_ids=own, labels=own)
    torch.manual_seed(data)
    model(input_ids=own, labels=own)

    _, model, optimizer = build("shard 2, tensor 2")
    loss = model(input_ids=own, labels=own).loss
    loss.backward()
    if rank % 2:  # as where a gradient lacks a sum over the axis
        model.model.norm.weight.grad.to_local().mul_(2)
        optimizer.param_groups[0]["lr"] = 3e-3
    optimizer.step()
    with pytest.raises(RankMismatchError, match=r"between the ranks \d and \d, .* axis 'tensor'. Nothing divides"):
        mmfsdp.save_checkpoint(f"{folder}/wrong", model)
    with pytest.raises(RankMismatchError, match="differs between the ranks"):
        model(input_ids=own, labels=own)


def refusals(rank: int) -> None:
    mesh = make_mesh({"shard": 2, "tensor": 2})
    with pytest.raises(MeshError, match=r"for 3 ranks, but the world has 4 ranks. .*of which one is -1"):
        mmfsdp.shard(nn.Linear(8, 8), mesh={"shard": 3})
    with pytest.raises(
        RankMismatchError, match=r"Ranks 1 and 0 were given different settings.*\n~ mesh: 4 ranks -> 2 x 2"
    ):
        mmfsdp.shard(nn.Linear(8, 8), mesh={"shard": 4} if rank else {"replicate": 2, "shard": 2})
    with pytest.raises(PlanError, match=r"no parameter is divided along 'tensor'.*parallelize_module"):
        mmfsdp.shard(make_llama(), CONFIG, mesh)
    divide(model := make_llama(), mesh)
    with pytest.raises(PlanError, match=r"'model.embed_tokens.weight' is divided already.*Give the mesh that 'tensor'"):
        mmfsdp.shard(model, CONFIG)
    with pytest.raises(ConfigError, match="axes beside 'replicate' and 'shard' need engine 'fsdp2'"):
        mmfsdp.shard(model, CONFIG, mesh, engine="fsdp1")
    with pytest.raises(MeshError, match="'NO_SHARD' replicates, but the axis 'shard' of the mesh has 2 ranks"):
        mmfsdp.shard(model, CONFIG, mesh, sharding="NO_SHARD")
    with pytest.raises(MeshError, match="shard_size=4 contradicts the mesh"):
        mmfsdp.shard(model, CONFIG, mesh, sharding={"strategy": "HYBRID_SHARD", "shard_size": 4})
    for sizes in ((4,), (4, 1)) if torch_has(KEEPS_ROOT_MESH) else ((4,),):  # no axis for data
        other = init_device_mesh("cpu", sizes, mesh_dim_names=("tensor", "pipe")[: len(sizes)])
        with pytest.raises(PlanError, match=r"Give the mesh that 'tensor' is an axis of, beside an axis 'shard'"):
            mmfsdp.shard(model, CONFIG, other)
    with pytest.raises(MeshError, match="each is there once, in the order shard > tensor"):
        mmfsdp.shard(model, CONFIG, init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "shard")))
    with pytest.raises(MeshError, match="each is there once"):
        mmfsdp.shard(model, CONFIG, init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("shard", "dp", "tensor")))
    with pytest.raises(PlanError, match="is divided already"):
        mmfsdp.shard(model, CONFIG, init_device_mesh("cpu", (1, 4), mesh_dim_names=("shard", "tensor")))
    with pytest.raises(MeshError, match=r"has no axis 'shard'.*\(2, 1, 2\).*\('replicate', 'shard', 'tensor'\)"):
        mmfsdp.shard(model, CONFIG, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "tensor")))
    with torch.device("meta"):
        divide(empty := make_llama(), mesh)
    assert mmfsdp.plan(empty, CONFIG, mesh).mesh.axes["tensor"] == 2
    with pytest.raises(PlanError, match=r"is divided, and on the meta device.*before you divide it"):
        mmfsdp.shard(empty, CONFIG, mesh)
    stages = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "shard"))
    assert mmfsdp.data_parallel_size(stages) == 2
    assert mmfsdp.data_parallel_size(init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))) == 4

    experts = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8, bias=False)).requires_grad_(False)
    experts[0].requires_grad_(True)
    own = torch.full((2, 4), float(rank))
    foreign = init_device_mesh("cpu", (4,))
    experts[1].weight = nn.Parameter(DTensor.from_local(own.clone(), foreign, [Shard(0)]), requires_grad=False)
    with pytest.raises(PlanError, match=r"'1.weight' is divided already.*on a mesh without names \(4\)"):
        mmfsdp.plan(experts, {}, 4)
    sharded = mmfsdp.shard(experts, ignored_modules=[experts[1]])
    assert torch.equal(sharded[1].weight.to_local(), own)  # not overwritten by the first rank's
    assert find_sharded_model(sharded).plan.param_bytes(rank) > 0
    pipe = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pipe", "dp", "tp"))
    divide(model := make_llama(), pipe)
    if not torch_has(KEEPS_ROOT_MESH):
        with pytest.raises(MeshError, match=r"divided along 'tensor' over the mesh \('pipe', 'dp', 'tp'\).*Install"):
            mmfsdp.shard(model, CONFIG, pipe)
        return
    sharded = mmfsdp.shard(model, CONFIG, pipe)  # other names for the axes, and an axis that is not ours
    assert find_sharded_model(sharded).mesh.mesh_dim_names == ("dp", "tp")


def divided_too_late(rank: int) -> None:
    """Torch notices another mesh than that of the shards; ours are parameters that come from elsewhere."""
    mesh = make_mesh({"shard": 2, "tensor": 2})
    config = {"wrap": {"kind": "module_name", "patterns": "0"}}
    for strategy, over in (("FULL_SHARD", mesh["shard"]), ("HYBRID_SHARD", (2, 2)), ("NO_SHARD", None)):
        over = make_mesh({"replicate": 2, "shard": 2}) if isinstance(over, tuple) else over
        model = mmfsdp.shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), config, over, sharding=strategy)
        for part, styles in ((model, {"0": ColwiseParallel()}), (model[1], ColwiseParallel())):
            with pytest.raises(ValueError, match="annot distribute a DTensor"):
                parallelize_module(part, mesh["tensor"], styles)
    same = make_mesh({"shard": 4})
    ignored = {"sharding": {"ignored_modules": ["1"]}}
    for given, style in (({}, ColwiseParallel()), (ignored, ColwiseParallel()), (ignored, RowwiseParallel())):
        model = mmfsdp.shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), {**config, **given}, same)
        parallelize_module(model[1], same, style)
        with pytest.raises(ShardStateError, match=r"'1.weight'.* divided over a mesh after .*Divide the model first"):
            model(torch.ones(2, 8))


def test_mistakes_are_named(tmp_path: Path) -> None:
    run_ranks(mistakes, 4, str(tmp_path))
    run_ranks(refusals, 4)
    run_ranks(divided_too_late, 4)


def test_axes_by_name() -> None:
    sizes = {"replicate": 2, "shard": 4, "tensor": 2}
    assert mmfsdp.plan(nn.Linear(8, 8), mesh={"replicate": 2, "shard": 4}).mesh.world_size == 8
    with pytest.raises(MeshError, match=r"'tensr' is no axis of a mesh. Did you mean 'tensor'\?"):
        mmfsdp.plan(nn.Linear(8, 8), mesh={"tensr": 2})
    with pytest.raises(MeshError, match=r"'tp' is no axis of a mesh. It is called 'tensor' here"):
        mmfsdp.plan(nn.Linear(8, 8), mesh={"tp": 2})
    with pytest.raises(MeshError, match="leave no whole number of ranks for shard in a world of 1"):
        mmfsdp.plan(nn.Linear(8, 8), mesh={"replicate": 2, "shard": -1})
    with pytest.raises(
        PlanError,
        match=r"2 x 4 x 2 ranks .replicate x shard x tensor; batches over replicate x shard., but no parameter is",
    ):
        mmfsdp.plan(nn.Linear(8, 8), mesh=sizes)
