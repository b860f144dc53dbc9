"""Finds devices by their names and in files, and writes them to files."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mmfsdp.errors import ConfigError, closest
from mmfsdp.rehearsal.timing.device_presets import PRESETS
from mmfsdp.rehearsal.timing.device_specs import UNKNOWN, Device
from mmfsdp.rehearsal.timing.links import Link, Links, links_of
from mmfsdp.rehearsal.timing.ranges import Range

__all__ = ["device_of", "devices", "target_of", "write_device"]

_RANGES = ("products", "attention", "attention_backward", "streaming", "copies", "host", "issue", "spread")


def devices() -> tuple[str, ...]:
    """Return the names of the devices that `mmfsdp.rehearsal.Rehearsal.time` knows."""
    return tuple(PRESETS)


def device_of(device: str | Path | Device) -> Device:
    """Return a device by its name, or from a TOML file that a calibration wrote.

    Args:
        device: The device, its name or file; after ``@`` the network between nodes: ``'h100@roce-200'``.

    Raises:
        ConfigError: There is no such device or network, or the file is not one of a calibration.
    """
    if isinstance(device, Device):
        return device
    text, _, network = str(device).partition("@")
    if network or str(device).endswith("@"):
        found = device_of(text)
        return replace(found, name=f"{found.name}@{network}", links=links_of(network, found.links))
    if text.lower() in PRESETS:
        return PRESETS[text.lower()]
    if text.endswith(".toml"):
        return _read(Path(text))
    hint = closest(text, PRESETS) or f" Known: {', '.join(PRESETS)}."
    raise ConfigError(
        f"{text!r} is not a device that is known.{hint} Or give the TOML file of a calibration.", config="device"
    )


def target_of(device: str | Device | None, device_type: str | None) -> tuple[Device | None, str]:
    """Return the device to train on and its type; without either, a GPU that is not known.

    Args:
        device: See `device_of`.
        device_type: ``'cuda'``, ``'cpu'`` or another type of torch; None for the device's own.

    Raises:
        ConfigError: There is no such device, or it is of another type.
    """
    known = None if device is None else device_of(device)
    if known is None:
        return None, device_type or "cuda"
    if device_type not in (None, known.type):
        raise ConfigError(
            f"{known.name} is of type {known.type!r}, but device_type is {device_type!r}. Drop one of them."
        )
    return known, known.type


def write_device(device: Device, path: str | Path) -> None:
    """Write a device as TOML, for `device_of`. The file appears whole.

    Args:
        device: The device.
        path: A file whose name ends in ``.toml``; one that exists is replaced.

    Raises:
        ConfigError: The name ends otherwise.
    """
    path = Path(path)
    if path.suffix != ".toml":
        raise ConfigError(f"The file of a device ends in .toml, got {str(path)!r}.", config="path")
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text("\n".join(_lines("", asdict(device))) + "\n", encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _lines(table: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a table, nested tables last."""
    for name, value in values.items():
        if not isinstance(value, Mapping) and value is not None:
            yield f"{json.dumps(name)} = {json.dumps(value)}"
    for name, value in values.items():
        if isinstance(value, Mapping):
            inner = f"{table}.{json.dumps(name)}" if table else json.dumps(name)
            yield from ("", f"[{inner}]", *_lines(inner, value))


def _read(path: Path) -> Device:
    try:
        values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        links = values.pop("links")
        within, between = Link(**links.pop("within")), Link(**links.pop("between"))
        reached = Range(*links.pop("reached"))
        values |= {name: Range(*values[name]) for name in _RANGES if name in values}
        values["capability"] = tuple(values.get("capability", UNKNOWN))
        return Device(**values, links=Links(within, between, reached=reached, **links))
    except OSError as error:
        raise ConfigError(f"The device in {str(path)!r} cannot be read: {error.strerror}.", config="device") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{str(path)!r} is not a device that a calibration wrote: {type(error).__name__}: {error}. Write one with "
            "mmfsdp.rehearsal.write_device().",
            config="device",
        ) from error
