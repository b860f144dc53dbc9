"""Compares the public API of core with public_api.txt, so that no name or signature changes by accident."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, get_origin

SNAPSHOT = Path(__file__).with_name("public_api.txt")
COMMAND = f"python {Path(*Path(__file__).parts[-3:])} --write"
SUBPACKAGES = (
    "mmfsdp",
    "mmfsdp.basics",
    "mmfsdp.checkpoint",
    "mmfsdp.collective",
    "mmfsdp.config",
    "mmfsdp.errors",
    "mmfsdp.frontends",
    "mmfsdp.optimizers",
    "mmfsdp.parity",
    "mmfsdp.planning",
    "mmfsdp.rehearsal",
    "mmfsdp.runtime",
    "mmfsdp.saving",
    "mmfsdp.sharding",
    "mmfsdp.state",
    "mmfsdp.testing",
    "mmfsdp.torch_style",
)


def describe_api() -> str:
    """Return every public name with its signature, one per line."""
    described: dict[int, str] = {}
    return "".join(
        f"{line}\n"
        for subpackage in SUBPACKAGES
        for line in described_lines(importlib.import_module(subpackage), described)
    )


def described_lines(subpackage: ModuleType, described: dict[int, str]) -> Iterator[str]:
    yield f"# {subpackage.__name__}"
    for name in subpackage.__all__:
        value = getattr(subpackage, name)
        if (first := described.setdefault(id(value), subpackage.__name__)) == subpackage.__name__:
            yield from describe_name(name, value)
        else:
            yield f"{name}: see {first}"
    yield ""


def describe_name(name: str, value: Any) -> Iterator[str]:
    if get_origin(value) is not None:
        yield f"{name}: type alias"
    elif inspect.isclass(value):
        bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
        yield f"class {name}({bases})" if bases else f"class {name}"
        yield from (f"    {member}" for member in describe_members(value))
    elif callable(value):
        yield f"def {name}{describe_signature(value)}"
    else:
        yield f"{name}: {type(value).__name__}"


def describe_members(cls: type) -> Iterator[str]:
    """Yield the constructor, fields, properties and methods that a class defines, and the base that has its fields."""
    if cls.__base__ is not None and cls.__base__.__name__ == "PlanData":
        yield from describe_members(cls.__base__)
    fields = getattr(cls, "model_fields", None) or getattr(cls, "__dataclass_fields__", {})
    for name in fields:
        if name in vars(cls).get("__annotations__", {}):
            yield f"{name}: {_without_validators(vars(cls)['__annotations__'][name])}"
    for name, member in vars(cls).items():
        is_init = name == "__init__" and not fields and not getattr(cls, "_is_protocol", False)
        if name.startswith("_") and not is_init:
            continue
        if isinstance(member, property):
            yield f"{name} -> {inspect.get_annotations(member.fget).get('return')}"  # type: ignore[arg-type]
        elif isinstance(member, classmethod | staticmethod):
            yield f"{type(member).__name__} {name}{describe_signature(member.__func__)}"
        elif isinstance(member, FunctionType):
            yield f"def {name}{describe_signature(member)}"


def describe_signature(function: Any) -> str:
    """Return a signature without quotes around annotations and without addresses of objects."""
    signature = inspect.signature(function)
    shown = [
        parameter
        if parameter.annotation is parameter.empty
        else parameter.replace(annotation=_Bare(parameter.annotation))
        for parameter in signature.parameters.values()
    ]
    text = f"{inspect.Signature(shown)} -> {signature.return_annotation}"
    return re.sub(r"<(function|object)\b.*? at 0x[0-9a-f]+>", "...", text)


def _without_validators(annotation: str) -> str:
    return re.sub(r"^Annotated\[(.+?), (?:_|as_mapping|BeforeValidator).*\]$", r"\1", annotation)


class _Bare(str):
    def __repr__(self) -> str:
        return str(self)


def test_the_public_api_is_the_snapshot() -> None:
    changes = difflib.unified_diff(
        SNAPSHOT.read_text().splitlines(), describe_api().splitlines(), "public_api.txt", "the code", lineterm="", n=1
    )
    found = "\n".join(changes)
    assert not found, (
        f"The public API has changed:\n{found}\nIf you meant it, run '{COMMAND}', and say it in CHANGELOG.md and "
        "docs/reference/api.md."
    )


def test_every_public_name_is_listed_by_dir_or_found() -> None:
    for subpackage in SUBPACKAGES:
        module = importlib.import_module(subpackage)
        assert len({*module.__all__}) == len(module.__all__), subpackage
        missing = {*module.__all__} - {*dir(module)}
        assert not missing, f"dir({subpackage}) does not show {missing}"
        for name in module.__all__:
            assert getattr(module, name) is getattr(module, name), f"{subpackage}.{name} is made anew at every access"
            assert not isinstance(getattr(module, name), ModuleType), f"{subpackage}.{name} is a module"


def test_dir_and_help_show_the_public_names_before_one_is_used() -> None:
    code = "import mmfsdp; shown = dir(mmfsdp); print(sorted({*mmfsdp.__all__} - {*shown}), 'lazy' in shown); "
    code += "import rlcompleter; print(rlcompleter.Completer({'mmfsdp': mmfsdp}).attr_matches('mmfsdp.load_ch')); "
    code += "help(mmfsdp)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names, completed, *pages = done.stdout.splitlines()
    assert names == "[] False"
    assert completed == "['mmfsdp.load_checkpoint(']"
    for name in ("shard(", "plan(", "load_checkpoint(", "class ShardPlan("):
        assert any(name in line for line in pages), name


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(f"usage: {COMMAND}")
    SNAPSHOT.write_text(describe_api())
