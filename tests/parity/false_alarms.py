"""Proves plans that are right, of 21 families of models: a proof that fails is a false alarm.

``python -m tests.parity.false_alarms`` proves all and writes docs/appendix/proven_models.md: half an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tests.parity.families import FAMILIES, batch_of, build, loss_of

from mmfsdp.config import ShardConfig
from mmfsdp.frontends import TrainingStep
from mmfsdp.parity import Proof
from mmfsdp.parity.proving.launched import Local
from mmfsdp.parity.proving.proof_task import Task, parts_of
from mmfsdp.parity.proving.prove import prove_beside, train_reference
from mmfsdp.testing import close_ranks

__all__ = ["PAGE", "PLANS", "PRECISIONS", "page", "proofs", "share_of"]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "appendix" / "proven_models.md"
RESULTS = ROOT / "work_dirs" / "false_alarms.json"

PRECISIONS = ("fp32", "bf16")
PLANS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "`FULL_SHARD`": (2, 1, {}),
    "recomputation": (2, 1, {"activation_checkpointing": "full"}),
    "offload": (2, 1, {"cpu_offload": True}),
    "accumulation": (2, 2, {}),
    "`HYBRID_SHARD`": (4, 1, {"sharding": {"strategy": "HYBRID_SHARD", "shard_size": 2}}),
}
"""Ranks, micro-batches and settings."""

STEPS, SAMPLES = 1, 2

INTRO = """---
orphan: true
---

# Models that were proven

On this page you look up for which families of models and which plans `mmfsdp.prove` has no false alarm. Each number
is the largest difference between the run on several ranks and the one in one process, of all tensors, as a share of
what [comparing](../explanation/parity.md#how-far-apart-tensors-may-be) allows; 0% means equal to the last bit, or
nearly. A plan that is right and is not proven would be a false alarm, and its cell would say so.

The {families} families are small models, written with torch alone in `tests/parity/families.py`: with batch norms,
dropout, recurrent layers, tied weights, experts, layers that are called several times, frozen weights, normalised
weights, and embeddings of three rows. Each trains {steps} step with {samples} samples on each rank, saves, resumes on
half as many ranks, and trains {steps} more; with AdamW, clipping to a norm of 1, and the model's own dropout. The
{plans} plans run on two ranks and go on with one, `HYBRID_SHARD` runs on four and goes on with two, and accumulation
takes two micro-batches. The one process computes the same parts of each batch in turn, and three more times with
perturbed inputs. `python -m tests.parity.false_alarms` runs them all and writes this page. On {on}.

"""


def proofs(family: str, precision: str, plans: tuple[str, ...] = tuple(PLANS)) -> Iterator[tuple[str, Proof]]:
    """Yield the proof of each plan; those with as many ranks and micro-batches share a reference."""
    references = {}
    with tempfile.TemporaryDirectory() as folder:
        for place, plan in enumerate(plans):
            ranks, accumulate, settings = PLANS[plan]
            again, home = ranks // 2, Path(folder, f"{ranks}-{accumulate}")
            config = {"wrap": {"kind": "module_class", "classes": [*FAMILIES[family].layer]}, **settings}
            if precision == "bf16":
                config["precision"] = "bf16"
            batch = batch_of(family, SAMPLES)
            step = TrainingStep(batch, partial(loss_of, family), max_norm=1.0, accumulate=accumulate)
            parts, sharded = parts_of(batch, ranks, again), ShardConfig.from_dict(config)
            task = Task(partial(build, family), step, ranks, parts, sharded, "cpu")
            if (reference := references.get(home)) is None:
                reference = references[home] = train_reference(Local(), task, home, 2 * STEPS)
            yield plan, prove_beside(Local(), task, reference, Path(folder, str(place)), STEPS, again)


def share_of(proof: Proof) -> str:
    """Return the largest difference as a share of what is allowed, or where a false alarm is."""
    if proof.proven:
        return f"{max(proof.trained.closest, proof.resumed.closest):.0%}"
    first = proof.trained.first or proof.resumed.first
    return f"**false alarm**: {first.key if first else 'nothing was compared'}"


def main() -> int:
    """Prove every family that the file of results does not have yet, write the page, and return 1 if one is not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="What an earlier run has found; it is kept.")
    path = parser.parse_args().results
    found = json.loads(path.read_text()) if path.exists() else {}
    for family in FAMILIES:
        for precision in PRECISIONS:
            if (name := f"{family} {precision}") not in found:
                cells = {plan: share_of(proof) for plan, proof in proofs(family, precision)}
                found[name] = cells
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(found))
                print(name, cells, flush=True)
    close_ranks()
    PAGE.write_text(page(found), encoding="utf-8")
    return int("false alarm" in PAGE.read_text(encoding="utf-8").split("## In", 1)[1])


def page(found: dict[str, dict[str, str]]) -> str:
    """Return the page of the documentation."""
    tables = []
    for precision in PRECISIONS:
        rows = [f"## In {precision}", "", f"| family | {' | '.join(PLANS)} |", "|---" * (len(PLANS) + 1) + "|"]
        for family in FAMILIES:
            rows.append(f"| {family} | {' | '.join(found[f'{family} {precision}'][plan] for plan in PLANS)} |")
        tables.append("\n".join(rows) + "\n")
    on = f"torch {torch.__version__}, Python {platform.python_version()}, on the CPU, over gloo"
    numbers = {"families": len(FAMILIES), "plans": len(PLANS), "steps": STEPS, "samples": SAMPLES}
    return INTRO.format(on=on, **numbers) + "\n".join(tables)


if __name__ == "__main__":
    sys.exit(main())
