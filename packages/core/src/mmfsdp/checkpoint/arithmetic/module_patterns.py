"""Finds the modules that the patterns of an adapter's config mean, however long its regular expressions would take."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmfsdp.errors import CorruptCheckpointError

__all__ = ["of_modules"]

_LIMIT = 20.0  # seconds for all names and patterns of a table; what people write takes milliseconds
_PLAIN = re.compile(r"\^?[\w.\\-]*\$?")  # names, with dots escaped or not: no repetition, so no backtracking
_CLASSES = re.compile(r"\\(?![.\-])")  # an escape that is more than a dot

# peft matches so (`get_pattern_key` in src/peft/utils/other.py). Python's regular expressions can neither be stopped
# nor bounded, so a file's patterns run in a process of their own, which can be ended.
_SCRIPT = """
import json, re, sys
names, patterns = json.load(sys.stdin)
rules = []
for number, pattern in enumerate(patterns):
    try:
        rules.append(re.compile(rf"(.*\\.)?({pattern})$"))
    except (re.error, RecursionError, OverflowError) as error:
        sys.exit(json.dump([number, str(error)], sys.stdout))
json.dump([next((i for i, rule in enumerate(rules) if rule.match(name)), None) for name in names], sys.stdout)
"""


def of_modules(modules: Sequence[str], table: Mapping[str, Any], setting: str, config: Path) -> dict[str, Any]:
    """Return what a table of patterns gives each module: the value of the first that matches the end of its name.

    Args:
        modules: The names of the modules.
        table: Patterns to values; as in peft, patterns are regular expressions.
        setting: The name of the table, for messages.
        config: The file with the table, for messages.

    Raises:
        CorruptCheckpointError: A pattern is malformed, or matching takes far longer than it should for any config.
    """
    patterns = [*table]
    if all(_PLAIN.fullmatch(pattern) and not _CLASSES.search(pattern) for pattern in patterns):
        rules = [re.compile(rf"(.*\.)?({pattern})$") for pattern in patterns]
        indices = [next((i for i, rule in enumerate(rules) if rule.match(name)), None) for name in modules]
    else:
        indices = _matched(modules, patterns, setting, config)
    return {name: table[patterns[index]] for name, index in zip(modules, indices, strict=True) if index is not None}


def _matched(modules: Sequence[str], patterns: Sequence[str], setting: str, config: Path) -> list[int | None]:
    command = [sys.executable, "-I", "-S", "-c", _SCRIPT]
    given = json.dumps([modules, patterns])
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=_LIMIT, check=False)
    except subprocess.TimeoutExpired:
        raise CorruptCheckpointError(
            f"The regular expressions of {setting!r} in {config.name} take more than {_LIMIT:.0f} s for "
            f"{len(modules)} names. Write the names of the modules instead.",
            file=str(config),
        ) from None
    answer = json.loads(done.stdout) if done.returncode == 0 and done.stdout else None
    if not isinstance(answer, list) or (len(answer) == 2 and isinstance(answer[1], str)):
        pattern, reason = (repr(patterns[answer[0]]), answer[1]) if answer else ("", done.stderr.strip()[-200:])
        raise CorruptCheckpointError(
            f"{config.name} holds the pattern {pattern}, which is malformed: {reason}.", file=str(config)
        )
    return answer
