import dataclasses
import re

from results import CONFIG, epoch_result, train

from cnnexp.measuring.confidence import median_interval
from cnnexp.measuring.interference import Interference
from cnnexp.tracking import verdict
from cnnexp.tracking.events import read_journal
from cnnexp.tracking.journal import REPORT, Run
from cnnexp.tracking.metrics import summary

QUIET, BUSY = Interference(0.004, 0.0, 0.3, 2, 2, 9.0), Interference(0.31, 0.02, 6.0, 2, 2, 9.0)
RATIOS = (2.0, 2.5, 3.0, 2.4, 2.6, 2.2, 2.8)


def rows(ratios=RATIOS, interference=QUIET, metrics=(), **options):
    epochs = [epoch_result(i + 1, speedup=ratio) for i, ratio in enumerate(ratios)]
    recorded = {**summary(epochs), **dict(metrics)}
    return dict(verdict.run_rows(epochs, recorded, "cpu", interference=interference, **options))


def test_speedup_with_its_interval_and_its_range_and_of_few_epochs_without():
    found = median_interval(RATIOS)
    assert (found.low, found.high) == (2.0, 3.0)
    said = "2.5 x (median of 7 epochs; 2 to 3 with 98% confidence; all 2 to 3); cpu = 1"
    assert rows()["speedup"] == said
    for count, few in ((1, "one epoch: how sure is not known"), (3, "too few for an interval")):
        assert few in rows(RATIOS[:count])["speedup"]
        assert "confidence" not in rows(RATIOS[:count])["speedup"]
    assert rows(contended=True)["speedup"] == "not given: other runs computed at the same time"


def test_a_quiet_machine_is_called_quiet_and_a_busy_one_is_flagged():
    assert rows()["machine"] == "quiet: others used 0.4% of 2 cores; load 0.3"
    busy = rows(interference=BUSY)["machine"]
    assert busy.startswith("DISTURBED by other work: others used 31.0% of 2 cores, 2.0% on other machines; load 6.0")
    assert "trainer.patient=true" in busy
    assert "not known" in rows(interference=None)["machine"]
    short = rows(interference=dataclasses.replace(BUSY, seconds=0.1))["machine"]
    assert short == "the run was too short to say whether other work disturbed it: 0.1 s on 2 cores"


def test_amdahl_limit_share_of_the_machine_and_largest_parts_stand_where_they_were_measured():
    bare = rows()
    assert not {"sharing alone", "cpu step"} & bare.keys()
    assert "GFLOP" not in bare["speed"]
    metrics = {"speedup/amdahl_limit": 20.7, "speedup/parallel_share": 0.982}
    metrics |= {"profile/share_of_gflops": 0.094, "profile/machine_gflops": 18.0}
    parts = {"cpu": {"a": 0.1, "b": 0.5, "c": 0.2, "d": 0.15, "e": 0.05}, "cpu-simd": {"train": 1.0}}
    full = rows(metrics=metrics, parts=parts)
    assert full["sharing alone"] == "20.7 x by threads and lanes; layers: 98.2% of cpu's step (Amdahl)"
    assert full["speed"] == "16 images/s, 0.5 s an epoch; 9.4% of the 18 GFLOP/s measured as the limit here"
    assert (full["cpu step"], full["cpu-simd step"]) == ("b 50%, c 20%, d 15%, a 10%", "train 100%")


def test_the_best_epoch_is_told_where_it_was_not_the_last():
    epochs = [epoch_result(1, correct=4), epoch_result(2, correct=2)]
    said = dict(verdict.run_rows(epochs, summary(epochs), None))
    assert said["accuracy"] == "50.00% of the test images; the best epoch 100.00%"
    assert "speedup" not in said


def test_no_line_is_wider_than_the_screen_and_markdown_keeps_its_columns():
    found = rows(interference=BUSY)
    for width in (40, 80, 120):
        text = verdict.screen(list(found.items()), width)
        assert max(map(len, text.splitlines())) <= width
        assert all(said in " ".join(text.split()) for said in found.values())
    assert "| a | one \\| two |" in verdict.markdown("title", [("a", "one | two")])


def test_a_run_writes_its_verdict_into_its_folder_and_shows_results_before_the_store_has_them(tmp_path):
    def show(rows):
        journal = (tmp_path / "journal.jsonl").read_text()
        shown.append(([title for title, _ in rows], '"event": "finish"' in journal))

    shown = []
    with Run(tmp_path, CONFIG) as run:
        run.show = show
        run.interference = BUSY
        train(run, [epoch_result(epoch, speedup=ratio) for epoch, ratio in enumerate(RATIOS, 1)])
    page = (tmp_path / REPORT).read_text()
    assert "| speedup | 2.5 x (median of 7 epochs" in page
    assert f"| folder | {tmp_path} |" in page
    assert re.search(rf"\| more \| [^|]*cnnexp predict {tmp_path} IMAGE \|", page), "what shows more"
    assert shown == [(["speedup", "speed", "accuracy", "machine"], False), (["folder", "more"], False)]
    journal = read_journal(tmp_path)
    assert journal["metrics"].items() >= {"speedup/median": 2.5, "speedup/low": 2.0, "speedup/high": 3.0}.items()
    assert journal["metrics"]["time/others_share"] == 0.31
    assert '"timing.disturbed": "true"' in (tmp_path / "journal.jsonl").read_text()


def test_a_run_that_was_stopped_says_so_and_one_without_an_epoch_has_no_verdict(tmp_path):
    for results, error in (([epoch_result(1)], KeyboardInterrupt()), ([], ValueError("early"))):
        run = Run(tmp_path / str(len(results)), CONFIG)
        train(run, results)
        run.__exit__(type(error), error, None)
    assert re.search(r"\| status \| KILLED after 1 epochs \|", (tmp_path / "1" / REPORT).read_text())
    assert run.verdict == []
    assert not (tmp_path / "0" / REPORT).exists()


def test_time_to_a_target_is_the_training_up_to_the_epoch_that_reached_it():
    given = ((1, 1, 2.0), (2, 3, 0.5), (3, 2, 0.5))
    epochs = [epoch_result(epoch, correct=correct, epoch_s=seconds) for epoch, correct, seconds in given]
    assert summary(epochs, target=0.75)["time/to_target_s"] == 2.5
    assert "time/to_target_s" not in summary(epochs, target=0.9)
    assert "time/to_target_s" not in summary(epochs)
    assert verdict.to_target(0.75, summary(epochs, target=0.75)) == "75.00% reached after 2.5 s of training"
    assert verdict.to_target(0.9, summary(epochs, target=0.9)) == "90.00% was not reached"
