import itertools
import subprocess
import sys

import numpy as np
from canvas import cut_off
from matplotlib.text import Text
from measuring.test_explanation import layer
from PIL import Image
from results import DATASET, LABELS, SCORES, epoch_result
from tables import each

from cnnexp.measuring.explanation import sides_of
from cnnexp.measuring.roofline import roofs
from cnnexp.tracking import figures
from cnnexp.tracking.metrics import epoch_metrics, predicted_classes

ROWS = [
    {"backend": backend, "model.filters": filters, "time/median_epoch_s": seconds}
    for backend, filters, seconds in [("cpu", "64", 4.0), ("cpu", "32", 2.0), ("cpu-parallel", "32", 1.0)]
]
LONG = "cpu-simd conv3 with-a-name-nobody-would-type mnist " + "root=/a/long/path/to/where/images/are/kept/" * 3
LONG_NAMES = ["WWWWWWWWWW" * 5, "a class of many words, all of them needed to say what it is", "i" * 80, "$x$ and $y"]
LIMITS = {"gflops": 100.0, "gb_per_s": 10.0, "l3_gb_per_s": 30.0, "l2_gb_per_s": 50.0, "l1_gb_per_s": 99.0}
SMALL = [f"{split}/{metric}" for split in ("train", "test") for metric in ("loss", "accuracy")]
TINY_LOSSES = [{"epoch": i, **dict.fromkeys((*SMALL, "time/epoch_s"), 1.23456e-7 * i)} for i in range(1, 4)]
SECONDS = "time/median_epoch_s"
LONG_ROWS = [{**row, "trainer.resume": LONG, "model.filters": str(32 * i)} for i, row in enumerate(ROWS, 1)]


def epochs(*results):
    return [{"epoch": result.epoch, **epoch_metrics(result)} for result in results]


def lines(axes):
    return {line.get_label(): [list(data) for data in line.get_data()] for line in axes.get_lines()}


def test_augmented_images_stand_four_in_a_row(tmp_path):
    images = np.zeros((6, 8, 8, 2), np.uint8)
    images[5, :, :, 0] = 255  # white, of black ones
    figures.draw_augmented(tmp_path / "augmented.png", images, "a run")
    with Image.open(tmp_path / "augmented.png") as picture:
        gray = np.asarray(picture.convert("L"))
    rows, columns = np.nonzero(gray < 50)  # not the title
    assert len(np.unique(np.diff(np.unique(columns)) > 1)) == 2, "gaps between columns"
    fifth, sixth = gray[240, 130], gray[240, 260]
    assert (fifth, sixth) == (0, 255)
    assert rows.max() < 320, "no third row"


def test_learning_shows_each_split_and_epoch_time_the_baseline_where_it_was_measured():
    results = epoch_result(1, correct=1, validation=2), epoch_result(2, correct=3, validation=4)
    figure = figures.learning(epochs(*results))
    losses, accuracies = map(lines, figure.axes)
    assert losses["train"] == [[1, 2], [1.0, 0.5]]
    assert accuracies["test"] == [[1, 2], [0.25, 0.75]]
    assert accuracies["validation"] == [[1, 2], [0.5, 1.0]]
    assert "validation" not in lines(figures.learning(epochs(epoch_result(1))).axes[0])

    figure = figures.epoch_time(epochs(epoch_result(1), epoch_result(2)), [None, 1.5])
    run, baseline = lines(figure.axes[0]).values()
    assert (run, baseline) == ([[1, 2], [0.5, 0.5]], [[2], [1.5]])
    assert len(lines(figures.epoch_time(epochs(epoch_result(1)), [None]).axes[0])) == 1


def test_confusion_counts_true_by_predicted_and_a_class_without_images_has_recall_zero():
    axes = figures.confusion(LABELS, predicted_classes(SCORES), DATASET.classes).axes[0]
    cells = {tuple(map(int, text.get_position()[::-1])): text.get_text() for text in axes.texts}
    assert cells[2, 1] == "1"  # the 2 that was taken for a 1
    assert (1, 2) not in cells  # zeros are left out
    assert [cells[i, i] for i in range(3)] == ["1", "1", "1"]
    assert np.array(axes.images[0].get_array())[2].tolist() == [0, 0.5, 0.5]
    heights = [bar.get_height() for bar in figures.recall(LABELS, predicted_classes(SCORES), "abcd").axes[0].patches]
    assert heights == [1, 1, 0.5, 0]
    many = list(map(str, range(100)))
    assert not figures.confusion(np.arange(100), np.arange(100), many).axes[0].texts, "they are not named"


def test_comparison_draws_a_line_per_choice_over_a_number_and_else_bars():
    axes = figures.comparison(ROWS, ["backend", "model.filters"], "time/median_epoch_s", "seconds").axes[0]
    assert axes.get_xlabel() == "model.filters"
    assert lines(axes) == {"cpu": [[32, 64], [2, 4]], "cpu-parallel": [[32], [1]]}

    axes = figures.comparison(ROWS[1:], ["backend"], "time/median_epoch_s", "seconds").axes[0]
    assert [text.get_text().strip() for text in axes.get_yticklabels()] == ["cpu", "cpu-parallel"]
    assert [bar.get_width() for bar in axes.patches] == [2, 1]


@each(
    (ROWS[:2], ["epoch_time.png"]),
    ([ROWS[0], {**ROWS[1], "speedup/median": 2.0}], ["epoch_time.png", "speedup.png"]),
    ([], []),
    ids=["no speedup", "a speedup", "failures alone"],
)
def test_draw_sweep_draws_what_was_measured(tmp_path, rows, drawn):
    figures.draw_sweep(tmp_path, rows, ["backend", "model.filters"])
    assert sorted(path.name for path in tmp_path.iterdir()) == drawn


PROFILE = {
    **{"backend": "W" * 60, "threads": 2, "images": 1000, "us_per_image": 12345.678, "wall_s": 1234.5},
    **{"accounted": 0.9876, "layered": True, "machine": LIMITS},
    "entries": [{"what": "update", "layer": name, "seconds": 400.0} for name in LONG_NAMES],
    "layers": [
        layer(f"residual{i}.conv1 residual{i}.batchnorm2d1", what, 0.1 + i, 1e9, 1e12 * (i + 1), 1e11)
        for i in range(6)
        for what in ("forward", "backward")
    ],
}
FEW = {**PROFILE, "layers": PROFILE["layers"][:4]}
FIGURES = {
    "learning": lambda: figures.learning(TINY_LOSSES),
    "epoch_time": lambda: figures.epoch_time(TINY_LOSSES, [None, 1.5e-7, 1e-7]),
    "slow epochs": lambda: figures.epoch_time(epochs(epoch_result(1, epoch_s=12345.678)), [1234567.8]),
    "confusion": lambda: figures.confusion(LABELS, predicted_classes(SCORES), LONG_NAMES),
    "few classes": lambda: figures.confusion(LABELS, predicted_classes(SCORES), "abc"),
    "recall": lambda: figures.recall(LABELS, predicted_classes(SCORES), LONG_NAMES),
    "short recall": lambda: figures.recall(LABELS, predicted_classes(SCORES), "abc"),
    "bars": lambda: figures.comparison(LONG_ROWS[1:], ["backend", "trainer.resume"], SECONDS, "seconds"),
    "lines": lambda: figures.comparison(LONG_ROWS, ["backend", "trainer.resume", "model.filters"], SECONDS, "s"),
    "ledger": lambda: figures.ledger(PROFILE),
    "both sides": lambda: figures.explained(sides_of({**FEW, "baseline": FEW})),
    "no roofline": lambda: figures.explained(sides_of({**FEW, "machine": {}})),
}


def assert_whole(figure, title):
    figures.entitle(figure, title)
    assert cut_off(figure) == []
    assert figure.get_suptitle().split()[0][:20] == title.split()[0][:20]
    (shown,) = (text for text in figure.texts if text.get_text() == figure.get_suptitle())
    assert not any(axes.bbox.overlaps(shown.get_window_extent()) for axes in figure.axes), "the title is above the axes"


@each(*((name, LONG) for name in FIGURES), *itertools.product(["learning", "recall"], ["W" * 300, "short"]))
def test_every_text_is_whole(name, title):
    assert_whole(FIGURES[name](), title)


def test_a_long_name_keeps_both_its_ends():
    assert figures.short("a" * 50 + "b" * 50, 20) == "aaaaaaa...bbbbbbbbbb"
    assert figures.short("as it is") == "as it is"
    assert figures.short("$5 or $6") == r"\$5 or \$6"


def test_letters_that_no_font_here_has_are_no_warning():
    code = "from cnnexp.tracking.figures import Figure; f = Figure(); f.suptitle('\u732b'); f._repr_png_()"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_numbers_on_the_roofline_lie_over_nothing():
    figure = figures.explained(sides_of(PROFILE), LONG)
    assert_whole(figure, LONG)  # and laid out
    axes = figure.axes[1]
    boxes = [Text.get_window_extent(text) for text in axes.texts]  # an annotation's own has its line in it
    assert [text.get_text() for text in axes.texts] == [str(number) for number in range(1, 13)]
    assert figure.axes[0].get_yticklabels()[0].get_text().endswith("(1)")
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[i + 1 :])
    assert len(axes.get_lines()) == 1 + len(roofs(LIMITS))
    for line in axes.get_lines():
        pixels = axes.transData.transform(line.get_xydata())
        assert not any(box.count_contains(pixels) for box in boxes), line.get_label()
