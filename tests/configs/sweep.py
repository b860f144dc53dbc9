"""Runs ``doctor`` and ``plan`` over every config of installed OpenMMLab packages, in one process.

    python tests/configs/sweep.py mmpretrain mmdet mmseg --out work_dirs/configs --sample 50 --seed 0

Each config's result is a line of JSON in the folder ``--out``; a second call goes on where the first one stopped. With
``--rehearse`` a step of each config is rehearsed, too, with two samples per rank. The exit code is 1 if a config fails:
a traceback, an error that the config does not deserve, advice that leaves more than a fifth of the parameters in the
root unit, or a rehearsal that ends without saying what to write instead.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import logging
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType

import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.registry import MODELS, DefaultScope

from mmfsdp import plan, rehearse
from mmfsdp.errors import ConfigError, MmfsdpError, RehearsalError
from mmfsdp.frontends import ReadConfig, read_config
from mmfsdp.planning import ShardPlan

__all__ = ["MOST_IN_ROOT", "Outcome", "configs_of", "examine"]

MOST_IN_ROOT = 0.2
RANKS = 8
SAMPLES = 2  # of one rank in a rehearsal
ASSUMED = 0.1
LIMIT = 300  # processor seconds for one config


@dataclass
class Outcome:
    """What doctor and plan said about one config."""

    config: str
    kind: str
    """``good``; ``skipped``: no config of a model; ``refused``: MMEngine cannot read or build it here either, as a
    download is missing or it is broken; and the failures: ``false error``, ``weak advice``, ``traceback``."""
    cause: str = ""
    seconds: float = 0.0
    """Of the processor, without the rehearsal's."""
    share: float | None = None
    """The part of the parameters in the root unit."""
    units: int = 0
    params: int = 0
    advice: str = ""
    rehearsal: str = ""
    """``rehearsed``; ``assumed``: rehearsed with a share that masks select; ``stopped``: the error says why."""
    stopped: str = ""
    """The errors that stopped it: without a share, and with one."""
    peak: int = 0
    """Bytes of the rehearsal's peak."""
    rehearsal_seconds: float = 0.0


def configs_of(package: str) -> list[Path]:
    """Return the configs that a package brings, without those that others inherit from."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        sys.exit(f"{package} is not installed. Run nox -s configs, which installs it.")
    home = Path(spec.origin).parent
    found = [*(home / ".mim/configs").rglob("*.py"), *(home / "configs").rglob("*.py")]
    return sorted(path for path in found if "_base_" not in path.parts and path.name != "__init__.py")


def examine(path: Path, *, rehearses: bool = False) -> Outcome:
    """Return what doctor and plan, as the commands run them, say about a config."""
    outcome = Outcome(str(path), "good")
    began = time.process_time()
    try:
        config = read_config(path)
        content = vars(config)["content"]
        if "model" not in content or "train_dataloader" not in content:
            outcome.kind = "skipped"
            return outcome
        diagnosis = config.diagnose(None)
        errors = [finding for finding in diagnosis.findings if finding.level == "error"]
        # True of a config that uses FSDPStrategy and was written before this package.
        errors = [finding for finding in errors if finding.path != "custom_imports.imports"]
        advice = [finding.advice for finding in diagnosis.findings if finding.advice and diagnosis.suggested]
        outcome.advice = advice[0].rpartition("strategy = ")[2] if advice else ""
        if errors:
            outcome.kind, outcome.cause = "false error", "; ".join(f"{item.path}: {item.here}" for item in errors)
            return outcome
        model = config.model()
        means = config.settings(model)
        planned = plan(model, means.config, RANKS, policy=means.policy)
        if planned != diagnosis.plan:
            outcome.kind, outcome.cause = "false error", "plan and doctor disagree"
        outcome.units, outcome.params = len(planned.units), planned.param_numel
        outcome.share = planned.root.numel / max(planned.param_numel, 1)
        if outcome.share > MOST_IN_ROOT:
            outcome.kind, outcome.cause = "weak advice", f"{outcome.share:.0%} in the root"
        if rehearses:
            outcome.seconds = round(time.process_time() - began, 3)
            _rehearse(config, model, planned, outcome)
    except MmfsdpError as error:
        outcome.kind, outcome.cause = "false error", error.message
    except Exception:
        outcome.kind, outcome.cause = "traceback", traceback.format_exc(limit=-4)
    finally:
        outcome.seconds = outcome.seconds or round(time.process_time() - began, 3)
        if outcome.kind == "false error" and (cause := _cause_without_us(path)):
            outcome.kind, outcome.cause = "refused", cause
    return outcome


def _rehearse(config: ReadConfig, model: nn.Module, planned: ShardPlan, outcome: Outcome) -> None:
    """Rehearse the config's step, and once more with a share of masks if it asks for values."""
    began = time.process_time()
    try:
        step = config.step(model, SAMPLES)
        try:
            found = rehearse(planned, model, step.batch, **step.arguments())
            outcome.rehearsal = "rehearsed"
        except RehearsalError as error:
            outcome.stopped = error.message
            found = rehearse(planned, model, step.batch, **step.arguments(), assume=ASSUMED)
            outcome.rehearsal = "assumed"
        outcome.peak = found.peak.nbytes
    except (ConfigError, RehearsalError) as error:
        outcome.rehearsal = "stopped"
        outcome.stopped += f"{' And with a share: ' if outcome.stopped else ''}{error.message}"
    except Exception:
        outcome.kind, outcome.cause = "traceback", traceback.format_exc(limit=-4)
    outcome.rehearsal_seconds = round(time.process_time() - began, 3)


def _cause_without_us(path: Path) -> str:
    """Return why MMEngine itself cannot read a config or build its model; empty if it can."""
    try:
        config = Config.fromfile(path)
        with DefaultScope.overwrite_default_scope(config.get("default_scope", "mmengine")):
            MODELS.build(config.model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _sweep(paths: list[Path], record: Path, *, rehearses: bool) -> list[Outcome]:
    done = {item.config: item for item in _read(record)}
    with record.open("a") as file:
        for place, path in enumerate(paths):
            if str(path) in done:
                continue
            signal.setitimer(signal.ITIMER_PROF, LIMIT)
            try:
                outcome = examine(path, rehearses=rehearses)
            except TimeoutError:
                outcome = Outcome(str(path), "traceback", f"more than {LIMIT} processor seconds", LIMIT)
            signal.setitimer(signal.ITIMER_PROF, 0)
            done[str(path)] = outcome
            file.write(json.dumps(asdict(outcome)) + "\n")
            file.flush()
            print(f"{place + 1}/{len(paths)} {outcome.kind} {outcome.seconds:.1f} s {path} {outcome.cause[:100]!r}")
            if rehearses:
                print(
                    f"    {outcome.rehearsal} {outcome.rehearsal_seconds:.1f} s {outcome.stopped[:300]!r}", flush=True
                )
    return [done[str(path)] for path in paths]


def _paths(packages: list[str], sample: int | None, seed: int) -> list[Path]:
    """Return the configs in a random order, so that wherever a sweep is stopped, what is done is a fair sample."""
    draw = random.Random(seed)
    found = []
    for package in packages:
        paths = configs_of(package)
        draw.shuffle(paths)
        found += paths[:sample]
    draw.shuffle(found)
    return found


def _read(record: Path) -> Iterator[Outcome]:
    for line in record.read_text().splitlines() if record.exists() else ():
        yield Outcome(**json.loads(line))


def _report(outcomes: list[Outcome]) -> None:
    times = sorted(item.seconds for item in outcomes if item.kind != "skipped") or [0.0]
    kinds = Counter(item.kind for item in outcomes)
    print(f"\n{len(outcomes)} configs: {', '.join(f'{count} {kind}' for kind, count in kinds.most_common())}")
    print(f"processor seconds per config: median {times[len(times) // 2]:.2f}, p95 {times[int(len(times) * 0.95)]:.2f}")
    if rehearsals := Counter(item.rehearsal for item in outcomes if item.rehearsal):
        took = sorted(item.rehearsal_seconds for item in outcomes if item.rehearsal)
        print(f"rehearsals: {', '.join(f'{count} {kind}' for kind, count in rehearsals.most_common())}")
        print(
            f"processor seconds per rehearsal: median {took[len(took) // 2]:.1f}, p95 {took[int(len(took) * 0.95)]:.1f}"
        )
        for cause, count in Counter(item.stopped[:200] for item in outcomes if item.rehearsal == "stopped").items():
            print(f"{count:5} stopped: {cause}")
    causes: Counter[tuple[str, str]] = Counter()
    for item in outcomes:
        if item.cause:
            causes[item.kind, item.cause.strip().splitlines()[-1][:200]] += 1
    for (kind, cause), count in causes.most_common(40):
        print(f"{count:5} {kind}: {cause}")


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TimeoutError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", default=["mmpretrain", "mmdet", "mmseg"])
    parser.add_argument("--out", type=Path, default=Path("work_dirs/configs"))
    parser.add_argument("--sample", type=int, help="the number of configs of each package, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rehearse", action="store_true", help="rehearse a step of each config, too: 10 s more")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGPROF, _too_long)
    MMLogger.get_instance("mmengine", log_level=logging.ERROR)
    paths = _paths(given.packages, given.sample, given.seed)
    outcomes = _sweep(paths, given.out / "outcomes.jsonl", rehearses=given.rehearse)
    _report(outcomes)
    sys.exit(any(item.kind in ("false error", "weak advice", "traceback") for item in outcomes))


def stand_in() -> None:
    """Let packages be imported that lack compiled code, which building a model does not run.

    torchvision's CUDA build does not load its operators beside torch's CPU build, and mmcv-lite has none.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:  # operator torchvision::nms does not exist
        for name in ("nms", "qnms"):
            signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", signature)
    compiled = ModuleType("mmcv._ext")
    compiled.__spec__ = ModuleSpec("mmcv._ext", None)
    vars(compiled)["__getattr__"] = lambda name: None
    sys.modules["mmcv._ext"] = compiled


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded, and nobody waits for it
    stand_in()
    main()
