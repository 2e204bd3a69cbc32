"""`python -m benchmarks.kernels`: what each kernel of `cpu-simd` costs, by the clock and by the planner's cost model.

One thread, one tile of images, every kernel repeated by itself on what a step left in the arena. With `--algorithms`
every algorithm of every layer is forced in turn, one layer at a time; they are compared by the sum of their kernels.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable

import numba
import numpy as np

from benchmarks import cases, machine
from benchmarks.cases import Case
from cnnexp.backends.simd.compiler.compose import compose
from cnnexp.backends.simd.compiler.host import host_target
from cnnexp.backends.simd.layouts import aligned_zeros
from cnnexp.backends.simd.lowering import Plan
from cnnexp.backends.simd.planner import allowed, split
from cnnexp.backends.simd.runtime.limit import fma_loop
from cnnexp.backends.simd.runtime.program import make_plan
from cnnexp.errors import ConfigError
from cnnexp.network import Network

SAMPLES = 20
"""Of each kernel; the fastest counts, since only other work makes one slower."""

SAMPLE_S = 0.001


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.hold and not machine.HOLDS[options.hold].items() <= os.environ.items():
        environment = {**os.environ, **machine.HOLDS[options.hold]}  # Numba reads it when it is imported
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.kernels", *sys.argv[1:]], environment)
    chosen = cases.select(options.cases)
    per_s = _multiply_adds_per_s()
    print(f"{machine.processor()}: {per_s / 1e9:.0f} billion multiply-adds a second on one core")
    for case in chosen:
        share = -(-case.batch_size // options.threads)
        print(f"\n{case.title}, {share} images of a thread and step")
        _show_kernels(case, share, per_s)
        if options.algorithms:
            _show_algorithms(case, share, per_s)
    return 0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    p.add_argument("--cases", nargs="+", default=["main"], help=f"groups ({', '.join(cases.GROUPS)}) or cases by name")
    p.add_argument("--threads", type=int, default=2, help="a tile is as of so many threads that share a batch")
    p.add_argument(
        "--algorithms", action="store_true", help="force every algorithm of every layer in turn, and compare"
    )
    p.add_argument("--hold", choices=machine.HOLDS, help="hold everything, the limit too, to these instructions")
    return p


def _multiply_adds_per_s() -> float:
    loop, per_turn, _ = fma_loop()
    turns = round(SAMPLE_S * 1e11 / per_turn)
    loop(turns)
    return turns * per_turn / min(_fastest(lambda: loop(turns)) for _ in range(5))


def _fastest(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(SAMPLES):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _show_kernels(case: Case, share: int, per_s: float) -> None:
    plan = make_plan(case.network, host_target(), share)
    print(
        f"{'kernel':<28}{'algorithm':<17}{'us/image':>9}{'cycles':>9}{'expected':>9}{'ratio':>6}{'of limit':>9}  tile"
    )
    _print_kernels(plan, time_kernels(plan, case.network), per_s, "")


def _print_kernels(plan: Plan, measured: dict[str, float], per_s: float, only: str) -> None:
    """Print a line for every kernel whose name begins with `only`."""
    for row in plan.explain(1):
        if row.kernel.startswith(only):
            seconds = measured[row.kernel]
            cycles = seconds * per_s / (2 * plan.target.lanes)
            print(
                f"{row.kernel:<28}{row.algorithm:<17}{1e6 * seconds:>9.2f}{cycles:>9.0f}{row.cycles:>9.0f}"
                f"{row.cycles / cycles:>6.2f}{row.macs / seconds / per_s:>9.0%}  {row.tile}"
            )


def _show_algorithms(case: Case, share: int, per_s: float) -> None:
    target, sections = host_target(), split(case.network.stages)
    cycles_per_s = per_s / (2 * target.lanes)
    for at, section in enumerate(sections):
        names = [node.algorithm for node in allowed(sections[at:], target, {}, first=at == 0)]
        for algorithm in names if len(names) > 1 else []:
            name = section.stage.name
            try:
                plan = make_plan(case.network, dataclasses.replace(target, forced=((name, algorithm),)), share)
            except ConfigError:  # the layers around it do not allow it
                continue
            measured = time_kernels(plan, case.network)
            cycles, expected = sum(measured.values()) * cycles_per_s, sum(row.cycles for row in plan.explain(1))
            print(f"{name} by {algorithm}: the network takes {cycles:,.0f} cycles, {expected:,} expected")
            _print_kernels(plan, measured, per_s, name)


def time_kernels(plan: Plan, network: Network) -> dict[str, float]:
    """Return the seconds that each kernel of a forward and backward pass takes for an image of a tile."""
    rng = np.random.default_rng(0)
    parameters, gradients = aligned_zeros((2, plan.parameters.size))
    plan.parameters.pack(rng.normal(0, 0.05, network.parameter_count), parameters)
    arena, count = plan.arena.make(1)[0], plan.share
    scores = plan.d_scores
    found = {}
    for kernel in [*plan.forward, None, *plan.backward, *plan.gradients]:
        if kernel is None:
            rows = arena[int(scores.offset) :][: count * scores.stride].reshape(count, scores.stride)
            rows[:, : scores.size] = rng.normal(0, 0.01, (count, scores.size))
            continue
        if kernel is plan.forward[0]:
            images = rng.random((count, int(np.prod(network.input_shape))), np.float32)
            _repeated(plan, plan.gather["float32"][0])(images.ravel(), np.arange(count), arena, count, 1)
        run = _repeated(plan, kernel)
        run(parameters, gradients, arena, count, 1)
        started = time.perf_counter()
        run(parameters, gradients, arena, count, 1)
        times = max(1, round(SAMPLE_S / (time.perf_counter() - started)))
        gradients[...] = 0
        once = functools.partial(run, parameters, gradients, arena, count, times)
        found[kernel[0]] = _fastest(once) / times / count
        gradients[...] = 0
    return found


def _repeated(plan: Plan, kernel) -> Callable[..., None]:
    """Return a function that runs a kernel so many times."""
    call = compose(kernel[0], plan.target, [kernel])

    @numba.njit(nogil=True)
    def repeat(a, b, c, count, times):
        for _ in range(times):
            call(a, b, c, count)

    return repeat


if __name__ == "__main__":
    sys.exit(main())
