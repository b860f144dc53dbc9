"""Writes mmfsdp/config/written.pyi: for type checkers, the forms in which users may write each setting.

``python tools/settings_types.py`` reads the config models. A model's own fields say what it holds once it is read:
``ShardConfig(precision="bf16").precision`` is a `PrecisionConfig`.
"""

from __future__ import annotations

import collections.abc
import re
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import mmfsdp.config
from mmfsdp.config.base import ConfigModel
from mmfsdp.config.fields import Accepted

__all__ = ["STUB", "stub"]

STUB = Path(mmfsdp.config.__file__).with_name("written.pyi")
PLAIN = ("AutoWrap", "CompileConfig", "CpuOffloadConfig", "InitConfig", "NoWrap")  # written as they are held

SIMPLE = (bool, float, int, str)

HEAD = """# Written by `python tools/settings_types.py`.
from collections.abc import Mapping, Sequence, Set
from typing import Any, Literal, Required, TypeAlias, TypedDict

import torch
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy

from mmfsdp.config import (
{imports}
)
from mmfsdp.config.base import ConfigModel

AnyNames: TypeAlias = str | type | Sequence[str | type] | Sequence[str] | Set[str] | Set[type]
AnyWrap: TypeAlias = ConfigModel | Mapping[str, Any] | AnyNames | None

"""


def stub() -> str:
    """Return the text of the stub."""
    models = {name: getattr(mmfsdp.config, name) for name in mmfsdp.config.__all__ if name not in PLAIN}
    classes = [_class(model) for model in models.values() if isinstance(model, type)]
    text = "\n".join(classes)
    sections = sorted(name for name in mmfsdp.config.__all__ if re.search(rf"\b{name} \|", text))
    return HEAD.format(imports="\n".join(f"    {name}," for name in sections)) + text


def _class(model: type[ConfigModel]) -> str:
    lines = [f"class {model.__name__.removesuffix('Config')}Settings(TypedDict, total=False):"]
    for name, field in model.model_fields.items():
        accepted = " | ".join(dict.fromkeys(_forms(field.annotation, field.metadata)))
        line = f"    {name}: {f'Required[{accepted}]' if field.is_required() else accepted}"
        lines.append(line if len(line) <= 120 else f"    {name}: (\n        {accepted}\n    )")
    return "\n".join(lines) + "\n"


def _forms(annotation: Any, metadata: Iterable[Any] = ()) -> list[str]:
    """Return what may be written for a type: the members of a union."""
    accepted = [note.types for note in metadata if isinstance(note, Accepted)]
    if accepted:
        return accepted
    for note in metadata:
        schema = getattr(note, "json_schema_input_type", None)
        if isinstance(schema, type | types.GenericAlias | types.UnionType) or get_origin(schema) is not None:
            return _forms(schema)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _forms(arguments[0], arguments[1:])
    if origin in (Union, types.UnionType):
        return [form for argument in arguments for form in _forms(argument)]
    if origin is Literal:
        words = ", ".join(f'"{value}"' for value in arguments)
        return [f"Literal[{words}]"]
    if origin in (list, tuple):
        items = dict.fromkeys(form for argument in arguments if argument is not ... for form in _forms(argument))
        return [f"Sequence[{' | '.join(items)}]"]
    if origin in (dict, collections.abc.Mapping):
        return [f"Mapping[{', '.join(' | '.join(_forms(argument)) for argument in arguments)}]"]
    if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
        return [annotation.__name__, "Mapping[str, Any]"]
    return ["None" if annotation is type(None) else "Any" if annotation not in SIMPLE else annotation.__name__]


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
