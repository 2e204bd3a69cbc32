"""`cnnexp explain`: why a run is as fast as it is, part by part of its training step, on the screen and as a figure."""

import json
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

from cnnexp.app.config import Trainer, build, named
from cnnexp.app.console import LINE, make_console, say
from cnnexp.app.resume import find_run, folder_of
from cnnexp.backends import backend_class
from cnnexp.backends.protocol import Program
from cnnexp.errors import ConfigError
from cnnexp.measuring.explanation import Side, rows, sentences, side_of, sides_of
from cnnexp.measuring.ledger import Ledger, Profiled, report, report_beside
from cnnexp.system.table import rounded
from cnnexp.tracking.events import read_journal
from cnnexp.tracking.journal import PROFILE
from cnnexp.training import checkpoint
from cnnexp.training.baseline import Baseline
from cnnexp.training.loop import TrainingPlan, train_epochs
from cnnexp.training.steps import Steps

NAME, SIDE, US, SHARE = 24, 14, 9, 6  # columns of the table; bars have what is left
PASSES, PASS_S, MOST_STEPS = 4, 0.5, 500  # of a run that was not profiled: passes, the most seconds and steps of each
EIGHTHS = " ▏▎▍▌▋▊▉█"


def command(arguments: Sequence[str]) -> None:
    """Print the step of a run beside its baseline's, or of two runs (see `resume.find_run`), why they differ; draw it.

    CheckpointError: there is no such run; ConfigError: not one or two, or one that was not profiled and whose record
    does not say how it was run; DataError: the data of such a run cannot be loaded.
    """
    if len(arguments) not in (1, 2):
        raise ConfigError("explain: give a run, to see it beside its baseline, or two: explain RUN | RUN RUN")
    paths = [find_run(run, f"explain {run}") for run in arguments]
    folders = [folder_of(path) for path in paths]
    console = make_console()
    title, profiles = " | ".join(str(read_journal(folder)["name"]) for folder in folders), []
    for run, path, folder in zip(arguments, paths, folders, strict=True):
        if (profile := _read_profile(folder)) is None:
            say(console, f"explain {run}: was not profiled; its steps are timed now, from {path.name}\n")
            profile = clock_steps(path, read_journal(folder)["config"], f"explain {run}")
        profiles.append(profile)
    sides = set_beside(profiles)
    file = folders[0] / "figures" / ("explain.png" if len(folders) == 1 else f"explain-{folders[1].name}.png")
    has_blocks = console.encoding.lower().startswith("utf")
    say(console, "\n".join(screen(sides, title, min(console.width, LINE), has_blocks)))
    from cnnexp.tracking import figures  # loads matplotlib: after the answer is there

    figures.save(figures.explained(sides, title), file)
    say(console, f"\nThe figure: {file}")


def clock_steps(path: Path, config: Mapping[str, Any], given: str) -> dict[str, Any]:
    """Train for some seconds, clocked, from a run's checkpoint; return their profile, see `ledger.report`.

    They train as one process, beside the run's baseline. Nothing is recorded. `given` is how the user gave the run.
    """
    if missing := {"backend", "optimizer", "dataset", "trainer"} - config.keys():
        raise ConfigError(f"{given}: its journal holds no config of {', '.join(sorted(missing))}")
    found = checkpoint.load(path)
    network, loss = checkpoint.rebuild(found.training)
    trainer = build(Trainer, config["trainer"], "trainer")
    dataset = named("dataset", config["dataset"]).load()
    if dataset.input_shape != network.input_shape:
        shapes = f"{dataset.input_shape}, the run's are of shape {network.input_shape}"
        raise ConfigError(f"{given}: dataset.name={dataset.name!r} has inputs of shape {shapes}")
    compiling = network, loss, named("optimizer", config["optimizer"]), trainer.batch_size
    backend, ledger = named("backend", config["backend"]).clocked, Ledger()
    most = MOST_STEPS * trainer.batch_size
    dataset = replace(dataset, train=dataset.train[:most], test=dataset.test[:1], validation=None)
    with ExitStack() as stack:
        compiled = stack.enter_context(closing(backend.compile(*compiling)))
        program = Profiled(cast(Program, Steps(compiled, **trainer.steps)) if trainer.steps else compiled, ledger)
        program.restore(found.state)
        beside = baseline = None
        if trainer.baseline is not None:
            compared = backend_class(trainer.baseline)()
            beside = Profiled(stack.enter_context(closing(compared.compile(*compiling))), ledger, train="baseline")
            timed = trainer.baseline_batches, trainer.baseline_s
            baseline = Baseline(beside, dataset.train, *timed, layers_share=beside.layers_share)
        plan = TrainingPlan(PASSES, trainer.seed, trainer.rates(), PASS_S)
        epochs = list(train_epochs(program, dataset, plan, baseline=baseline))
        profile = report(ledger, program, epochs, backend)
        if beside is not None:
            profile["baseline"] = report_beside(beside, compared, epochs)
    return profile


def set_beside(profiles: Sequence[Mapping[str, Any]]) -> list[Side]:
    """Return the steps to set beside each other: two runs', or a run's and its baseline's, where it had one."""
    if len(profiles) == 1:
        return sides_of(profiles[0])
    labels = [str(profile["backend"]) for profile in profiles]
    if labels[0] == labels[1]:
        labels = [f"{label} {number}" for number, label in enumerate(labels, 1)]
    return [side_of(profile, label) for profile, label in zip(profiles, labels, strict=True)]


def screen(sides: Sequence[Side], title: str, width: int = LINE, blocks: bool = True) -> list[str]:
    """Return the lines to show, `width` columns wide: bars to one scale, of `blocks` or of `#`, then the sentences."""
    table = rows(sides)
    bar = max(8, width - NAME - SIDE - US - SHARE - 2)
    longest = max((piece.us for row in table for piece in row.pieces if piece is not None), default=0.0)
    lines = [textwrap.shorten(title, width, placeholder="..."), ""]
    if table:
        lines.append(f"{'part of a step':{NAME}}{'':{SIDE}}{'us/image':>{US}}{'share':>{SHARE}}")
    for row in table:
        here = [(side, piece) for side, piece in zip(sides, row.pieces, strict=True) if piece is not None]
        # a line per side that has the part; its name goes over as many as there are
        for name, found in zip_longest(textwrap.wrap(row.name, NAME - 1), here):
            line = f"{name or '':{NAME}}"
            if found is not None:
                side, us = found[0], found[1].us
                length = us / longest * bar
                whole, eighths = divmod(round(8 * length), 8)
                line += f"{side.label[: SIDE - 1]:{SIDE}}{rounded(us):>{US}}{f'{us / side.us:.1%}':>{SHARE + 1}} "
                line += EIGHTHS[8] * whole + EIGHTHS[eighths] if blocks else "#" * round(length)
            lines.append(line.rstrip())
    for i, side in enumerate(sides):
        lines.append(f"{'' if i else 'the whole step':{NAME}}{side.label[: SIDE - 1]:{SIDE}}{rounded(side.us):>{US}}")
    for text in sentences(sides):
        lines += ["", *textwrap.wrap(text, width, break_on_hyphens=False)]
    return lines


def _read_profile(folder: Path) -> dict[str, Any] | None:
    """Return the profile that a run recorded; None where it has none, or an older version's."""
    try:
        profile = json.loads((folder / PROFILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return profile if isinstance(profile, dict) and "us_per_image" in profile else None
