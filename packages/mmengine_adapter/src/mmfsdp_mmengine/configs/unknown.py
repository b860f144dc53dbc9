"""Refuses arguments in configs that nothing accepts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from mmfsdp.errors import ConfigError, closest

__all__ = ["refuse_unknown"]


def refuse_unknown(
    owner: str,
    given: Iterable[str],
    known: Collection[str],
    config: str,
    others: Mapping[str, str] | None = None,
    advice: Callable[[str, Collection[str]], str] | None = None,
) -> None:
    """Raise for the first argument that a class does not accept.

    Args:
        owner: The name of the class, for the message.
        given: Names of arguments.
        known: Names of the arguments that the class accepts.
        config: Dotted path of the setting that holds the arguments.
        others: What to say of arguments that belong elsewhere, by name: a sentence.
        advice: Returns what to write for a name that another library gave an argument, or an empty string.

    Raises:
        ConfigError: An argument is unknown; the error suggests the nearest names, or says where it belongs.
    """
    for name in given:
        if name not in known:
            if others and name in others:
                raise ConfigError(f"{owner} has no argument {name!r}. {others[name]}", config=f"{config}.{name}")
            hint = advice(name, known) if advice is not None else ""
            hint = hint or f"{closest(name, known)} Accepted: {', '.join(known) or 'none'}."
            raise ConfigError(f"{owner} has no argument {name!r}.{hint}", config=f"{config}.{name}")
