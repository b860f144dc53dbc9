"""Checks that a module can be divided as a rule says: its class, its sizes and its heads."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator

import torch.nn as nn

from mmfsdp.config.parallel import ParallelRule
from mmfsdp.errors import PlanError

__all__ = ["check_experts", "check_heads", "check_module", "check_sizes"]

_HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "head_dims", "dim_head", "d_head")
_COUNTS = (
    *("num_attention_heads", "num_key_value_heads", "num_heads", "num_kv_heads"),
    *("n_heads", "n_head", "n_kv_heads", "nhead", "heads"),
)
_FUSED = re.compile(r"(w|to_|in_proj_)?(qkv|kv)(_proj)?|c_attn|query_key_value|(gate_up|up_gate)(_proj)?|w12|w13")
_HEAD_BY_HEAD = ("GPTNeoX", "Bloom")
"""How names of classes begin whose matrix of queries, keys and values has those of one head side by side."""


def check_module(fqn: str, module: nn.Module, parent: nn.Module, rule: ParallelRule, ignored: Collection[int]) -> None:
    """Check that a style knows a module's class, and that a whole matrix is nothing else.

    Args:
        fqn: The module's name.
        module: The module.
        parent: The module that holds it.
        rule: Its rule.
        ignored: ``id`` of the parameters that are not sharded.

    Raises:
        PlanError: It does not.
    """
    if rule.style == "replicate":
        return
    what, kind = f"parallel divides {fqn!r} by style {rule.style!r}", type(module).__name__
    if any(id(param) in ignored for param in module.parameters()):
        raise PlanError(f"{what}, and sharding.ignored_modules or ignored_parameters names it, too. Drop one.", fqn=fqn)
    if rule.style == "experts":
        return
    if rule.style == "sequence":
        if next(module.children(), None) is not None:
            raise PlanError(
                f"{what}, but it is a {kind}, which holds other modules. Name the norms themselves.", fqn=fqn
            )
        return
    if isinstance(parent, nn.MultiheadAttention):
        raise PlanError(
            f"{what}, but torch's MultiheadAttention reads its weights itself and never calls it, so that no rule has "
            "an effect. Keep the attention whole, or write it with linear layers of its own for q, k and v.",
            fqn=fqn,
        )
    if not isinstance(module, nn.Linear | nn.Embedding):
        inside = [f"{fqn}.{name}" for name, found in module.named_modules() if isinstance(found, nn.Linear)]
        if kind == "Conv1D":
            advice = (
                "whose weight is transposed; torch has no style for it. Replace it by nn.Linear, with queries, keys "
                "and values apart, or keep it whole."
            )
        elif inside:
            advice = f"and styles divide nn.Linear and nn.Embedding. It holds {inside[0]!r}: name what is inside."
        else:
            advice = "and styles divide nn.Linear and nn.Embedding. Keep it whole."
        raise PlanError(f"{what}, but it is a {kind}, {advice}", fqn=fqn)
    weight = module._parameters.get("weight")
    shape = _shape(module)
    if weight is None or tuple(weight.shape) != shape or not weight.is_floating_point():
        has = "computes its weight" if weight is None else f"packs its weight as {weight.dtype} {tuple(weight.shape)}"
        raise PlanError(f"{what}, but this {kind} {has}, and only whole matrices are divided. Keep it whole.", fqn=fqn)


def check_experts(module: nn.Module, ranks: int, name: str) -> int:
    """Return the number of experts that each rank gets of a module of stacked ones.

    Args:
        module: The module; its own parameters have one row per expert.
        ranks: The ranks of the axis ``expert``.
        name: Its name, for errors.

    Raises:
        PlanError: The ranks cannot hold equal numbers of experts; or a parameter has other rows.
    """
    counts = {name: param.shape[0] if param.dim() else 1 for name, param in module.named_parameters(recurse=False)}
    stated = getattr(module, "num_experts", next(iter(counts.values()), 0))
    if not counts or (other := [name for name, count in counts.items() if count != stated]):
        found = (
            f"{stated} experts, and {other[0]!r} of {counts[other[0]]} rows" if counts else "no parameters of its own"
        )
        raise PlanError(
            f"{name!r}, a {type(module).__name__}, has {found}. Experts are divided where one module "
            "owns the stacked weights of all of them, each with one row per expert.",
            fqn=name,
        )
    taken = [*inspect.signature(module.forward).parameters]
    if len(taken) < 3 and taken[:1] != ["args"]:
        raise PlanError(
            f"The forward of {name!r}, a {type(module).__name__}, takes {', '.join(taken) or 'nothing'}. Experts are "
            "divided where it takes tokens, the experts of each, and their weights.",
            fqn=name,
        )
    if stated % ranks:
        divisors = [n for n in range(1, stated + 1) if stated % n == 0]
        raise PlanError(
            f"The {stated} experts of {name!r} cannot be divided over {ranks} ranks in equal numbers. Give the axis "
            f"'expert' one of {divisors} ranks.",
            fqn=name,
        )
    return int(stated) // ranks


def check_sizes(fqn: str, module: nn.Module, rule: ParallelRule, ranks: int) -> None:
    """Check that the ranks of ``tensor`` can divide a matrix: evenly, if they compute with their parts.

    Raises:
        PlanError: They cannot.
    """
    if rule.style == "sequence":
        return
    rows, columns = _shape(module)
    is_embedding = isinstance(module, nn.Embedding)
    size = rows if (rule.style == "colwise") != is_embedding else columns
    names = ("num_embeddings", "embedding_dim") if is_embedding else ("out_features", "in_features")
    name = names[0 if size is rows and (rule.style == "colwise") != is_embedding else 1]
    inputs, outputs = rule.layouts
    is_part = outputs == "features" if rule.style == "colwise" else inputs == "features" and not is_embedding
    if is_part and size % ranks:
        near = [n for n in range(2, ranks + 1) if size % n == 0]
        fits = f" It can be divided by {', '.join(map(str, near))}." if near else ""
        raise PlanError(
            f"parallel divides {fqn!r} by style {rule.style!r} along an axis 'tensor' of {ranks} ranks, but its "
            f"{name}, {size}, cannot be divided by {ranks}.{fits} Give the axis another number of ranks, or keep "
            "the module whole.",
            fqn=fqn,
        )
    if -(-size // ranks) * (ranks - 1) >= size:
        raise PlanError(
            f"parallel divides {fqn!r} by style {rule.style!r}: its {name}, {size}, leaves nothing to the last of "
            f"{ranks} ranks. Keep it whole.",
            fqn=fqn,
        )


def check_heads(
    fqn: str, module: nn.Module, parent: nn.Module, rule: ParallelRule, ranks: int, taken: Collection[int]
) -> None:
    """Check that a part of a ``colwise`` matrix is a number of whole heads, and that its module counts its own.

    Args:
        fqn: The matrix's name.
        module: The linear layer.
        parent: The module that holds it, which may be an attention.
        rule: The rule of the matrix.
        ranks: Ranks of the axis ``tensor``.
        taken: Numbers of features that ``rowwise`` layers of the same module take.

    Raises:
        PlanError: It is not.
    """
    if rule.style != "colwise" or rule.layouts[1] != "features" or not isinstance(module, nn.Linear):
        return
    what, kind = f"parallel divides {fqn!r} by style 'colwise'", type(parent).__name__
    counts, size = dict(_counts(parent)), next(_numbers(parent, _HEAD_SIZES), ("", 0))[1]
    is_attention = bool(size or any(name in vars(parent) for name in counts))
    fused = _is_fused(fqn, module, parent, is_attention, taken)
    if fused and not rule.head_by_head and not kind.startswith(_HEAD_BY_HEAD):
        raise PlanError(
            f"{what}, but it seems to hold several matrices in one ({module.out_features} outputs from "
            f"{module.in_features} inputs), such as queries, keys and values, or a gate and what it multiplies: equal "
            "parts would cut across them. Keep it whole, or gather its output ({'style': 'colwise', 'output': "
            "'replicate'}). If those of one head lie side by side, say so: {'style': 'colwise', 'head_by_head': True}.",
            fqn=fqn,
        )
    if not is_attention:
        return
    for name, count in counts.items():
        if count % ranks:
            raise PlanError(
                f"{what} along an axis 'tensor' of {ranks} ranks, but {kind} has {name}={count}, which cannot be "
                f"divided by {ranks}: a head would be cut. Give 'tensor' a divisor of {count}, or keep the attention "
                "whole.",
                fqn=fqn,
            )
    heads = module.out_features // size if size and module.out_features % size == 0 else 0
    if heads % ranks:
        raise PlanError(
            f"{what} along an axis 'tensor' of {ranks} ranks, but it has {heads} heads of {size}: a head would be cut. "
            f"Give 'tensor' a divisor of {heads}, or keep the attention whole.",
            fqn=fqn,
        )
    if (read := next((name for name in counts if name in _read_by_forward(parent)), None)) is not None:
        raise PlanError(
            f"{what}, but the forward of {kind} reads {read}, which counts the heads of all ranks. A rank has its own "
            "heads only: let it find their number, as in x.view(*x.shape[:-1], -1, head_dim), or keep the attention "
            "whole.",
            fqn=fqn,
        )


def _shape(module: nn.Linear | nn.Embedding | nn.Module) -> tuple[int, int]:
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    assert isinstance(module, nn.Linear)
    return module.out_features, module.in_features


def _is_fused(fqn: str, module: nn.Linear, parent: nn.Module, is_attention: bool, taken: Collection[int]) -> bool:
    """Tell whether a matrix holds several: by its name, or by what others give to it and take from it."""
    name = fqn.rpartition(".")[2].lower()
    if _FUSED.fullmatch(name) or (name == "in_proj" and hasattr(parent, "conv1d")):  # as Mamba's
        return True
    made = module.out_features
    if made not in taken and any(made in (2 * size, 3 * size) for size in taken):
        return True
    siblings = [child for child in parent.children() if isinstance(child, nn.Linear)]
    return is_attention and made == 3 * module.in_features and len(siblings) <= 2


def _counts(parent: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the numbers of heads that an attention or its config states, with their names."""
    yield from _numbers(getattr(parent, "config", None), _COUNTS[:2])
    yield from _numbers(parent, _COUNTS)


def _numbers(holder: object, names: Collection[str]) -> Iterator[tuple[str, int]]:
    for name in names:
        value = getattr(holder, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            yield name, value


def _read_by_forward(module: nn.Module) -> set[str]:
    """Return the names that a module's forward, and methods of the module that it names, look up."""
    seen: set[str] = set()
    waiting = ["forward"]
    while waiting:
        method = inspect.unwrap(getattr(type(module), waiting.pop(), None) or _nothing)
        code = getattr(method, "__code__", None)
        names = set(code.co_names) - seen if code is not None else set()
        seen |= names
        own = [name for name in names if name in vars(type(module))]
        waiting += [name for name in own if callable(vars(type(module))[name])]
    return seen


def _nothing() -> None:
    pass
