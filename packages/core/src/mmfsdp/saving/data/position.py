"""Counts the samples that a run has seen, and begins at the next one after a resume, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from mmfsdp.errors import ConfigError, StateDictError
from mmfsdp.saving.data.order import order_of, own_samples
from mmfsdp.saving.data.patient_workers import patient_workers

__all__ = ["DataPosition"]


class DataPosition:
    """The batches of a data loader, and how far a run has come in them. Not collective.

    Iterating yields the batches that are left of the current epoch, then `epoch` grows by one. Give the object to a
    `CheckpointManager` in ``state``, and iterate over it in place of the loader::

        data = mmfsdp.DataPosition(DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset)))
        while data.epoch < 10:
            for batch in data: ...

    With a ``DistributedSampler`` the position is the number of samples that all ranks have seen, so a run resumes on
    any number of ranks: every sample is seen once in an epoch, apart from those that the sampler itself repeats or
    leaves out at the end. If ``batch_size`` times the number of ranks is the same as before, each step gets the same
    samples.

    An iterable data set has no order that ranks could divide anew. Its ``state_dict()`` is saved for
    each rank, or the loader's if it has one, as torchdata's ``StatefulDataLoader`` does; the run resumes on as many
    ranks.

    Workers of the loader outlive signals that ask ranks to save, see `mmfsdp.patient_workers`.

    Args:
        loader: The loader. Its batch sampler takes the samples from this object from now on.

    Raises:
        ConfigError: The position in this loader could not be resumed exactly.
    """

    epoch: int
    """The number of the current epoch, from 0. It sets the order of a sampler that has ``set_epoch()``."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader, self.epoch, self._consumed = loader, 0, 0
        patient_workers(loader)
        self._sampler = _sampler_of(loader)
        self._order = order_of(self._sampler) if _batches_in_order(loader) else None
        if self._order is None:
            self._source = _source_of(loader)
            return
        sampler, batches = self._sampler, loader.batch_sampler
        assert isinstance(batches, BatchSampler)
        self._per_batch = batches.batch_size * sampler.num_replicas
        batches.sampler = _Share(self, len(sampler))

    @property
    def is_elastic(self) -> bool:
        """Whether the position is the same on all ranks, so that a run resumes on any number of them."""
        return self._order is not None

    @property
    def inexact(self) -> str | None:
        """A sentence on what differs after a resume within an epoch, or ``None``."""
        if self._loader.num_workers == 0:
            return None
        return (
            "After a resume within an epoch, worker processes of the data loader draw other random numbers. The order "
            "of the samples stays; random augmentations of the rest of that epoch differ."
        )

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch on this rank."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(self.epoch)
        # Making an iterator draws a random number, which within an epoch has been drawn already.
        state = torch.get_rng_state() if self._consumed else None
        batches = iter(self._loader)
        if state is not None:
            torch.set_rng_state(state)
        for batch in batches:
            self._consumed += self._per_batch if self._order is not None else 1
            yield batch
        self.epoch, self._consumed = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the epoch, and the samples that all ranks have seen in it."""
        state = {"epoch": self.epoch, "consumed": self._consumed}
        if self._order is not None:
            return {**state, **self._facts(), "seed": self._sampler.seed}
        return {**state, "source": self._source.state_dict() if self._consumed else None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a position. The sampler takes the saved seed.

        Raises:
            StateDictError: It is a position in another data set, or in another order.
        """
        if ("source" in state_dict) == self.is_elastic:
            raise StateDictError(
                "One position is that of a sampler, which all ranks share, and the other that of an iterable data set. "
                "Give DataPosition a loader of the same kind as in the run that saved it."
            )
        if self._order is not None:
            for name, own in self._facts().items():
                if (saved := state_dict.get(name)) != own:
                    raise StateDictError(
                        f"The {_FACTS[name]} was {saved!r} when the position was saved, and is {own!r} now. Use the "
                        "same data and sampler."
                    )
            self._sampler.seed = state_dict["seed"]
        elif state_dict["source"] is not None:
            self._source.load_state_dict(state_dict["source"])
        self.epoch, self._consumed = state_dict["epoch"], state_dict["consumed"]

    def _facts(self) -> dict[str, Any]:
        return {"samples": len(self._loader.dataset), "shuffle": self._sampler.shuffle}  # type: ignore[arg-type]

    def _own_samples(self) -> list[int]:
        assert self._order is not None
        return own_samples(self._sampler, self._order(self.epoch), self._consumed)


_FACTS = {"samples": "number of samples in the data set", "shuffle": "setting shuffle of the sampler"}


class _Share(Sampler[int]):
    """The samples of the current epoch that this rank has not seen yet."""

    def __init__(self, position: DataPosition, length: int) -> None:
        self._position, self._length = position, length

    def __iter__(self) -> Iterator[int]:
        return iter(self._position._own_samples())

    def __len__(self) -> int:
        return self._length


def _sampler_of(loader: DataLoader[Any]) -> Any:
    if isinstance(loader.dataset, IterableDataset):
        return loader.dataset  # it may have set_epoch()
    batches = loader.batch_sampler
    return batches.sampler if isinstance(batches, BatchSampler) else loader.sampler


def _batches_in_order(loader: DataLoader[Any]) -> bool:
    """Tell whether a batch is the next samples of the sampler; a class of the user's may group them otherwise."""
    batches = loader.batch_sampler
    return isinstance(batches, BatchSampler) and type(batches).__module__.partition(".")[0] in ("torch", "torchdata")


def _source_of(loader: DataLoader[Any]) -> Any:
    """Return what has the position of this rank: the loader, or the data set that it reads in this process."""
    if _is_stateful(loader):
        return loader
    if not isinstance(loader.dataset, IterableDataset):
        name = type(_sampler_of(loader)).__name__
        raise ConfigError(
            f"The order in which a {name} gives samples cannot be resumed. Give the data loader batch_size=... and "
            "sampler=DistributedSampler(dataset, shuffle=...), also on one rank, or use torchdata's "
            "StatefulDataLoader, whose position resumes on as many ranks."
        )
    if not _is_stateful(loader.dataset):
        raise ConfigError(
            f"The data set {type(loader.dataset).__name__} is iterable and has no state_dict() and load_state_dict(), "
            "so nothing says where to go on. Add them, or use torchdata's StatefulDataLoader, which can skip."
        )
    if loader.num_workers:
        raise ConfigError(
            f"The {loader.num_workers} worker processes have copies of the data set, whose positions this process does "
            "not know. Use torchdata's StatefulDataLoader, or num_workers=0."
        )
    return loader.dataset


def _is_stateful(item: Any) -> bool:
    return callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))
