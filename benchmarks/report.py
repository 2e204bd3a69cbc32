"""From raw samples to what people read: a table on the screen, Markdown, and figures."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

SWEEPS = {"batch": "images per batch", "filters": "filters", "size": "image side in pixels", "depth": "convolutions"}

# Okabe and Ito's colours, which the colour-blind can distinguish
BLUE, SKY, ORANGE, GREEN, PURPLE, RED, GREY = (
    "#0072B2",
    "#56B4E9",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#D55E00",
    "#666666",
)
LINES = {
    "cpu-simd": (BLUE, "o"),
    "cpu-parallel": (SKY, "s"),
    "torch": (ORANGE, "v"),
    "torch channels_last": (RED, "^"),
    "torch compiled": (PURPLE, "D"),
    "keras": (GREEN, "P"),
    "keras jit_compile": ("#F0E442", "X"),
    "jax": (GREY, "*"),
}


@dataclass(frozen=True)
class Line:
    """One contestant on one case, in numbers to print.

    Attributes:
        rate, low, high, worst: images per second: median, quartiles and slowest sample. For a limit, multiply-adds.
        against_peer: `rate` over the best peer's, None where no peer ran.
        of_limit: useful multiply-adds per second, through the argmax, over the machine's.
        scaled: whether its steps had fewer images than the batch.
    """

    contestant: str
    side: str
    error: str | None
    rate: float = 0.0
    low: float = 0.0
    high: float = 0.0
    worst: float = 0.0
    against_peer: float | None = None
    of_limit: float | None = None
    scaled: int | None = None
    peak_bytes: int | None = None
    compile_s: float | None = None
    gradient_error: float | None = None


def lines(match: dict[str, Any]) -> list[Line]:
    """Sum up a match, fastest first, those that failed last."""
    rates = {row["contestant"]: _rates(row) for row in match["rows"] if row["samples"] and not row["error"]}
    sides = {row["contestant"]: row["side"] for row in match["rows"]}
    medians = {name: statistics.median(found) for name, found in rates.items()}
    best_peer = max((medians[name] for name in medians if sides[name] == "peer"), default=None)
    limit = max((medians[name] for name in medians if sides[name] == "limit"), default=None)
    work = match["multiply_adds_per_image"]["through_argmax"]
    summed = []
    for row in match["rows"]:
        name, side = row["contestant"], row["side"]
        if name not in rates:
            summed.append(Line(name, side, row["error"] or "no samples"))
            continue
        low, _, high = (
            statistics.quantiles(rates[name], n=4, method="inclusive") if len(rates[name]) > 1 else rates[name] * 3
        )
        summed.append(
            Line(
                name,
                side,
                None,
                medians[name],
                low,
                high,
                min(rates[name]),
                medians[name] / best_peer if best_peer and side != "limit" else None,
                medians[name] * (1 if side == "limit" else work) / limit if limit else None,
                row["per_step"] if side == "ours" and row["per_step"] < match["batch_size"] else None,
                row["peak_bytes"],
                row["setup"]["compile_s"],
                _error(row["setup"].get("check", {})),
            )
        )
    return sorted(summed, key=lambda line: (line.side == "limit", line.error is not None, -line.rate))


def _error(check: dict[str, float]) -> float | None:
    return check.get("gradient", check.get("probabilities"))


def screen_table(match: dict[str, Any]) -> Table:
    """Return one match as a table for the terminal: the columns that fit."""
    summed = lines(match)
    failures = "\n".join(f"{line.contestant} failed: {line.error}" for line in summed if line.error)
    table = Table(title=_heading(match), caption=failures, title_justify="left", caption_justify="left", box=box.SIMPLE)
    shown = [number for number, heading in enumerate(COLUMNS) if heading not in ("quartiles", "slowest", "gradient")]
    for number in shown:
        table.add_column(COLUMNS[number], justify="right" if number else "left", no_wrap=True)
    for line in summed:
        if not line.error:
            cells = _cells(line)
            table.add_row(*(cells[number] for number in shown), style="bold" if line.side == "ours" else None)
    return table


def write(result: dict[str, Any], out: Path) -> list[Path]:
    """Write the tables and figures of a whole run under `out`; return their paths."""
    written = [out / "cpu.md"]
    written[0].write_text(markdown(result))
    for threads in sorted({match["threads"] for match in result["matches"]}):
        matches = [match for match in result["matches"] if match["threads"] == threads]
        many = [match for match in matches if match["group"] == "networks"]
        single = [match for match in matches if match["grows"] is None and match not in many]
        swept = [match for match in matches if match["grows"] is not None]
        if single:
            written += _bars(single, result, out / f"cpu-{threads}-threads")
        if many:
            written += _ratios(many, result, out / f"networks-{threads}-threads")
        if swept:
            written += _growth(swept, result, out / f"growth-{threads}-threads")
    return written


OTHERS = "other backends of cnnexp"
KINDS = {"cpu-simd": BLUE, OTHERS: SKY, "frameworks": ORANGE}
LABEL_SHARE = 0.17  # of a panel's width, what the longest number takes beside its bar
EXPLANATION = """Whole training steps: forward, loss, backward, optimizer; float32; the same images, batches and first
parameters for all, in memory beforehand (ours gather each shuffled batch, the peers find theirs gathered).
Contestants take turns; a sample starts from the first parameters. Medians over rounds. Before timing each is verified
against a float64 oracle; `gradient` is its distance, relative. `of limit`: useful multiply-adds, those of gradients
counted through the max-pool's argmax, over the faster of a loop of multiply-adds in registers and a large matrix
product, both timed in the same rounds. `MB`: the most memory resident in its process, framework included.
`compile s`: as found, caches of earlier runs included. `(32 a step)`: so few images a step, since a whole batch would
take too long."""

COLUMNS = ("", "images/s", "quartiles", "slowest", "x best peer", "of limit", "us/image", "MB", "compile s", "gradient")


def _cells(line: Line) -> list[str]:
    name = line.contestant + (f" ({line.scaled} a step)" if line.scaled else "")
    if line.error:
        return [name, f"failed: {line.error}", *[""] * (len(COLUMNS) - 2)]
    memory = f"{line.peak_bytes / 1e6:,.0f}" if line.peak_bytes else ""
    if line.side == "limit":
        rate, low, high, worst = (f"{value / 1e9:.1f}" for value in (line.rate, line.low, line.high, line.worst))
        return [f"{name}, 10^9 MAC/s", rate, f"{low} - {high}", worst, "", f"{line.of_limit:.0%}", *[""] * 4]
    return [
        name,
        _figures(line.rate),
        f"{_figures(line.low)} - {_figures(line.high)}",
        _figures(line.worst),
        "" if line.against_peer is None else f"{line.against_peer:.2f}",
        "" if line.of_limit is None else f"{line.of_limit:.1%}",
        _figures(1e6 / line.rate),
        memory,
        f"{line.compile_s:.1f}",
        f"{line.gradient_error:.0e}",
    ]


def _figures(value: float) -> str:
    """Return a number with three figures, thousands apart."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _heading(match: dict[str, Any]) -> str:
    work = match["multiply_adds_per_image"]
    return (
        f"{match['title']}, {match['threads']} thread{'s' if match['threads'] > 1 else ''} "
        f"({work['through_argmax']:,} multiply-adds per image; dense {work['dense']:,})"
    )


def markdown(result: dict[str, Any]) -> str:
    """Return all tables as Markdown, with what they need to be judged."""
    parts = [
        "# Training on the CPU, side by side",
        "",
        *(["**A quick run: it shows that the program works. Do not quote its numbers.**", ""] * result["quick"]),
        f"`{result['command']}`",
        "",
        _conditions(result),
        "",
        EXPLANATION,
        "",
    ]
    swept = {m["group"] for m in result["matches"] if m["grows"] is not None}
    for match in result["matches"]:
        parts += [f"## {_heading(match)}", "", *_markdown_rows(COLUMNS, [_cells(line) for line in lines(match)]), ""]
    if any(match["group"] == "networks" for match in result["matches"]):
        parts += ["## Networks: `cpu-simd` against the best peer", "", *_markdown_rows(*_network_rows(result)), ""]
    for group in (g for g in SWEEPS if g in swept):
        for threads in sorted({m["threads"] for m in result["matches"]}):
            matches = [m for m in result["matches"] if m["group"] == group and m["threads"] == threads]
            parts += [f"## Microseconds per image, by {SWEEPS[group]}, {threads} threads", ""]
            parts += [*_markdown_rows(("", *(f"{m['grows']}" for m in matches)), _growth_rows(matches)), ""]
    return "\n".join(parts)


def _conditions(result: dict[str, Any]) -> str:
    machine, matches = result["machine"], result["matches"]
    loads = [load for match in matches for load in match["load_averages"]]
    facts: dict[str, Any] = {}
    for match in matches:
        for row in match["rows"]:
            facts |= row["setup"].get("facts", {})
    skip = ("threads", "device", "lanes", "chains", "blas", "threading_layer", "numba_cpu")
    versions = ", ".join(f"{name} {value}" for name, value in sorted(facts.items()) if name not in skip)
    stolen = result.get("stolen_share")
    held = f", everyone restricted to {result['held']}" if result.get("held") else ""
    return (
        f"{result['started']}, {result['seconds']:.0f} s. {machine['processor']}, {len(machine['cores'])} cores, "
        f"{machine['system']}{held}, Python {machine['python']}, {versions}. {result['rounds']} rounds of "
        f"{result['seconds_per_sample']:g} s. Load average {min(loads, default=0):.1f} to {max(loads, default=0):.1f} "
        f"(this program's own work included)"
        + (f"; {stolen:.1%} of the CPU's time went to other machines." if stolen is not None else ".")
        + (f" Not installed: {', '.join(result['not_installed'])}." if result["not_installed"] else "")
    )


def _network_rows(result: dict[str, Any]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Return the head and the rows of the table of all networks."""
    rows = []
    for match in (m for m in result["matches"] if m["group"] == "networks"):
        found = lines(match)
        ours = next((line for line in found if line.contestant == "cpu-simd"), None)
        peers = [line for line in found if line.side == "peer" and not line.error]
        if ours is None or ours.error or not peers:
            continue
        best = max(peers, key=lambda line: line.rate)
        memory = f"{ours.peak_bytes / best.peak_bytes:.2f}" if ours.peak_bytes and best.peak_bytes else ""
        rows.append(
            [
                match["title"],
                str(match["threads"]),
                _figures(ours.rate),
                f"{_figures(best.rate)} ({best.contestant})",
                f"{ours.against_peer:.2f}",
                f"{ours.of_limit:.0%}",
                memory,
            ]
        )
    return ("", "threads", "cpu-simd, images/s", "best peer", "ratio", "of limit", "memory of the peer's"), rows


def _growth_rows(matches: list[dict[str, Any]]) -> list[list[str]]:
    summed = [{line.contestant: line for line in lines(match) if line.side != "limit"} for match in matches]
    names = dict.fromkeys(name for found in summed for name in found)
    rows = []
    for name in names:
        cells = [found.get(name) for found in summed]
        rows.append([name, *("" if c is None or c.error else _figures(1e6 / c.rate) for c in cells)])
    return rows


def _markdown_rows(columns: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    rule = ["---", *["---:"] * (len(columns) - 1)]
    return ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in (columns, rule, *rows)]


def _rates(row: dict[str, Any]) -> list[float]:
    return [row["per_step"] * row["steps"] / seconds for seconds in row["samples"]]


def _bars(matches: list[dict[str, Any]], result: dict[str, Any], path: Path) -> list[Path]:
    """Draw images per second as bars, one panel per case, with the hardware's limit as a line."""
    plt = _pyplot()
    across = min(2, len(matches))
    down = -(-len(matches) // across)
    tallest = max(len(match["rows"]) for match in matches)
    figure, axes = plt.subplots(
        down, across, figsize=(6 * across, 0.9 + down * (0.9 + 0.26 * tallest)), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(matches) :]:
        axis.set_visible(False)
    for axis, match in zip(axes.flat, matches, strict=False):
        _bar_panel(axis, match)
    figure.suptitle(_figure_title("Images trained per second", matches[0]["threads"], result), fontsize=11)
    drawn = {_kind(line) for match in matches for line in lines(match) if line.error is None and line.side != "limit"}
    kinds = {name: plt.Rectangle((0, 0), 1, 1, color=colour) for name, colour in KINDS.items() if name in drawn}
    figure.legend(kinds.values(), kinds, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return _save(figure, path)


def _ratios(matches: list[dict[str, Any]], result: dict[str, Any], path: Path) -> list[Path]:
    """Draw how many times the best peer's images per second `cpu-simd` trains, a row per network, a mark per batch."""
    plt = _pyplot()
    names = list(dict.fromkeys(match["case"].rpartition("-b")[0] for match in matches))
    figure, axis = plt.subplots(figsize=(7, 1.2 + 0.32 * len(names)), layout="constrained")
    for batch, colour, marker in zip(
        sorted({match["batch_size"] for match in matches}), (ORANGE, GREEN, BLUE), "vso", strict=False
    ):
        points = [
            (line.against_peer, names.index(match["case"].rpartition("-b")[0]))
            for match in matches
            if match["batch_size"] == batch
            for line in lines(match)
            if line.contestant == "cpu-simd" and line.against_peer
        ]
        if points:
            axis.scatter(*zip(*points, strict=True), color=colour, marker=marker, label=f"batch {batch}")
    axis.axvline(1, color=RED, linewidth=1.2, linestyle=(0, (4, 2)))
    axis.set_xlim(left=0)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlabel("times the best peer's images/s", fontsize=8)
    axis.legend(fontsize=8, frameon=False)
    _tidy(axis, "x")
    figure.suptitle(_figure_title("cpu-simd beside the best peer", matches[0]["threads"], result), fontsize=10)
    return _save(figure, path)


def _kind(line: Line) -> str:
    return "frameworks" if line.side == "peer" else "cpu-simd" if line.contestant == "cpu-simd" else OTHERS


def _bar_panel(axis, match: dict[str, Any]) -> None:
    summed = [line for line in lines(match) if line.error is None]
    shown = [line for line in summed if line.side != "limit"]
    limit = max((line.rate for line in summed if line.side == "limit"), default=None)
    limit = limit and limit / match["multiply_adds_per_image"]["through_argmax"]
    names = [line.contestant + (f" ({line.scaled} a step)" if line.scaled else "") for line in shown]
    rates = [line.rate for line in shown]
    axis.barh(names, rates, color=[KINDS[_kind(line)] for line in shown], height=0.72)
    axis.invert_yaxis()
    top = max([*rates, limit or 0], default=1)
    axis.set_xlim(0, top * 1.18)
    for place, rate in enumerate(rates):
        inside = (
            limit is not None and rate <= limit < rate + LABEL_SHARE * top
        )  # beside the bar it would cross the line
        axis.annotate(
            _figures(rate),
            (rate, place),
            (-4 if inside else 4, 0),
            textcoords="offset points",
            ha="right" if inside else "left",
            va="center",
            fontsize=8,
            color="white" if inside else "black",
        )
    if limit:
        axis.axvline(limit, color=RED, linewidth=1.2, linestyle=(0, (4, 2)))
        axis.text(
            limit,
            1.01,
            f"limit {_figures(limit)}",
            color=RED,
            fontsize=8,
            ha="center",
            va="bottom",
            transform=axis.get_xaxis_transform(),
        )
    axis.set_title(match["title"], fontsize=10, loc="left", pad=16)
    axis.set_xlabel("images/s", fontsize=8)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.locator_params(axis="x", nbins=5)
    _tidy(axis, "x")


def _growth(matches: list[dict[str, Any]], result: dict[str, Any], path: Path) -> list[Path]:
    """Draw the cost of an image as something grows, one panel per sweep, a line per contestant."""
    plt = _pyplot()
    groups = [group for group in SWEEPS if any(match["group"] == group for match in matches)]
    across = min(2, len(groups))
    down = -(-len(groups) // across)
    figure, axes = plt.subplots(down, across, figsize=(5.2 * across, 0.9 + 3.4 * down), squeeze=False)
    for axis in axes.flat[len(groups) :]:
        axis.set_visible(False)
    for axis, group in zip(axes.flat, groups, strict=False):
        _growth_panel(axis, [match for match in matches if match["group"] == group], SWEEPS[group])
    handles = {label: h for axis in axes.flat for h, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.suptitle(_figure_title("What an image costs", matches[0]["threads"], result), fontsize=11)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    figure.legend(handles.values(), handles, loc="lower center", ncols=5, fontsize=8, frameon=False)
    return _save(figure, path)


def _growth_panel(axis, matches: list[dict[str, Any]], label: str) -> None:
    grows = [match["grows"] for match in matches]
    summed = [{line.contestant: line for line in lines(match) if line.error is None} for match in matches]
    for name, (colour, marker) in LINES.items():
        points = [(x, 1e6 / found[name].rate) for x, found in zip(grows, summed, strict=True) if name in found]
        if points:
            width = 2 if name == "cpu-simd" else 1.2
            axis.plot(
                *zip(*points, strict=True), color=colour, marker=marker, linewidth=width, markersize=5, label=name
            )
    limits = [
        (x, 1e6 * match["multiply_adds_per_image"]["through_argmax"] / max(rates))
        for x, match, found in zip(grows, matches, summed, strict=True)
        if (rates := [line.rate for line in found.values() if line.side == "limit"])
    ]
    if limits:
        axis.plot(
            *zip(*limits, strict=True), color="black", linestyle=(0, (4, 2)), linewidth=1.2, label="hardware limit"
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(grows, [str(x) for x in grows])
    axis.minorticks_off()
    axis.set_xlabel(label, fontsize=8)
    axis.set_ylabel("us/image (log)", fontsize=8)
    axis.set_title(_common_title(matches), fontsize=10, loc="left")
    _tidy(axis, "both")


def _common_title(matches: list[dict[str, Any]]) -> str:
    """Return what the titles of a sweep's cases have in common."""
    parts = [match["title"].split(", ") for match in matches]
    return ", ".join(part for part in parts[0] if all(part in others for others in parts))


def _figure_title(what: str, threads: int, result: dict[str, Any]) -> str:
    quick = " - quick run, not to be quoted" if result["quick"] else ""
    return f"{what}, {threads} thread{'s' if threads > 1 else ''} of {result['machine']['processor']}{quick}"


def _tidy(axis, grid: str) -> None:
    axis.tick_params(labelsize=8, length=2)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis=grid, color="#dddddd", linewidth=0.5)
    axis.set_axisbelow(True)


def _pyplot():
    """Import matplotlib only here, and without a screen."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save(figure, path: Path) -> list[Path]:
    import matplotlib.pyplot as plt

    target = path.with_suffix(".png")
    figure.savefig(target, dpi=120, facecolor="white")
    plt.close(figure)
    return [target]
