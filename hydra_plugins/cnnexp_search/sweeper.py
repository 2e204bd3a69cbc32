"""`search=tpe`: Optuna proposes each job of a multirun from how the jobs before it did.

Hydra loads sweepers only from packages under `hydra_plugins`, so this file is not in `cnnexp`. Hydra's own Optuna
plugin needs an Optuna whose storage fails with the SQLAlchemy of MLflow 3; this one keeps its trials in a journal file.
"""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from cnnexp.errors import BackendUnavailable, ConfigError, installing

log = logging.getLogger(__name__)
ANOTHER = "name another study: hydra.sweeper.study=NAME"


class TpeSweeper(Sweeper):
    """Tree-structured Parzen estimators (Bergstra et al. 2011); conf/hydra/sweeper/tpe.yaml explains the arguments."""

    def __init__(
        self,
        study: str,
        journal: str,
        direction: str,
        trials: int,
        at_once: int,
        seed: int,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        if direction not in ("minimize", "maximize"):
            raise ConfigError(f"hydra.sweeper.direction={direction!r}: must be minimize or maximize")
        for key, value in (("trials", trials), ("at_once", at_once)):
            if value < 1:
                raise ConfigError(f"hydra.sweeper.{key}={value}: must be >= 1")
        self._study, self._journal, self._direction = study, Path(journal), direction
        self._trials, self._at_once, self._seed = trials, at_once, seed
        self._params = params or {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._config = config
        self._launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run as many trials as the study still lacks."""
        try:
            from optuna.samplers import TPESampler
            from optuna.trial import TrialState
        except ImportError as error:
            raise BackendUnavailable(f"search=tpe: needs Optuna; {installing('search')}") from error
        folder = Path(self._config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self._config, folder / "multirun.yaml")
        typed = {argument.partition("=")[0] for argument in arguments}
        arguments = [*(f"{key}={value}" for key, value in self._params.items() if key not in typed), *arguments]
        overrides = OverridesParser.create().parse_overrides(arguments)
        fixed = [override.input_line for override in overrides if not override.is_sweep_override()]
        space = {o.get_key_element(): _distribution(o) for o in overrides if o.is_sweep_override()}
        if not space:
            raise ConfigError("search=tpe: nothing to search; e.g. 'optimizer.lr=tag(log,interval(1e-4,1e-1))'")
        study = self._open(space)
        done = len(study.get_trials(deepcopy=False, states=[TrialState.COMPLETE]))
        if done >= self._trials:
            log.warning("search=tpe: all %d trials of study %r are done; more: hydra.sweeper.trials", done, self._study)
        study.sampler = TPESampler(seed=self._seed + done)  # a search that goes on does not propose the same again
        # jobs are numbered on from those that are in the folder: each has a folder of its own, that of its number
        job = 1 + max((int(path.name) for path in folder.iterdir() if path.name.isdecimal()), default=-1)
        last = job + self._trials - done
        while job < last:
            trials = [study.ask(space) for _ in range(min(self._at_once, last - job))]
            batch = [[*fixed, *(f"{key}={value}" for key, value in trial.params.items())] for trial in trials]
            for trial, returned in zip(trials, self._launcher.launch(batch, initial_job_idx=job), strict=True):
                value = returned.return_value
                if value is None or not math.isfinite(value):
                    study.tell(trial, state=TrialState.FAIL)
                else:
                    study.tell(trial, value)
            job += len(trials)

    def _open(self, space: Mapping[str, Any]) -> Any:
        """Open the study, made where it is missing; ConfigError: its trials cannot be learned from in such a space."""
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._journal.parent.mkdir(parents=True, exist_ok=True)
        study = optuna.create_study(
            study_name=self._study,
            storage=JournalStorage(JournalFileBackend(str(self._journal))),
            direction=self._direction,
            load_if_exists=True,
        )
        if (before := study.direction.name.lower()) != self._direction:
            raise ConfigError(
                f"hydra.sweeper.direction={self._direction!r}: study {self._study!r} is to {before}; {ANOTHER}"
            )
        for trial in study.get_trials(deepcopy=False):
            then = trial.distributions
            # those that failed or were cut short teach nothing: but Optuna takes no other kind of a key of theirs
            complete = trial.state == optuna.trial.TrialState.COMPLETE
            for key in sorted({*then} | {*space} if complete else {*then} & {*space}):
                if (old := _kind(then.get(key))) != (new := _kind(space.get(key))):
                    raise ConfigError(f"hydra.sweeper.study={self._study!r}: had {key} {old}, not {new}; {ANOTHER}")
        return study


def _kind(distribution: Any) -> str:
    """Return what of a key stays as it is in a study: its choices, or what numbers it is of; their ends may change."""
    if distribution is None:
        return "fixed"
    if choices := getattr(distribution, "choices", None):
        return f"choice({','.join(choices)})"
    numbers = "range(...)" if isinstance(distribution.low, int) else "interval(...)"
    return f"tag(log,{numbers})" if distribution.log else numbers


def _distribution(override: Override) -> Any:
    """Return where Optuna may look for an override's value."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    sweep: Any = override.value()
    log = "log" in getattr(sweep, "tags", ())
    try:
        match sweep:
            case ChoiceSweep():
                return CategoricalDistribution(list(override.sweep_string_iterator()))
            case RangeSweep(start=int(start), stop=int(stop), step=int(step)):
                numbers = range(start, stop, step)
                low, high = sorted((numbers[0], numbers[-1]))
                return IntDistribution(low, high, log=log, step=abs(step))
            case IntervalSweep(start=start, end=end) if math.isfinite(end - start):
                return FloatDistribution(start, end, log=log)
    except (ValueError, IndexError) as error:
        legal = "must hold a number at least; with log all must be above 0, and the step of a range 1"
        raise ConfigError(f"{override.input_line}: {legal}") from error
    raise ConfigError(
        f"{override.input_line}: search=tpe takes choice(...), range(...) of whole numbers, and finite interval(...)"
    )
