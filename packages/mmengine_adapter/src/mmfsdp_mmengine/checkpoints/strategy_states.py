"""The part of `FSDPStrategy` that saves, loads and resumes: all ranks succeed or all ranks raise."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import mmengine
from mmengine._strategy import DDPStrategy
from mmengine.utils import get_git_hash

from mmfsdp import load_model_state_dict, model_state_dict
from mmfsdp.collective import on_all_ranks, scope_of
from mmfsdp.errors import ConfigError, StateDictError
from mmfsdp.runtime import find_sharded_model
from mmfsdp.saving import (
    PendingSave,
    buffers_of_ranks,
    load_buffers_of_ranks,
    load_row,
    random_state,
    restore_random_state,
    rows_of_ranks,
    write_checkpoint,
)
from mmfsdp_mmengine.checkpoints.adapting import adapted
from mmfsdp_mmengine.checkpoints.averages import with_averages
from mmfsdp_mmengine.checkpoints.continuing import (
    Resumed,
    check_resumable,
    check_same_schedulers,
    optimizer_classes,
    scheduler_classes,
    warning_of_missing_state,
    warning_of_waiting_gradients,
)
from mmfsdp_mmengine.checkpoints.live_content import (
    describe_mismatch,
    load_content,
    load_optimizer_content,
    nothing_fits,
    optimizer_content,
    revised_keys,
    with_own_counters,
)
from mmfsdp_mmengine.checkpoints.pending import PendingWeights

__all__ = ["CheckpointingStrategy"]

_NO_PREFIX = [(r"^module.", "")]


class CheckpointingStrategy(DDPStrategy):
    """The part of `FSDPStrategy` that handles checkpoints.

    Args:
        kind: The kind of checkpoints to save: ``full``, ``local`` or ``sharded``.
        **kwargs: Arguments of MMEngine's DDPStrategy.
    """

    def __init__(self, kind: Literal["full", "local", "sharded"], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._kind = kind
        self._randomness: dict[str, Any]  # set by MMEngine
        self._pending: PendingWeights | None = None
        self._paused_at: bytes | None = None
        self._resumed: Resumed | None = None
        self._warned = False
        self._validates = False
        self.resumed_from: str | None = None
        """The checkpoint that training goes on from."""
        self._background = False
        self._into: Callable[[dict[str, Any]], PendingSave] | None = None
        self._written = PendingSave.over()
        self._offered: dict[str, Callable[[], dict[str, Any]]] = {}

    @property
    def writes_directories(self) -> bool:
        """Whether a checkpoint is a directory."""
        return self._kind != "full"

    def model_state_dict(self) -> dict[str, Any]:
        """Return the model's weights under their own names. Collective: every rank.

        Whole tensors on the first rank if checkpoints are ``full``, otherwise each rank's DTensors.
        """
        return model_state_dict(self.model, "full" if self._kind == "full" else "sharded")

    def optim_state_dict(self) -> dict[str, Any]:
        """Return the optimizer wrapper's state, of the same kind as `model_state_dict`. Collective: every rank."""
        return optimizer_content(self.model, self.optim_wrapper, self._kind)

    def load_model_state_dict(
        self, state_dict: dict[str, Any], *, strict: bool = False, revise_keys: Sequence[tuple[str, str]] = _NO_PREFIX
    ) -> None:
        """Load weights, and log keys and shapes that do not match. Collective: every rank.

        Args:
            state_dict: Whole tensors, or shards of this model. Not changed.
            strict: Raise if keys or shapes do not match; nothing is changed then.
            revise_keys: ``(pattern, replacement)`` pairs that change the keys first.

        Raises:
            StateDictError: With ``strict``, keys or shapes do not match; or no key is one of the model's, which
                MMEngine only logs. Raised on every rank.
        """
        offered = with_own_counters(self.model, revised_keys(state_dict, revise_keys))
        report = load_model_state_dict(self.model, offered, strict=strict, read_once=True)
        if report.missing and state_dict and len(report.unexpected) == len(state_dict):
            raise StateDictError(nothing_fits(report, type(find_sharded_model(self.model).module).__name__))
        if not report.clean:
            self.logger.warning(describe_mismatch(report))
        if self._pending is not None:
            self._pending.loaded(report.missing)

    def load_optim_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the optimizer wrapper's state, of either kind. Collective: every rank."""
        load_optimizer_content(self.model, self.optim_wrapper, state_dict)

    def load_checkpoint(
        self,
        filename: str,
        *,
        map_location: str | Callable[..., Any] = "cpu",
        strict: bool = False,
        revise_keys: Sequence[tuple[str, str]] = _NO_PREFIX,
        callback: Callable[[dict[str, Any]], Any] | None = None,
    ) -> dict[str, Any]:
        """Load a model's weights from a checkpoint of any kind and world size. Collective: every rank.

        Args:
            filename: A file or directory, or anything else that MMEngine loads from.
            map_location: The device for downloaded checkpoints; other checkpoints are read where they are needed.
            strict: Raise if keys or shapes do not match.
            revise_keys: ``(pattern, replacement)`` pairs that change the keys first.
            callback: Called on every rank with the content before it is used; may change it.

        Returns:
            The rest of the content.

        Raises:
            CheckpointError: The checkpoint cannot be read; raised on every rank.
            StateDictError: With ``strict``, keys or shapes do not match; raised on every rank.
        """
        self.logger.info(f"Load checkpoint from {filename}")

        scope = scope_of(None)
        offered = self._offered.pop(str(filename), None)
        content = offered() if offered else load_content(str(filename), map_location, self.model, scope)
        if callback is not None:
            on_all_ranks(lambda: callback(content), scope)
        own = find_sharded_model(self.model)
        weights = revised_keys(content.pop("state_dict"), revise_keys)
        if not own.is_fsdp1:  # FSDP1 hides the shapes of parameters from the model's code
            weights = adapted(own.module, weights, scope)
        self.load_model_state_dict(weights, strict=strict, revise_keys=())
        return content

    def resume(
        self,
        filename: str,
        *,
        resume_optimizer: bool = True,
        resume_param_scheduler: bool = True,
        map_location: str | Callable[..., Any] = "default",
        callback: Callable[[dict[str, Any]], Any] | None = None,
    ) -> dict[str, Any]:
        """Load model, optimizer, schedulers and seed from a checkpoint. Collective: every rank.

        What a checkpoint lacks, as the optimizer's state after ``save_optimizer=False``, starts anew, with a warning.

        Args:
            filename: See `load_checkpoint`.
            resume_optimizer: Whether to load the optimizer's state.
            resume_param_scheduler: Whether to load the schedulers' state.
            map_location: See `load_checkpoint`.
            callback: See `load_checkpoint`.

        Returns:
            The rest of the content.

        Raises:
            FormatError: The checkpoint has only weights, and no ``meta``.
            StateDictError: The checkpoint has other optimizers or schedulers; nothing is loaded then.
            CheckpointError: The checkpoint cannot be read; raised on every rank.
        """
        self.logger.info(f"Resume checkpoint from {filename}")
        with_optimizer = resume_optimizer and hasattr(self, "optim_wrapper")
        with_schedulers = resume_param_scheduler and hasattr(self, "param_schedulers")
        wanted = [*["optimizer"] * with_optimizer, *["param_schedulers"] * with_schedulers]
        own = optimizer_classes(self.optim_wrapper) if with_optimizer else {}

        def check(content: dict[str, Any]) -> None:
            check_resumable(content, filename, own)
            if with_schedulers and "param_schedulers" in content:
                check_same_schedulers(content, filename, self.param_schedulers)
            if callback is not None:
                callback(content)

        content = self.load_checkpoint(filename, map_location=map_location, callback=check)
        if (warning := warning_of_missing_state(content, filename, wanted)) is not None:
            self.logger.warning(warning)
        if resume_param_scheduler and not with_schedulers and content.get("param_schedulers"):
            self.logger.warning(
                f"{filename} holds the states of schedulers, and the config has none: no schedule continues."
            )
        if with_optimizer and "optimizer" in content:
            self.load_optim_state_dict(content.pop("optimizer"))
        if with_schedulers and "param_schedulers" in content:
            self.load_scheduler_state_dict(content.pop("param_schedulers"))
        self._resume_seed(content["meta"].get("seed"))
        self._resume_progress(content.pop("progress", None))
        self.resumed_from = filename
        if hasattr(self, "optim_wrapper"):
            self._count_iterations(content["meta"]["iter"])
        return content

    def save_checkpoint(
        self,
        filename: str,
        *,
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        extra_ckpt: dict[str, Any] | None = None,
        callback: Callable[[dict[str, Any]], Any] | None = None,
    ) -> None:
        """Save a checkpoint atomically. Collective: every rank; the checkpoint is complete when any rank returns.

        Args:
            filename: The file to write, or the directory for ``local`` and ``sharded``.
            save_optimizer: Whether to save the optimizer wrapper's state.
            save_param_scheduler: Whether to save the schedulers' state.
            extra_ckpt: More content. Not changed.
            callback: Called with the content before it is written; may change it. With ``full`` only on the first rank,
                which has the content, as under DDPStrategy.

        Raises:
            CheckpointError: It cannot be written; raised on every rank, and an older checkpoint there is untouched.
        """
        kind: Literal["full", "sharded"] = "full" if self._kind == "full" else "sharded"
        content = with_averages(self.model, {"state_dict": self.model_state_dict()}, kind)
        if save_optimizer and hasattr(self, "optim_wrapper"):
            warning = None if self._warned else warning_of_waiting_gradients(self.optim_wrapper, filename)
            if warning is not None:
                self._warned = True
                self.logger.warning(warning)
            content["optimizer"] = self.optim_state_dict()
            mesh = find_sharded_model(self.model).mesh
            scope, generators = scope_of(mesh), random_state() if self._paused_at is None else self._paused_at
            content["progress"] = {
                "random": rows_of_ranks(generators, mesh, scope, whole=self._kind == "full"),
                "optimizers": optimizer_classes(self.optim_wrapper),
            }
            if (buffers := buffers_of_ranks(self.model, scope, whole=self._kind == "full")) is not None:
                content["progress"]["buffers"] = buffers
        if save_param_scheduler and hasattr(self, "param_schedulers"):
            content["param_schedulers"] = self.scheduler_state_dict()
            if "progress" in content:
                content["progress"]["schedulers"] = scheduler_classes(self.param_schedulers)
        content |= extra_ckpt or {}
        content["meta"] = {
            **content.get("meta", {}),
            "seed": self.seed,
            "time": time.strftime("%Y%m%d_%H%M%S", time.localtime()),
            "mmengine": mmengine.__version__ + get_git_hash(),
        }
        if callback is not None:
            does_call = self._kind != "full" or self.rank == 0
            on_all_ranks(lambda: callback(content) if does_call else None, scope_of(None))
        if self._into is not None:
            self._written = self._into(content)
            return
        self._written = write_checkpoint(filename, content, self.model, kind=self._kind, blocking=not self._background)

    def begin_save(
        self,
        save: Callable[[], None],
        *,
        background: bool,
        into: Callable[[dict[str, Any]], PendingSave] | None = None,
    ) -> PendingSave:
        """Call a function that calls `save_checkpoint`, and return that save. Collective: every rank.

        Args:
            save: The function, such as one that calls the runner's ``save_checkpoint``.
            background: Write while training goes on; the result says when the checkpoint is complete.
            into: Writes the content, with the shards of each rank, in place of this strategy.

        Raises:
            CheckpointError: See `save_checkpoint`; in the background also if the save before failed.
        """
        kind = self._kind
        self._background, self._into, self._written = background, into, PendingSave.over()
        self._kind = kind if into is None else "sharded"
        try:
            save()
            return self._written
        finally:
            self._kind, self._background, self._into, self._written = kind, False, None, PendingSave.over()

    def offer(self, filename: str, read: Callable[[], dict[str, Any]]) -> None:
        """Let `load_checkpoint` and `resume` read something else in place of a file, once.

        Args:
            filename: What they will be called with.
            read: Returns the content that a file would have. Collective.
        """
        self._offered = {filename: read}

    def pause_randomness(self) -> None:
        """Save the state of the random number generators while something else uses them."""
        self._paused_at = random_state()

    def continue_randomness(self) -> None:
        """Restore the state that `pause_randomness` saved."""
        if self._paused_at is not None:
            restore_random_state(self._paused_at)
            self._paused_at = None

    def take_resumed(self) -> Resumed | None:
        """Return what `resume` found for the training loop; only the first call after it does."""
        resumed, self._resumed = self._resumed, None
        return resumed

    def take_validation(self) -> bool:
        """Return whether a resumed run left before a validation had ended; only the first call after it does."""
        validates, self._validates = self._validates, False
        return validates

    def _resume_progress(self, progress: dict[str, Any] | None) -> None:
        if progress is None:
            return
        self._validates = bool(progress.get("validates"))
        scope, buffers = scope_of(find_sharded_model(self.model).mesh), progress.pop("buffers", None)
        has_heads = "random" in progress  # before, rows did not say how long they are
        rows = progress.pop("random" if has_heads else "random_states")
        mine = load_row(rows, scope, has_head=has_heads) if rows.shape[0] == scope.size else None
        if buffers is not None and buffers.shape[0] == scope.size:
            load_buffers_of_ranks(self.model, buffers, scope)
        elif buffers is not None:
            self.logger.warning(
                f"Buffers, such as running statistics, differed between the {buffers.shape[0]} ranks that saved the "
                f"checkpoint. On {scope.size} ranks all begin with those of the first; broadcast_buffers=True keeps "
                "them equal."
            )
        self._resumed = Resumed(progress, self.seed, mine)
        if mine is None:
            self.logger.info(
                f"The checkpoint was saved by {rows.shape[0]} ranks and is resumed by "
                f"{self.world_size}: everything is restored except the random number generators."
            )

    def _count_iterations(self, done: int) -> None:
        if getattr(self.optim_wrapper, "_accumulative_counts", 1) <= 1:
            return
        if "max_iters" not in self.dispatch_kwargs:
            raise ConfigError(
                "accumulative_counts needs the number of iterations: pass max_iters in dispatch_kwargs.",
                config="optim_wrapper.accumulative_counts",
            )
        self.optim_wrapper.initialize_count_status(self.model, done, self.dispatch_kwargs["max_iters"])

    def _resume_seed(self, seed: int | None) -> None:
        current = self._randomness.get("seed")
        if seed is None or seed == current:
            return
        if current is not None:
            self.logger.warning(
                f"The checkpoint was trained with random seed {seed}, but randomness.seed is {current}: {seed} is used."
            )
        self._randomness = {**self._randomness, "seed": seed}
        self._set_randomness(**self._randomness)
