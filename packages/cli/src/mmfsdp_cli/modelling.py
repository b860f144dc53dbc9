"""Models on the command line: what a name, its arguments and the current directory make of it."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import torch.nn as nn

    from mmfsdp.checkpoint import Layout
    from mmfsdp.frontends import ReadConfig

__all__ = ["key_values", "model_of", "reference_of", "running_user_code"]


def key_values(texts: Sequence[str], option: str) -> dict[str, Any]:
    """Return ``KEY=VALUE`` texts as a dict; a value is JSON where it can be read as such, else text.

    Raises:
        BadParameter: One has no sign, or no key.
    """
    found: dict[str, Any] = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not sign or not key.strip():
            raise click.BadParameter(f"{text!r} is not of the form KEY=VALUE.", param_hint=option)
        found[key.strip()] = _value(value)
    return found


@contextmanager
def running_user_code() -> Iterator[None]:
    """Let modules in the current directory be imported, as ``python -m`` does, and what they print go to stderr."""
    gc.enable()  # frameworks make garbage, unlike metadata
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    with redirect_stdout(sys.stderr):
        yield


def model_of(name: str, arguments: Sequence[str]) -> tuple[nn.Module, ReadConfig | None]:
    """Build a model, its parameters on the meta device; see `mmfsdp.frontends.build_model`."""
    given = key_values(arguments, "--model-arg")
    with running_user_code():
        from mmfsdp.frontends import build_model

        return build_model(name, given)


def reference_of(reference: Path | None, model: str | None, arguments: Sequence[str]) -> Path | Layout | None:
    """Return where shapes come from: a checkpoint, a model, or nowhere."""
    if reference is not None and model is not None:
        raise click.BadParameter("give --reference or --model, not both", param_hint="--model")
    if model is None:
        if arguments:
            raise click.BadParameter("needs --model", param_hint="--model-arg")
        return reference
    built, _ = model_of(model, arguments)
    from mmfsdp.checkpoint import layout_of_model

    return layout_of_model(built)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)
