from papers.jobs import make_job

from cnnexp.papers import EXPERIMENTS, page
from cnnexp.papers.compare import Cell, Result
from cnnexp.papers.experiment import Column, Experiment, Line


def test_a_page_tells_on_how_many_images_an_epoch_was_timed():
    job = make_job(images=1000, timed=250)
    job.epochs.append({**job.epochs[0], "train/images": 400})
    facts = {"machine.load": "0.1", "machine.cores": "2"}
    result = Result("castanheira_fig3", EXPERIMENTS["castanheira_fig3"], (job,), (), facts)
    assert any("timed on 250 to 400 of 1,000 images an epoch, and scaled" in note for note in page.notes(result))


def test_only_columns_with_a_published_number_have_three_headings():
    columns = (Column("seconds"), Column("ours alone"))
    table = Experiment("t", "s", "q", (Line("a", {}, (2.0,)), Line("b")), columns)
    cells = [[Cell(2.0, 1.0), Cell(None, 3.0)], [Cell(None, None, why="failed"), Cell(None, 4.0)]]
    shown = page.table_of(Result("t", table, (), cells, {}))
    assert shown.titles(": ")[1:] == ["seconds: paper", "seconds: ours", "seconds: ours / paper", "ours alone: ours"]
    assert shown.rows == [["a", "2", "1.000", "0.5", "3.000"], ["b", "", "failed", "", "4.000"]]
