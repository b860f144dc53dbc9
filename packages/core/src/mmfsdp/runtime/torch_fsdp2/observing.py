"""Calls other modules at fixed points of a parameter group: before and after it is gathered, freed and reduced.

A `Subscriber` overrides the points that it wants. A point that nobody wants costs nothing: torch's own method runs.
Only this module replaces methods of a group. `Turn` orders the subscribers, whenever they subscribed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from enum import IntEnum
from typing import Any, Literal
from weakref import ref

import torch

from mmfsdp.collective.lost_ranks import is_lost, lost_rank_error
from mmfsdp.runtime.torch_fsdp2.param_groups import Group, name_of

__all__ = ["Role", "Subscriber", "Turn", "subscribe", "unsubscribe"]

Role = Literal["gather", "reduce"]
"""The purpose of a group's communication."""


class Turn(IntEnum):
    """The order of subscribers. Before torch acts, the first is called first; after it has acted, the last is.

    Thus a measurement includes the other subscribers, and a step is refused before anything is sent for it.
    """

    MEASURING = 0
    """A rehearsal records where a step is, and the memory allocated for a group."""
    REFUSING = 1
    """Checks that refuse backwards that cannot work."""
    AGREEING = 2
    """Gradients that only some ranks have."""
    COMPARING = 3
    """Writes to gathered copies."""
    OPENING = 4
    """Layers of a unit compute as usual within its backward."""


class Subscriber:
    """Base class of objects that are called at fixed points of parameter groups. Override the points that you need.

    Points are called where torch acts: within forward and backward, on the thread that runs them.
    """

    turn: Turn

    def before_forward(self, group: Group) -> None:
        """The forward of the group's modules is about to begin; after that the group is gathered."""

    def before_gather(self, group: Group) -> None:
        """Gathering may begin: in a forward, before a backward, or ahead of either. It may be gathered already."""

    def gathered(self, group: Group) -> None:
        """The gathered copies are registered and hold the values."""

    def before_free(self, group: Group) -> None:
        """The gathered copies, if there are any, are about to be freed."""

    def before_backward(self, group: Group) -> None:
        """The backward of the group's modules is about to begin; after that the group is gathered."""

    def before_reduce(self, group: Group) -> None:
        """The backward of the group's modules is over. Gradients are about to be reduced, or kept (`reduces`)."""

    def reduced(self, group: Group) -> None:
        """The reduction of the gradients was issued, or gradients were kept."""

    def finished(self, group: Group) -> None:
        """All gradients were reduced, by a backward or after several, and later work may read the group's."""

    def communicating(self, group: Group, role: Role) -> AbstractContextManager[None]:
        """Return a context for the time in which torch issues communication of the group, and copies to and from it."""
        return nullcontext()


_OBSERVER = "_mmfsdp_observer"
"""An attribute of the group: the methods that it replaced refer to the group, so both are collected together."""


def observe(groups: Iterable[Group]) -> None:
    """Make errors of lost ranks name the groups, and gathering work under ``inference_mode()``. Not collective."""
    for group in groups:
        if not hasattr(group, _OBSERVER):
            setattr(group, _OBSERVER, _Observer(group))


def subscribe(subscriber: Subscriber, groups: Iterable[Group]) -> None:
    """Call a subscriber at the points of groups from now on. Not collective."""
    groups = list(groups)
    observe(groups)
    for group in groups:
        _observer_of(group).add(subscriber)


def unsubscribe(subscriber: Subscriber, groups: Iterable[Group]) -> None:
    """Stop calling a subscriber; it may be called from one of its points. Not collective."""
    for group in groups:
        _observer_of(group).remove(subscriber)


def _observer_of(group: Group) -> _Observer:
    observer: _Observer = getattr(group, _OBSERVER)
    return observer


class _Points:
    """The callbacks of one method of a group; they may change while the method is installed."""

    def __init__(self) -> None:
        self.before: list[Callable[..., Any]] = []
        self.after: list[Callable[..., Any]] = []
        self.spans: list[Callable[..., Any]] = []


class _Observer:
    """Replaces the methods of one group that have subscribers.

    A method is replaced once, and only its callbacks change: others, such as torch's memory tracker, may wrap it.
    """

    def __init__(self, group: Group) -> None:
        self._group = ref(group)
        self._subscribers: list[Subscriber] = []
        self._points: dict[str, _Points] = {}
        self._installed: dict[str, Callable[..., Any]] = {}
        self._install()

    def add(self, subscriber: Subscriber) -> None:
        self._subscribers = sorted([*self._subscribers, subscriber], key=lambda known: known.turn)
        self._install()

    def remove(self, subscriber: Subscriber) -> None:
        self._subscribers = [known for known in self._subscribers if known is not subscriber]
        self._install()

    def _install(self) -> None:
        before_free = self._wanted("before_free")
        # The first three are always replaced, because ranks wait for each other there.
        self._set("unshard", self._wanted("before_gather"), [], "gather")
        self._set("wait_for_unshard", [], [], "gather")
        self._set("post_backward", self._wanted("before_reduce"), self._wanted("reduced")[::-1], "reduce")
        self._set("finalize_backward", [], self._wanted("finished")[::-1])
        self._set("_to_unsharded", [], self._wanted("gathered")[::-1])
        self._set("_to_sharded", before_free, [])
        self._set("_to_sharded_post_forward", before_free, [])
        self._set("pre_forward", self._wanted("before_forward"), [])
        self._set("pre_backward", self._wanted("before_backward"), [])

    def _set(
        self, name: str, before: list[Callable[..., Any]], after: list[Callable[..., Any]], role: Role | None = None
    ) -> None:
        group = self._group()
        assert group is not None  # somebody passes it
        points = self._points.setdefault(name, _Points())
        points.before, points.after = before, after
        points.spans = self._wanted("communicating") if role is not None else []
        is_wanted = bool(before or after or role is not None)
        if is_wanted and name not in self._installed:
            method = _calling(group, name, points) if role is None else _communicating(group, name, role, points)
            self._installed[name] = method
            setattr(group, name, method)
        elif not is_wanted and name in self._installed and vars(group).get(name) is self._installed[name]:
            del self._installed[name]
            delattr(group, name)

    def _wanted(self, point: str) -> list[Callable[..., Any]]:
        own = getattr(Subscriber, point)
        return [getattr(known, point) for known in self._subscribers if getattr(type(known), point) is not own]


def _calling(group: Group, name: str, points: _Points) -> Callable[..., Any]:
    """Return what replaces a method of a group."""
    method = getattr(type(group), name)

    def act(*args: Any, **kwargs: Any) -> Any:
        for call in points.before:
            call(group)
        result = method(group, *args, **kwargs)
        for call in points.after:
            call(group)
        return result

    return act


def _communicating(group: Group, name: str, role: Role, points: _Points) -> Callable[..., Any]:
    """Return what replaces a method that communicates."""
    method = getattr(type(group), name)
    doing = "gathering the shard unit" if role == "gather" else "reducing the gradients of the shard unit"

    def act(*args: Any, **kwargs: Any) -> Any:
        for call in points.before:
            call(group)
        try:
            if torch.is_inference_mode_enabled():
                # A group first gathered under inference_mode() could never be gathered again outside of it.
                with torch.inference_mode(False), torch.no_grad():
                    result = method(group, *args, **kwargs)
            else:
                result = method(group, *args, **kwargs)
        except RuntimeError as error:
            if is_lost(error):
                raise lost_rank_error(error, f"{doing} {name_of(group)!r}") from error
            raise
        for call in points.after:
            call(group)
        return result

    def act_within(*args: Any, **kwargs: Any) -> Any:
        if not points.spans:
            return act(*args, **kwargs)
        with ExitStack() as stack:
            for span in points.spans:
                stack.enter_context(span(group, role))
            return act(*args, **kwargs)

    return act_within
