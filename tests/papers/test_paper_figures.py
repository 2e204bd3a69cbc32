"""The figures of the papers: whether every text in them is whole."""

import pytest
from canvas import cut_off
from papers.test_compare import make_job

from cnnexp.papers import EXPERIMENTS, figures
from cnnexp.papers.compare import Cell, Result

SCALING = [
    {"link": link, "sync": sync, "workers": workers, "epoch_s": 100.0 / workers}
    for link in ("a link of a long name, 100 Gbit/s", "another, 1 Gbit/s")
    for sync in ("gradients", "parameters")
    for workers in (1.0, 16.0, 1024.0)
]

MISSING = ("castanheira_fig2_batch", "castanheira_fig3", "garg_table1", "chavan_fig4")  # one of each kind of figure


@pytest.mark.parametrize(("key", "missing"), [*((k, False) for k in EXPERIMENTS), *((k, True) for k in MISSING)])
def test_every_text_is_whole(key, missing, tmp_path):
    experiment = EXPERIMENTS[key]
    cell = Cell(12345.678, None, why="not on this machine") if missing else Cell(12345.678, 0.0012345, 0.0001)
    cells = [[cell for _ in experiment.columns] for _ in experiment.lines]
    configs = [{**column.jobs, **line.jobs} for line in experiment.lines for column in experiment.columns]
    jobs = [make_job()._replace(folder=str(tmp_path), config=config) for config in configs]
    for job in jobs:
        job.epochs[0].update({"train/loss": 123.456, **{f"recall/{digit}": 1.0 for digit in range(10)}})
    jobs = [] if missing else jobs
    result = Result(experiment, jobs, cells, {"machine.cores": "2"}, SCALING if experiment.scaling else ())
    assert cut_off(figures.figure(result)) == []
