"""Writes docs/reference/cli.md, the reference of the command line, from the commands themselves.

``python tools/cli_reference.py`` reads help texts, options and defaults from click. The fields of ``--json`` are here,
each with one meaning for all commands; tests compare them with what the commands print.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import click

from mmfsdp_cli.main import app

__all__ = ["FIELDS", "JSON", "PAGE", "VARIABLES", "page"]

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "cli.md"

HEAD = """# Command line

On this page you look up the commands of `mmfsdp-cli`, with their arguments, options, exit codes and JSON. `python
tools/cli_reference.py` writes it from the commands; `mmfsdp-cli COMMAND --help` prints the same.
"""

COMPLETION = """## Completion

bash, zsh and fish complete commands, options and values such as formats and devices once the shell has read what
`mmfsdp-cli completion` prints:

| shell | what to do |
|---|---|
| bash | put `eval "$(mmfsdp-cli completion bash)"` into `~/.bashrc` |
| zsh | put `eval "$(mmfsdp-cli completion zsh)"` into `~/.zshrc` |
| fish | run `mmfsdp-cli completion fish > ~/.config/fish/completions/mmfsdp-cli.fish` |

`_MMFSDP_CLI_COMPLETE=bash_source mmfsdp-cli` prints the same for bash.
"""

VARIABLES = {
    "NO_COLOR": "Print no colours, as with `TERM=dumb`. Pipes and files get none anyway.",
    "MMFSDP_REMOTE_TIMEOUT": "Seconds to wait for a server that does not answer; 30 by default. "
    "[URLs](../howto/remote.md) also heed proxies and the variables of their drivers.",
    "MMFSDP_TIMEOUT": "Seconds that ranks of `measure` and `prove` wait for each other; an hour by default.",
    "WORLD_SIZE": "Set by torchrun: `measure` and `prove` run on its ranks.",
    "CUBLAS_WORKSPACE_CONFIG": "`rehearse` and `fit` count these workspaces, as torch does.",
    "NCCL_BUFFSIZE": "`rehearse` and `fit` count buffers of this size.",
    "OPENBLAS_NUM_THREADS": "1, unless it is set: commands divide the work among threads of their own.",
}
"""The environment variables that commands heed."""

_NUMBER, _SHARE, _TEXT, _FLAG, _LIST, _OBJECT = "integer", "number", "text", "boolean", "list", "object"

FIELDS = {
    "a": (_TEXT, "The first of two checkpoints or runs."),
    "about": (_TEXT, "The libraries that a recipe converts between."),
    "against": (_TEXT, "The reference of a proof: `alone` or `ddp`."),
    "aliases": (_LIST, "Other names of a format."),
    "assumed": (_LIST, "Changes that made two runs comparable."),
    "b": (_TEXT, "The second of two checkpoints or runs."),
    "bytes": (_NUMBER, "Bytes of tensor data."),
    "bytes_read": (_NUMBER, "Bytes of tensor data that are read from the source."),
    "casts": (_OBJECT, "New dtypes, by the names of tensors."),
    "checked_bytes": (_NUMBER, "Bytes that were compared with a checksum."),
    "children": (_LIST, "The parts of names below this one, with the same fields."),
    "chunks": (_LIST, "Where a tensor is stored: `file`, `offset`, `bytes`, `box_offsets`, `box_sizes`, `crc32`."),
    "compared": (_NUMBER, "Number of tensors whose values were compared."),
    "config": (_TEXT, "The config that was read."),
    "considered": (_NUMBER, "Combinations of settings that are possible."),
    "content": (
        _OBJECT,
        "What lies under each top-level key: `num_tensors` and `bytes`, `num_values` and `names`, or `value`.",
    ),
    "conversion": (_OBJECT, "The settings of a conversion, as `convert --config` takes them."),
    "description": (_TEXT, "A format in a few words."),
    "device": (_OBJECT, "A GPU or CPU: `name`, `type`, `memory_bytes`, `bandwidth`, `capability`, `links`, `source`."),
    "device_type": (_TEXT, "Type of the device in torch, such as `cuda`."),
    "differences": (_LIST, "Tensors that differ by more than they may, in the order of computation."),
    "dropped": (_LIST, "Parts of the source that are not in the target."),
    "dry_run": (_FLAG, "Whether nothing was written."),
    "dtype": (_TEXT, "Dtype of a tensor."),
    "dtypes": (_LIST, "Tensors whose dtypes differ: `name`, `a`, `b`."),
    "elements": (_NUMBER, "Number of elements of a tensor."),
    "error": (_OBJECT, "Why a command failed: `type`, `message`, `context`, `exit_code`. It is the only field then."),
    "evaluated": (_FLAG, "Whether evaluations were compared, too."),
    "faster": (_OBJECT, "The fastest settings that do not fit, with the `reason`; null if the fastest of all fit."),
    "files": (_OBJECT, "Bytes of tensor data, by the files that hold them; an empty name is the target itself."),
    "findings": (_LIST, "What to know about a config: `level`, `setting`, `here`, `stock`, `advice`."),
    "format": (_TEXT, "Name of a checkpoint's format; null if it could not be opened."),
    "free_bytes": (_NUMBER, "Bytes free on the target's disk."),
    "impossible": (_NUMBER, "Combinations of settings that are not possible."),
    "infs": (_NUMBER, "Number of infinities."),
    "left_out": (_LIST, "Top-level keys that were not compared."),
    "manifest": (_FLAG, "Whether there is a manifest of checksums."),
    "margin": (_SHARE, "Share of the device's memory that is left free."),
    "max": (_SHARE, "Largest element; null if there is none."),
    "mean": (_SHARE, "Mean of the elements; null if there is none."),
    "measured": (
        _OBJECT,
        "Real steps: `mesh`, `rank`, `step_seconds`, `peak_bytes`.",
    ),
    "memory": (
        _OBJECT,
        "Bytes of a step without activations, null without a plan: `rank`, `parameters`, `buffers`, `gradients`, "
        "`optimizer`, `optimizer_state`, `gathered`, `reducing`, `on_cpu`, `total`.",
    ),
    "memory_bytes": (_NUMBER, "Bytes of memory of the device."),
    "min": (_SHARE, "Smallest element; null if there is none."),
    "model": (_TEXT, "The model that was proven."),
    "name": (_TEXT, "Name of a tensor, of a part of names, of a format or of a recipe."),
    "nans": (_NUMBER, "Number of NaNs."),
    "needs": (_LIST, "Numbers that a recipe needs, from `config.json` or `--recipe-value`."),
    "norm": (_SHARE, "Root of the sum of the elements' squares."),
    "notes": (_LIST, "Other facts that the reader should know, as sentences."),
    "num_differing": (_NUMBER, "Number of tensors that differ, those included that only one checkpoint has."),
    "num_tensors": (_NUMBER, "Number of tensors; of two checkpoints, those that either has."),
    "ok": (_FLAG, "Whether nothing is wrong, as far as it could be checked."),
    "only_in_a": (_LIST, "Names of tensors that only the first has."),
    "only_in_b": (_LIST, "Names of tensors that only the second has."),
    "options": (_LIST, "Settings that fit, the fastest first, with `seconds` of a step and `nbytes` of the device."),
    "other": (_LIST, "Content that is not a tensor and differs: `name`, `a`, `b`."),
    "overflowed": (_OBJECT, "Numbers of elements that were too large for the new dtype, by the names of tensors."),
    "path": (_TEXT, "The file or directory that was read or written."),
    "plan": (
        _OBJECT,
        "How the model is sharded, as `mmfsdp.ShardPlan.from_json` reads it; null without one.",
    ),
    "plan_is_suggested": (_FLAG, "Whether the plan follows advice, because the config shards nothing."),
    "prefix": (_TEXT, "A prefix without which most names would match; empty if there is none."),
    "problems": (_LIST, "Defects: `message`, `file`, `offset`."),
    "proven": (_FLAG, "Whether everything that was compared is equal."),
    "quantized": (_FLAG, "Whether only one has weights as 8-bit codes with scales."),
    "ranks": (_NUMBER, "Number of ranks."),
    "reads": (_FLAG, "Whether a format can be read."),
    "recipe": (_OBJECT, "The recipe itself."),
    "rehearsal": (_OBJECT, "A step: its `peak`, `timeline`, `collectives` and more, sizes in bytes."),
    "rehearsed": (_NUMBER, "Steps that were rehearsed."),
    "renamed": (_OBJECT, "New names, by the old ones."),
    "resumed": (_OBJECT, "The comparison of the steps after the checkpoint, as `mmfsdp-cli compare` prints it."),
    "resumed_on": (_NUMBER, "Number of ranks after the checkpoint."),
    "room": (_NUMBER, "Bytes of the device that a step may take."),
    "same": (_FLAG, "Whether no difference was found."),
    "scope": (_TEXT, "The part that was compared: `all`, `model` or a top-level key."),
    "seconds": (_SHARE, "Seconds that the command took."),
    "shape": (_LIST, "Shape of a tensor."),
    "shapes": (_LIST, "Tensors whose shapes differ: `name`, `a`, `b`."),
    "skipped": (_OBJECT, "Numbers of tensors that were not compared, by the reasons."),
    "smallest": (_OBJECT, "The settings that need least memory, with the `reason`; null if any fit."),
    "steps": (_NUMBER, "Number of steps before the checkpoint, and after it."),
    "suffixes": (_LIST, "Suffixes of a target that ask for a format."),
    "tensor": (_TEXT, "Whole name of the tensor that ends here."),
    "tensors": (_LIST, "The tensors: `name`, `dtype`, `shape`, `num_chunks`, `bytes`."),
    "time": (_OBJECT, "Time of a step: `seconds`, `low`, `high` and what they are spent on; with `--device`."),
    "trained": (_OBJECT, "The comparison of the steps before the checkpoint, as `mmfsdp-cli compare` prints it."),
    "unchecked": (_LIST, "What could not be checked, and why, as sentences."),
    "values": (_LIST, "Tensors whose values differ: `name`, `elements`, `differing`, `max_abs`, `max_rel`, `decades`."),
    "verified": (_FLAG, "Whether the output was read again and compared."),
    "versions": (_OBJECT, "Versions of what computed."),
    "world_size": (_NUMBER, "Number of ranks that wrote the checkpoint."),
    "world_sizes": (_LIST, "Number of ranks of both runs."),
    "writes": (_FLAG, "Whether a format can be written."),
    "zeros": (_NUMBER, "Number of zeros."),
}
"""Each field of ``--json`` at the top, with its type and its meaning, which is the same in every command."""

_WRITTEN = """num_tensors path format conversion bytes bytes_read files free_bytes dropped renamed casts overflowed
notes verified dry_run seconds"""
_TENSOR = "name dtype shape"

JSON = {
    "inspect": "path format world_size num_tensors bytes content tensors notes",
    "inspect --tree": "name num_tensors bytes children? tensor? dtype? shape?",
    "inspect --tensor": f"{_TENSOR} chunks",
    "inspect --tensor --stats": f"{_TENSOR} elements min max mean norm zeros nans infs",
    "convert": _WRITTEN,
    "average": _WRITTEN,
    "merge-lora": _WRITTEN,
    "delta": _WRITTEN,
    "apply-delta": _WRITTEN,
    "verify": "ok num_tensors checked_bytes path format manifest problems unchecked seconds",
    "diff": """same num_tensors num_differing a b scope compared only_in_a only_in_b shapes dtypes values other left_out
    seconds prefix quantized""",
    "compare": "a b world_sizes same compared differences skipped notes",
    "formats": "name description reads writes suffixes aliases",
    "recipes": "name about needs path recipe?",
    "plan": "plan plan_is_suggested memory",
    "rehearse": "plan plan_is_suggested memory rehearsal time?",
    "fit": "memory_bytes margin room ranks considered impossible rehearsed device options faster smallest",
    "measure": "plan plan_is_suggested memory rehearsal time measured",
    "prove": "model ranks steps resumed_on proven trained resumed versions evaluated assumed device_type against",
    "doctor": "config ok findings plan plan_is_suggested memory",
}
"""The fields that each command prints with ``--json``; those with a question mark are not always there."""

WRITING = ("convert", "average", "merge-lora", "delta", "apply-delta")
_CODES = "Exit codes: "


def page() -> str:
    """Return the text of the page."""
    context = click.Context(app)
    commands = {name: command for name in app.list_commands(context) if (command := app.get_command(context, name))}
    everywhere = _common(command for name, command in commands.items() if name != "completion")
    writing = _common(commands[name] for name in WRITING) - everywhere
    parts = [HEAD, _everywhere(commands, everywhere), COMPLETION, _needs(commands), _variables()]
    for name, command in commands.items():
        parts.append(_command(name, command, everywhere | writing if name in WRITING else everywhere))
    return "\n".join([*parts, _writing(commands["convert"], writing), _fields()])


def _common(commands: Iterable[click.Command]) -> set[str]:
    """Return the options that all of some commands have."""
    return set.intersection(*({*_options(command)} for command in commands))


def _options(command: click.Command) -> dict[str, click.Option]:
    return {max(param.opts, key=len): param for param in command.params if isinstance(param, click.Option)}


def _everywhere(commands: Mapping[str, click.Command], shared: set[str]) -> str:
    options = {name: option for command in commands.values() for name, option in _options(command).items()}
    [codes] = [text for text in _paragraphs(app.epilog) if text.startswith(_CODES)]
    rows = [code.split(" ", 1) for code in codes.removeprefix(_CODES).rstrip(".").split("; ")]
    return f"""## Every command

All take these options; only `completion` has no `--json`.

| option | what it does |
|---|---|
{_rows(options[name] for name in sorted(shared))}
| `-h`, `--help` | Print the help. |

| exit code | meaning |
|---|---|
{_lines(f"| {code} | {meaning} |" for code, meaning in rows)}
| 130, 143 | stopped by Ctrl-C, or by SIGTERM |

Sizes in text have binary units: B, KiB, MiB, GiB, TiB. Sizes that you give may have decimal ones, too, such as `5GB`.
In JSON, sizes are whole numbers of bytes.
"""


def _needs(commands: Mapping[str, click.Command]) -> str:
    rows = []
    for what in ("torch", "numpy"):
        phrase = f"Needs {what}."
        whole = [name for name, command in commands.items() if phrase in (command.help or "")]
        parts: dict[str, list[str]] = {}
        for name, command in commands.items():
            for option, param in _options(command).items():
                if name not in whole and phrase in (param.help or ""):
                    parts.setdefault(option, []).append(name)
        given = [f"`{option}` of {', '.join(names)}" for option, names in parts.items()]
        rows.append(f"| {what} | {', '.join(whole)} | {'; '.join(given)} |")
    return f"""## What needs torch or numpy

No other command needs either. `doctor`, and any command given an MMEngine config, also needs `mmfsdp-mmengine`.
[Install](../howto/install.md) names the packages.

| needs | commands | options |
|---|---|---|
{_lines(rows)}
"""


def _variables() -> str:
    return f"""## Environment variables

| variable | what it does |
|---|---|
{_lines(f"| `{name}` | {text} |" for name, text in VARIABLES.items())}
"""


def _command(name: str, command: click.Command, known: set[str]) -> str:
    *texts, last = map(_marked, _paragraphs(command.help))
    codes = last if last.startswith(_CODES) else ""
    arguments = [param for param in command.params if isinstance(param, click.Argument)]
    own = [option for option_name, option in _options(command).items() if option_name not in known]
    usage = command.get_usage(click.Context(command, info_name=f"mmfsdp-cli {name}")).removeprefix("Usage: ")
    parts = [f"## {name}\n", "\n\n".join([*texts, *([] if codes else [last])]), f"\n`{' '.join(usage.split())}`\n"]
    if arguments or own:
        parts += ["| argument or option | what it is |\n|---|---|"]
        parts += [
            f"| `{(param.name or '').upper()}` | {_cell(_marked(getattr(param, 'help', '')))} |" for param in arguments
        ]
        parts += [*([_rows(own)] if own else []), ""]
    if name in WRITING:
        parts.append(
            "It also takes the [options of every command that writes](#options-of-every-command-that-writes).\n"
        )
    printed = {key: fields.replace("?", "").split() for key, fields in JSON.items() if key.split()[0] == name}
    shown = [f"- `{key} --json`: {', '.join(f'`{field}`' for field in fields)}" for key, fields in printed.items()]
    return "\n".join([*parts, *([f"{codes}\n"] if codes else []), *([*shown, ""] if shown else [])])


def _writing(command: click.Command, names: set[str]) -> str:
    return f"""## Options of every command that writes

| option | what it is |
|---|---|
{_rows(option for name, option in _options(command).items() if name in names)}
"""


def _fields() -> str:
    return f"""## Fields of JSON

Each field has one meaning, whichever command prints it. `formats` and `recipes` print a list of objects. These fields
are not always there: {", ".join(f"`{field}`" for field in sorted(_optional()))}.

| field | type | meaning |
|---|---|---|
{_lines(f"| `{name}` | {kind} | {_cell(text)} |" for name, (kind, text) in FIELDS.items())}
"""


def _optional() -> set[str]:
    return {field.rstrip("?") for fields in JSON.values() for field in fields.split() if field.endswith("?")}


def _rows(options: Iterable[click.Option]) -> str:
    return _lines(
        f"| {_spelling(option)} | {_cell(_marked(option.help or ''))}{_default(option)} |" for option in options
    )


def _spelling(option: click.Option) -> str:
    if isinstance(option.type, click.Choice):
        value = f" {'|'.join(map(str, option.type.choices))}"
    else:
        value = "" if option.is_flag else f" {option.metavar}"
    *short, long = sorted(option.opts, key=len)
    return _cell(", ".join([*(f"`{name}`" for name in short), f"`{long}{value}`"]))


def _default(option: click.Option) -> str:
    is_set = not option.is_flag and not option.multiple and isinstance(option.default, (int, float, str))
    return f" Default: `{option.default}`." if is_set and option.default != "" else ""


def _paragraphs(text: str | None) -> list[str]:
    return [" ".join(part.split()) for part in (text or "").split("\n\n")]


def _marked(text: str) -> str:
    """Return text of a help with options and what is to be typed as code: quotes and hyphens stay as they are."""
    return re.sub(r"""torchrun .*? \.\.\.|eval "[^"]*"|'[^']*=[^']*'|(?<!\S)--[a-z][a-z-]*""", r"`\g<0>`", text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _lines(texts: Iterable[str]) -> str:
    return "\n".join(texts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
