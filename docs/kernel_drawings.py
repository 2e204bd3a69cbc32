"""Drawings of what the kernels do, from the kernels' own functions and sizes: `make drawings` draws them again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from cnnexp import Conv2d, Flatten, Linear, MaxPool2d, Network, ReLU
from cnnexp.network.models import TwoConvMlp
from cnnexp.network.shapes import Window

# Okabe and Ito's colours, which the colour-blind can tell apart
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
PALE = "#f4f4f4"


def draw_all(folder: Path) -> None:
    """Write every drawing into `folder` as PNG."""
    for draw in (im2col, argmax_kept, batch_in_lanes, register_tile, shared_memory_tile, fusion):
        draw().savefig(folder / f"{draw.__name__}.png", dpi=110)


def im2col() -> Figure:
    """A 4x4 image and its unrolled windows: the numbers are what `unroll` returns for pixels numbered in order."""
    from cnnexp.backends.plain.unrolled import unroll

    side, kernel = 4, 3
    out = (side - kernel + 1,) * 2
    image = np.arange(side * side, dtype=np.float32).reshape(1, side, side, 1)
    columns = unroll(image, Window(kernel, stride=1), out).reshape(-1, kernel * kernel).astype(int)  # (P*Q, K*K)
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(side, kernel * kernel))
    owners = np.arange(side * side).reshape(side, side)
    _cells(left, owners, lambda r, c: COLOURS[0] + "55" if owners[r, c] in columns[0] else PALE)
    left.set_title(f"image, {side} x {side}; its first window shaded", fontsize="medium")
    _cells(right, columns, lambda r, c: COLOURS[r % len(COLOURS)] + "55")
    right.set_title(f"unrolled: {len(columns)} windows, {kernel * kernel} numbers each", fontsize="medium")
    right.set_ylabel("a row per output pixel")
    return figure


def argmax_kept() -> Figure:
    """Forward: of each window the largest and its place are kept; backward: the gradient goes to that place alone."""
    side, pool = 6, 2
    image = np.random.default_rng(3).integers(0, 100, (side, side))
    windows = image.reshape(side // pool, pool, side // pool, pool).transpose(0, 2, 1, 3).reshape(side // pool, -1, 4)
    argmax, largest = windows.argmax(axis=2), windows.max(axis=2)
    kept = np.zeros_like(image, dtype=bool)
    for (u, v), place in np.ndenumerate(argmax):
        kept[u * pool + place // pool, v * pool + place % pool] = True
    figure = Figure(figsize=(9.5, 3.2), layout="constrained")
    first, second, third = figure.subplots(1, 3, width_ratios=(side, side // pool, side))
    _cells(first, image, lambda r, c: COLOURS[4] + "99" if kept[r, c] else PALE, heavy=pool)
    first.set_title("convolution's output", fontsize="medium")
    texts = np.array([[f"{n}\nat {a}" for n, a in zip(*row, strict=True)] for row in zip(largest, argmax, strict=True)])
    _cells(second, texts, lambda r, c: COLOURS[4] + "99")
    second.set_title("kept: maximum\nand its place", fontsize="medium")
    gradient = np.where(kept, "dy", "0")
    _cells(third, gradient, lambda r, c: COLOURS[2] + "77" if kept[r, c] else PALE, heavy=pool)
    third.set_title(f"gradient: {kept.mean():.0%} of the work is left", fontsize="medium")
    return figure


def batch_in_lanes() -> Figure:
    """A vector holds the same pixel of as many images as the CPU has lanes."""
    from cnnexp.backends.simd.compiler.host import host_target

    lanes = host_target().lanes
    figure = Figure(figsize=(9, 3.0), layout="constrained")
    axes = figure.subplots()
    side = 3
    for n in range(4):
        x = n * 1.2 if n < 3 else 4.6
        name = f"image {n}" if n < 3 else f"image {lanes - 1}"
        for i in range(side):
            for j in range(side):
                chosen = (i, j) == (1, 1)
                colour = COLOURS[n % len(COLOURS)] if chosen else PALE
                axes.add_patch(Rectangle((x + j * 0.3, 1.6 - i * 0.3), 0.3, 0.3, facecolor=colour, edgecolor="#888888"))
        axes.text(x + 0.45, 2.0, name, ha="center", fontsize="small")
    axes.text(4.05, 1.45, "...", ha="center", fontsize="x-large")
    width = 5.6 / lanes
    for lane in range(lanes):
        n = lane if lane < 3 else 3 if lane == lanes - 1 else None
        colour = PALE if n is None else COLOURS[n]
        axes.add_patch(Rectangle((lane * width, 0), width, 0.4, facecolor=colour, edgecolor="#444444"))
        axes.text((lane + 0.5) * width, 0.2, str(lane), ha="center", va="center", fontsize="x-small")
        if n is not None:
            start = (n * 1.2 if n < 3 else 4.6) + 0.45
            arrow = FancyArrowPatch((start, 1.28), ((lane + 0.5) * width, 0.42), arrowstyle="-|>", mutation_scale=9)
            axes.add_patch(arrow)
    said = f"one vector register of the machine that drew this: {lanes} lanes, one pixel of {lanes} images"
    axes.text(0, -0.3, said, fontsize="small")
    axes.set_xlim(-0.1, 5.8)
    axes.set_ylim(-0.5, 2.3)
    axes.set_aspect("equal")
    axes.axis("off")
    return figure


def register_tile() -> Figure:
    """The sums that a convolution holds in registers, of the size that the planner gives them on this machine."""
    from cnnexp.backends.simd.compiler.host import host_target
    from cnnexp.backends.simd.lowering import Plan

    target = replace(host_target(), forced=(("conv2", "lanes"),))  # elsewhere the planner may choose another algorithm
    plan = Plan(TwoConvMlp().network((28, 28, 1), 10), target, vectors=1, share=target.lanes)
    kernel = next(row for row in plan.explain(1) if "pixels x" in row.tile)
    pixels, filters = map(int, re.findall(r"\d+", kernel.tile))
    sums = np.array([[f"+= x{p} w{f}" for p in range(pixels)] for f in range(filters)])
    figure = Figure(figsize=(7.5, 0.5 * filters + 1.1), layout="constrained")
    axes = figure.subplots()
    _cells(axes, sums, lambda r, c: COLOURS[4] + "77")
    axes.set_aspect("auto")
    axes.set_xticks(range(pixels), [f"x{p}" for p in range(pixels)], color=COLOURS[0], weight="bold")
    axes.set_yticks(range(filters), [f"w{f}" for f in range(filters)], color=COLOURS[2], weight="bold")
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.set_title(f"{pixels} vectors of pixels (a pixel of {target.lanes} images each)", fontsize="medium")
    axes.set_ylabel(f"{filters} weights")
    axes.set_xlabel(
        f"{pixels * filters} sums of {target.lanes} images in registers: {pixels + filters} loads serve "
        f"{pixels * filters} multiply-adds\n({kernel.kernel} of two_conv_mlp, on the machine that drew this)",
        fontsize="small",
    )
    return figure


def shared_memory_tile() -> Figure:
    """Pixels that the threads of a block read from global memory, with and without a staged tile, for a 3x3 kernel."""
    tile, kernel = 8, 3
    reach = tile + kernel - 1
    loads = np.zeros((reach, reach), int)
    for i in range(kernel):
        for j in range(kernel):
            loads[i : i + tile, j : j + tile] += 1
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _cells(left, loads, lambda r, c: (0.0, 0.45, 0.70, loads[r, c] / loads.max() * 0.7))
    left.set_title(f"without: {loads.sum()} reads of global memory", fontsize="medium")
    _cells(right, np.ones_like(loads), lambda r, c: (0.0, 0.62, 0.45, 0.25))
    right.add_patch(Rectangle((0.5, 0.5), tile, tile, fill=False, edgecolor=COLOURS[1], linewidth=2.5))
    right.set_title(
        f"staged: {loads.size} reads, {loads.sum() / loads.size:.1f} times fewer\n"
        f"(orange: the {tile} x {tile} outputs of one block)",
        fontsize="medium",
    )
    return figure


def fusion() -> Figure:
    """Floats that a training step's arrays hold per image: layer by layer, and with ReLU and pool fused."""
    network = Network((28, 28, 1), (Conv2d(64, kernel=3), ReLU(), MaxPool2d(2), Flatten(), Linear(10)))
    sizes = {stage.name: int(np.prod(stage.output_shape)) for stage in network.stages if stage.name != "flatten1"}
    rows = [
        ("layer by layer", [*(("x", 784),), *sizes.items(), *((f"d {name}", size) for name, size in sizes.items())]),
        ("fused", [("x", 784), *((n, sizes[n]) for n in ("maxpool1", "linear1")), ("argmax", sizes["maxpool1"] // 4)]),
    ]
    rows[1][1].extend((f"d {name}", sizes[name]) for name in ("maxpool1", "linear1"))
    names = list(dict.fromkeys(name for _, parts in rows for name, _ in parts))
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.subplots()
    for place, (_, parts) in enumerate(rows):
        start = 0
        for name, size in parts:
            colour = COLOURS[names.index(name) % len(COLOURS)]
            alpha = 0.5 if name.startswith("d ") else 1
            axes.barh(place, size, left=start, color=colour, edgecolor="white", alpha=alpha)
            if size > 4000:  # a narrower bar has no room for a text
                turn = 0 if size > 30_000 else 90
                text = f"{name}\n{size:,}"
                axes.text(start + size / 2, place, text, ha="center", va="center", rotation=turn, fontsize="x-small")
            start += size
        axes.text(start + 1000, place, f"{start:,}", va="center", fontsize="small")
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("floats per image that pass through memory, one_conv with 64 filters (pale: gradients)")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure


def _cells(axes: Axes, texts: np.ndarray, colour, heavy: int = 0) -> None:
    """Draw a grid of cells with a text in each; `heavy` draws a thick line after so many rows and columns."""
    rows, columns = texts.shape
    for (r, c), text in np.ndenumerate(texts):
        axes.add_patch(Rectangle((c - 0.5, r - 0.5), 1, 1, facecolor=colour(r, c), edgecolor="#aaaaaa", linewidth=0.6))
        axes.text(c, r, str(text), ha="center", va="center", fontsize="x-small")
    if heavy:
        _grid(axes, rows, columns, heavy)
    axes.set_xlim(-0.5, columns - 0.5)
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_aspect("equal")
    axes.set_xticks([])
    axes.set_yticks([])


def _grid(axes: Axes, rows: int, columns: int, step: int) -> None:
    places: Sequence[float] = np.arange(0, rows + 1, step) - 0.5
    axes.hlines(places, -0.5, columns - 0.5, color="#333333", linewidth=1.4)
    axes.vlines(np.arange(0, columns + 1, step) - 0.5, -0.5, rows - 0.5, color="#333333", linewidth=1.4)


if __name__ == "__main__":
    draw_all(Path(__file__).parent / "drawings")
