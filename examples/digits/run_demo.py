"""The main job, end to end: plan, train sharded, stop, resume, convert, load in plain PyTorch, compare."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

__all__ = ["main"]

HERE = Path(__file__).resolve().parent
CONFIG = HERE / "digits_fsdp.py"
PROGRESS = re.compile(r"INFO - (Epoch\((train|val)\)|Saving checkpoint|Resume|resumed)")


def main() -> int:
    """Run every step and return the exit code: 0 if all that must hold does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work-dir", type=Path, default=Path("work_dirs"), help="where runs are kept")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--verbose", action="store_true", help="show all that training logs")
    arguments = parser.parse_args()
    ranks, epochs, began = arguments.ranks, arguments.epochs, time.monotonic()
    sharded, plain = (arguments.work_dir.resolve() / name for name in ("digits_fsdp", "digits_plain"))
    for folder in (sharded, plain):
        shutil.rmtree(folder, ignore_errors=True)
    options = [f"train_cfg.max_epochs={epochs}", f"train_dataloader.batch_size={64 // ranks}"]

    step("1. The plan: which modules are sharded how, before anything runs")
    show_plan(ranks)

    step(f"2. Train on {ranks} ranks, and stop half-way")
    stop = ["--stop-after", epochs // 2]
    torchrun(ranks, [CONFIG, "--work-dir", sharded, *stop, "--cfg-options", *options], arguments.verbose)

    step("3. Resume from the checkpoint, to the end")
    torchrun(ranks, [CONFIG, "--work-dir", sharded, "--resume", "--cfg-options", *options], arguments.verbose)

    step("4. Convert the sharded checkpoint to one safetensors file")
    checkpoint = sharded / f"epoch_{epochs}.pth"
    weights = sharded / "digits.safetensors"
    cli("inspect", checkpoint, "--limit", 6)
    cli("convert", checkpoint, weights)

    step("5. Load it in plain PyTorch, in a fresh process")
    after = float(run([sys.executable, HERE / "evaluate.py", weights], capture=True))
    before = validation_accuracy(sharded)
    print(f"accuracy in sharded training: {before:.2f} %, of the safetensors file in plain PyTorch: {after:.2f} %")

    step("6. The same config, unsharded, in one process")
    single = ["strategy._delete_=True", "strategy.type=SingleDeviceStrategy", "train_dataloader.batch_size=64"]
    train = [sys.executable, HERE / "train.py", CONFIG, "--work-dir", plain, "--cfg-options", options[0], *single]
    run(train, verbose=arguments.verbose)
    early, overall = compare(losses(sharded), losses(plain), ranks)

    print(f"\nDone in {time.monotonic() - began:.0f} s.")
    checks = {
        f"validation accuracy {before:.2f} % is at least 95 %": before >= 95.0,
        "the converted weights have the same accuracy": abs(before - after) < 0.01,
        f"losses equal those of unsharded training: first 100 steps to {early:.1e} (at most 1e-5)": early <= 1e-5,
        f"and all steps, as rounding errors of float32 grow with training, to {overall:.1e} (at most 2e-2)": overall
        <= 2e-2,
    }
    for claim, holds in checks.items():
        print(("ok    " if holds else "FAILED"), claim)
    return 0 if all(checks.values()) else 1


def show_plan(ranks: int) -> None:
    """Plan the model for ``ranks`` ranks on the meta device: no processes, no weights."""
    import torch
    from vit import VisionTransformer

    import mmfsdp

    with torch.device("meta"):
        model = VisionTransformer()
    print(mmfsdp.plan(model, {"wrap": {"kind": "module_class", "classes": "Block"}}, ranks).table())


def torchrun(ranks: int, arguments: list[object], verbose: bool) -> None:
    """Start ``train.py`` on several ranks of this machine."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    run([*launch, HERE / "train.py", *arguments], verbose=verbose, OMP_NUM_THREADS="1")


def cli(*arguments: object) -> None:
    """Run ``mmfsdp-cli`` of this environment."""
    run([Path(sys.executable).with_name("mmfsdp-cli"), *arguments])


def run(command: list[object], *, capture: bool = False, verbose: bool = True, **environment: str) -> str:
    """Run a command, showing it first.

    Args:
        command: Program and arguments.
        capture: Return what it prints instead of showing it.
        verbose: Show all that it prints; otherwise only a line of progress per epoch, and all of it on failure.
        **environment: Variables to add.
    """
    words = [str(word) for word in command]
    print("$", " ".join(Path(word).name if os.sep in word else word for word in words), flush=True)
    paths = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        words,
        text=True,
        stdout=subprocess.PIPE,
        stderr=None if verbose else subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if not capture and (verbose or PROGRESS.search(line)):
            print(line.rstrip() if verbose else "  " + line.rpartition(" - INFO - ")[2].rstrip(), flush=True)
    if process.wait():
        print("".join(lines[-80:]), file=sys.stderr)
        raise SystemExit(f"{Path(words[0]).name} failed with exit code {process.returncode}.")
    return "".join(lines)


def losses(folder: Path) -> dict[int, float]:
    """Return the loss of every step that a run wrote down."""
    lines = [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


def validation_accuracy(folder: Path) -> float:
    """Return the last validation accuracy that a run logged."""
    found = [
        json.loads(line)["accuracy"]
        for file in sorted(folder.glob("*/vis_data/*.json"))
        for line in file.read_text().splitlines()
        if '"accuracy"' in line
    ]
    return float(found[-1])


def compare(sharded: dict[int, float], plain: dict[int, float], ranks: int) -> tuple[float, float]:
    """Print losses side by side and return the largest relative difference: of the first 100 steps, and of all."""
    assert sharded.keys() == plain.keys(), "the two runs took different steps"
    steps = sorted(plain)
    differences = {step: abs(sharded[step] - plain[step]) / abs(plain[step]) for step in steps}
    print(f"\n{'step':>6}  {f'{ranks} ranks, resumed':>18}  {'1 process':>12}  {'relative':>9}")
    for step_number in sorted({*steps[:: max(len(steps) // 12, 1)], steps[-1]}):
        row = f"{sharded[step_number]:18.6f}  {plain[step_number]:12.6f}  {differences[step_number]:9.1e}"
        print(f"{step_number:>6}  {row}")
    return max(differences[number] for number in steps[:100]), max(differences.values())


def step(title: str) -> None:
    """Print a heading."""
    print(f"\n=== {title} ===", flush=True)


if __name__ == "__main__":
    sys.exit(main())
