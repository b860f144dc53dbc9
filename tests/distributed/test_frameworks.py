"""The examples of docs/howto/frameworks.md: a sharded model in a framework trains and resumes as one process does."""

from __future__ import annotations

import ast
import importlib
import json
import re
import runpy
import shutil
import subprocess
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.doc_pages import ROOT
from tests.forked_scripts import environ_alone, python
from torch import nn

import mmfsdp
from mmfsdp.checkpoint import convert
from mmfsdp.errors import UnsupportedCallError
from mmfsdp.testing import RankError, run_ranks

SECONDS = 280
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * SECONDS)]


def run(example: str, *arguments: str, ranks: int = 2) -> str:
    """Run an example under torchrun, or alone, and return what it printed."""
    script = str(ROOT / "examples" / "frameworks" / example)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    done = subprocess.run(
        [python(), *launcher, script, *arguments],
        cwd=ROOT,
        env={**environ_alone(), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


def curve_of(printed: str) -> dict[str, list[float]]:
    [line] = re.findall(r"^CURVE (.*)$", printed, flags=re.MULTILINE)
    curve: dict[str, list[float]] = json.loads(line)
    return curve


@pytest.mark.exhaustive
def test_trainer(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    one, two = tmp_path / "one", tmp_path / "two"
    expected = curve_of(run("hf_trainer.py", "--dir", str(one), "--alone", ranks=1))
    found = curve_of(run("hf_trainer.py", "--dir", str(two)))
    assert [*found] == [*expected] == [str(step) for step in range(1, 7)]
    weights = load_file(one / "trained" / "model.safetensors")
    for step, pair in expected.items():
        assert found[step] == pytest.approx(pair, abs=1e-5)
    torch.testing.assert_close(load_file(two / "trained" / "model.safetensors"), weights, rtol=1e-4, atol=1e-5)

    for name in ("checkpoint-6", "trained"):
        shutil.rmtree(two / name)
    resumed = curve_of(run("hf_trainer.py", "--dir", str(two), "--resume"))
    for step, pair in expected.items():
        assert resumed[step] == pytest.approx(pair, abs=1e-5)  # of the first steps, those that the checkpoint keeps
    torch.testing.assert_close(load_file(two / "trained" / "model.safetensors"), weights, rtol=1e-4, atol=1e-5)


def steps_of(model: nn.Module, accumulate: int, decay: bool) -> Iterator[tuple[int, float, float]]:
    """Epoch, loss of the last pass, and norm of each step of a plain loop on the data of the examples."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    data, labels = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)), torch.arange(64) % 4
    for epoch in range(2):
        for place, (x, y) in enumerate(zip(data.split(8), labels.split(8), strict=True), start=1):
            loss = nn.functional.cross_entropy(model(x), y)
            (loss / accumulate).backward()
            if place % accumulate == 0:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.2)
                yield epoch, loss.item(), norm.item()
                optimizer.step()
                optimizer.zero_grad()
                if decay:
                    scheduler.step()


@pytest.mark.parametrize(
    ("example", "module", "accumulate"),
    [("with_accelerate.py", "accelerate", 2), ("with_fabric.py", "lightning_fabric", 1)],
)
def test_loops(example: str, module: str, accumulate: int, tmp_path: Path) -> None:
    pytest.importorskip(module)
    printed = run(example, "--dir", str(tmp_path / "saved"), "--epochs", "1")
    printed += run(example, "--dir", str(tmp_path / "saved"), "--epochs", "2")  # resumes
    lines = re.findall(r"^epoch (\d+): loss ([\d.]+), norm ([\d.]+)$", printed, flags=re.MULTILINE)
    found = [(int(epoch), float(loss), float(norm)) for epoch, loss, norm in lines]

    model = built(example)
    expected = [*steps_of(model, accumulate, decay=accumulate == 2)]
    assert [line[0] for line in found] == [line[0] for line in expected]
    for got, want in zip(found, expected, strict=True):
        assert got == pytest.approx(want, abs=2e-5)
    [saved] = [path.parent for path in (tmp_path / "saved").rglob("manifest.json")]
    convert(saved, tmp_path / "weights.safetensors")
    weights = load_file(tmp_path / "weights.safetensors")
    torch.testing.assert_close(weights, dict(model.state_dict()), rtol=1e-4, atol=1e-5)


def saved_by_accelerate(rank: int, folder: str) -> str:
    accelerate = importlib.import_module("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = mmfsdp.shard(nn.Linear(4, 4))
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    assert optimizer.state_dict()["state"]  # a user may keep each rank's own
    with pytest.raises(UnsupportedCallError) as caught:
        accelerator.save_state(folder)
    return str(caught.value)


def loaded_and_saved_by_accelerate(rank: int, folder: str) -> str:
    accelerate = importlib.import_module("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = mmfsdp.shard(nn.Linear(4, 4))
    trained = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    trained.step()
    state = mmfsdp.optim_state_dict(model, trained)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    mmfsdp.load_optim_state_dict(model, optimizer, state, from_rank0=True)  # it never took a step
    with pytest.raises(UnsupportedCallError) as caught:
        accelerator.save_state(folder)
    return str(caught.value)


def saved_by_trainer(rank: int, folder: str) -> None:
    transformers = importlib.import_module("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = mmfsdp.shard(transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=8, **sizes)))
    model._is_accelerate_prepared = True
    settings = {"save_only_model": False, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    args = transformers.TrainingArguments(f"{folder}/{rank}", max_steps=1, max_grad_norm=0, **settings)
    tokens = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(32)]
    trainer = transformers.Trainer(model, args, train_dataset=tokens)
    trainer.save_model = lambda *_, **__: None  # the step before it, for which save_pretrained() has its own error
    trainer.train()


def saved_by_fabric(rank: int, folder: str) -> str:
    fabric_of = importlib.import_module("lightning_fabric").Fabric
    fabric = fabric_of(accelerator="cpu", devices=1)
    model = mmfsdp.shard(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(UnsupportedCallError) as caught:
        fabric.save(f"{folder}/state.ckpt", {"optimizer": optimizer})
    return str(caught.value)


@pytest.mark.parametrize(
    ("save", "module", "named"),
    [
        (saved_by_accelerate, "accelerate", "accelerator.save_state()"),
        (loaded_and_saved_by_accelerate, "accelerate", "accelerator.save_state()"),
        (saved_by_fabric, "lightning_fabric", "Fabric.save()"),
    ],
)
def test_saves_of_one_ranks_shards_raise(
    save: Callable[[int, str], str], module: str, named: str, tmp_path: Path
) -> None:
    pytest.importorskip(module)
    for said in run_ranks(save, 2, str(tmp_path)):
        assert said.startswith(f"{named} would write this AdamW from the first rank, which has only its own shards.")


@pytest.mark.exhaustive
def test_a_trainers_save_of_one_ranks_shards_raises(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    with pytest.raises(RankError, match=r"Trainer would write this AdamW from the first rank") as caught:
        run_ranks(saved_by_trainer, 2, str(tmp_path))  # the other rank waits for the first, until the launcher ends it
    assert isinstance(caught.value.errors[0], UnsupportedCallError)


def built(example: str) -> nn.Module:
    """The example's model."""
    torch.manual_seed(0)
    assert (ROOT / "examples" / "frameworks" / example).read_text().count("nn.Linear") == 3
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))


def losses_of_the_job(start: Path) -> list[float]:
    """The first rank's losses of examples/frameworks/same_job.py in one process and float32; writes its weights."""
    torch.manual_seed(0)
    model = runpy.run_path(str(ROOT / "examples" / "frameworks" / "same_job.py"))["build"]()
    torch.save(model.state_dict(), start)
    optimizer = torch.optim.AdamW(model.parameters())
    found = []
    for step in range(3):
        draws = [torch.Generator().manual_seed(100 * step + rank) for rank in range(2)]
        losses = [model(torch.randn(8, 64, generator=draw)).square().mean() for draw in draws]
        (sum(losses) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(losses[0].item())
    return found


@pytest.mark.exhaustive
def test_the_same_job(tmp_path: Path) -> None:
    start = tmp_path / "start.pth"
    expected = losses_of_the_job(start)
    optional = {"fabric": "lightning_fabric", "deepspeed": "deepspeed"}
    tools = ["mmfsdp", "torch", "accelerate", *(tool for tool, module in optional.items() if find_spec(module))]
    found = {}
    for tool in tools:
        printed = run("same_job.py", "--tool", tool, "--weights", str(start), "--dir", str(tmp_path / tool))
        [line] = re.findall(r"^LOSSES (.*)$", printed, flags=re.MULTILINE)
        found[tool] = [float(loss) for loss in line.split()]
        assert found[tool] == pytest.approx(expected, rel=2e-2)  # in bfloat16
    for tool, losses in found.items():
        close = 3e-3 if tool == "deepspeed" else 1e-3  # it reduces in bfloat16
        assert losses == pytest.approx(found["torch"], rel=close), tool


def test_the_page_counts_the_lines_of_the_job() -> None:
    source = (ROOT / "examples" / "frameworks" / "same_job.py").read_text(encoding="utf-8")
    counts = {}
    for function in ast.parse(source).body:
        if isinstance(function, ast.FunctionDef) and function.name.startswith("with_"):
            [first, *body] = function.body
            assert isinstance(first, ast.Expr)  # the docstring
            imports = [node for node in body if isinstance(node, ast.ImportFrom | ast.Import)]
            start = next(node for node in body if node not in imports).lineno
            lines = source.splitlines()[start - 1 : function.end_lineno]
            counts[function.name] = sum(bool(line.strip()) and not line.strip().startswith("#") for line in lines)
    page = (ROOT / "docs" / "explanation" / "why.md").read_text(encoding="utf-8")
    rows = dict(
        re.findall(
            r"^\| (mmfsdp|`fully_shard`|accelerate|Lightning Fabric|DeepSpeed)[^|]* \| (\d+) \|", page, re.MULTILINE
        )
    )
    assert {name: int(lines) for name, lines in rows.items()} == {
        "mmfsdp": counts["with_mmfsdp"],
        "`fully_shard`": counts["with_torch"],
        "accelerate": counts["with_accelerate"] - 2,  # those that only a CPU needs
        "Lightning Fabric": counts["with_fabric"],
        "DeepSpeed": counts["with_deepspeed"],
    }
