"""The command line: `python -m cnnexp ...` and the console script `cnnexp ...` are the same.

Only light modules are imported at the top, so that MLflow begins to load, in a process of its own, before Hydra here.
"""

import contextlib
import gc
import importlib
import os
import re
import signal
import sys

from cnnexp.errors import BackendUnavailable, CnnexpError, ConfigError, did_you_mean, explained, leave
from cnnexp.measuring.environment import RANK_VARIABLES, launched_rank
from cnnexp.system.registry import take_plugins
from cnnexp.tracking.pipe import end_early, start_early

# name -> its arguments and what it does; the function `command` of the module of that name in app/ does it
COMMANDS = {
    "check": ("NAME [plugins=FILE.py]", "Is a backend, a layer, an optimizer or a loss right? Your own, too."),
    "doctor": ("", "What this machine can run, and what is missing for the rest."),
    "draw": ("RUN", "A page to draw a digit on, and watch what the layers make of it."),
    "explain": ("RUN | RUN RUN", "Where the time of a run's step goes, beside its baseline's or another's,\nand why."),
    "export": ("RUN [FILE.onnx]", "Write what a run has trained as an ONNX file."),
    "find-rate": (
        "[GROUP=NAME ...] [GROUP.KEY=VALUE ...]",
        "Try ever higher learning rates, a step each, and suggest one for a run.",
    ),
    "predict": (
        "RUN IMAGE... | RUN dataset=NAME [dataset.KEY=VALUE ...] [backend=NAME]",
        "Classify photographs, or a data set, with what a run has trained.",
    ),
    "report": ("FOLDER | EXPERIMENT", "Make the page of a paper's table or figure again, from the folder of a sweep."),
    "runs": (
        "[KEY=VALUE ...] [sort=COLUMN] [last=NUMBER]",
        "List the recorded runs here, the newest first; KEY is status,\nor a group or key of the config.",
    ),
    "sync": ("[FOLDER ...] [tracking.uri=STORE]", "Send to their store what runs have written down and it has missed."),
    "ui": (
        "[tracking.uri=STORE] [port=NUMBER]",
        "Open the recorded runs in a browser, ranked, the latest experiment first.",
    ),
}
ELSEWHERE = {"runs": "cnnexp.app.listing", "ui": "cnnexp.tracking.browser"}
A_RUN = "RUN is its folder, a checkpoint, its MLflow id or its first digits,\nfour or more, latest, or best."


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP, treated like Ctrl-C: the run ends as killed."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.exit_code = 128 + signum


def main() -> None:
    """Run the command line and leave with its exit code."""
    gc.set_threshold(50_000)
    gc.disable()  # until a run trains, or a command begins: to look for garbage takes a tenth of the start
    traceback_wanted = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise what it would print, so that errors are reported here
    signal.signal(signal.SIGTERM, _terminate)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # not with nohup
        signal.signal(signal.SIGHUP, _terminate)
    try:
        rank = launched_rank()
        if rank:
            with contextlib.suppress(CnnexpError):  # rank 0 reports it
                take_plugins(sys.argv[1:])
            importlib.import_module("cnnexp.workers.mpi").follow()
            return
        if rank == 0:
            _lead()
        sys.argv[1:] = take_plugins(sys.argv[1:])
        _dispatch(sys.argv[1:])
    except KeyboardInterrupt as error:
        word, code = ("terminated", error.exit_code) if isinstance(error, Terminated) else ("interrupted", 130)
        leave("; ".join([word, *getattr(error, "__notes__", ())]), code)
    except BrokenPipeError:
        # who read standard output is gone, as with `| head`; nobody is left to read, nor at the interpreter's end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        if traceback_wanted:
            raise
        failure = error if isinstance(error, CnnexpError) else _composing(error) or explained(error)
        leave(str(failure), failure.exit_code)
    finally:
        gc.freeze()  # else the interpreter, as it ends, walks through all of Numba's objects for half a second


def _lead() -> None:
    """Be rank 0 of those that a launcher of MPI started; alone where no MPI is there and none was asked for."""
    try:
        importlib.import_module("cnnexp.workers.mpi").lead()
    except BackendUnavailable:
        if "workers=mpi" in sys.argv:
            raise
        for name in RANK_VARIABLES:  # a shell within a job has them, too
            os.environ.pop(name, None)


def _dispatch(arguments: list[str]) -> None:
    if "--version" in arguments or arguments[:1] == ["version"]:
        sys.stdout.write(f"cnnexp {importlib.import_module('cnnexp').__version__}\n")
        return
    if "query=bash" in arguments and len(os.environ.get("COMP_LINE", "").split()) <= 2:
        sys.stdout.write(f"{' '.join(COMMANDS)} ")  # beside the groups, which Hydra completes
    if arguments[:1] == ["help"]:
        if arguments[1:] and arguments[1] not in COMMANDS and re.fullmatch(r"[a-z]+(=[\w-]*)?", arguments[1]):
            importlib.import_module("cnnexp.app.groups").show(arguments[1], COMMANDS)
            return
        arguments = sys.argv[1:] = [*arguments[1:2], "--help"]
    if arguments and re.fullmatch(r"[a-z][a-z_-]*", arguments[0]) and arguments[0] not in COMMANDS:
        legal = ("help", *COMMANDS)
        known = f"{', '.join(legal)}{did_you_mean(arguments[0], legal)}"
        takes = "a run takes GROUP=NAME and GROUP.KEY=VALUE alone"
        raise ConfigError(f"{arguments[0]}: no such command; legal: {known}; {takes}")
    if arguments and arguments[0] in COMMANDS:
        usage, does = COMMANDS[arguments[0]]
        gc.enable()
        if set(arguments[1:]) & {"-h", "--help"}:
            lines = f"Usage: cnnexp {arguments[0]} {usage}".rstrip().replace(" | ", f"\n       cnnexp {arguments[0]} ")
            sys.stdout.write("\n".join([lines, "", does, *([A_RUN] if "RUN" in usage else []), ""]))
        else:
            module = ELSEWHERE.get(arguments[0], f"cnnexp.app.{arguments[0].replace('-', '_')}")
            importlib.import_module(module).command(arguments[1:])
        return
    if {"-h", "--help"} & set(arguments):
        importlib.import_module("cnnexp.app.groups").show_all({name: does for name, (_, does) in COMMANDS.items()})
        return
    about = [word for word in arguments if word.startswith("-") and word not in ("-m", "--multirun")]
    if not about and "tracking=none" not in arguments:  # as far as can be seen before the config is composed
        # loads MLflow while this process loads Hydra, the data and its compiler
        start_early(database=not any(word.startswith("tracking.uri=") for word in arguments))
    try:
        importlib.import_module("cnnexp.app.hydra_app").launch()
    finally:
        end_early()


def _composing(error: Exception) -> CnnexpError | None:
    """Return the mistake in the config behind an exception, None where it is none or nobody can say."""
    try:
        from cnnexp.app import composing, hydra_app

        return composing.explain(error, hydra_app.config_keys)
    except Exception:  # what cannot be explained is shown as it is
        return None


def _terminate(signum: int, frame: object) -> None:
    raise Terminated(signum)


if __name__ == "__main__":
    main()
