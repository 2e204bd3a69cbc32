import pytest

from cnnexp.app import ranking

FAST, SLOW = (5.0, 5.1, 5.2, 4.9, 5.3, 4.8), (2.0, 2.1, 1.9, 2.2, 2.05, 1.95)
LIKE_SLOW = (2.01, 2.11, 1.91, 2.19, 2.04, 1.96)


def row(job, backend, seed="0", status="FINISHED", contended=False, disturbed=False, **metrics):
    run = {"job": job, "name": f"job {job}", "status": status, "contended": contended, "disturbed": disturbed}
    return run | {"fallback": None, "backend": backend, "trainer.seed": seed, "final/test_accuracy": 0.9, **metrics}


def epochs(*speedups):
    return [{"epoch": i, "speedup/vs_baseline": s, "throughput/images_per_s": 100 * s} for i, s in enumerate(speedups)]


def verdict(rows, by_job, failed=0):
    measure, places = ranking.rank(rows, ["backend", "trainer.seed"], by_job)
    return dict(ranking.rows(rows, measure, places, "cpu", failed)), places


def test_places_by_median_and_which_neighbours_differ():
    rows = [row("0", "slow"), row("1", "fast"), row("2", "like slow")]
    told, places = verdict(rows, {"0": epochs(*SLOW), "1": epochs(*FAST), "2": epochs(*LIKE_SLOW)})
    assert [place.label for place in places] == ["fast", "slow", "like slow"]
    assert told["   1."] == "fast: 5.05 x (4.8 to 5.3 with 97% confidence, 6 epochs)"
    assert told["differ"] == "1 from 2 (p 0.0043)"
    assert told["not sure"].startswith("2 and 3 (p 0.94): more epochs")
    assert told["machine"].startswith("quiet")
    medians = {"ranking/fast": 5.05, "ranking/slow": 2.025, "ranking/like slow": 2.025, "speedup/best": 5.05}
    assert ranking.metrics("speedup/vs_baseline", places) == pytest.approx(medians)


def test_jobs_that_differ_in_their_seed_alone_are_repeats():
    rows = [row("0", "fast", "0"), row("1", "fast", "1"), row("2", "slow", "0")]
    _, places = verdict(rows, {"0": epochs(*FAST[:3]), "1": epochs(*FAST[3:]), "2": epochs(*SLOW)})
    assert [(place.label, place.values) for place in places] == [("fast", FAST), ("slow", SLOW)]


def test_too_few_epochs_tell_nothing_apart_and_without_a_baseline_speed_ranks():
    told, _ = verdict([row("0", "a"), row("1", "b")], {"0": epochs(5.0, 5.1), "1": epochs(1.0, 1.1)})
    assert "differ" not in told
    assert told["not sure"].startswith("1 and 2 (p 0.33)")
    assert told["   1."] == "a: 5.05 x (5 to 5.1, 2 epochs)"
    rows = [row(str(i), letter) for i, letter in enumerate("abc")]
    told, _ = verdict(rows, {str(i): epochs(5.0 - i) for i in range(3)})
    assert told["not sure"].startswith("each of 1 to 2 and the next (p 1): ")

    rows = [row("0", "a"), row("1", "b")]
    by_job = {job: [{"throughput/images_per_s": 1e4 * (1 + int(job))}] for job in "01"}
    told, places = verdict(rows, by_job)
    assert [place.label for place in places] == ["b", "a"]
    assert told["   1."] == "b: 20,000 images/s (one epoch)"
    assert "speedup/best" not in ranking.metrics("throughput/images_per_s", places)


def test_a_job_that_was_skipped_is_ranked_by_the_median_that_its_run_had():
    rows = [row("0", "a", status="SKIPPED", **{"speedup/median": 3.0}), row("1", "b"), row("2", "c", status="SKIPPED")]
    told, places = verdict(rows, {"0": [], "1": epochs(2.0, 2.0), "2": []})
    assert [place.label for place in places] == ["a", "b"]
    assert told["   1."] == "a: 3 x (as recorded before)"
    rows[1] |= {"backend": "a", "trainer.seed": "1"}
    told, ((_, values, *_),) = verdict(rows, {"0": [], "1": epochs(1.0, 2.0, 2.0, 2.0, 9.0), "2": []})
    assert values == (3.0, 2.0)  # a job whose median alone is known counts as much as one whose epochs are
    assert told["   1."] == "a: 2.5 x (median of the medians of 2 jobs, 1 as recorded before)"


def test_places_whose_labels_are_alike_are_metrics_of_their_own():
    rows = [row("0", "a[1]"), row("1", "a(1)"), row("2", f"{'b' * 200}1"), row("3", f"{'b' * 200}2")]
    _, places = verdict(rows, {str(i): epochs(4.0 - i) for i in range(4)})
    found = ranking.metrics("throughput/images_per_s", places)
    assert found == {"ranking/a 1 ": 4, "ranking/a 1  2": 3, f"ranking/{'b' * 200}": 2, f"ranking/{'b' * 200} 4": 1}


def test_what_failed_or_was_contended_has_no_place_and_what_was_disturbed_is_named():
    rows = [row("0", "a", disturbed=True), row("1", "b", contended=True)]
    rows.append(row("2", "c", status="FAILED", disturbed=None))
    told, places = verdict(rows, {job: epochs(2.0) for job in "012"}, failed=1)
    assert [place.label for place in places] == ["a"]
    assert "DISTURBED by other work: 1 of 3 jobs, in folders 0;" in told["machine"]
    assert told["failed"] == "1 of 3 jobs"
    told, places = verdict([rows[1]], {"1": epochs(2.0)})
    assert (places, told["ranking"]) == ([], "none: no job was timed alone to its end")


def test_a_sweep_over_seeds_alone_is_one_place_and_tells_the_time_to_its_target():
    rows = [row("0", "a", "4"), row("1", "a", "5"), row("2", "a", "6")]
    for found, to_target_s in zip(rows, (3.0, 2.0, None), strict=True):
        found["name"] = f"seed={found['trainer.seed']} cpu-simd custom"
        found |= {} if to_target_s is None else {"time/to_target_s": to_target_s}
    measure, places = ranking.rank(rows, ["trainer.seed"], {job: epochs(*FAST) for job in "012"})
    assert [(place.label, place.values) for place in places] == [("cpu-simd custom", 3 * FAST)]
    told = dict(ranking.rows(rows, measure, places, "cpu", 0))
    assert told["target"] == "reached by 2 of 3 jobs, after 2 to 3 s of training, median 2.5 s"
