"""Rebuilds published runs: the model, the settings and the hardware that a record means, or why it cannot be."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.published.hf_models import HfShape
from benchmarks.published.lit_models import LitShape
from benchmarks.published.models import Shape
from benchmarks.published.qlora_models import QloraShape

__all__ = ["RUNS", "Rebuilt", "UnknownRunError", "published_memory", "rebuild", "runs"]

RUNS = Path(__file__).with_name("runs.jsonl")
"""One record a line, each with its source."""

_BLOCKS = {"kind": "module_class", "classes": ["Block"]}
_LLAMA_2 = {"vocabulary": 32000}
_LLAMA_3 = {"vocabulary": 128256, "kv_heads": 8}

LLAMAS = {
    "Llama 2 7B": Shape(4096, 32, 32, hidden=11008, **_LLAMA_2),
    "Llama 2 13B": Shape(5120, 40, 40, hidden=13824, **_LLAMA_2),
    "Llama 2 34B": Shape(8192, 48, 64, hidden=22016, kv_heads=8, **_LLAMA_2),
    "Llama 2 70B": Shape(8192, 80, 64, hidden=28672, kv_heads=8, **_LLAMA_2),
    "Llama 3 8B": Shape(4096, 32, 32, hidden=14336, **_LLAMA_3),
    "Llama 3 70B": Shape(8192, 80, 64, hidden=28672, **_LLAMA_3),
}

MPTS = {  # scripts/train/benchmarking of llm-foundry: width, layers, heads
    "MPT-125m": (768, 12, 12),
    "MPT-350m": (1024, 24, 16),
    "MPT-760m": (1536, 24, 12),
    "MPT-1b": (2048, 24, 16),
    "MPT-3b": (2560, 32, 20),
    "MPT-7b": (4096, 32, 32),
    "MPT-13b": (5120, 40, 40),
    "MPT-30b": (7168, 48, 56),
    "MPT-70b": (8192, 80, 64),
}

# llm-foundry computed attention with its own kernels of 2023, slower than those that torch has had since 2.2. Fitted.
_OF_FOUNDRY = {"a100": (0.46, 0.27), "h100": (0.21, 0.168)}

_PHI = {"is_llama": False, "is_parallel": True, "shares_norm": True, "head_bias": True}
LITS = {  # LitGPT's lit_gpt/config.py
    "phi-1.5": LitShape(2048, 24, 32, 51200, 8192, rotary=32, **_PHI),
    "StableLM Alpha 3B": LitShape(4096, 16, 32, 50688, 16384, is_llama=False, rotary=32, is_parallel=True),
    "Llama 2 7B": LitShape(4096, 32, 32, 32000, 11008),
    "Llama 2 13B": LitShape(5120, 40, 40, 32000, 13824),
}


HUGGING_FACES = {  # config.json of each on the hub
    "Mistral 7B": HfShape(4096, 32, 32, 8, 32000, 14336),
    "PowerLM 3B": HfShape(2304, 40, 36, 36, 49152, 9216, is_tied=True, is_scaled=True),
    "SantaCoder": HfShape(2048, 24, 16, 1, 49280, 8192, is_llama=False, positions=2048, is_tied=True),
}

QLORAS = {  # config.json of each on the hub
    "Llama 2 7B": QloraShape(4096, 32, 32, 32, 32000, 11008),
    "Yi 34B": QloraShape(7168, 60, 56, 8, 64000, 20480),
}


class UnknownRunError(ValueError):
    """A record cannot be rebuilt; the message says why."""


@dataclass(frozen=True)
class Rebuilt:
    """A published run as `benchmarks.published.forecasting` rehearses it."""

    shape: Shape | LitShape | HfShape | QloraShape
    rows: int
    samples: int
    ranks: int
    config: Mapping[str, Any]
    device: str
    network: str = ""
    """A preset of `mmfsdp.rehearsal.networks`; empty: as the device usually is."""
    accumulate: int = 1
    optimizer: str = "adamw"
    max_norm: float | None = 1.0
    keeps_logits: bool = False
    """Whether the training loop holds the logits during backward."""
    keeps_last: bool = False
    """Whether the last block stays gathered after forward."""
    reduces_apart: bool = False
    """Whether FSDP2 allocates what it reduces on the stream that reduces, as it did until torch 2.4."""
    attention: tuple[float, float] | None = None
    """Shares of the peak that an attention kernel of its own reaches, forward and backward; None: torch's flash."""
    casts: bool = False
    """Whether the whole model is in bfloat16."""
    keeps_gradients: bool = False
    """Whether gradients are reduced with the last of several micro-batches, and kept whole until then."""


def runs() -> list[dict[str, Any]]:
    """Return all records."""
    return [json.loads(line) for line in RUNS.read_text(encoding="utf-8").splitlines()]


def rebuild(run: Mapping[str, Any]) -> Rebuilt:
    """Return what a record means.

    Raises:
        UnknownRunError: It cannot be rebuilt; says why.
    """
    if run["micro_batch"] is None or run["seq_len"] is None or run["num_gpus"] is None:
        raise UnknownRunError("batch, length or number of GPUs is not stated")
    if "8" in str(run["precision"]).lower().replace("bf16", "").replace("fp32", "").replace("16", ""):
        raise UnknownRunError("float8")
    if run["compile"]:
        raise UnknownRunError("compiled")
    for words in (" x TP", " x CP", "EP", "DDP", " x PP"):
        if words in str(run["sharding"]):
            raise UnknownRunError("other parallelism than sharding")
    for name, builder in _BUILDERS.items():
        if name in run["framework"]:
            return builder(run)
    raise UnknownRunError("its project's code is not rebuilt")


def published_memory(run: Mapping[str, Any]) -> dict[str, float]:
    """Return the published figures of memory in GiB, as fields of `benchmarks.published.forecasting.Memory`.

    ``active`` counts what is allocated, and what waits for another stream before it is free.
    """
    found = {}
    kind, gib = str(run["memory_kind"]), run["memory_gib"]
    if gib and "active" in kind:
        found["active"] = gib
    elif gib and "allocated" in kind:
        found["allocated"] = gib
    elif gib and "reserved" in kind:
        found["expandable" if "expandable" in kind else "reserved"] = gib
    if reserved := re.search(r"reserved ([\d.]+) GiB", run["notes"] or ""):
        found["reserved"] = float(reserved[1])
    return found


def _shape(table: Mapping[str, Any], run: Mapping[str, Any]) -> Any:
    name = run["model"].replace("3.1", "3").partition(" (")[0].lower()
    found = next((shape for known, shape in table.items() if known.lower() == name), None)
    if found is None:
        raise UnknownRunError(f"model {run['model']}")
    return found


def _device(run: Mapping[str, Any]) -> str:
    text = run["gpu"].lower().replace("_", " ").replace("-", " ")
    if "h100" in text:
        return "h100-96gb-500w" if "96gb" in text else "h100"
    if "a100" in text:
        return "a100-40gb" if "40" in text else "a100"
    for name in ("rtx 3090", "rtx 4090"):
        if name in text:
            return name.replace(" ", "")
    raise UnknownRunError(f"GPU {run['gpu']}")


def _checkpointing(run: Mapping[str, Any]) -> dict[str, Any] | None:
    mode = str(run["ac"])
    if mode.startswith("none"):
        return None
    if mode.startswith("full"):
        return {"mode": "full"}
    if "2nd" in mode:
        return {"mode": "every_n", "n": 2}
    if mode.startswith("selective op"):
        return None  # the model's own
    raise UnknownRunError(f"activation checkpointing {mode}")


def _torchtitan(run: Mapping[str, Any]) -> Rebuilt:
    is_early = "pull/165" in run["source"] or "157a12c56" in run["source"]
    # Before torch 2.9, whose kernel is fused, nn.RMSNorm computed the same as torchtitan's own.
    shape = replace(
        _shape(LLAMAS, run), repeats=True, widens=True, keeps_products=str(run["ac"]).startswith("selective op")
    )
    engine = "fsdp1" if "FSDP1" in run["sharding"] else "fsdp2"
    config = {
        "engine": engine,
        "wrap": _BLOCKS,
        "precision": {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
        "activation_checkpointing": _checkpointing(run),
    }
    is_fsdp2 = engine == "fsdp2"
    return _rebuilt(run, shape, config, keeps_logits=is_early, keeps_last=is_fsdp2, reduces_apart=is_early and is_fsdp2)


def _foundry(run: Mapping[str, Any]) -> Rebuilt:
    dim, layers, heads = _shape(MPTS, run)
    shape = Shape(
        dim, layers, heads, 50368, 4 * dim, norm="layer", is_gated=False, positions=run["seq_len"], is_tied=True,
        packed=True,
    )  # fmt: skip
    reduced = "bfloat16" if "PURE" in run["precision"] else "float32"
    config = {
        "sharding": run["sharding"],
        "wrap": _BLOCKS,
        "precision": {"param_dtype": "bfloat16", "reduce_dtype": reduced},
        "activation_checkpointing": _checkpointing(run),
    }
    is_ampere = _device(run).startswith("a100")
    return _rebuilt(
        run,
        shape,
        config,
        network="roce-200" if is_ampere else "roce-400",
        accumulate=run.get("grad_accum") or 1,
        attention=_OF_FOUNDRY["a100" if is_ampere else "h100"],
    )


def _fms(run: Mapping[str, Any]) -> Rebuilt:
    config = {
        "sharding": "HYBRID_SHARD" if run["sharding"] == "HSDP" else "FULL_SHARD",
        "wrap": _BLOCKS,
        "precision": {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"},
        "activation_checkpointing": _checkpointing(run),
    }
    return _rebuilt(run, _shape(LLAMAS, run), config, network="roce-50" if "400 Gbps" in run["notes"] else "roce-100")


def _litgpt(run: Mapping[str, Any]) -> Rebuilt:
    config: dict[str, Any] = {"wrap": {"kind": "module_class", "classes": ["LitBlock"]}}
    if run["num_gpus"] == 1:
        config["sharding"] = {"ignored_parameters": ["**"]}  # plain modules, which keep no copies
    else:  # finetune/lora.py recomputes each block, whatever the table says, and reduces with the last micro-batch
        config |= {"engine": "fsdp1", "activation_checkpointing": {"mode": "full"}}
    return _rebuilt(run, _shape(LITS, run), config, max_norm=None, casts=True, keeps_gradients=run["num_gpus"] > 1)


def _hugging_face(run: Mapping[str, Any]) -> Rebuilt:
    if "Mixtral" in run["model"]:
        raise UnknownRunError("which experts compute depends on the data")
    shape = _shape(HUGGING_FACES, run)
    is_recent = "transformers 4.48" in run["framework"]  # which left it to the loss to widen logits
    widens = ("loss" if is_recent else "model") if shape.is_llama else ""
    rank = 16 if "LoRA" in run["model"] else 0
    config: dict[str, Any] = {"sharding": {"ignored_parameters": ["**"]}}  # plain modules, as LitGPT's
    if run["num_gpus"] > 1:
        classes = ["HfBlock", "Factor"] if rank else ["HfBlock"]
        config = {"engine": "fsdp1", "wrap": {"kind": "module_class", "classes": classes}}
    return _rebuilt(run, replace(shape, widens=widens, rank=rank), config)


def _qlora(run: Mapping[str, Any]) -> Rebuilt:
    if "offload" in run["sharding"]:
        raise UnknownRunError("shards in CPU memory with FSDP1")
    config = {
        "engine": "fsdp1",
        "sharding": run["sharding"],
        "wrap": {"kind": "module_class", "classes": ["QloraBlock", "Factor"]},
        "activation_checkpointing": _checkpointing(run),
    }
    shape = _shape(QLORAS, run)
    return _rebuilt(run, replace(shape, is_quantized="QLoRA" in run["model"]), config, max_norm=None)


def _rebuilt(
    run: Mapping[str, Any], shape: Shape | LitShape | HfShape | QloraShape, config: Mapping[str, Any], **settings: Any
) -> Rebuilt:
    """Return a run of which a record states batch, ranks and device."""
    return Rebuilt(shape, run["seq_len"], run["micro_batch"], run["num_gpus"], config, _device(run), **settings)


_BUILDERS: dict[str, Callable[[Mapping[str, Any]], Rebuilt]] = {
    "torchtitan": _torchtitan,
    "llm-foundry": _foundry,
    "fms-fsdp": _fms,
    "LitGPT": _litgpt,
    "fms-acceleration": _hugging_face,
    "fsdp_qlora": _qlora,
}
