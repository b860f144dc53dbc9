"""Checkpoints of DeepSpeed: read to what its live engine gathers and its own scripts merge, bit for bit."""

from __future__ import annotations

import math
import os
import pickle
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.deepspeed_data import write

from mmfsdp.basics.boxes import meet
from mmfsdp.checkpoint import convert, diff, open_layout, verify
from mmfsdp.checkpoint.formats.deepspeed.flat_ranges import PieceBoxes, boxes_of, by_parameter, by_stretch, even_pieces
from mmfsdp.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatError,
    IncompleteCheckpointError,
    MmfsdpError,
)

ARCHIVES = sorted((Path(__file__).parents[2] / "deepspeed").glob("*.tar.gz"))


def unpacked(archive: Path, directory: Path) -> Path:
    with tarfile.open(archive) as tar:
        # As the documentation of tarfile has it for Python before 3.11.4, which knows no filter.
        tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        tar.extractall(directory)
    return directory


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases as ``release/case``."""
    directory = tmp_path_factory.mktemp("deepspeed")
    for archive in ARCHIVES:
        unpacked(archive, directory / archive.name.removesuffix(".tar.gz"))
    return directory


def cases() -> list[str]:
    """Return ``release/case`` of every checkpoint that the archives hold."""
    found = []
    for archive in ARCHIVES:
        with tarfile.open(archive) as tar:
            names = [Path(name).parent.name for name in tar.getnames() if name.endswith("truth.pth")]
        found += [f"{archive.name.removesuffix('.tar.gz')}/{name}" for name in sorted(names)]
    return found


def converted(source: Path, target: Path, keep: str = "all") -> Any:
    convert(source, target, keep=keep, overwrite=True, fsync=False)
    return torch.load(target, weights_only="mmengine" not in str(source))  # which saves its history of losses


def tags(case: Path) -> list[Path]:
    """Return the directories of the last step, the universal one too, and the one whose file ``latest`` names it."""
    tag = (case / "latest").read_text() if (case / "latest").exists() else "epoch_1.pth"
    own = [case] if (case / "latest").exists() else []
    return [*own, case / tag, *case.glob("global*_universal")]


def states_by_name(optimizer: Any) -> dict[str, Any]:
    names = [name for group in optimizer["param_groups"] for name in group["param_names"]]
    places = [place for group in optimizer["param_groups"] for place in group["params"]]
    return {name: optimizer["state"][place] for name, place in zip(names, places, strict=True)}


def prefix_of(case: str) -> str:
    return "inner." if case.endswith("mmengine") else ""


@pytest.mark.sample(
    "0.19.8/zero3_2ranks_groups",
    "0.19.8/zero2_4ranks_elastic",
    "0.19.8/zero1_2ranks_bf16",
    "0.14.5/zero2_2ranks_fp16_groups",
    "0.19.8/zero3_2ranks_unfrozen_only",
    "0.19.8/zero2_1rank_fp32",
)
@pytest.mark.parametrize("case", [name for name in cases() if "zero0" not in name])
def test_equals_what_deepspeed_makes_of_it(golden: Path, tmp_path: Path, case: str) -> None:
    truth = torch.load(golden / case / "truth.pth")
    for directory in tags(golden / case):
        assert verify(directory).ok
        found = converted(directory, tmp_path / "out.pth")
        for name, tensor in truth.get("fp32", {}).items():
            assert found["state_dict"][name].dtype == torch.float32
            assert torch.equal(found["state_dict"][name], tensor), name
        for name, tensor in truth.get("merged", {}).items():
            # DeepSpeed casts buffers, and reads a tied parameter for each of its names.
            assert torch.equal(found["state_dict"][name].to(tensor.dtype), tensor), name
        states = states_by_name(found["optimizer"])
        for kind in ("exp_avg", "exp_avg_sq"):
            for name, tensor in truth.get(kind, {}).items():
                assert torch.equal(states[name][kind], tensor), (kind, name)
        assert {int(state["step"]) for state in states.values()} == {2}
        assert {len(group["params"]) for group in found["optimizer"]["param_groups"]} in ({9}, {11}, {3, 6}, {3, 8})
        one, two = (found["state_dict"][f"{prefix_of(case)}{name}.weight"] for name in ("head", "tied"))
        assert torch.equal(one, two)


def test_frozen_parameters_buffers_and_what_else_was_saved(golden: Path, tmp_path: Path) -> None:
    found = converted(golden / "0.19.8" / "zero1_2ranks_bf16", tmp_path / "out.pth")
    # Stage 1 has frozen parameters with the buffers, in half precision; zero_to_fp32 leaves them out.
    weights = found["state_dict"]
    assert weights["norm.bias"].dtype == weights["conv.weight"].dtype == torch.bfloat16
    assert weights["steps"].item() == 7
    assert [*weights][:3] == ["steps", "mean", "up.weight"]
    assert found["epoch"] == 3
    assert found["history"]["loss"].tolist() == [0.5, 0.25]
    assert found["deepspeed"]["global_steps"] == 2
    assert found["deepspeed"]["loss_scaler"] == {"cur_scale": 1.0, "dynamic": False}


def test_groups_of_the_optimizer_keep_their_settings(golden: Path, tmp_path: Path) -> None:
    for case in ("zero2_2ranks_fp16_groups", "zero3_2ranks_groups"):
        groups = converted(golden / "0.19.8" / case, tmp_path / "out.pth")["optimizer"]["param_groups"]
        assert [(group["lr"], group["param_names"][0]) for group in groups] == [(0.1, "up.weight"), (0.01, "down.bias")]


def test_without_zero(golden: Path, tmp_path: Path) -> None:
    found = converted(golden / "0.19.8" / "zero0_2ranks", tmp_path / "out.pth")
    assert found["state_dict"]["up.weight"].dtype == torch.bfloat16
    masters = found["optimizer"]["fp32_groups"][0]
    assert torch.equal(masters[0].bfloat16(), found["state_dict"]["up.weight"])
    assert found["optimizer"]["state"][0]["exp_avg"].shape == (7, 5)


def test_mmengines_strategy(golden: Path, tmp_path: Path) -> None:
    [case] = [golden / name for name in cases() if name.endswith("mmengine")]
    source = case / "epoch_1.pth"
    found = converted(source, tmp_path / "all.pth")
    assert [*found] == ["state_dict", "optimizer", "meta", "message_hub", "param_schedulers", "deepspeed"]
    assert found["meta"]["epoch"] == 1
    model = converted(source, tmp_path / "model.pth", keep="model")
    assert [*model] == ["state_dict", "meta"]
    assert [*model["state_dict"]] == [*found["state_dict"]]
    assert model["state_dict"]["inner.up.weight"].dtype == torch.float32


def test_neither_torch_nor_deepspeed_is_imported(golden: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from mmfsdp.checkpoint import convert;"
        "convert(sys.argv[1], sys.argv[2], fsync=False); assert not {'torch', 'deepspeed'} & sys.modules.keys()"
    )
    source = golden / "0.19.8" / "zero3_4ranks_subgroups"
    subprocess.run([sys.executable, "-c", code, source, tmp_path / "out.safetensors"], check=True, env=os.environ)
    assert diff(tmp_path / "out.safetensors", source, keep="model").same


@pytest.mark.parametrize("case", ["zero1_2ranks_bf16", "zero3_4ranks_subgroups"])
def test_the_first_rank_says_where_everything_is(golden: Path, tmp_path: Path, case: str) -> None:
    source = tmp_path / "source"
    shutil.copytree(golden / "0.19.8" / case / "global_step2", source)
    expected = open_layout(source).tensors
    layout = pickle.loads(pickle.dumps(open_layout(source, look_up=False)))  # as another rank gets it
    assert layout.tensors.keys() == expected.keys()
    for name, entry in layout.tensors.items():
        assert set(entry.chunks()) == set(expected[name].chunks()), name
    [other] = source.glob("*_rank_1_mp_rank_00_optim_states.pt")
    other.write_bytes(b"")
    late = open_layout(source, look_up=False)
    with pytest.raises(CorruptCheckpointError, match=re.escape(other.name)):
        late.tensors["state_dict/down.weight"].chunks()


@pytest.fixture
def step(golden: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint of stage 3 with two steps, of which ``latest`` names the second."""
    shutil.copytree(golden / "0.19.8" / "zero3_2ranks_groups", tmp_path / "run")
    return tmp_path / "run" / "global_step2"


def test_latest_names_what_is_not_there(step: Path) -> None:
    (step.parent / "latest").write_text("global_step9\n")
    with pytest.raises(
        CheckpointNotFoundError, match=r"'global_step9', which is not there.*global_step1.*global_step2"
    ):
        open_layout(step.parent)
    (step.parent / "latest").write_text("../elsewhere")
    with pytest.raises(FormatError, match=re.escape("names the directory '../elsewhere'")):
        open_layout(step.parent)


@pytest.mark.parametrize("kind", ["model", "optim"])
def test_a_missing_rank_is_named(step: Path, kind: str) -> None:
    [path] = step.glob(f"*_rank_1_mp_rank_00_{kind}_states.pt")
    path.unlink()
    with pytest.raises(IncompleteCheckpointError, match=re.escape(path.name)):
        open_layout(step)


def test_all_states_are_missing(golden: Path, step: Path, tmp_path: Path) -> None:
    for path in step.glob("*optim*"):
        path.unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"no \*_optim_states.pt"):
        open_layout(step)
    whole = tmp_path / "whole"
    shutil.copytree(golden / "0.19.8" / "zero2_1rank_fp32" / "global_step2", whole)
    next(whole.glob("*optim*")).unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"convert mp_rank_00_model_states.pt with keep='module'"):
        open_layout(whole)
    found = converted(whole / "mp_rank_00_model_states.pt", tmp_path / "out.pth", keep="module")
    assert found["module"]["up.weight"].shape == (7, 5)


@pytest.mark.parametrize("kind", ["model", "optim"])
def test_a_file_of_another_step_is_named(step: Path, kind: str) -> None:
    [path] = step.glob(f"*_rank_1_mp_rank_00_{kind}_states.pt")
    shutil.copyfile(step.parent / "global_step1" / path.name, path)
    with pytest.raises(CorruptCheckpointError, match=rf"{path.name} is of another save"):
        open_layout(step)


def test_files_of_exchanged_ranks_and_left_over_ones_are_named(golden: Path, step: Path, tmp_path: Path) -> None:
    [path] = step.glob("*_rank_1_mp_rank_00_optim_states.pt")
    extra = path.with_name(path.name.replace("rank_1", "rank_2"))
    shutil.copyfile(path, extra)
    with pytest.raises(CorruptCheckpointError, match=rf"of 2 ranks, but {extra.name} is there"):
        open_layout(step)
    exchanged = tmp_path / "exchanged"
    shutil.copytree(golden / "0.19.8" / "zero2_4ranks_elastic" / "global_step2", exchanged)
    one, two = (next(exchanged.glob(f"*_rank_{rank}_mp*optim*")) for rank in (1, 2))
    one.rename(exchanged / "other")
    two.rename(one)
    (exchanged / "other").rename(two)
    with pytest.raises(CorruptCheckpointError, match=rf"{one.name} holds .* elements .*different saves"):
        open_layout(exchanged)


def test_damage_and_foreign_files_are_named(step: Path) -> None:
    [path] = step.glob("*_rank_1_mp_rank_00_optim_states.pt")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorruptCheckpointError, match=path.name):
        open_layout(step)
    torch.save({"weights": torch.ones(3)}, path)
    with pytest.raises(FormatError, match=rf"{path.name} is named as a file of DeepSpeed"):
        open_layout(step)
    path.write_bytes(whole)
    chunk = open_layout(step).tensors["optimizer/state/up.weight/exp_avg"].chunks()[-1]
    with chunk.file.open("r+b") as file:
        file.seek(chunk.offset)
        file.write(b"\xff\xff")
    report = verify(step)
    assert not report.ok
    assert chunk.file.name in str(report.problems)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor parallelism.*_consolidated_16bit_state_dict"),
        ("layer_00-model_01-model_states.pt", "tensor parallelism.*_consolidated_16bit_state_dict"),
        ("layer_0_expert_3_mp_rank_00_model_states.pt", "expert parallelism.*keep='module', and each layer_"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "expert parallelism"),
    ],
)
def test_other_parallelism_is_refused(step: Path, name: str, message: str) -> None:
    (step / name).write_bytes(b"")
    with pytest.raises(FormatError, match=rf"'{name}', which DeepSpeed writes for {message}"):
        open_layout(step)


def test_a_pipeline_is_put_together(golden: Path, tmp_path: Path) -> None:
    case = golden / "0.19.8-pipeline" / "pipeline"
    assert verify(case).ok
    found = converted(case, tmp_path / "out.pth")
    weights, states = found["state_dict"], states_by_name(found["optimizer"])
    trained = {}
    for stage in range(2):
        truth = torch.load(case / f"truth_of_stage{stage}.pth")
        for name, tensor in truth["fp32"].items():
            assert torch.equal(weights[name], tensor), name
            assert torch.equal(states[name]["exp_avg"], truth["exp_avg"][name]), name
            assert int(states[name]["step"]) == 2
        trained |= truth["fp32"]
    assert trained.keys() == states.keys() >= {"tied_modules.ends.weight", "3.weight", "4.bias"}
    assert len(found["optimizer"]["param_groups"]) == 1
    layers = sorted((case / "global_step2").glob("layer_*"))
    stored = {f"{int(path.name[6:8])}.{key}": value for path in layers for key, value in torch.load(path).items()}
    assert weights.keys() == {*stored, *trained}
    assert weights["1.weight"].dtype == torch.bfloat16  # it is frozen
    for name, tensor in stored.items():
        assert torch.equal(weights[name].bfloat16(), tensor), name
    assert torch.equal(weights["0.weight"], weights["tied_modules.ends.weight"].bfloat16())
    assert found["epoch"] == 3


def test_a_universal_checkpoint_of_a_pipeline(golden: Path, tmp_path: Path) -> None:
    case = golden / "0.19.8-pipeline" / "pipeline_universal"
    found = converted(case / "global_step2_universal", tmp_path / "out.pth")
    states, trained = states_by_name(found["optimizer"]), set()
    for stage in range(2):
        truth = torch.load(case / f"truth_of_stage{stage}.pth")
        for name, tensor in truth["fp32"].items():
            assert torch.equal(found["state_dict"][name], tensor), name
            assert torch.equal(states[name]["exp_avg"], truth["exp_avg"][name]), name
        trained |= {*truth["fp32"]}
    assert found["state_dict"].keys() == states.keys() == trained


def test_a_pipeline_lacks_a_stage_or_has_one_of_another_save(golden: Path, tmp_path: Path) -> None:
    step = tmp_path / "global_step2"
    shutil.copytree(golden / "0.19.8-pipeline" / "pipeline" / "global_step2", step)
    other = torch.load(step / "mp_rank_01_model_states.pt", weights_only=False)
    torch.save({**other, "global_steps": 1}, step / "mp_rank_01_model_states.pt")
    with pytest.raises(CorruptCheckpointError, match=r"mp_rank_01_model_states.pt is of another save \(step 1\)"):
        open_layout(step)
    for path in step.glob("*mp_rank_01*"):
        path.unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"of 2 stages, but .*'mp_rank_01_model_states\.pt'"):
        open_layout(step)
    for path in step.glob("layer_*"):  # then it is a part of something
        path.unlink()
    with pytest.raises(FormatError, match="which DeepSpeed writes for tensor parallelism"):
        open_layout(step)


def test_a_universal_checkpoint_without_a_parameter(golden: Path, tmp_path: Path) -> None:
    source = tmp_path / "universal"
    shutil.copytree(golden / "0.19.8" / "zero1_2ranks_bf16" / "global_step2_universal", source)
    (source / "zero" / "up.bias" / "fp32.pt").unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"lacks zero/up.bias/fp32.pt"):
        open_layout(source)
    shutil.copyfile(source / "zero" / "down.bias" / "fp32.pt", source / "zero" / "up.bias" / "fp32.pt")
    with pytest.raises(CorruptCheckpointError, match=r"zero/up.bias/fp32.pt holds a tensor of shape \[5\]"):
        open_layout(source)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("up.bias/exp_avg.pt", "lacks zero/up.bias/exp_avg.pt, which other parameters of its group have"),
        ("up.weight/exp_avg_sq.pt", "lacks zero/up.weight/exp_avg_sq.pt, which other parameters"),  # the first one
        ("head.bias/step.pt", "lacks zero/head.bias/step.pt, which other parameters"),
        ("optimizer_state.pt", "lacks zero/optimizer_state.pt, the settings of the optimizer"),
    ],
)
def test_a_universal_checkpoint_lacks_a_file_of_the_optimizer(
    golden: Path, tmp_path: Path, path: str, message: str
) -> None:
    source = tmp_path / "universal"
    shutil.copytree(golden / "0.19.8" / "zero1_2ranks_bf16" / "global_step2_universal", source)
    (source / "zero" / path).unlink()
    with pytest.raises(IncompleteCheckpointError, match=message):
        open_layout(source)


def test_a_universal_checkpoint_with_what_is_no_step(golden: Path, tmp_path: Path) -> None:
    source = tmp_path / "universal"
    shutil.copytree(golden / "0.19.8" / "zero1_2ranks_bf16" / "global_step2_universal", source)
    zero = source / "zero" / "up.bias"
    shutil.copyfile(zero / "exp_avg.pt", zero / "step.pt")
    with pytest.raises(CorruptCheckpointError, match=r"zero/up.bias/step.pt does not hold a step"):
        open_layout(source)


def test_a_stage_of_a_universal_pipeline_is_there_twice(golden: Path, tmp_path: Path) -> None:
    source = tmp_path / "universal"
    shutil.copytree(golden / "0.19.8-pipeline" / "pipeline_universal" / "global_step2_universal", source)
    shutil.copyfile(source / "mp_rank_00_model_states.pt", source / "mp_rank_01_model_states.pt")
    message = r"zero/3.bias is there, but no \*_model_states.pt beside zero lists this parameter"
    with pytest.raises(IncompleteCheckpointError, match=message):
        open_layout(source)


def trees(tree: Any) -> list[tuple[Any, Any]]:
    """Return every container of nested content with each of its keys."""
    if not isinstance(tree, dict | list):
        return []
    items = [*tree.items()] if isinstance(tree, dict) else [*enumerate(tree)]
    return [(tree, key) for key, _ in items] + [pair for _, value in items for pair in trees(value)]


JUNK = (None, -1, 0, 2, 2**70, 1.5, "x", [], {}, [None], {"a": 1}, {None: None}, set(), torch.Size((10**9, 10**9)))
JUNK += (*map(torch.zeros, (3, (2, 2), (), 100)), torch.zeros(10, dtype=torch.int8), torch.zeros(20)[::2])


@pytest.mark.sample("2")
@pytest.mark.parametrize("stage", [2, 3])
def test_nonsense_ends_with_an_error_of_ours(tmp_path: Path, stage: int) -> None:
    random = np.random.default_rng(stage)
    write(stage, tmp_path / "good", 128, side=4)
    good = {path.name: torch.load(path) for path in (tmp_path / "good" / "global_step1").iterdir()}
    for tree in good.values():
        tree |= {"shared_params": {"t": "layers.0.weight"}, "meta": {}} if "module" in tree else {}
    refused = 0
    for _ in range(25):
        files = pickle.loads(pickle.dumps(good))
        name = str(random.choice(sorted(files)))
        places = trees(files[name])
        holder, key = places[int(random.integers(len(places)))]
        holder[key] = JUNK[int(random.integers(len(JUNK)))]
        path = tmp_path / "bad"
        path.mkdir(exist_ok=True)
        for file, tree in files.items():
            torch.save(tree, path / file)
        try:
            convert(path, tmp_path / "out.pth", keep="all", overwrite=True, fsync=False)
        except MmfsdpError:
            refused += 1
    assert 2 < refused < 25


def shapes_at_random(random: np.random.Generator) -> dict[str, tuple[int, ...]]:
    count = int(random.integers(1, 6))
    return {
        f"p{number}": tuple(int(size) for size in random.integers(0 if number else 1, 6, int(random.integers(0, 4))))
        for number in range(count)
    }


def filled(shape: tuple[int, ...], pieces: Any, flats: dict[tuple[int, int], np.ndarray]) -> np.ndarray:
    """Return a parameter with each box copied from where the plan says."""
    result = np.full(shape, -1)
    for (offsets, sizes), piece, at in boxes_of(shape, pieces):
        box = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        result[box] = flats[piece.rank, piece.flat][at : at + math.prod(sizes)].reshape(sizes)
    return result


@pytest.mark.parametrize("seed", range(40))
def test_the_plan_equals_a_division_by_numpy(seed: int) -> None:
    random = np.random.default_rng(seed)
    ranks = int(random.integers(1, 6))
    groups = [{f"{name}/{place}": shape for name, shape in shapes_at_random(random).items()} for place in range(3)]
    number = iter(range(1_000_000))
    values = {
        name: np.array([next(number) for _ in range(math.prod(shape))], dtype=int).reshape(shape)
        for shapes in groups
        for name, shape in shapes.items()
    }
    # Stages 1 and 2: laid end to end with gaps, padded, and cut into equal stretches.
    for shapes in groups:
        gaps = [int(gap) for gap in random.integers(0, 3, len(shapes))]
        parts = [np.append(values[name].ravel(), [-7] * gap) for name, gap in zip(shapes, gaps, strict=True)]
        joined = np.concatenate(parts)
        stretch = -(-len(joined) // ranks) + int(random.integers(0, 3))
        padded = np.append(joined, np.full(stretch * ranks - len(joined), -9))
        flats = {(rank, 0): padded[rank * stretch : (rank + 1) * stretch] for rank in range(ranks)}
        for name, pieces in by_stretch(0, shapes, stretch, gaps).items():
            assert np.array_equal(filled(shapes[name], pieces, flats), values[name])
    # Stage 3: each parameter cut by itself; what a rank has of them laid end to end, cut anywhere into flat tensors.
    shares = {rank: [] for rank in range(ranks)}
    for name, value in values.items():
        share = -(-value.size // ranks)
        padded = np.append(value.ravel(), np.full(share * ranks - value.size, -9))
        for rank in range(ranks):
            shares[rank].append(padded[rank * share : (rank + 1) * share])
            alone = {(other, 0): padded[other * share : (other + 1) * share] for other in range(ranks)}
        assert np.array_equal(filled(value.shape, even_pieces(value.size, ranks), alone), value), name
    length = sum(len(part) for part in shares[0])
    cuts = sorted(int(cut) for cut in random.integers(0, length + 1, 2))
    flats = {}
    for rank, parts in shares.items():
        for place, part in enumerate(np.split(np.concatenate(parts), cuts)):
            flats[rank, place] = part
    lengths = [len(flats[0, place]) for place in range(3)]
    for name, pieces in by_parameter(groups, lengths, ranks).items():
        shape = values[name].shape
        assert np.array_equal(filled(shape, pieces, flats), values[name])
        boxes = PieceBoxes(shape, pieces, lambda piece, at: (piece, at))
        everything = boxes.meeting(None)
        assert boxes.count == len(everything) == len([*boxes_of(shape, pieces)])
        low = tuple(int(random.integers(0, size + 1)) for size in shape)
        asked = low, tuple(int(random.integers(0, size - at + 1)) for size, at in zip(shape, low, strict=True))
        assert boxes.meeting(asked) == {box: held for box, held in everything.items() if meet(box, asked)}


def test_a_file_of_deepspeed_names_its_directory(tmp_path: Path) -> None:
    source = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({"module": {"w": torch.ones(2)}, "ds_version": "0.19.8", "optimizer": None}, source)
    with pytest.raises(FormatError, match=rf"is one of several files of DeepSpeed\. Open its directory '{tmp_path}'"):
        convert(source, tmp_path / "out.safetensors")
