"""docs/howto/get_weights.md: each row of its table fits what its writers leave, and its command writes the weights."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from tests.cli.support import invoke
from tests.core.layout_writers import like_torchtitan
from tests.core.samples import content, weights, write_samples

from mmfsdp.checkpoint import convert

ROOT = Path(__file__).parents[3]
WRITTEN = ROOT / "tests" / "core"
PAGE = ROOT / "docs" / "howto" / "get_weights.md"
DIR = Path("DIR")


class Row(NamedTuple):
    """A row: patterns of names, in one list or another, and the words of its command, if it has one."""

    names: tuple[tuple[str, ...], ...]
    command: tuple[str, ...]

    def fitting(self, found: list[str]) -> tuple[str, ...] | None:
        """Return the first list of which all patterns match a name in the directory."""
        return next((names for names in self.names if all(fnmatch.filter(found, name) for name in names)), None)


def rows() -> list[Row]:
    table = PAGE.read_text(encoding="utf-8").partition("| `ls -A DIR` shows |")[2].partition("\n\n")[0]
    found = []
    for line in table.splitlines()[2:]:
        first, _, last = line.strip("| ").split(" | ")
        command = re.match(r"(?:for one file, )?`mmfsdp-cli (.+?)`", last)
        assert command or last.startswith("none: "), line
        names = tuple(tuple(re.findall(r"`(.+?)`", part)) for part in first.split(" or "))
        found.append(Row(names, tuple(shlex.split(command[1])) if command else ()))
    return found


ROWS = rows()


def copied(path: str) -> Callable[[], None]:
    """Return a maker that copies files which the writer's own code made, without our copy of the truth."""

    def make() -> None:
        shutil.copytree(WRITTEN / path, DIR, ignore=shutil.ignore_patterns("full.pth"))

    return make


def of_deepspeed(path: str) -> Callable[[], None]:
    def make() -> None:
        with tarfile.open(WRITTEN / "deepspeed" / "0.19.8.tar.gz") as archive:
            archive.extractall("made", [member for member in archive if path in member.name], filter="data")
        shutil.move(f"made/{path}", DIR)

    return make


def sample(name: str) -> Callable[[], None]:
    def make() -> None:
        Path("samples").mkdir()
        shutil.move(write_samples(Path("samples"))[name], DIR)

    return make


def one_file(name: str, *, beside: str = "notes.txt") -> Callable[[], None]:
    def make() -> None:
        DIR.mkdir()
        torch.save(content(), DIR / name)
        (DIR / beside).touch()

    return make


def foreign(name: str, head: bytes) -> Callable[[], None]:
    def make() -> None:
        DIR.mkdir()
        (DIR / name).write_bytes(head)

    return make


def save_dcp(path: Path, held: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is one process
        dcp.save(held, checkpoint_id=path, no_dist=True)


def managed_run() -> None:
    torch.save(content(), "whole.pth")
    DIR.mkdir()
    (DIR / "run.json").touch()
    for step in (8, 16):
        convert("whole.pth", DIR / f"step_{step}", to="dcp", ranks=2, fsync=False)


def megatron_run() -> None:
    shutil.copytree(WRITTEN / "megatron" / "0.16.1" / "iter_0000007", DIR / "iter_0000007")
    (DIR / "latest_checkpointed_iteration.txt").write_text("7")


def parts(name: str) -> Callable[[], None]:
    def make() -> None:
        for number in range(2):
            path = DIR / name.format(number)
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"model": weights()}, path)

    return make


def titan() -> None:
    like_torchtitan(DIR)


def unfinished() -> None:
    save_dcp(DIR, weights())
    (DIR / ".metadata").unlink()


def trainer() -> None:
    (DIR / "checkpoint-2").mkdir(parents=True)
    save_file(weights(), DIR / "checkpoint-2" / "model.safetensors")
    torch.save({}, DIR / "checkpoint-2" / "optimizer.pt")


def accelerate() -> None:
    DIR.mkdir()
    save_dcp(DIR / "pytorch_model_fsdp_0", {"model": weights()})
    save_dcp(DIR / "optimizer_0", {"optimizer": {"state": {"encoder.weight": {"step": torch.ones(1)}}}})


def folder() -> None:
    DIR.mkdir()
    save_file(weights(), DIR / "model.safetensors")
    (DIR / "config.json").write_text("{}")


def adapter() -> None:
    DIR.mkdir()
    save_file({"encoder.weight": torch.ones(6, 5)}, "BASE.safetensors")
    shutil.move("BASE.safetensors", "BASE")
    sides = {"A": torch.ones(2, 5), "B": torch.ones(6, 2)}
    factors = {f"base_model.model.encoder.lora_{side}.weight": factor for side, factor in sides.items()}
    save_file(factors, DIR / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["encoder"]}
    (DIR / "adapter_config.json").write_text(json.dumps(config))


GGUF = (WRITTEN / "gguf" / "llama-f16.gguf").read_bytes()
# Makers of what writers leave, by the names in the first row that fits it.
MAKERS: dict[str, list[Callable[[], None]]] = {
    "run.json step_*": [managed_run],
    "latest_checkpointed_iteration.txt iter_*": [megatron_run],
    ".metadata common.pt": [copied("megatron/0.16.1/iter_0000007")],
    ".metadata *.distcp": [titan, sample("dcp")],
    "*.distcp": [unfinished],
    "rank0.pth": [sample("local"), sample("stock")],
    "iter_*.pth last_checkpoint": [one_file("iter_10.pth", beside="last_checkpoint")],
    "epoch_*.pth last_checkpoint": [one_file("epoch_3.pth", beside="last_checkpoint")],
    "latest global_step*": [of_deepspeed("zero3_2ranks_groups")],
    "mp_rank_*_model_states.pt": [of_deepspeed("zero1_2ranks_bf16/global_step2")],
    "zero_pp_rank_*_model_states.pt": [of_deepspeed("zero3_2ranks_groups/global_step2")],
    "checkpoint-*": [trainer],
    "pytorch_model_fsdp_0 optimizer_0": [accelerate],
    "model_world_size_*_rank_0.pt huggingface": [copied("verl/0.9.1/fsdp2-2/actor")],
    "ep*-rank0.pt": [copied("composer/0.32.1")],
    "*rank*0.pt": [copied("dtensors/2.12.1")],
    "*rank*0.bin": [copied("dtensors/accelerate-1.15.0")],
    "model_0.pt metadata.pkl": [copied("torch_checkpointing/0.1.1/fsdp-2/step_7")],
    "*shard0.pt": [copied("fairscale/0.4.13/shards")],
    "adapter_model.safetensors": [adapter],
    "shard-*.safetensors": [sample("safetensors_ranks")],
    "*.safetensors": [folder, sample("index")],
    "pytorch_model*.bin": [sample("bins")],
    "*.ckpt": [one_file("epoch=1-step=2.ckpt")],
    "consolidated.00.pth consolidated.01.pth": [parts("consolidated.0{}.pth")],
    "*model_part-0.pt *model_part-1.pt": [parts("reshard-model_part-{}.pt")],
    "mp_rank_*": [parts("mp_rank_0{}/model_optim_rng.pt")],
    "tp_rank_*": [parts("tp_rank_0{}_pp_rank_000/model_weights.ckpt")],
    "*.pth": [one_file("model.pth")],
    "*.pt": [one_file("model.pt")],
    "*.bin": [one_file("model.bin")],
    "*.gguf": [foreign("model.gguf", GGUF)],
    "*.h5": [foreign("model.h5", b"\x89HDF\r\n\x1a\n")],
    "*.onnx": [foreign("model.onnx", b"onnx")],
    "*.msgpack": [foreign("model.msgpack", b"flax")],
    "_CHECKPOINT_METADATA": [foreign("_CHECKPOINT_METADATA", b"orbax")],
    "saved_model.pb": [foreign("saved_model.pb", b"graph")],
}


def test_every_row_is_tried() -> None:
    assert {" ".join(names) for row in ROWS for names in row.names} == {*MAKERS}


def first_fit(found: list[str]) -> tuple[Row, tuple[str, ...]]:
    return next((row, names) for row in ROWS if (names := row.fitting(found)) is not None)


@pytest.mark.parametrize(
    ("names", "index"), [(names, index) for names, makers in MAKERS.items() for index in range(len(makers))]
)
def test_the_first_row_that_fits_has_the_command(
    names: str, index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    MAKERS[names][index]()
    found = sorted(os.listdir(DIR))
    row, fitting = first_fit(found)
    assert " ".join(fitting) == names
    if not row.command:
        refused()
        return
    words = [typed(word, row, fitting, found) for word in row.command]
    done = invoke(*words)
    assert done.exit_code == 0, done.stderr
    target = next(word for word in words if word in ("weights.safetensors", "model"))
    assert invoke("verify", target).exit_code == 0
    if words[0] == "convert" and target == "weights.safetensors":
        compared = invoke("diff", words[1], target)
        assert compared.exit_code == 0, compared.stderr + compared.stdout


def typed(word: str, row: Row, names: tuple[str, ...], found: list[str]) -> str:
    """Return what a reader types for a word of a command: for `DIR/step_16`, the last name that the row shows."""
    above, _, name = word.rpartition("/")
    if above != "DIR":
        return word
    index = next(index for index, pattern in enumerate(row.names[0]) if fnmatch.fnmatch(name, pattern))
    return f"DIR/{fnmatch.filter(found, names[index])[-1]}"


def refused() -> None:
    """Check that whatever is there is refused, and that the message helps."""
    inner = [str(path) for path in sorted(DIR.rglob("*")) if path.is_file()]
    said = [invoke("convert", path, "weights.safetensors") for path in [str(DIR), *inner]]
    assert all(done.exit_code for done in said)
    helpful = r"reads it|its save did not finish|merges (Meta's|its) files|--ckpt-convert-format torch_dist"
    assert re.search(helpful, "".join(done.stderr for done in said))
