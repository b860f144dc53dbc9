"""The links between ranks, and how long collectives take on them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mmfsdp.errors import ConfigError, closest
from mmfsdp.rehearsal.recording.step_records import Collective
from mmfsdp.rehearsal.timing.ranges import Range

__all__ = ["Link", "Links", "collective_seconds", "links_of", "networks"]

_REACHED = Range(0.5, 0.75, 0.9)


@dataclass(frozen=True)
class Link:
    """The link that one rank sends through."""

    bandwidth: float
    """Bytes per second in one direction."""
    latency: float
    """Seconds of one step from a rank to the next."""


@dataclass(frozen=True)
class Links:
    """How ranks are connected: within a node, and between nodes."""

    within: Link
    between: Link
    """The share of one rank: the network of a node divided by its ranks."""
    ranks_per_node: int = 8
    reached: Range = _REACHED
    """Share of the bandwidth that large messages reach."""
    base: float = 10e-6
    """Seconds of a collective before anything is sent."""
    reducing: float = 1.0
    """How much longer a byte of a reduce-scatter takes than one of an all-gather: about 2 times with gloo."""

    def placed(self, ranks: int, stride: int) -> tuple[int, int]:
        """Return how many nodes a group spans, and how many of its ranks share a node.

        Args:
            ranks: Number of ranks in the group.
            stride: Distance between neighbours.
        """
        together = max(min(self.ranks_per_node // max(stride, 1), ranks), 1)
        return -(-ranks // together), together


_NETWORKS = {  # Gbit/s per rank and direction, and seconds of a step
    "infiniband-400": (400, 4e-6),
    "infiniband-200": (200, 4e-6),
    "infiniband-100": (100, 4e-6),
    "roce-400": (400, 5e-6),
    "roce-200": (200, 5e-6),
    "roce-100": (100, 5e-6),
    "roce-50": (50, 5e-6),
    "efa-400": (400, 15e-6),
    "efa-50": (50, 15e-6),
    "ethernet-25": (25, 20e-6),
    "ethernet-12": (12.5, 20e-6),
}
"""Networks between nodes by kind and Gbit/s per rank: the cards of a node divided by its ranks. A DGX H100 has
``infiniband-400``, a DGX A100 ``infiniband-200``, AWS p5 ``efa-400`` (3,200 Gbit/s for 8 ranks) and p4d ``efa-50``; 100
Gbit/s of Ethernet for 8 ranks are ``ethernet-12``. NCCL assumes 4 us for a step over a network
(``src/graph/tuning.cc``, ``hwLat``, LL128); the latencies of other networks than InfiniBand are assumptions."""


def networks() -> tuple[str, ...]:
    """Return the names of the networks that `mmfsdp.rehearsal.Rehearsal.time` knows."""
    return tuple(_NETWORKS)


def links_of(network: str | Links | None, usual: Links) -> Links:
    """Return links by the name of the network between nodes; within a node they are as usual.

    Args:
        network: A name, or links as they are; None for the usual ones.
        usual: The links that the device usually has.

    Raises:
        ConfigError: There is no such network.
    """
    if network is None:
        return usual
    if isinstance(network, Links):
        return network
    if network not in _NETWORKS:
        hint = closest(network, _NETWORKS) or f" Known: {', '.join(_NETWORKS)}."
        raise ConfigError(f"{network!r} is not a network that is known.{hint}", config="links")
    gigabits, latency = _NETWORKS[network]
    return replace(usual, between=Link(gigabits / 8 * 1e9, latency))


def collective_seconds(item: Collective, links: Links, reached: float) -> float:
    """Return how long a collective takes by the usual model of latency and bandwidth. Pure.

    A ring of n ranks sends (n - 1) / n of the bytes through each rank, an all-reduce twice as many, in n - 1 steps or
    twice as many (nccl-tests, ``doc/PERFORMANCE.md``). An all-reduce may use a tree instead, with fewer steps (NCCL,
    ``src/graph/tuning.cc``); the faster one counts. Through the network of a node go the shares of all ranks of the
    group that are there.

    Args:
        item: The collective; its ``nbytes`` is the whole tensor.
        links: The links.
        reached: Share of the bandwidth that messages reach.
    """
    if item.ranks < 2:
        return 0.0
    nodes, together = links.placed(item.ranks, item.stride)
    bandwidth = links.within.bandwidth if together > 1 else links.between.bandwidth
    if nodes > 1:
        bandwidth = min(bandwidth, links.between.bandwidth * together)
    bandwidth *= reached
    steps, across = item.ranks - 1, nodes - 1
    if item.name in ("broadcast", "reduce", "scatter", "gather", "send", "recv"):
        depth = math.ceil(math.log2(nodes)) * links.between.latency + (together - 1) * links.within.latency
        return links.base + depth + item.nbytes / bandwidth
    times = 2 if item.name == "all_reduce" else 1
    latency = (steps - across) * links.within.latency + across * links.between.latency
    slower = links.reducing if item.name == "reduce_scatter" else 1.0
    sent = slower * item.nbytes * steps / item.ranks / bandwidth
    ring = links.base + times * (latency + sent)
    if times == 1:
        return ring
    depth = 2 * ((together - 1) * links.within.latency + math.ceil(math.log2(nodes)) * links.between.latency)
    return min(ring, links.base + depth + 2 * item.nbytes / bandwidth)
