"""Builds the model that the command line names, from a factory or a config."""

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
    """Return ``KEY=VALUE`` texts as a dict; a value that is not JSON is text.

    Raises:
        BadParameter: A text has no ``=`` or no key.
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
    """Import modules from the current directory too, as ``python -m`` does, and send their output to stderr."""
    gc.enable()  # unlike reading metadata, frameworks leave garbage
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


def reference_of(
    reference: Path | str | None, model: str | None, arguments: Sequence[str]
) -> Path | str | Layout | None:
    """Return the checkpoint or model that gives the shapes, or None."""
    if reference is not None and model is not None:
        raise click.BadParameter("give --reference or --model, not both", param_hint="--model")
    if model is None:
        if arguments:
            raise click.BadParameter("needs --model", param_hint="--model-arg")
        return reference
    from mmfsdp.basics import require_torch

    require_torch("--model")
    built, _ = model_of(model, arguments)
    from mmfsdp.checkpoint import layout_of_model

    return layout_of_model(built)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)
