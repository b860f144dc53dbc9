"""How messages write an argument: as Python does, or as the option of the command line that stands for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

__all__ = ["argument", "arguments_written_as"]

# Of the whole process and not of a context, as readers raise in threads of their own.
_options: Mapping[str, str] = {}


def argument(name: str, value: object = None, *, python: str | None = None) -> str:
    """Return how the user writes an argument of a function or a setting of a conversion, for a message.

    Args:
        name: The argument.
        value: Its value; None speaks of the argument alone.
        python: What Python's users write, if it is neither the quoted name nor ``name=value``.

    Example:
        >>> argument("dtype"), argument("keep", "model"), argument("inverse", True)
        ("'dtype'", "keep='model'", 'inverse=True')
    """
    option = _options.get(name)
    if option is None:
        return python or repr(name) if value is None else f"{name}={value!r}"
    return option if value is None or isinstance(value, bool) else f"{option} {value!r}"


@contextmanager
def arguments_written_as(options: Mapping[str, str]) -> Iterator[None]:
    """Let messages of this process, in all its threads, speak of options in place of arguments.

    Args:
        options: The options of a command, by the arguments that they stand for.
    """
    global _options
    before, _options = _options, options
    try:
        yield
    finally:
        _options = before
