"""`wrap: auto`: chooses shard units from the structure of a model, each with a reason.

Blocks are the modules that a model repeats: in a list or sequence, modules of one class with equal parameter shapes.
The outermost repetition counts, so a block's own experts and attentions stay inside it. Stages of unequal width (Swin,
ConvNeXt, ResNet) are not blocks, and are searched for blocks. Hugging Face's models name their blocks in
``_no_split_modules``. An embedding or head outside of the blocks becomes a unit if it is as large as a block; otherwise
it would stay gathered with the root for a whole step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch.nn as nn

from mmfsdp.basics.text import name_list
from mmfsdp.planning.plan_records import Note

__all__ = ["LARGE", "automatic_units", "explain", "repeated_classes"]

LARGE = "auto: as large as a block"
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_EMBEDDINGS_AND_HEADS = (nn.Embedding, nn.EmbeddingBag, nn.Linear)
_LEAST_SHARE = 0.05  # of the model's parameters that all blocks of a class hold together
_CHOSEN_FROM = ("expert", "head")  # a rank may use one and not another, and a unit must run on all ranks


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Classes whose instances are blocks, each with the reason."""

    reasons: Mapping[type, str]

    def __contains__(self, module: nn.Module) -> bool:
        return type(module) in self.reasons


def automatic_units(root: nn.Module, ignored: Collection[int] = ()) -> dict[int, str]:
    """Return the modules that become shard units, by ``id``, with reasons; empty if the model repeats no blocks.

    Args:
        root: The model; meta or real.
        ignored: ``id`` of modules to skip.
    """
    blocks = _Blocks({**_repeated(root, ignored), **_declared(root, ignored)})
    found: dict[int, str] = {}
    outside: list[nn.Module] = []
    largest = 0
    for module in _outermost(root, blocks, ignored):
        if module in blocks:
            found[id(module)] = blocks.reasons[type(module)]
            largest = max(largest, _numel(module))
        elif isinstance(module, _EMBEDDINGS_AND_HEADS):
            outside.append(module)
    if found:
        found |= {id(module): LARGE for module in outside if _numel(module) >= largest}
    return found


def repeated_classes(model: nn.Module) -> list[str]:
    """Return the names of the classes of blocks that a model repeats, the one with most parameters first.

    Args:
        model: A model on any device.
    """
    reasons = {**_repeated(model, ()), **_declared(model, ())}
    blocks = [module for module in _outermost(model, _Blocks(reasons), ()) if type(module) in reasons]
    held: Counter[str] = Counter()
    for module in blocks:
        held[type(module).__name__] += _numel(module)
    return [name for name, _ in held.most_common()]


def explain(chosen: Sequence[tuple[str, str, str]]) -> Note:
    """Return the note of the plan that explains the choice.

    Args:
        chosen: FQN, class name and reason of each module that `automatic_units` chose.
    """
    if not chosen:
        return Note(
            kind="wrap",
            text="wrap auto: the model repeats no blocks, so all of it is one shard unit. Name the modules to gather "
            "one by one with wrap kind module_class or module_name, or write wrap: none.",
        )
    blocks = Counter((name, reason) for _, name, reason in chosen if reason != LARGE)
    large = [fqn for fqn, _, reason in chosen if reason == LARGE]
    parts = [f"{count} x {name} ({reason.removeprefix('auto: ')})" for (name, reason), count in blocks.items()]
    also = f"; also {name_list(large, 4)}, as large as a block" if large else ""
    return Note(kind="wrap", text=f"wrap auto: {', '.join(parts)}{also}. wrap: none makes one unit of all.")


def _repeated(root: nn.Module, ignored: Collection[int]) -> dict[type, str]:
    """Return the classes of the outermost repeated modules that hold a fair part of the model."""
    where: dict[type, str] = {}

    def visit(fqn: str, module: nn.Module) -> None:
        run = _run(fqn, module)
        for cls in run:
            where.setdefault(cls, fqn)
        for name, child in module.named_children():
            if id(child) not in ignored and type(child) not in run:
                visit(f"{fqn}.{name}" if fqn else name, child)

    visit("", root)
    reasons = {cls: f"auto: repeated in {fqn or 'the model'}" for cls, fqn in where.items()}
    held: Counter[type] = Counter()
    for module in _outermost(root, _Blocks(reasons), ignored):
        held[type(module)] += _numel(module)
    least = _LEAST_SHARE * _numel(root)
    return {cls: reason for cls, reason in reasons.items() if held[cls] >= least}


def _run(fqn: str, module: nn.Module) -> set[type]:
    """Return the classes with at least two modules of equal parameter shapes in a list."""
    if not isinstance(module, _LISTS):
        return set()
    if isinstance(module, nn.ModuleDict) and not all(key.isdigit() for key in module):
        return set()  # code picks its modules by name
    children = [child for child in module.children() if _may_be_block(child)]
    names = [fqn.rpartition(".")[2], *(type(child).__name__ for child in children)]
    if any(name.lower().removesuffix("s").endswith(_CHOSEN_FROM) for name in names):
        return set()
    structures = Counter(_structure(child) for child in children)
    return {type(child) for child in children if structures[_structure(child)] > 1}


def _may_be_block(module: nn.Module) -> bool:
    """Return whether a module is neither a layer of torch, such as the ``Linear`` of an MLP, nor a container."""
    is_layer = type(module).__module__.startswith("torch.nn.modules") and not any(True for _ in module.children())
    return not is_layer and not isinstance(module, _LISTS) and any(True for _ in module.parameters())


def _structure(module: nn.Module) -> tuple[object, ...]:
    shapes = tuple((name, tuple(param.shape)) for name, param in module.named_parameters())
    return type(module), shapes


def _declared(root: nn.Module, ignored: Collection[int]) -> dict[type, str]:
    """Return the classes that a Hugging Face model names as blocks."""
    names: dict[str, str] = {}
    for module in root.modules():
        for name in getattr(module, "_no_split_modules", None) or ():
            if isinstance(name, str):
                names.setdefault(name, type(module).__name__)
    return {
        type(module): f"auto: _no_split_modules of {names[type(module).__name__]}"
        for module in (root.modules() if names else ())
        if type(module).__name__ in names and module is not root and id(module) not in ignored
    }


def _outermost(root: nn.Module, blocks: _Blocks, ignored: Collection[int]) -> Iterator[nn.Module]:
    """Return every module below the root that is neither ignored nor inside a block, each once."""
    seen: set[int] = set()

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if id(child) in seen or id(child) in ignored:
                continue
            seen.add(id(child))
            yield child
            if child not in blocks:
                yield from visit(child)

    return visit(root)


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())
