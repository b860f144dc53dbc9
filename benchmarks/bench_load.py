"""`load_from` of 1 GB on 2 ranks against stock MMEngine, `skip_init_weights` of a billion parameters, averages' memory.

See `benchmarks.measuring.Peak`: ``VmHWM`` has pages of the mapped checkpoint in it, which the machine may drop.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measuring import MB, Peak, Ratio, memory, paired, peak_of, sized
from benchmarks.models import Block, Transformer
from mmfsdp.testing import close_ranks, run_ranks

__all__ = ["main"]

GB = 1e9
SMALL, LARGE = sized(((1024, 21), (2048, 20)), ((64, 2), (64, 4)))  # width and depth: 1.06 GB, a billion parameters
ALLOWED = 150  # MB per rank beside the shard
PAIRS = sized(7, 1)


def main() -> dict[str, Any]:
    """Measure on 2 ranks, print and return the figures."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="mmfsdp-bench-") as name:
        folder = Path(name)
        torch.save({"state_dict": built(*SMALL).state_dict(), "meta": {}}, folder / "full.pth")
        for engine in sized(("fsdp2", "fsdp1"), ("fsdp2",)):
            fresh_ranks()
            peaks = run_ranks(loading, 2, folder, engine, timeout=300)
            shard = max(part for part, _ in peaks)
            peak = Peak(*(max(getattr(found, key) for _, found in peaks) for key in Peak.__dataclass_fields__))
            ratio = run_ranks(loading_times, 2, folder, engine, timeout=600)[0]
            fits = "reached" if max(peak.private, peak.resident) <= shard + ALLOWED else "MISSED"
            results[f"load_from, {engine}"] = {"shard MB": shard, **asdict(peak), **ratio.to_dict()}
            print(
                f"load_from 1 GB, {engine}: shard {shard:.0f} MB, peak above start: private {peak.private:.0f} MB, "
                f"resident {peak.resident:.0f} MB, to reach shard + {ALLOWED}: {fits}; "
                f"time / stock {ratio.ratio}; ours {ratio.ours} s, stock {ratio.theirs} s",
                flush=True,
            )
        fresh_ranks()
        for part, peak in run_ranks(skipping, 1, folder, timeout=300)[0].items():
            results[f"skip_init_weights, {part}"] = asdict(peak)
            print(f"skip_init_weights, 1 B parameters, {part}: {peak.seconds:.2f} s, private {peak.private:.0f} MB")
        fresh_ranks()
        averages = run_ranks(averaging, 2, timeout=300)
        results["EMAHook"] = [{"shard MB": shard, "added MB": added} for shard, added in averages]
        for rank, (shard, added) in enumerate(averages):
            print(
                f"EMAHook, rank {rank}: shard {shard:.0f} MB, averages added {added:.0f} MB private memory", flush=True
            )
    return results


def fresh_ranks() -> None:
    """End the ranks, for new processes have no memory to use again; where only it has to run, they may be used."""
    sized(close_ranks, int)()


def built(width: int, depth: int) -> Any:
    """Return a model for MMEngine's runners."""
    from mmengine.model import BaseModel

    class Model(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.net = Transformer(width, depth)

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor, mode: str = "tensor") -> Any:
            return self.net(inputs)

    return Model()


def strategy_of(folder: Path, engine: str, **arguments: Any) -> Any:
    """Return an FSDPStrategy whose units are blocks."""
    from mmfsdp_mmengine import FSDPStrategy

    policy = {"type": "ModuleWrapPolicy", "module_classes": [Block]}
    wrapper = {"auto_wrap_policy": policy, "engine": engine}
    made = FSDPStrategy(work_dir=str(folder), model_wrapper=wrapper, state_dict_cfg="full", **arguments)
    made.logger.setLevel("ERROR")
    return made


def loading(rank: int, folder: Path, engine: str) -> tuple[float, Peak]:
    """The first load of a process: this rank's shard in MB, and how far memory rose."""
    made = strategy_of(folder, engine)
    made.prepare(built(*SMALL))
    small = folder / "small.pth"  # what is imported on first use is no cost of loading
    if rank == 0:
        torch.save({"state_dict": {"net.head.bias": torch.zeros(10)}}, small)
    dist.barrier()
    made.load_checkpoint(str(small))
    return _bytes(made.model) / MB, peak_of(lambda: made.load_checkpoint(str(folder / "full.pth"), strict=True))


def loading_times(rank: int, folder: Path, engine: str) -> Ratio:
    """Ours, and MMEngine's into the unsharded model, on all ranks at once as under DDP."""
    from mmengine.runner.checkpoint import load_checkpoint

    path = str(folder / "full.pth")
    made = strategy_of(folder, engine)
    made.prepare(built(*SMALL))
    plain = built(*SMALL)

    def ours() -> None:
        dist.barrier()
        made.load_checkpoint(path, strict=True)
        dist.barrier()

    def stock() -> None:
        dist.barrier()
        load_checkpoint(plain, path, map_location="cpu", strict=True, logger="silent")
        dist.barrier()

    return paired(ours, stock, PAIRS)


def skipping(rank: int, folder: Path) -> dict[str, Peak]:
    """Build a model of a billion parameters, 4 GB, with and without weights."""
    from mmengine.registry import MODELS

    MODELS.register_module("Billion", module=lambda: built(*LARGE), force=True)
    made = strategy_of(folder, "fsdp2", skip_init_weights=True)
    built(64, 1)
    found = {"build": peak_of(lambda: made.build_model({"type": "Billion"}))}
    found["build with weights"] = peak_of(lambda: built(*LARGE))
    return found


def averaging(rank: int) -> tuple[float, float]:
    """This rank's shard, and private memory that EMAHook adds to it, in MB."""
    from mmfsdp_mmengine import EMAHook, MMFullyShardedDataParallel

    model = MMFullyShardedDataParallel(built(*SMALL), config={"wrap": {"kind": "module_class", "classes": "Block"}})
    before = memory("RssAnon")
    hook = EMAHook()
    hook.before_run(SimpleNamespace(model=model))
    hook.after_train_iter(SimpleNamespace(model=model, iter=0), 0)
    return _bytes(model) / MB, (memory("RssAnon") - before) / MB


def _bytes(model: torch.nn.Module) -> int:
    return sum(getattr(param, "_local_tensor", param).nbytes for param in model.parameters())


if __name__ == "__main__":
    main()
