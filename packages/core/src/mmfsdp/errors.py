"""Every error that mmfsdp raises on purpose, each saying where the mistake is and what to write instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = [
    "CheckpointError",
    "CheckpointNotFoundError",
    "CheckpointPermissionError",
    "ConfigError",
    "CorruptCheckpointError",
    "FormatError",
    "FrozenParametersError",
    "GradScalerError",
    "IncompleteCheckpointError",
    "LostRankError",
    "MeshError",
    "MissingTorchAttributeError",
    "MissingTorchError",
    "MissingTorchImportError",
    "MmfsdpError",
    "OptimizerStepError",
    "PlanError",
    "PlanMismatchError",
    "PolicyError",
    "PolicyNotFoundError",
    "RankMismatchError",
    "RehearsalError",
    "RunDirectoryError",
    "ShardStateError",
    "StateDictError",
    "UnknownDtypeError",
    "UnknownTorchError",
    "UnsafePickleError",
    "UnsupportedCallError",
    "closest",
]


class MmfsdpError(Exception):
    """Base of all errors of this library.

    Args:
        message: What went wrong and what to write instead, one or more sentences.
        **context: Where it went wrong: ``config`` (dotted path), ``fqn``, ``file``, ``offset`` (bytes), ``rank``.
            Entries that are ``None`` or empty, as the root's name is, are dropped.

    Attributes:
        message: The message without its context.
        context: The context, as given.
    """

    def __init__(self, message: str, **context: object) -> None:
        self.message = message
        self.context: Mapping[str, object] = {key: value for key, value in context.items() if value not in (None, "")}
        super().__init__(message)

    def __str__(self) -> str:
        if not self.context:
            return self.message
        where = ", ".join(f"{key}={value!r}" for key, value in self.context.items())
        return f"{self.message} [{where}]"

    def __reduce__(self) -> tuple[object, ...]:
        # Errors travel between ranks and worker processes: keep the keyword context.
        return _rebuild, (type(self), self.message, dict(self.context))


def _rebuild(cls: type[MmfsdpError], message: str, context: dict[str, object]) -> MmfsdpError:
    return cls(message, **context)


class MissingTorchError(MmfsdpError):
    """torch is not installed, or it is older than mmfsdp supports.

    Imports raise it as an ``ImportError``, and ``mmfsdp.shard`` as an ``AttributeError``, so that ``hasattr`` is False.
    No class can derive from both.
    """


class MissingTorchImportError(MissingTorchError, ImportError):
    """A module or command that needs torch is imported or called without it."""


class MissingTorchAttributeError(MissingTorchError, AttributeError):
    """A public name that needs torch is looked up without it."""


class UnknownTorchError(MmfsdpError, RuntimeError):
    """The installed torch is newer than mmfsdp knows, and has changed where mmfsdp relies on it."""


class ConfigError(MmfsdpError, ValueError):
    """A setting is unknown, misspelt, of the wrong type, or cannot be honoured."""


class PolicyNotFoundError(ConfigError):
    """No registry and no module has the named wrapping policy or initialisation function."""


class PlanError(MmfsdpError, ValueError):
    """The configuration and the model do not fit together."""


class PolicyError(PlanError):
    """A wrapping policy matched nothing, or returned something other than a decision."""


class MeshError(PlanError):
    """A mesh, process group or shard size does not fit the world size or the sharding strategy."""


class FrozenParametersError(PlanError):
    """Frozen and trained parameters meet in one flat parameter (``use_orig_params=False``)."""


class PlanMismatchError(PlanError):
    """A plan is applied to a model or mesh that it was not made for."""


class OptimizerStepError(MmfsdpError, RuntimeError):
    """The update of a matrix cannot be computed, or is not finite."""


class ShardStateError(MmfsdpError, RuntimeError):
    """A sharded model is used in a state in which it would silently train incorrectly."""


class GradScalerError(ShardStateError):
    """fp16 training is about to start without a gradient scaler."""


class UnsupportedCallError(MmfsdpError, NotImplementedError):
    """A method of torch's FullyShardedDataParallel that cannot be carried out as called; says what to write instead."""


class RehearsalError(MmfsdpError, RuntimeError):
    """A step cannot be rehearsed: the model failed, or it needs the values of tensors."""


class RankMismatchError(MmfsdpError, RuntimeError):
    """Ranks were given different models, configurations or inputs, or ran different units."""


class LostRankError(MmfsdpError, RuntimeError):
    """While this rank waited for another one, that rank died, ran something else or did not answer in time."""


class StateDictError(MmfsdpError, RuntimeError):
    """Keys or shapes of a state dict do not fit the model or optimizer."""


class CheckpointError(MmfsdpError, RuntimeError):
    """A checkpoint cannot be read or written."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """The given path holds no checkpoint."""


class CheckpointPermissionError(CheckpointError, PermissionError):
    """The user of this process may not read a checkpoint, enter its directory, or write there."""


class FormatError(CheckpointError):
    """The file has no known format, or breaks the rules of its format."""


class UnknownDtypeError(FormatError):
    """A file holds a dtype that this version of mmfsdp does not know."""


class CorruptCheckpointError(CheckpointError):
    """The bytes of a checkpoint are damaged."""


class IncompleteCheckpointError(CheckpointError):
    """Parts of a checkpoint are missing: a rank's file, or a region of a tensor."""


class RunDirectoryError(CheckpointError):
    """The directory of a run belongs to another run or model, to a running job, or to a run that was not resumed."""


class UnsafePickleError(CheckpointError):
    """A pickle wants to import something that is not on the list of safe names."""


def closest(given: object, accepted: Iterable[object], *, count: int = 3, cutoff: float = 0.5) -> str:
    """Return ``" Did you mean 'x'?"`` for the nearest accepted spellings, or an empty string.

    Args:
        given: What the user wrote.
        accepted: The accepted spellings.
        count: The largest number of suggestions.
        cutoff: How alike a suggestion is at least, from 0 to 1: `difflib.get_close_matches` says how it is measured.
    """
    import difflib  # only when something is wrong

    spellings = {str(name).lower(): str(name) for name in accepted}
    matches = difflib.get_close_matches(str(given).lower(), spellings, n=count, cutoff=cutoff)
    if not matches:
        return ""
    return " Did you mean " + " or ".join(repr(spellings[match]) for match in matches) + "?"
