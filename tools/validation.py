"""Writes docs/explanation/validation.md: which combinations were tested, with which command, and which never were.

``python tools/validation.py`` reads the releases from noxfile.py, the formats from the package, the figures from
benchmarks/results.json, whose date it names, and those of families of models from tests/models/agreement.jsonl.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mmfsdp.checkpoint import known_formats

__all__ = ["PAGE", "page"]

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "explanation" / "validation.md"

AGREEMENT = ROOT / "tests" / "models" / "agreement.jsonl"
"""A row for each run of `nox -s models` that MODELS_TABLE recorded: its name, units, and how far loss and norm are."""

INTRO = """# Validation

On this page you look up what was tested, with which command, what never ran, and how far families of real models are
from one process. `python tools/validation.py` writes it. What benchmarks measured is of {date}, with torch {torch} and
Python {python}, on two cores without a GPU.
"""

# What was tested, and the command that repeats it. Paths and sessions exist: a test looks.
TESTS = {
    "Training": [
        ("ten families of real models, in MMEngine, against one process, with a resume", "nox -s models"),
        ("engines and strategies, against one process", "pytest tests/distributed/sharding/test_parity.py"),
        (
            "proofs of [21 families of models](../appendix/proven_models.md), and no false alarm",
            "nox -s false_alarms",
        ),
        ("faults in a training loop, each found where it begins", "nox -s parity"),
        ("groups of ranks within a world of 6 and 8", "pytest tests/distributed/sharding/test_sub_meshes.py"),
        ("`Trainer`, accelerate, Lightning Fabric", "pytest tests/distributed/test_frameworks.py"),
        (
            "mistakes that torch accepts in silence",
            "pytest tests/distributed/runtime/test_guards.py tests/test_mistakes.py",
        ),
        (
            "optimizers of torch; those of other packages in `nox -s models`",
            "pytest tests/distributed/optimizers/test_optimizers.py",
        ),
        (
            "two hosts, as processes with networks and disks of their own",
            "pytest tests/distributed/collective/test_two_hosts.py",
        ),
    ],
    "Checkpoints": [
        (
            "every format to every format, chains of conversions",
            "pytest tests/core/checkpoint/conversion/test_chains.py",
        ),
        ("files of other writers, loaded on ranks", "pytest tests/distributed/loading/test_loading_foreign.py"),
        ("recipes and Hugging Face folders, loaded by other libraries", "pytest tests/models/test_shipping.py"),
        ("S3, against a server on the same machine", "nox -s stores"),
    ],
    "Faults": [
        (
            "damaged bytes, files and metadata, of each format",
            "pytest tests/core/checkpoint/inspection/test_damage_matrix.py",
        ),
        ("random bytes changed", "pytest tests/core/checkpoint/inspection/test_fuzz.py"),
        ("files that somebody crafted", "pytest tests/core/checkpoint/inspection/test_crafted.py"),
        ("`kill -9` at random moments of a conversion", "pytest tests/core/checkpoint/conversion/test_crash.py"),
        ("a save that fails in the background", "pytest tests/distributed/saving/test_failed_saves.py"),
        ("what other tools do with damaged files", "python -m benchmarks.damage_table"),
    ],
}

FAMILIES = {
    "deit": ("`DeiTForImageClassification`, layer-wise learning rates", "`DeiTLayer`"),
    "swin": ("`SwinForImageClassification`", "`SwinLayer`, `SwinPatchMerging`"),
    "convnext": ("`ConvNextForImageClassification`", "`ConvNextLayer`"),
    "convnext+EMA": ("the same with `EMAHook`", "`ConvNextLayer`"),
    "resnet": ("`ResNetForImageClassification`, two parts frozen, `norm_eval`", "`ResNetStage`"),
    "resnet (DDP)": ("the same with batch statistics, against DDP", "`ResNetStage`"),
    "mae": ("`ViTMAEForPreTraining`, fixed positions frozen", "`ViTMAELayer`"),
    "segformer": ("`SegformerForSemanticSegmentation`, `norm_eval`", "`SegformerLayer`, head"),
    "detr": ("`DetrForObjectDetection` on a ResNet with frozen batch norm", "layers of both halves, `ResNetStage`"),
    "gpt2": ("`GPT2LMHeadModel`, tied", "`GPT2Block`"),
    "bert": ("`BertForMaskedLM`, tied twice", "`BertLayer`, `BertEmbeddings`"),
    "llama": ("`LlamaForCausalLM`", "`LlamaDecoderLayer`"),
}

MODELS = """## Families of real models

`nox -s models` builds each family of transformers with a few layers and random weights, and trains it through
`FlexibleRunner` and `FSDPStrategy` for 10 steps on 2 ranks in float32: AdamW with parameter groups, `clip_grad`, a
warm-up, validation, checkpoints. One process trains on the same global batches. Losses and gradient norms must agree to
1e-5, optimizer groups and validation must be the same, and a run that resumes at step 5 must be equal to the bit.
Dropout is 0, because ranks draw other random numbers than one process. The columns are the units of a policy by size,
by class and by name, and the largest relative deviation of all three.

"""

OLD = """
With arguments as written for MMEngine's own classes (`FULL_SHARD` and `SHARD_GRAD_OP`, each `auto_wrap_policy`,
`backward_prefetch`, `sync_module_states`), on engines `fsdp2` and `fsdp1`, DeiT, SegFormer and GPT-2 are at most {loss}
and {norm} apart. Llama with `mixed_precision` in bfloat16 is {bf16_loss} and {bf16_norm} from float32.

Such models need only a policy, with two exceptions. MMEngine's optimizer constructor sees a tied weight twice: set
`paramwise_cfg=dict(bypass_duplicate=True)`, as without sharding. A size policy with engine `fsdp1` on a model that
iterates over an `nn.Sequential` without calling it needs `exclude_wrap_modules=['Sequential', 'ModuleList',
'ModuleDict']`, as the error says. Batch norm with statistics of each rank's batch differs from a single process,
sharded or not, so one row is compared with DDP, and does not resume.
"""

NEVER = """## What never ran

- **Several GPUs.** One H100, and for a third of them an H200, ran the tests of `pytest -m gpu` that one GPU can run,
  with NCCL on one rank and on two that shared it, with torch 2.11; [what was measured
  there](../appendix/measured_on_gpu.md) is beside its forecasts. Forecasts for many GPUs are compared with [figures
  that others published](../appendix/published_runs.md); how often torch empties its cache on a full GPU, with one of
  these, and with a step on the H100.
- **More than eight ranks** at once, all on one machine. What a rank does on up to 2,048 ranks was simulated
  (`nox -s bench -- ranks`).
- **Several physical machines.** Two hosts were processes of one machine.
- **Network file systems** such as NFS, Lustre and GPFS, and S3 itself.
- **Real pretraining.** Tests train small models with random weights for 3 to 20 steps.
- **Windows and macOS.**
"""


def page() -> str:
    """Return the page."""
    results = json.loads((ROOT / "benchmarks" / "results.json").read_text(encoding="utf-8"))
    parts = [
        INTRO.format(date=results["date"], torch=results["torch"], python=results["python"]),
        "## Releases\n",
        _table(("torch", "command"), [(release, f"`nox -s 'compat({release})'`") for release in _releases()]),
        f"Python {', '.join(_pythons())}; "
        "[compatibility](../reference/compatibility.md#torch) has each run's result.\n",
        "## Forecasts and agreement\n",
        _table(("figure", "value", "command"), _figures(results)),
    ]
    parts += [
        MODELS + _table(("family", "units by class", "units", "loss", "norm"), _families()) + OLD.format(**_old())
    ]
    for title, rows in TESTS.items():
        parts += [f"## {title}\n", _table(("tested", "command"), [(what, f"`{command}`") for what, command in rows])]
    formats = [(item.name, "yes" if item.reads else "no", "yes" if item.writes else "no") for item in known_formats()]
    parts += ["## Formats\n", _table(("format", "read", "written"), formats)]
    parts.append(
        "`pytest tests/core/checkpoint/conversion/test_roundtrip.py` tests each; "
        "[formats](../reference/formats.md) has the writers.\n"
    )
    return "\n".join([*parts, NEVER])


def _releases() -> list[str]:
    text = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    pinned = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    ends = re.search(r'^RELEASES = \("([\d.]+)", .*, "([\d.]+)"\)', text, re.MULTILINE)
    assert pinned is not None
    assert ends is not None
    return [ends[1], pinned[1], ends[2]]


def _pythons() -> list[str]:
    text = (ROOT / "packages/core/pyproject.toml").read_text(encoding="utf-8")
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)


def _figures(results: dict[str, Any]) -> Iterable[tuple[str, str, str]]:
    runs = [run for run in results["parity"].values() if "loss" in run]
    errors = [abs(error) for error in results["rehearse"]["errors"].values()]
    bench = "`nox -s bench -- {}`".format
    yield (
        f"losses of 20 steps against one process, {len(runs)} engines, strategies and worlds",
        f"at most {max(run['loss'] for run in runs):.1e} apart",
        bench("parity"),
    )
    yield (
        f"forecast peak memory against real steps on 2 ranks, {len(errors)} cases",
        f"median error {statistics.median(errors):.2%}, worst {max(errors):.1%}",
        bench("rehearse"),
    )
    for ranks, families in results["step_time"].items():
        off = [abs(family["error"]) for family in families.values() if isinstance(family, dict)]
        said = f"median error {statistics.median(off):.1%}, worst {max(off):.1%}"
        what = (
            f"forecast time of a step on the calibrated CPU, {ranks.replace('1 ranks', '1 rank')}, {len(off)} families"
        )
        yield what, said, bench("step_time")
    ratio = results["step"]["shard() over fully_shard"]["ratio"]
    yield (
        f"time of a step over raw `fully_shard`, 2 ranks, {ratio['count']} pairs",
        f"{ratio['median']:.3f} ({ratio['low']:.2f} to {ratio['high']:.2f})",
        bench("step"),
    )


def _agreement() -> dict[str, tuple[int, float, float]]:
    """Return units and deviations of loss and norm, by the name of the run."""
    rows = map(json.loads, AGREEMENT.read_text(encoding="utf-8").splitlines())
    return {name: (units, loss, norm) for name, units, loss, norm, *_ in rows}


def _families() -> Iterable[tuple[str, ...]]:
    found = _agreement()
    for family, (built, unit) in FAMILIES.items():
        units, losses, norms = zip(*(found[f"{family} {kind}"] for kind in ("size", "class", "name")), strict=True)
        yield built, unit, ", ".join(map(str, units)), _short(max(losses)), _short(max(norms))


def _old() -> dict[str, str]:
    found = _agreement()
    figures = {}
    for prefix, kind in (("", " old, "), ("bf16_", " bf16, ")):
        _, losses, norms = zip(*(row for name, row in found.items() if kind in name), strict=True)
        figures |= {f"{prefix}loss": _short(max(losses)), f"{prefix}norm": _short(max(norms))}
    return figures


def _short(deviation: float) -> str:
    return f"{deviation:.0e}".replace("e-0", "e-") if deviation else "0"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
