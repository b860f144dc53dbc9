"""Writes the three API pages of docs/reference: every public name with the first sentence of its docstring.

``python tools/api_pages.py`` reads ``__all__`` of each package. Links to other pages are here.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel

import mmfsdp
from mmfsdp import errors

__all__ = ["FOLDER", "PAGES", "page"]

FOLDER = Path(__file__).parents[1] / "docs" / "reference"

PAGES = {
    "api.md": (
        "mmfsdp",
        "mmfsdp.config",
        "mmfsdp.planning",
        "mmfsdp.optimizers",
        "mmfsdp.errors",
        "mmfsdp.testing",
        "mmfsdp_mmengine",
    ),
    "api_checkpoints.md": ("mmfsdp.checkpoint", "mmfsdp.saving", "mmfsdp.state", "mmfsdp.rehearsal"),
    "api_frameworks.md": (
        "mmfsdp.sharding",
        "mmfsdp.runtime",
        "mmfsdp.collective",
        "mmfsdp.torch_style",
        "mmfsdp.parity",
        "mmfsdp.frontends",
        "mmfsdp.basics",
    ),
}
"""The packages of each page."""

HEADS = {
    "api.md": """# API

On this page, on [the next](api_checkpoints.md) and on [the third](api_frameworks.md) you look up every public name; the
third page is for frameworks. Other names, and those that begin with an underscore, may change without notice. `python
tools/api_pages.py` writes these pages from the docstrings.

`import mmfsdp` takes a few milliseconds and imports nothing large. Names are loaded on first use.
""",
    "api_checkpoints.md": """# API of checkpoints and rehearsals

On this page you look up the names for checkpoint files, live state and rehearsals. It goes on from [the API](api.md).
""",
    "api_frameworks.md": """# API for frameworks

On this page you look up names that frameworks need, and training programs rarely. It goes on from [the API](api.md).
""",
}

INTROS = {
    "mmfsdp": "The names that a training program needs, in the order in which one uses them.",
    "mmfsdp.config": "The sections of `ShardConfig`, to build a config from objects instead of dicts. "
    "[Configuration](configuration.md)\ndescribes every field.",
    "mmfsdp_mmengine": "The classes that the import registers in place of MMEngine's: see "
    "[mmfsdp in MMEngine](../howto/mmengine.md).",
}
"""What is said of a package in place of its docstring."""

MORE = {
    "mmfsdp.optimizers": "[Muon](../explanation/muon.md) explains them.",
    "mmfsdp.saving": "For frameworks that gather content themselves.",
    "mmfsdp.rehearsal": "[Rehearsal](../explanation/rehearsal.md) explains it.",
    "mmfsdp.parity": "[Parity](../explanation/parity.md) explains both.",
    "mmfsdp.frontends": "[Readers of other configs](../howto/doctor.md#configs-of-other-frameworks) may be added.",
}
"""What is said of a package beside its docstring."""

ORDER = """
ShardConfig plan ShardPlan rehearse fit apply_plan shard parameters_on_meta build_optimizer matrix_optimizer no_sync
clip_grad_norm_ GradScaler full_params sharded_params save_checkpoint load_checkpoint load_pretrained model_state_dict
load_model_state_dict optim_state_dict load_optim_state_dict AveragedModel CheckpointManager DataPosition
patient_workers accumulation_steps init_process_group watch_ranks recording compare prove watching
FullyShardedDataParallel
"""
"""The names of `mmfsdp` in the order in which one uses them."""

SEE = {
    "mmfsdp.ShardConfig": "[configuration](configuration.md)",
    "mmfsdp.rehearse": "[rehearsal](../explanation/rehearsal.md)",
    "mmfsdp.fit": "[fit](../howto/fit.md)",
    "mmfsdp.compare": "[parity](../explanation/parity.md)",
    "mmfsdp.build_optimizer": "[Muon](../explanation/muon.md)",
    "mmfsdp.watch_ranks": "[ranks that stop](../howto/multi_node.md#ranks-that-stop)",
    "mmfsdp.init_process_group": "[restarts](../howto/multi_node.md#restarts)",
    "mmfsdp.AveragedModel": "[averaged weights](../howto/ema.md)",
    "mmfsdp.CheckpointManager": "[saving and resuming a run](../howto/resume.md)",
    "mmfsdp.DataPosition": "[the position in the data](../howto/resume.md#the-position-in-the-data)",
    "mmfsdp.patient_workers": "[when a scheduler ends the job](../howto/resume.md#when-a-scheduler-ends-the-job)",
    "mmfsdp.planning.estimate_memory": "[memory from the plan](../explanation/rehearsal.md#from-the-plan-alone)",
    "mmfsdp.sharding.apply_activation_checkpointing": "[activation checkpointing]"
    "(../explanation/activation_checkpointing.md)",
    "mmfsdp_mmengine.MuonConstructor": "[Muon](../explanation/muon.md)",
}
"""Pages about single names."""

SHORT = {"Conversion", "Watch"}
"""Classes whose docstrings describe their fields, beside config models and errors."""

ABOUT_ERRORS = """
All derive from `MmfsdpError`, which has a `message` and a `context` (config path, module name, file, rank), and from
the built-in error that code written for torch or MMEngine catches:

"""


def page(name: str) -> str:
    """Return the text of a page."""
    return "\n".join([HEADS[name], *map(_section, PAGES[name])])


def _section(package: str) -> str:
    module = importlib.import_module(package)
    names = [name for name in module.__all__ if name != "__version__"]
    if module is mmfsdp:
        order = ORDER.split()
        names.sort(key=lambda name: order.index(name) if name in order else len(order))
    own = [name for name in names if module is mmfsdp or not _is_exported_above(module, name)]
    intro = INTROS.get(package) or " ".join([_plain(_first_sentence(module.__doc__)), MORE.get(package, "")]).strip()
    rows = [f"| `{name}` | {_row(module, name)} |" for name in names]
    directives = [line for name in own for line in _directive(module, name)]
    return "\n".join(
        [
            f"## {package}\n",
            intro,
            *([ABOUT_ERRORS + _kinds()] if module is errors else []),
            "\n| name | what it is |\n|---|---|",
            *rows,
            "\n```{eval-rst}",
            *directives,
            "```\n",
        ]
    )


def _is_exported_above(module: ModuleType, name: str) -> bool:
    return name in mmfsdp.__all__ and getattr(mmfsdp, name) is getattr(module, name)


def _row(module: ModuleType, name: str) -> str:
    if module is not mmfsdp and _is_exported_above(module, name):
        return f"The same as `mmfsdp.{name}`."
    text = _plain(_first_sentence(_docstring(module, name))).replace("|", r"\|")
    see = SEE.get(f"{module.__name__}.{name}")
    return f"{text} See {see}." if see else text


def _directive(module: ModuleType, name: str) -> Iterable[str]:
    thing, path = getattr(module, name), f"{module.__name__}.{name}"
    if not _has_docstring(thing):
        yield f".. py:data:: {path}\n"
        yield from (f"   {line}".rstrip() for line in inspect.cleandoc(_docstring(module, name)).splitlines())
        yield ""
        return
    yield f".. auto{'class' if isinstance(thing, type) else 'function'}:: {path}"
    if isinstance(thing, type) and (issubclass(thing, BaseModel | BaseException) or name in SHORT):
        yield "   :no-members:"


def _has_docstring(thing: Any) -> bool:
    return isinstance(thing, type) or inspect.isroutine(thing)


def _docstring(module: ModuleType, name: str) -> str:
    """Return the docstring of a public name; that of data is the text below its assignment.

    Raises:
        ValueError: It has none.
    """
    thing = getattr(module, name)
    text = inspect.getdoc(thing) if _has_docstring(thing) else _docstring_of_data(module, name)
    if not text:
        raise ValueError(f"{module.__name__}.{name} has no docstring.")
    return text


def _docstring_of_data(module: ModuleType, name: str) -> str | None:
    folder = Path(str(module.__file__)).parent
    for path in sorted(folder.rglob("*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        for statement, after in itertools.pairwise(body):
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            if not any(isinstance(target, ast.Name) and target.id == name for target in targets):
                continue
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                return str(after.value.value)
    return None


def _first_sentence(text: str | None) -> str:
    paragraph = " ".join((text or "").strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.?])\s+(?=[A-Z`])", paragraph, maxsplit=1)[0]


def _plain(text: str) -> str:
    """Return text of a docstring as Markdown."""
    return text.replace("``", "`")


def _kinds() -> str:
    """Return the built-in errors that ours derive from, each with those of ours that derive from it at once."""
    found: dict[str, list[str]] = {}
    for name in errors.__all__:
        kind = getattr(errors, name)
        if isinstance(kind, type) and issubclass(kind, Exception):
            for base in kind.__bases__:
                if base.__module__ == "builtins" and base is not Exception:
                    found.setdefault(base.__name__, []).append(name)
    return "\n".join(f"- `{kind}`: {', '.join(f'`{name}`' for name in names)}" for kind, names in found.items())


if __name__ == "__main__":
    for name in PAGES:
        (FOLDER / name).write_text(page(name), encoding="utf-8")
