"""`python -m benchmarks`: time our CPU backends and the peers that are installed, in turn, and write what came out."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import cases, contestants, machine, report
from benchmarks.runner import ROOT, Match, Plan, installed, make_oracle

PATHS = ("--peer-python", "--out", "--mnist")


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code: 1 where one of ours failed; a peer that fails is only a row."""
    options = parser().parse_args(arguments)
    if options.redraw:
        report.write(json.loads((options.out / "cpu.json").read_text()), options.out)
        return 0
    try:
        chosen = cases.select(options.cases)
        entries = contestants.select(options.contestants)
        threads = _threads(options.threads)
        if options.mnist and (other := [c for c in chosen if c.network.input_shape != (28, 28, 1)]):
            raise ValueError(f"--mnist: {other[0].name} takes no images of 28 x 28 pixels; choose others by --cases")
    except ValueError as error:
        parser().error(str(error))
    plan = Plan(
        rounds=2 if options.quick else options.rounds,
        seconds=0.05 if options.quick else options.seconds,
        setup_timeout_s=options.setup_timeout,
        peer_python=options.peer_python,
        cores=machine.usable_cores(),
        mnist=str(options.mnist.resolve()) if options.mnist else None,
        environment=machine.HOLDS.get(options.hold, {}),
    )
    console = Console(width=max(120, Console().width), highlight=False)
    entries, missing = _present(entries, plan.peer_python)
    for name in missing:
        console.print(f"{name}: not installed for {plan.peer_python}; left out")
    result = {
        "command": _command(sys.argv[1:] if arguments is None else arguments),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": options.quick,
        "images": "MNIST" if options.mnist else "uniform noise",
        "rounds": plan.rounds,
        "seconds_per_sample": plan.seconds,
        "machine": machine.facts(),
        "held": options.hold,
        "not_installed": missing,
        "matches": [],
    }
    began, before = time.monotonic(), machine.cpu_times()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for case in chosen:
            oracle = Path(folder) / f"{case.name}.npz"
            make_oracle(case, oracle, plan.mnist)
            for count in threads:
                match = Match(case, count, plan, oracle)
                suited = [entry for entry in entries if entry.infers == (case.group == "inference")]
                with console.status("") as status:
                    heading = f"{case.title}, {count} thread{'s' if count > 1 else ''}"
                    match.run(suited, lambda text, h=heading, s=status: s.update(f"{h}: {text}"))
                result["matches"].append(match.record())
                result["seconds"] = time.monotonic() - began
                result["stolen_share"] = _stolen(before, machine.cpu_times())
                # after every match, so that nothing is lost where a run is broken off
                (options.out / "cpu.json").write_text(dumps(result))
                console.print(report.screen_table(result["matches"][-1]))
    written = report.write(result, options.out)
    console.print(f"{result['seconds']:.0f} s; wrote", *(str(path) for path in [options.out / "cpu.json", *written]))
    failed = [row for match in result["matches"] for row in match["rows"] if row["error"] and row["side"] != "peer"]
    return 1 if failed else 0


def dumps(value: Any, levels: int = 4) -> str:
    """Return JSON whose upper levels stand a value a line: of a result, each contestant's row is one line.

    Anything deeper is on one line: all samples of a contestant, and one line of a diff where they change.
    """

    def lines(value: Any, left: int) -> str:
        nested = isinstance(value, dict | list) and any(isinstance(inner, dict | list) for inner in _inner(value))
        if not nested or not left:
            return json.dumps(value)
        keys = [f"{json.dumps(key)}: " for key in value] if isinstance(value, dict) else [""] * len(value)
        body = ",\n".join(key + lines(inner, left - 1) for key, inner in zip(keys, _inner(value), strict=True))
        return f"{{\n{body}\n}}" if isinstance(value, dict) else f"[\n{body}\n]"

    return lines(value, levels) + "\n"


def _inner(value: dict | list) -> list:
    return list(value.values()) if isinstance(value, dict) else value


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    p.add_argument("--cases", nargs="+", default=["main"], help=f"groups ({', '.join(cases.GROUPS)}) or cases by name")
    p.add_argument("--threads", nargs="+", default=["1", "all"], help="numbers of threads; all: every usable core")
    p.add_argument("--contestants", nargs="+", default=["ours", "peer"], help="ours, peer, or contestants by name")
    p.add_argument("--rounds", type=int, default=5, help="samples of each contestant")
    p.add_argument("--seconds", type=float, default=0.2, help="length of a sample; longer where one step takes longer")
    p.add_argument("--setup-timeout", type=float, default=240, help="seconds to import, compile and check")
    p.add_argument("--peer-python", default=sys.executable, help="the interpreter that has the peers installed")
    p.add_argument("--out", type=Path, default=ROOT / "outputs" / "benchmarks", help="folder to write to")
    p.add_argument("--redraw", action="store_true", help="measure nothing; write tables and figures of --out/cpu.json")
    p.add_argument("--mnist", type=Path, help="folder with MNIST's files: train on real images, not on noise")
    p.add_argument("--hold", choices=machine.HOLDS, help="restrict everyone, the limits too, to these instructions")
    p.add_argument("--quick", action="store_true", help="2 short rounds: to see that it works, not to quote")
    return p


def _command(arguments: list[str]) -> str:
    """Return the command as anyone would type it: without this machine's folders."""
    parts = [word.partition("=") for word in arguments]
    shown = [f"{name}=PATH" if equals and name in PATHS else name + equals + value for name, equals, value in parts]
    for number, word in enumerate(shown[:-1]):
        if word in PATHS:
            shown[number + 1] = "PATH"
    return shlex.join(["python", "-m", "benchmarks", *shown])


def _threads(wanted: list[str]) -> list[int]:
    """Return the numbers of threads, fewest first.

    Raises:
        ValueError: a number is none, or is more than there are cores.
    """
    cores = len(machine.usable_cores())
    legal = {"all": cores, **{str(n): n for n in range(1, cores + 1)}}
    for word in wanted:
        if word not in legal:
            raise ValueError(f"--threads {word}: legal are 1 .. {cores} and all")
    return sorted({legal[word] for word in wanted})


def _present(entries: list[contestants.Entry], peer_python: str) -> tuple[list[contestants.Entry], list[str]]:
    """Return the entries whose module can be imported, and the names of the others."""
    found = installed(peer_python, {entry.module for entry in entries if entry.side == "peer"})
    present = [entry for entry in entries if entry.side != "peer" or entry.module in found]
    return present, [entry.name for entry in entries if entry not in present]


def _stolen(before: dict[str, float] | None, after: dict[str, float] | None) -> float | None:
    """Return the share of CPU time that the hypervisor gave to others."""
    if before is None or after is None:
        return None
    return (after["stolen"] - before["stolen"]) / max(after["all"] - before["all"], 1e-9)


if __name__ == "__main__":
    sys.exit(main())
