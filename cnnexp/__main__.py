"""The composition root: the command line. It puts the pieces together, and is the only module that imports Hydra.

`python -m cnnexp ...` and the console script `cnnexp ...` are the same.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import signal
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from cnnexp import config, explain
from cnnexp.environment import outputs_dir
from cnnexp.errors import CnnexpError
from cnnexp.losses import check_loss
from cnnexp.train import train_epochs

log = logging.getLogger(__name__)

COMMANDS = {"ui": "cnnexp.tracking:ui"}
PACKAGE = Path(__file__).resolve().parent
# a checkout holds conf/ beside the package, an installed package inside it
CONF = next((path for path in (PACKAGE / "conf", PACKAGE.parent / "conf") if path.is_dir()), PACKAGE / "conf")
ERROR_FILE = "error.txt"  # left in the folder of a job that failed


class Terminated(KeyboardInterrupt):
    """SIGTERM, treated like Ctrl-C: the run ends as killed."""


def main() -> None:
    """Run the command line and leave with its exit code."""
    traceback_wanted = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise what it would print, so that errors are reported here
    signal.signal(signal.SIGTERM, _terminate)
    try:
        _dispatch(sys.argv[1:])
    except CnnexpError as error:
        if traceback_wanted:
            raise
        _leave(str(error), error.exit_code)
    except KeyboardInterrupt as error:
        terminated = isinstance(error, Terminated)
        _leave("terminated" if terminated else "interrupted", 143 if terminated else 130)
    except Exception as error:
        composing = explain.explain(error, _config_keys)
        if composing is None or traceback_wanted:
            raise
        _leave(str(composing), composing.exit_code)


def job(composed: DictConfig) -> float:
    """Run one job of the command line; return its objective, nan if it failed.

    A failure is kept, not raised: Hydra would print it its own way, and report only a sweep's first.
    """
    try:
        return run(composed)
    except Exception as error:
        _failures.append(error)
        if HydraConfig.get().mode is RunMode.MULTIRUN:
            _note_failure(error)
        return math.nan


def run(composed: DictConfig) -> float:
    """Train what the config describes; return the objective."""
    settings = config.load(config.plain(composed))
    trainer, dataset = settings.trainer, settings.dataset.load()
    network = settings.model.network(dataset.input_shape, len(dataset.classes))
    check_loss(network, settings.model.loss, len(dataset.classes))
    compiling = (network, settings.model.loss, settings.optimizer, trainer.batch_size)
    with contextlib.closing(settings.backend.compile(*compiling)) as program:
        program.restore({"parameters": network.initial_parameters(trainer.seed)})
        for result in train_epochs(
            program, dataset, trainer.epochs, trainer.seed, trainer.rates(), patience=trainer.patience
        ):
            log.info("%s", result)
    return result.test.accuracy


class SweepFolder(Callback):
    """Remembers where a sweep's jobs write, in the process that starts them (Hydra calls it; see conf/config.yaml)."""

    path: Path | None = None

    def on_multirun_start(self, config: DictConfig, **_) -> None:
        SweepFolder.path = Path(config.hydra.sweep.dir)


_failures: list[Exception] = []  # of this process


def _dispatch(arguments: list[str]) -> None:
    if arguments and arguments[0] in COMMANDS:
        module, _, function = COMMANDS[arguments[0]].partition(":")
        getattr(importlib.import_module(module), function)(arguments[1:])
        return
    OmegaConf.register_new_resolver("outputs", lambda: str(outputs_dir()), replace=True)
    hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)()
    if SweepFolder.path is not None:
        _report_sweep(SweepFolder.path)
    elif _failures:
        raise _failures[0]


def _note_failure(error: Exception) -> None:
    """Leave one line in the job's folder, where the process that started the sweep finds it."""
    line = str(error) if isinstance(error, CnnexpError) else f"{type(error).__name__}: {error}"
    hydra_config = HydraConfig.get()
    overrides = " ".join(hydra_config.overrides.task)
    log.error("%s: %s", overrides, line, exc_info=None if isinstance(error, CnnexpError) else error)
    Path(hydra_config.runtime.output_dir, ERROR_FILE).write_text(f"{overrides}: {line}\n", encoding="utf-8")


def _report_sweep(folder: Path) -> None:
    """Say which jobs failed and why, and leave with 1 if any did."""
    failed = sorted(folder.glob(f"*/{ERROR_FILE}"))
    if failed:
        lines = "".join(f"\n  {path.read_text(encoding='utf-8').strip()}" for path in failed)
        _leave(f"{len(failed)} jobs of the sweep failed:{lines}", 1)


def _config_keys() -> list[str]:
    """Return the dotted keys of the config, with the groups that the command line picks where they exist."""
    picked = [
        word for word in sys.argv[1:] if (CONF / word.partition("=")[0] / f"{word.partition('=')[2]}.yaml").is_file()
    ]
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        composed = OmegaConf.to_container(hydra.compose("config", picked), resolve=False)
    return list(_dotted(composed))


def _dotted(values: dict, prefix: str = ""):
    for key, value in values.items():
        yield from _dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else (f"{prefix}{key}",)


def _terminate(signum: int, frame: object) -> None:
    raise Terminated


def _leave(message: str, code: int) -> None:
    sys.stderr.write(f"cnnexp: error: {message}\n")
    sys.exit(code)


if __name__ == "__main__":
    # under its import name, so that Hydra's callback and the workers of a parallel launcher see this one module
    from cnnexp.__main__ import main

    main()
