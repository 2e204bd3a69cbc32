import re
from types import SimpleNamespace

import pytest
from commands import TINY, raises
from omegaconf import OmegaConf

from cnnexp.app import hydra_app
from cnnexp.errors import ConfigError
from cnnexp.tracking.events import read_journal
from hydra_plugins.cnnexp_search.sweeper import TpeSweeper

optuna = pytest.importorskip("optuna", reason="search=tpe needs Optuna: pip install cnnexp[search]")
distributions = optuna.distributions
LOOK = {  # in Hydra's words
    "optimizer.weight_decay=interval(0.1,0.5)": distributions.FloatDistribution(0.1, 0.5),
    "optimizer.lr=tag(log,interval(1e-4,1e-1))": distributions.FloatDistribution(1e-4, 1e-1, log=True),
    "model.filters=range(2,8,2)": distributions.IntDistribution(2, 6, step=2),
    "trainer.seed=range(3)": distributions.IntDistribution(0, 2),
    "trainer.batch_size=range(60,40,-10)": distributions.IntDistribution(50, 60, step=10),
    "model.kernel=choice(3,5)": distributions.CategoricalDistribution(["3", "5"]),
    "optimizer=adam,sgd": distributions.CategoricalDistribution(["adam", "sgd"]),
}


def test_what_cannot_be_searched_is_one_line(run):
    code, _, err = run(*TINY, "-m", "search=tpe", "optimizer.lr=glob(*)")
    assert code == 2
    assert re.fullmatch(r"cnnexp: error: .*optimizer.lr=glob\(\*\): search=tpe takes choice.*\n", err)
    for values, message in (
        ({"direction": "up"}, "hydra.sweeper.direction='up': must be minimize or maximize"),
        ({"trials": 0}, "hydra.sweeper.trials=0: must be >= 1"),
        ({"at_once": 0}, "hydra.sweeper.at_once=0: must be >= 1"),
    ):
        defaults = {"study": "s", "journal": "j", "direction": "maximize", "trials": 1, "at_once": 1, "seed": 0}
        raises(ConfigError, re.escape(message), TpeSweeper, **{**defaults, **values})


def test_a_search_goes_on_where_it_stopped(run, tmp_path):
    def search(trials, *more):
        asked = (f"hydra.sweeper.journal={tmp_path}/trials", f"hydra.sweeper.trials={trials}")
        return run(*TINY, "-m", "search=tpe", *asked, *more)[::2]

    assert search(1)[0] == 2  # nothing to search
    assert search(2, *LOOK) == (0, "")
    assert search(3, *LOOK) == (0, "")
    found = [read_journal(path.parent)["metrics"]["final/test_accuracy"] for path in tmp_path.glob("*/*/journal.jsonl")]

    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "trials"))
    (study,) = optuna.get_all_study_summaries(optuna.storages.JournalStorage(backend))
    assert (study.study_name, study.n_trials) == ("one_conv-synthetic-test_accuracy", 3)
    study = optuna.load_study(study_name=study.study_name, storage=optuna.storages.JournalStorage(backend))
    assert len({trial.params["optimizer.lr"] for trial in study.trials}) == 3
    assert study.trials[0].distributions == {word.partition("=")[0]: where for word, where in LOOK.items()}
    assert sorted(trial.value for trial in study.trials) == pytest.approx(sorted(found))


def searched(folder, *words, direction="maximize", trials=1, params=None, value=0.5):
    """Return what a search launches, of which every job's value is the same."""
    sweeper = TpeSweeper("s", str(folder / "journal"), direction, trials, 1, 0, params)
    sweeper._config = OmegaConf.create({"hydra": {"sweep": {"dir": str(folder)}}})
    launched, returned = [], [SimpleNamespace(return_value=value)]
    sweeper._launcher = SimpleNamespace(launch=lambda batch, initial_job_idx: launched.extend(batch) or returned)
    sweeper.sweep([*words])
    return launched


def test_a_study_is_of_one_search_whose_numbers_may_go_further(tmp_path, caplog):
    assert len(searched(tmp_path, "a=choice(1,2)", "b=interval(0,1)", "c=9", value=float("nan"))) == 1
    assert len(searched(tmp_path, "a=choice(1,2)", "b=interval(0,1)")) == 1  # the last one failed
    for words, more, said in (
        (("a=choice(1,2)",), {}, "hydra.sweeper.study='s': had b interval(...), not fixed; name another study: hydra."),
        (("a=choice(1,2)", "b=interval(0,1)", "c=1,2"), {}, "study='s': had c fixed, not choice(1,2); name another"),
        (("a=choice(1,2,3)", "b=interval(0,1)"), {}, "had a choice(1,2), not choice(1,2,3); name another"),
        (("a=choice(1,2)", "b=tag(log,interval(1,2))"), {}, "had b interval(...), not tag(log,interval(...)); name"),
        (("a=choice(1,2)", "b=range(2)"), {}, "had b interval(...), not range(...); name another"),
        (("a=choice(1,2)",), {"direction": "minimize"}, "direction='minimize': study 's' is to maximize; name another"),
    ):
        raises(ConfigError, re.escape(said), searched, tmp_path, *words, **more)
    words = ("a=choice(1,2)", "b=interval(5,6)")
    assert searched(tmp_path, *words) == []
    assert caplog.messages == ["search=tpe: all 1 trials of study 's' are done; more: hydra.sweeper.trials"]
    assert float(searched(tmp_path, *words, trials=2)[0][1].removeprefix("b=")) >= 5


EMPTY = "interval(2,1) tag(log,interval(0,1)) interval(0,inf) interval(nan,1) range(5,1) range(0,6,0)"


@pytest.mark.parametrize("space", [*EMPTY.split(), "tag(log,range(0,5))", "tag(log,range(1,8,2))"])
def test_where_no_number_lies_is_one_line_that_names_the_key(space, tmp_path):
    raises(
        ConfigError, rf"^a={re.escape(space)}: (must hold a number|search=tpe takes)", searched, tmp_path, f"a={space}"
    )


def test_what_an_experiment_sweeps_is_searched_unless_it_is_typed(tmp_path):
    params = {"model.filters": "choice(2,3)", "trainer.seed": "1,2"}
    launched = searched(tmp_path, "trainer.seed=5", params=params)
    assert launched in ([["trainer.seed=5", "model.filters=2"]], [["trainer.seed=5", "model.filters=3"]])
    asked = OmegaConf.create({"_target_": "TpeSweeper", "params": params})
    asked_for = {"optimizer.lr": "interval(0.1,0.2)", "model.filters": "choice(2,3)"}
    assert hydra_app._plan(["trainer.seed=5", "optimizer.lr=interval(0.1,0.2)"], asked) == (asked_for, None)
    asked = OmegaConf.create({"_target_": "BasicSweeper", "params": {"trainer.seed": "10,11,12"}})  # of a sweep, too
    for typed, swept, jobs in (
        ("trainer.seed=0", {}, 1),
        ("model.filters=2,3", {"model.filters": "2,3", "trainer.seed": "10,11,12"}, 6),
        ("trainer.seed=1,2", {"trainer.seed": "1,2"}, 2),
    ):
        assert hydra_app._plan([typed], asked) == (swept, jobs)
