"""Files that stay open while a checkpoint is read, and are opened again when there are many."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import mmfsdp
from mmfsdp.basics.boxes import Bounds
from mmfsdp.checkpoint import convert, open_layout, verify
from mmfsdp.checkpoint.chunks import Chunk
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.files.disk import OpenFiles
from mmfsdp.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatError, IncompleteCheckpointError
from mmfsdp.saving import read_checkpoint
from mmfsdp.saving.reading.verified_files import VerifiedFiles
from mmfsdp.testing import single_rank

COUNT = 100  # more than stay open


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    for number in range(COUNT):
        (tmp_path / f"{number}").write_bytes(bytes([number]) * 8)
    return [tmp_path / f"{number}" for number in range(COUNT)]


def test_every_file_is_read_again_and_few_are_open(paths: list[Path]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with OpenFiles() as files:
        for _ in range(2):
            for number, path in enumerate(paths):
                assert os.pread(files.descriptor(path), 1, 0) == bytes([number])
        assert len(os.listdir("/proc/self/fd")) <= before + 64
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("names", "advice"),
    [
        (["consolidated.00.pth", "consolidated.01.pth"], "convert_llama_weights_to_hf"),
        (["mp_rank_00/model_optim_rng.pt", "mp_rank_01/model_optim_rng.pt"], "--ckpt-convert-format torch_dist"),
        (["mp_rank_00_000/model_rng.pt", "mp_rank_00_001/model_rng.pt"], "--ckpt-convert-format torch_dist"),
        (["tp_rank_00_pp_rank_000/model.ckpt", "tp_rank_01_pp_rank_000/model.ckpt"], "change_num_partitions"),
        (["opt175b-model_part-0.pt", "opt175b-model_part-1.pt"], "convert_to_singleton"),
    ],
)
def test_a_part_of_a_divided_model_is_not_written_as_a_whole(names: list[str], advice: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        torch.save({"model": {"w": torch.ones(2)}}, tmp_path / name)
    for name, other in (names, names[::-1]):
        with pytest.raises(FormatError, match=re.escape(name)) as caught:
            convert(tmp_path / name, tmp_path / "out.pth")
        assert advice in str(caught.value)
        assert f"and {other} another" in str(caught.value)
    with pytest.raises(CheckpointNotFoundError, match=advice):
        open_layout(tmp_path)
    assert "of which this file holds one" in str(verify(tmp_path / names[0]).unchecked)
    convert(tmp_path / names[0], tmp_path / "part.pth", source_format="torch_zip")
    # Alone, a file of this name holds the whole model.
    (tmp_path / names[1]).unlink()
    convert(tmp_path / names[0], tmp_path / "whole.pth")


def test_files_of_ranks_that_hold_other_weights_are_not_one_checkpoint(tmp_path: Path) -> None:
    def save(other: dict[str, torch.Tensor]) -> None:
        whole = {"w": torch.ones(2, 4), "v": torch.ones(4, 2), "queue": torch.zeros(2, 2), "mean": torch.zeros(2)}
        for rank, held in enumerate([whole, whole | other]):
            torch.save({"state_dict": held}, tmp_path / f"rank{rank}.pth")

    save({"queue": torch.ones(2, 2), "mean": torch.ones(2)})  # buffers
    assert open_layout(tmp_path).world_size == 2
    for other in ({"w": torch.zeros(2, 4), "v": torch.zeros(4, 2)}, {"layers.1.weight": torch.ones(2, 4)}):
        save(other)
        with pytest.raises(
            FormatError, match=rf"hold no shards of FSDP, but other weights, such as '{next(iter(other))}'"
        ):
            open_layout(tmp_path)
    open_layout(tmp_path / "rank0.pth")


@pytest.mark.parametrize("how", ["replaced", "rewritten"])
def test_a_file_that_changes_between_two_reads(paths: list[Path], how: str) -> None:
    with OpenFiles() as files:
        for path in paths:
            files.descriptor(path)
        if how == "replaced":
            other = paths[3].with_name("other")
            other.write_bytes(bytes(8))
            os.replace(other, paths[3])
        else:
            paths[3].write_bytes(bytes(9))
        for _ in range(2):
            with pytest.raises(CorruptCheckpointError, match=r"3 changed while it was read: another process") as caught:
                files.descriptor(paths[3])
            assert caught.value.context["file"] == str(paths[3])
        files.descriptor(paths[4])
        paths[5].unlink()
        with pytest.raises(IncompleteCheckpointError, match="5 is missing"):
            files.descriptor(paths[5])


def test_loading_notices_a_file_that_was_replaced(paths: list[Path]) -> None:
    chunks = tuple(Chunk(path, 0, 8, (number, 0), (1, 8)) for number, path in enumerate(paths))
    entry = TensorEntry("w", "uint8", (COUNT, 8), chunks)
    box: Bounds = ((0, 0), (COUNT, 8))
    target = memoryview(bytearray(8 * COUNT))
    files = VerifiedFiles(verify=False, own_records=False)
    files.fill(entry, box, target)
    assert target == b"".join(bytes([number]) * 8 for number in range(COUNT))
    other = paths[0].with_name("other")
    other.write_bytes(bytes(8))
    os.replace(other, paths[0])
    with pytest.raises(CorruptCheckpointError, match="0 changed while it was read"):
        files.fill(entry, box, target)
    files.close()


@pytest.mark.parametrize(
    ("to", "link"),
    [
        ("local", "rank0.pth"),
        ("local", "rank1.pth"),
        ("local", "manifest.json"),
        ("sharded", ".metadata"),
        ("sharded", "__1_0.distcp"),
        ("safetensors_index", "model.safetensors.index.json"),
        ("safetensors_index", "model-00001-of-00001.safetensors"),
    ],
)
def test_a_link_to_a_file_that_does_not_exist_is_named(tmp_path: Path, to: str, link: str) -> None:
    torch.save({"w": torch.arange(8.0)}, tmp_path / "model.pth")
    path = tmp_path / "checkpoint"
    convert(tmp_path / "model.pth", path, to=to, ranks=None if to == "safetensors_index" else 2)
    (path / link).unlink()
    (path / link).symlink_to("elsewhere")
    with pytest.raises((IncompleteCheckpointError, CheckpointNotFoundError), match=re.escape(link)):
        convert(path, tmp_path / "whole.pth")
    assert not (tmp_path / "whole.pth").exists()


def test_what_is_only_a_part_of_a_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    torch.save(torch.arange(8.0), tmp_path / "model.pth")
    with pytest.raises(FormatError, match=r"model\.pth holds one tensor and not a mapping of names"):
        convert(tmp_path / "model.pth", tmp_path / "whole.safetensors")
    torch.save({"w": torch.arange(8.0)}, tmp_path / "model.pth")
    convert(tmp_path / "model.pth", tmp_path / "dcp", to="dcp")
    for name in ("__0_0.distcp", ".metadata"):
        with pytest.raises(
            FormatError, match=r"is one file of torch's distributed checkpoint; open its directory .*dcp"
        ):
            convert(tmp_path / "dcp" / name, tmp_path / "whole.safetensors")


class Vector(torch.nn.Module):
    """One weight."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(2))


class TestDirectoriesOfWholeFiles:
    def test_as_accelerate_writes_full_state_dicts(self, tmp_path: Path) -> None:
        for name in ("optimizer.bin", "pytorch_model_fsdp.bin", "scheduler.bin", "scaler.pt", "sampler_1.bin"):
            torch.save({"w": torch.ones(2)}, tmp_path / name)
        (tmp_path / "trainer_state.json").write_text("{")
        (tmp_path / "notes.txt").write_text("none")
        with pytest.raises(
            CheckpointNotFoundError,
            match=r"Open a checkpoint within it: 'pytorch_model_fsdp.bin', 'optimizer.bin'\. \[",
        ):
            open_layout(tmp_path)

    def test_as_transformers_trainer_writes_shards(self, tmp_path: Path) -> None:
        """As transformers 5.10 with accelerate 1.15 does: the weights come first, and what holds none is left out."""
        torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "model.pth")
        torch.save(
            {"optimizer": {"state": {"w": {"step": torch.ones(())}}, "param_groups": []}}, tmp_path / "optim.pth"
        )
        run = tmp_path / "run"
        for step in (5, 10):
            folder = run / f"checkpoint-{step}"
            folder.mkdir(parents=True)
            convert(tmp_path / "model.pth", folder / "pytorch_model_fsdp_0", to="dcp")
            convert(tmp_path / "optim.pth", folder / "optimizer_0", to="dcp")
            for name in ("rng_state_0.pth", "rng_state_1.pth", "scheduler.pt"):
                torch.save({"last_epoch": 1}, folder / name)
            (folder / "trainer_state.json").write_text("{}")
        torch.save({"args": 1}, run / "training_args.bin")
        parts = ("pytorch_model_fsdp_0", "optimizer_0")
        inner = "'pytorch_model_fsdp_0', 'optimizer_0'"
        with pytest.raises(CheckpointNotFoundError, match=rf"Open a checkpoint within it: {inner}\."):
            open_layout(folder)
        inner = ", ".join(f"'checkpoint-{step}/{part}'" for step in (10, 5) for part in parts)
        with pytest.raises(CheckpointNotFoundError, match=rf"Open a checkpoint within it: {inner}\."):
            open_layout(run)
        with pytest.raises(FormatError, match=r"or open what lies beside it: 'pytorch_model_fsdp_0'\."):
            convert(folder / "optimizer_0", tmp_path / "out.safetensors")
        with single_rank():
            model = mmfsdp.shard(Vector())
            optimizer = torch.optim.AdamW(model.parameters())
            with pytest.raises(
                FormatError, match=r"Beside it lies 'optimizer_0': load the weights without the optimizer"
            ):
                mmfsdp.load_checkpoint(folder / "pytorch_model_fsdp_0", model, optimizer)
            with pytest.raises(FormatError, match=r"Open what lies beside it: 'pytorch_model_fsdp_0'\."):
                mmfsdp.load_checkpoint(folder / "optimizer_0", model)

    def test_as_transformers_trainer_writes_with_deepspeed(self, tmp_path: Path) -> None:
        """As with DeepSpeed 0.19: a Hugging Face folder in the dtype of training, around DeepSpeed's own."""
        step = tmp_path / "checkpoint-2"
        (step / "global_step2").mkdir(parents=True)
        (step / "latest").write_text("global_step2")
        (step / "config.json").write_text("{}")
        save_file({"w": torch.ones(2, dtype=torch.bfloat16)}, step / "model.safetensors")
        torch.save({"module": {}}, step / "global_step2" / "mp_rank_00_model_states.pt")
        [note] = convert(step, tmp_path / "out.safetensors").notes
        assert note.startswith("checkpoint-2/global_step2 is DeepSpeed's, with weights in full precision")
        with single_rank():
            model = mmfsdp.shard(Vector())
            with pytest.raises(FormatError, match=r"Give DeepSpeed's checkpoint within it, 'global_step2'\."):
                mmfsdp.load_checkpoint(step, model, torch.optim.AdamW(model.parameters()))

    def test_as_nemo_automodel_writes(self, tmp_path: Path) -> None:
        """As its Checkpointer does in 2026: weights and optimizer, and folders of what each rank has of its own."""
        torch.save({"w": torch.ones(2)}, tmp_path / "model.pth")
        state = {"state": {"w": {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": ["w"], "lr": 0.1}]}
        torch.save({"optim": state, "sched": {"last_epoch": 1}}, tmp_path / "optim.pth")
        step = tmp_path / "epoch_0_step_1"
        for name in ("rng", "dataloader"):
            (step / name).mkdir(parents=True)
            torch.save({"seed": torch.ones(3)}, step / name / f"{name}_dp_rank_0.pt")
        convert(tmp_path / "model.pth", step / "model", to="dcp")
        convert(tmp_path / "optim.pth", step / "optim", to="dcp")
        with pytest.raises(CheckpointNotFoundError, match=r"Open a checkpoint within it: 'model', 'optim'\."):
            open_layout(step)
        content = read_checkpoint(step / "optim")
        assert content["sched"] == {"last_epoch": 1}
        assert content["optimizer"]["param_groups"][0]["lr"] == 0.1

    def test_below_directories(self, tmp_path: Path) -> None:
        """As Composer's `save_checkpoint_to_disk` leaves them."""
        for name in ("model", "optim"):
            (tmp_path / name).mkdir()
            torch.save({"w": torch.ones(2)}, tmp_path / name / f"{name}.pt")
        (tmp_path / "optim" / "other.pt").symlink_to("nowhere.pt")
        (tmp_path / "resumption.pkl").write_bytes(b"\x80\x04N.")
        with pytest.raises(
            CheckpointNotFoundError, match=r"Open a checkpoint within it: 'model/model.pt', 'optim/optim.pt'\. \["
        ):
            open_layout(tmp_path)

    def test_parts_of_a_save_that_did_not_finish(self, tmp_path: Path) -> None:
        torch.save({"w": torch.ones(2)}, tmp_path / "model.pth")
        convert(tmp_path / "model.pth", tmp_path / "dcp", to="dcp", ranks=2)
        (tmp_path / "dcp/.metadata").unlink()
        with pytest.raises(CheckpointNotFoundError, match=r"so its save did not finish") as caught:
            open_layout(tmp_path / "dcp")
        assert "within" not in str(caught.value)

    def test_of_rank_0(self, tmp_path: Path) -> None:
        """As Composer's trainer leaves them: each is the whole."""
        torch.save({"w": torch.ones(2)}, tmp_path / "ep1-ba2-rank0.pt")
        with pytest.raises(FormatError, match=r"If the file is whole, open it instead of its directory\."):
            open_layout(tmp_path)
        torch.save({"w": torch.ones(2)}, tmp_path / "ep2-ba4-rank0.pt")
        with pytest.raises(FormatError, match=r"whole checkpoint, open one of them, such as 'ep2-ba4-rank0.pt'\."):
            open_layout(tmp_path)
