"""Whether a rehearsal says what every rank holds and sends, to the byte: all engines and strategies, 1 to 4 ranks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from tests.distributed.engines import configs_of, rehearsed_step, steps

from benchmarks.measuring import sized
from mmfsdp.testing import run_ranks

__all__ = ["main"]


def main(arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Compare, and return how many steps are equal; ``arguments`` are the command line's, without the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=sized([1, 2, 3, 4], [1]))
    options = parser.parse_args(arguments)
    compared = num_collectives = 0
    different: list[str] = []
    for ranks in options.ranks:
        names = configs_of(ranks)[: sized(None, 1)]
        found = run_ranks(steps, ranks, names, timeout=600)
        for place, name in enumerate(names):
            wrong = []
            for rank in range(ranks):
                real = found[rank][place]
                compared += 1
                num_collectives += len(real[1])
                if rehearsed_step(name, ranks, rank) != real:
                    wrong.append(rank)
            different += [f"{name}, rank {rank} of {ranks}" for rank in wrong]
            print(f"{ranks} ranks  {name:28} {f'ranks {wrong} differ' if wrong else 'equal on every rank'}", flush=True)
    print(f"{compared - len(different)} of {compared} steps equal: bytes held, and {num_collectives:,} collectives")
    return {"steps": compared, "collectives": num_collectives, "different": different}


if __name__ == "__main__":
    if main(sys.argv[1:])["different"]:
        sys.exit(1)
