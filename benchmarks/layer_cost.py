"""`python -m benchmarks.layer_cost BatchNorm2d`: what the layers of a kind add to a training step of `cpu-simd`.

The network and the same one without them train in one process, in turn; of the rounds' ratios the median counts, the
quartiles are told. Without a normalization after it a convolution has the bias that the normalization's shift is.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import replace

from benchmarks import cases, machine
from benchmarks.ours import Ours
from cnnexp.network import BatchNorm2d, Conv2d, Dropout, Layer, Network, Residual

KINDS: dict[str, type[Layer]] = {kind.__name__: kind for kind in (BatchNorm2d, Dropout)}
ROUND_S = 0.5


def main(arguments: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.layer_cost", description=__doc__)
    p.add_argument("kind", choices=KINDS)
    p.add_argument("--cases", nargs="+", default=["vgg_norm-b128", "resnet20-b128", "mobilenet-b128"])
    p.add_argument("--threads", nargs="+", type=int, default=[2, 1])
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--hold", choices=machine.HOLDS, help="what instructions the code may use")
    options = p.parse_args(arguments)
    if options.hold and not machine.HOLDS[options.hold].items() <= os.environ.items():
        environment = {**os.environ, **machine.HOLDS[options.hold]}  # Numba reads it when it is imported
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.layer_cost", *sys.argv[1:]], environment)
    print(f"{machine.processor()}: {options.kind} adds to a step (median of {options.rounds} rounds, quartiles)")
    for case in cases.select(options.cases):
        for threads in options.threads:
            low, median, high = measured(case, KINDS[options.kind], threads, options.rounds)
            print(f"{case.name}, {threads} threads: {median:+.1%} ({low:+.1%} to {high:+.1%})", flush=True)
    return 0


def measured(case: cases.Case, kind: type[Layer], threads: int, rounds: int) -> list[float]:
    """Return the quartiles of what the layers add, as part of a step without them."""
    both = case, replace(case, network=without(case.network, kind))
    programs = [Ours(one, cases.data(one), threads, "cpu-simd", False) for one in both]
    steps = max(1, round(ROUND_S / min(_seconds(program, 2) / 2 for program in programs)))
    ratios = []
    for number in range(rounds):
        seconds = {program: _seconds(program, steps) for program in programs[:: 1 - 2 * (number % 2)]}
        ratios.append(seconds[programs[0]] / seconds[programs[1]] - 1)
    return statistics.quantiles(ratios, n=4)


def _seconds(program: Ours, steps: int) -> float:
    began = time.perf_counter()
    program.train(steps)
    return time.perf_counter() - began


def without(network: Network, kind: type[Layer]) -> Network:
    """Return the network without its layers of a kind."""

    def kept(layers: Iterable[Layer]) -> Iterable[Layer]:
        for layer in layers:
            if isinstance(layer, Residual):
                yield replace(layer, layers=tuple(kept(layer.layers)))
            elif isinstance(layer, Conv2d) and kind is BatchNorm2d:
                yield replace(layer, bias=True)
            elif not isinstance(layer, kind):
                yield layer

    return Network(network.input_shape, tuple(kept(network.layers)))


if __name__ == "__main__":
    sys.exit(main())
