"""The only module that imports Hydra: it composes the config of a command line, and hands each job to `run`."""

import contextlib
import logging
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import BrokenExecutor
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from cnnexp.app import config_security, sweep
from cnnexp.app.config import GROUPS, SECTIONS, Settings, Tracking, build, container, defaults, load, plain, record
from cnnexp.app.config_security import CONF
from cnnexp.app.console import JobTable, make_console, say, say_folder, say_rows
from cnnexp.app.resume import AUTO, find_earlier
from cnnexp.app.run import train
from cnnexp.errors import CnnexpError, ConfigError, TrackingError, did_you_mean, explained, leave, without_secrets
from cnnexp.measuring.environment import outputs_dir, program_name
from cnnexp.system import registry
from cnnexp.system.table import as_screen
from cnnexp.tracking import browser
from cnnexp.tracking.address import store_uri
from cnnexp.tracking.events import JOURNAL, SWEEP, read_journal
from cnnexp.tracking.journal import Run, holds_run
from cnnexp.tracking.metrics import default_name, leaves
from cnnexp.tracking.pipe import Recorder
from cnnexp.training import checkpoint

log = logging.getLogger(__name__)
for noisy in ("matplotlib", "numba", "PIL"):
    logging.getLogger(noisy).setLevel(logging.WARNING)  # else hydra.verbose=true prints all byte code

NOTHING = {"experiment=null", "search=null", "debug=null"}  # as without them; Hydra takes no null for a name
FOLDERS = ("hydra.run.dir", "hydra.sweep.dir")
OBJECTIVES = {"test_accuracy": "final/test_accuracy", "epoch_s": "time/median_epoch_s"}
LEFT = "the same command with sweep.skip_finished=true trainer.resume=auto trains what is left"
GAVE_UP = f"a process of hydra/launcher died, and the launcher ended the jobs that had not; {LEFT}"

# ${outputs:} in conf/config.yaml; here, so that the workers of a parallel launcher know it too
OmegaConf.register_new_resolver("outputs", lambda: str(outputs_dir()), replace=True)
# ${by:NAME,{NAME1: VALUE1},OTHERWISE} in conf/experiment/: a value that depends on the backend, say
OmegaConf.register_new_resolver("by", lambda name, values, otherwise: values.get(name, otherwise), replace=True)


def launch() -> None:
    """Run all jobs of this process's command line; raise what made the only one fail."""
    sys.argv[1:] = flags_first(_prepared(sys.argv[1:]))
    command = hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)
    interrupted, gave_up = True, []
    try:
        command()
        interrupted = False
    except KeyboardInterrupt as stopped:
        if SweepCallback.started:
            stopped.add_note(LEFT)
        raise
    except BrokenExecutor:  # of a parallel launcher: one of its processes was killed, and it ends the others
        interrupted, gave_up = False, [GAVE_UP]
    finally:
        failed = _finish_sweep(SweepCallback.started, interrupted) if SweepCallback.started else []
        lost = any(isinstance(error, TrackingError) for error in _failures)
        links: dict[Tracking, str] = {}
        with contextlib.suppress(TrackingError):  # a store that is gone has been reported by then
            links = {} if lost else {tracking: recorder.call("link") for tracking, recorder in _recorders.items()}
        for recorder in _recorders.values():
            recorder.close()
    for tracking, link in links.items():
        store = f" tracking.uri={without_secrets(tracking.uri)}" if tracking.uri else ""
        first = f"{missing}, then " if (missing := browser.installing_pages()) else ""
        if (tracking.uri or "").startswith("http"):  # at another store's port somebody else's may be served
            say(make_console(), link)
        else:
            say_rows(make_console(), [("To look at it:", f"{first}{program_name()} ui{store}")])
    if failed or gave_up:
        leave("\n  ".join([*failed, *gave_up, *map(str, _failures)]), 1)
    if _failures:
        raise _failures[0]


def _change_hydra() -> None:
    """Have every config checked before Hydra acts on it, in the workers of a parallel launcher, too.

    And spare it composing one only to see whether its `hydra.mode` asks for a sweep, where nothing sets that.
    """
    load_file, place = OmegaConf.load, ConfigLoaderImpl._load_single_config
    compose, get_mode = ConfigLoaderImpl.load_configuration, Hydra.get_mode

    def load(file: Any) -> Any:
        name = file if isinstance(file, str | Path) else getattr(file, "name", None)  # a path's `name` is its last part
        if isinstance(name, str | Path):
            config_security.check_file(Path(name))
        return load_file(file)

    def load_single_config(self: ConfigLoaderImpl, default: Any, repo: Any) -> Any:
        placed = place(self, default, repo)
        if placed.path.startswith("file://"):
            name = default.config_path
            name = name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"
            config_security.check_placed(container(placed.config), Path(placed.path.removeprefix("file://"), name))
        return placed

    def load_configuration(self: ConfigLoaderImpl, *arguments: Any, **options: Any) -> DictConfig:
        composed = compose(self, *arguments, **options)
        config_security.check_composed(container(composed))
        return composed

    def mode(self: Hydra, config_name: str | None, overrides: list[str]) -> Any:
        keys = (word.lstrip("+~").partition("=")[0] for word in sys.argv[1:] if word not in ("-m", "--multirun"))
        ours = all(key.partition(".")[0] in SECTIONS or key in FOLDERS for key in keys)
        return None if ours else get_mode(self, config_name, overrides)

    # Hydra loads its plugins, the reader of files among them, as modules that nobody else can reach
    setattr(OmegaConf, "load", staticmethod(load))  # noqa: B010
    setattr(ConfigLoaderImpl, "_load_single_config", load_single_config)  # noqa: B010
    setattr(ConfigLoaderImpl, "load_configuration", load_configuration)  # noqa: B010
    setattr(Hydra, "get_mode", mode)  # noqa: B010


_change_hydra()


def _prepared(words: Sequence[str]) -> list[str]:
    """Return a command line as Hydra may have it, without `NOTHING` and secrets; it may pick what plugins added.

    ConfigError is raised where a group is given no name but something else: Hydra's own errors name no key then.
    """
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        if key in SECTIONS and (value in ("", "null") or value[0] in ("{" if key == "augment" else "[{")):
            raise ConfigError(f"{word}: must be a name of the group {key}, e.g. a file of conf/{key}/")
    picked = [(group, name) for group, _, names in (word.partition("=") for word in words) for name in names.split(",")]
    if any(group in GROUPS and not (CONF / group / f"{name}.yaml").is_file() for group, name in picked):
        registry.load_installed()
    for group in GROUPS:  # the defaults of a plugin's class stand where our groups have a file
        for name, cls in registry.added(group).items():
            ConfigStore.instance().store(name, {"name": name, **defaults(cls)}, group)
    return config_security.hide_secrets([word for word in words if word not in NOTHING])


def flags_first(words: Sequence[str]) -> list[str]:
    """Return a command line with its flags at its start: Hydra takes no words on both sides of one.

    ConfigError is raised where one is unknown or refused, lacks its value, or has one that it does not take.
    """
    legal = {flag: action for action in get_args_parser()._actions for flag in action.option_strings}
    flags, others, left = [], [], list(words)
    while left:
        word = left.pop(0)
        flag, given, value = word.partition("=")
        if not word.startswith("-"):
            others.append(word)
            continue
        if flag == config_security.RERUN:
            raise ConfigError(f"{flag}: refused; it unpickles a file, which runs what is in it")
        if flag not in legal:
            names = [name for name in legal if name.startswith("--") and name != config_security.RERUN]
            raise ConfigError(f"{word}: unknown flag; legal: {', '.join(names)}{did_you_mean(flag, names)}")
        action = legal[flag]
        name = action.option_strings[0]
        if action.nargs == 0:
            if given:
                raise ConfigError(f"{word}: {flag} takes no value")
            flags.append(name)
            continue
        optional = action.nargs == "?"
        if not given and left and not left[0].startswith("-") and not (optional and "=" in left[0]):
            value = left.pop(0)
        value = value or (str(action.const) if optional else "")
        if not value or (action.choices and value not in action.choices):
            choices = f"one of {', '.join(map(str, action.choices))}" if action.choices else f"given, as {name} VALUE"
            raise ConfigError(f"{flag}{f'={value}' if value else ''}: its value must be {choices}")
        flags.append(f"{name}={value}")
    return [*flags, *others]


def job(composed: DictConfig) -> float:
    """Run one job; return its objective, nan if it failed: failures are kept, as Hydra would print the first alone."""
    try:
        return run(composed)
    except (Exception, SystemExit) as error:
        failure = error if isinstance(error, BrokenPipeError) else explained(error, _folder())
        failure.__cause__ = error.__cause__ if failure is error else error
        if within := sweep.current():
            _show(within, {}, str(failure))
        else:
            _failures.append(failure)
        return math.nan


def run(composed: DictConfig) -> float:
    """Train what the config describes, record it, show it; return the objective."""
    folder, overrides = _folder(), container(HydraConfig.get().overrides.task)
    within, recorded = sweep.current(), record(composed)
    try:
        settings = _load(composed, overrides)
    except CnnexpError:
        # a sweep finds what became of its jobs in their folders
        with Run(folder, recorded, overrides, name="illegal config"):
            raise
    tracking, parent = settings.tracking, within.begun if within else None
    contended = within is not None and within.contended
    earlier = find_earlier(settings.trainer.resume, folder, recorded)
    name = tracking.run_name or default_name(recorded, overrides, within.varied if within else ())
    before = earlier.folder if earlier else None
    try:
        with Run(folder, recorded, overrides, _recorder(tracking), name, parent, contended, before) as run:
            if within is None:
                run.show = partial(say_rows, make_console())
            if settings.sweep.skip_finished and run.skip_if_finished():
                log.info("skipped, finished before: %s", run.name)
            else:
                train(settings, run, earlier, _table(within).name(HydraConfig.get().job.num) if within else "")
    except KeyboardInterrupt as stopped:
        if within is None and (kept := checkpoint.list_checkpoints(folder / checkpoint.FOLDER)):
            words = [word for word in sys.argv[1:] if not word.lstrip("+").startswith("trainer.resume=")]
            if plugins := os.environ.get(registry.VARIABLE):
                words.insert(0, f"plugins=[{plugins.replace(os.pathsep, ',')}]")
            again = f"{program_name()} {shlex.join([*words, f'trainer.resume={folder}'])}"
            stopped.add_note(f"its checkpoint is {kept[-1]}; to go on: {again}")
        raise
    if within is not None:
        _show(within, run.metrics)
    return run.metrics.get(OBJECTIVES[settings.sweep.objective], math.nan)


def _load(composed: DictConfig, overrides: Sequence[str]) -> Settings:
    """Return the settings of a composed config; a key that an experiment sets and another model lacks says so."""
    try:
        return load(plain(composed))
    except ConfigError as error:
        key, experiment = str(error).partition("=")[0], HydraConfig.get().runtime.choices.get("experiment")
        typed = any(re.match(rf"\+*{re.escape(key)}=", word) for word in overrides)
        if experiment is None or typed or ": unknown key" not in str(error):
            raise
        raise ConfigError(f"{error}; experiment={experiment} sets it: add ~{key}, or choose no other") from error


class SweepCallback(Callback):
    """Hydra's word that a sweep starts, in the process that starts it (see conf/config.yaml)."""

    started: sweep.SweepRecord | None = None

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Begin the sweep; what Hydra would swallow ends the program instead."""
        try:
            tracking = build(Tracking, plain(config.tracking), "tracking")
            overrides = container(config.hydra.overrides.task)
            folder, paper = Path(config.hydra.sweep.dir), config.sweep.paper
            varied, jobs = _plan(overrides, config.hydra.sweeper)
            if config.trainer.resume is None and any(holds_run(folder / str(number)) for number in range(jobs or 0)):
                advice = "choose another folder, or go on with them by trainer.resume=auto"
                raise ConfigError(f"hydra.sweep.dir={folder}: holds the runs of another sweep; {advice}")
            common = {**record(OmegaConf.masked_copy(config, list(SECTIONS))), "varied": varied}
            earlier = _earlier_sweep(config, folder, common)
            recorder = _recorder(tracking)
            say_folder(make_console(), folder)
            SweepCallback.started = sweep.SweepRecord(folder, overrides, recorder, paper, common, jobs, earlier)
        except CnnexpError as error:
            leave(str(error), error.exit_code)


_failures: list[Exception] = []  # of this process
_recorders: dict[Tracking, Recorder] = {}  # the jobs of a sweep share one
_tables: dict[str, JobTable] = {}  # of the sweeps whose jobs this process has run, by their folder


def _earlier_sweep(config: DictConfig, folder: Path, recorded: Mapping[str, Any]) -> Path | None:
    """Return the folder of the sweep that one goes on with: that of its own folder, or, if asked for, the newest."""
    asked = config.sweep.skip_finished or OmegaConf.select(config, "trainer.resume") == AUTO
    found = find_earlier(AUTO if asked or (folder / JOURNAL).exists() else None, folder, recorded)
    return found.folder if found and read_journal(found.folder)["kind"] == SWEEP else None


def _plan(overrides: Sequence[str], sweeper: DictConfig) -> tuple[dict[str, str], int | None]:
    """Return what a sweeper varies, keys in their order with their values, and how many jobs that makes, if known."""
    params = {str(key): str(value) for key, value in (sweeper.get("params") or {}).items()}
    typed = OverridesParser.create().parse_overrides([*overrides, *(f"{key}={value}" for key, value in params.items())])
    swept = {override.get_key_element(): override for override in reversed(typed) if override.is_sweep_override()}
    # what is typed comes before what an experiment sweeps
    fixed = {override.get_key_element() for override in typed[: len(overrides)] if not override.is_sweep_override()}
    varied = [key for key in dict.fromkeys(override.get_key_element() for override in typed) if key in {*swept} - fixed]
    if "BasicSweeper" in sweeper["_target_"]:
        values = {key: list(swept[key].sweep_string_iterator()) for key in varied}
        for key, given in values.items():
            if not given:
                raise ConfigError(f"{swept[key].input_line}: no value to run; a sweep takes one at least")
            if twice := [value for value in dict.fromkeys(given) if given.count(value) > 1]:
                raise ConfigError(f"{key}={twice[0]}: given twice; a sweep runs each value once (vary trainer.seed)")
        return {key: ",".join(given) for key, given in values.items()}, math.prod(map(len, values.values()))
    lines = {key: str(swept[key].input_line).partition("=")[2] for key in varied}
    return lines | {key: value for key, value in params.items() if key not in {*lines, *fixed}}, sweeper.get("n_trials")


def _table(within: sweep.Sweep) -> JobTable:
    if within.folder not in _tables:
        _tables[within.folder] = JobTable(within.varied, within.jobs, within.started)
    return _tables[within.folder]


def _show(within: sweep.Sweep, metrics: Mapping[str, float], error: str | None = None) -> None:
    """Show the job of a sweep that has just ended."""
    typed = dict(override.lstrip("+~").partition("=")[::2] for override in container(HydraConfig.get().overrides.task))
    keys = [key for key in within.varied if key in typed]
    values = (f"{key.rpartition('.')[2]}={typed[key]}" if "." in key else typed[key] for key in keys)
    _table(within).row(HydraConfig.get().job.num, " ".join(values), metrics, error, time.time())


def _finish_sweep(started: sweep.SweepRecord, interrupted: bool) -> list[str]:
    """End a sweep and show its table; return a line for each job that failed."""
    rows, folder = started.finish(interrupted), str(started.folder)
    if rows:
        console = make_console()
        shown = _tables.pop(folder).shown if folder in _tables else 0
        if shown < len(rows):  # other processes ran them
            console.print(as_screen(sweep.job_table(rows), f"{len(rows)} jobs", console.width))
        say_rows(console, started.verdict)
        if started.paper is not None:
            from cnnexp.papers import compare, page

            result = compare.compare(started.folder, started.paper)
            title = f"{result.experiment.title}\n{result.experiment.source}: {result.experiment.quantity}"
            console.print(as_screen(page.table_of(result), title, console.width))
            console.print(f"The page: {started.folder / page.FOLDER / 'index.html'}", soft_wrap=True)
    if started.lost is not None:
        send = f"{program_name()} sync {folder} sends it"
        _failures.append(TrackingError(f"{started.lost}; the sweep is recorded in {folder}; {send}"))
    return sweep.failures(rows, started.paper)


def _recorder(tracking: Tracking) -> Recorder | None:
    if tracking.name == "none":
        return None
    if tracking not in _recorders:
        _recorders[tracking] = Recorder(store_uri(tracking.uri), tracking.experiment)
    return _recorders[tracking]


def _folder() -> Path:
    """Return the folder of the job that runs now."""
    return Path(HydraConfig.get().runtime.output_dir)


def settings_of(words: Sequence[str]) -> Settings:
    """Return the settings of a run's command line, for a command that does something else with them."""
    if flags := [word for word in words if word.startswith("-")]:
        raise ConfigError(f"{flags[0]}: unknown; legal: GROUP=NAME and GROUP.KEY=VALUE")
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return load(plain(hydra.compose("config", _prepared(words))))


def config_keys() -> list[str]:
    """Return the dotted keys of the config, with the groups that the command line picks where they exist."""
    choices = [word.partition("=")[::2] for word in sys.argv[1:]]
    picked = [f"{group}={name}" for group, name in choices if (CONF / group / f"{name}.yaml").is_file()]
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return list(leaves(container(hydra.compose("config", picked))))
