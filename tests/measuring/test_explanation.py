"""Steps beside each other, and whether the sentences say what the numbers say."""

import re

import pytest

from cnnexp.measuring.explanation import changes, plain_name, rows, sentences, side_of, us_text
from cnnexp.measuring.ledger import BETWEEN

LIMITS = {"gflops": 100.0, "gb_per_s": 10.0}


def layer(names, what, seconds, multiply_adds=0, flops=0.0, size=1.0, at_once="", fewer=""):
    return {
        **{"layers": names.split(), "pass": what, "seconds": seconds, "multiply_adds": multiply_adds, "flops": flops},
        **{"bytes": size, "at_once": at_once, "fewer": fewer},
    }


def entry(what, name, seconds):
    return {"what": what, "layer": name, "seconds": seconds}


RUN = {
    **{"backend": "cpu-simd", "threads": 2, "us_per_image": 10.0, "machine": LIMITS},
    "images": 1_000_000,  # so a second is a microsecond an image
    "layers": [
        layer("conv1 relu1 maxpool1", "forward", 3.0, 400_000, 9e10, 3e9, "16 filters"),
        layer("linear1", "forward", 1.0, 10_000, 2e10, 4e10, "16 weights"),
        layer("linear1", "backward", 0.9, 20_000, 4e10, 8e10, "16 weights"),
        layer("conv1 relu1 maxpool1", "backward", 4.0, 100_000, 2e11, 4e9, "16 filters", "little is followed"),
    ],
    "entries": [
        *(entry("wait", "threads", 0.5), entry("gather", "batch", 0.2), entry("forward", "loss", 0.1)),
        *(entry("forward", "linear1", 1.0), entry("train", "", 0.1), entry("evaluate", "", 77.0)),
        entry("rest", "", 99.0),
    ],
}
BASELINE = {
    **{"backend": "cpu", "threads": 1, "us_per_image": 500.0, "machine": {}, "images": 1_000_000},
    "layers": [
        *(layer("conv1", "forward", 100.0, 400_000), layer("relu1", "forward", 5.0)),
        *(layer("maxpool1", "forward", 15.0), layer("linear1", "forward", 0.5, 10_000)),
        *(layer("linear1", "backward", 40.0, 20_000), layer("maxpool1", "backward", 20.0)),
        *(layer("relu1", "backward", 10.0), layer("conv1", "backward", 300.0, 400_000)),
    ],
    "entries": [entry("gather", "batch", 1.5), entry("train", "", 8.0)],
}


def steps(run=RUN, baseline=BASELINE):
    return [side_of(run), side_of(baseline)]


def test_groups_are_the_coarser_ones_joined_where_they_overlap_and_add_up():
    table = {row.name: [piece and piece.us for piece in row.pieces] for row in rows(steps())}
    assert table["conv1 relu1 maxpool1 forward"] == [3.0, 120.0]
    assert table["conv1 relu1 maxpool1 backward"] == [4.0, 330.0]
    assert table["linear1 forward"] == [1.0, 0.5]
    assert table["waiting for threads"] == [0.5, None]
    assert table[BETWEEN] == [0.1, 8.0]
    assert list(table)[:2] == ["gathering the batch", "conv1 relu1 maxpool1 forward"], "in the order of a step"
    for i, side in enumerate(steps()):
        assert sum(pieces[i] or 0 for pieces in table.values()) == pytest.approx(side.accounted * side.us)
    assert steps()[0].accounted == pytest.approx(0.98), "evaluation and what is no training are no part of a step"

    a = {**RUN, "layers": [layer("conv1 relu1", "forward", 1.0), layer("pool1", "forward", 2.0)], "entries": []}
    b = {**RUN, "layers": [layer("conv1", "forward", 4.0), layer("relu1 pool1", "forward", 5.0)], "entries": []}
    (row,) = rows([side_of(a, "a"), side_of(b, "b")])
    assert (row.name, [piece.us for piece in row.pieces]) == ("conv1 relu1 pool1 forward", [3.0, 9.0])


def test_the_sentences_say_what_the_numbers_say():
    first, *why, left, accounted = sentences(steps())
    assert first == "An image costs cpu-simd on 2 threads 10 us and cpu on 1 thread 500 us: 50 times less."
    assert why[0] == (
        "conv1's backward pass with relu1 and maxpool1 fell from 330 us to 4 us an image, 82.5 times less: 4 times "
        "fewer multiply-adds, since little is followed; an instruction takes 16 filters at once; 2 threads "
        "instead of 1."
    )
    assert why[1].startswith("conv1's forward pass with relu1 and maxpool1 fell from 120 us to 3 us an image, 40 times")
    assert "fewer" not in why[1]
    assert why[2].startswith("linear1's backward pass fell from 40 us to 0.9 us an image, 44.4 times less")
    assert len(why) == 3, "what differs by less than 2 % of the slower step is not worth a sentence"
    # 2e11 flops in 4 s are 50 GFLOP/s; 2e11 / 4e9 bytes are 50 a byte; the ridge is 100 / 10
    assert left == (
        "Most of cpu-simd's step is conv1 relu1 maxpool1 backward, 40%: 4 us at 50 GFLOP/s, 50% of the 100 that "
        "arithmetic allows here (50 FLOP a byte)."
    )
    assert accounted == "These parts are 98.0% of the step as the epochs' own clock has it."


def test_the_ways_that_the_planner_took_and_that_a_run_was_disturbed_are_said():
    ways = {"conv1 relu1 maxpool1": "lanes-argmax", "linear1": "skinny"}
    run = {**RUN, "ways": ways, "disturbed": "DISTURBED by other work: measure again"}
    told = sentences(steps(run))
    wanted = "conv1 relu1 maxpool1 by `lanes-argmax`, linear1 by `skinny`"
    assert f"The algorithms that cpu-simd chose, of those in docs/kernels.md: {wanted}." in told
    assert "cpu-simd's run was DISTURBED by other work: measure again." in told
    assert "DISTURBED" not in " ".join(sentences(steps()))


def test_the_other_way_round_it_rose_and_a_step_timed_whole_is_told_whole():
    text = " ".join(changes(steps()[::-1]))
    assert "conv1's backward pass with relu1 and maxpool1 rose from 4 us to 330 us an image, 82.5 times more." in text
    assert "fewer" not in text
    assert "at once" not in text

    whole = {**BASELINE, "layers": [], "entries": [entry("train", "", 500.0)]}
    assert side_of(whole).pieces == ()
    assert changes(steps(baseline=whole)) == []
    assert sentences(steps(baseline=whole))[0].endswith("cpu on 1 thread 500 us: 50 times less.")


def test_memory_may_be_what_bounds():
    run = {**RUN, "layers": [layer("linear1", "backward", 9.0, 1, 9e9, 3e9)], "entries": []}
    (left, _) = sentences([side_of(run)])
    # 1 GFLOP/s at 3 FLOP a byte, of 3 * 10 GB/s
    assert re.search(r"at 1 GFLOP/s, 3% of the 30 that memory allows here", left)
    faster = {**run, "layers": [layer("linear1", "backward", 9.0, 1, 9e12, 3e12)]}
    assert "more than the 30 that was measured as the limit here" in sentences([side_of(faster)])[0]
    cached = {**faster, "machine": {**LIMITS, "l3_gb_per_s": 2e3, "l1_gb_per_s": 4e4, "gflops": 2e3}}
    assert sentences([side_of(cached)])[0].endswith(
        "at 1,000 GFLOP/s, more than the 30 that memory allows: much of what it reads is in the caches; 50% of the "
        "2,000 that arithmetic allows here (3 FLOP a byte)."
    )
    denser = {**faster, "layers": [layer("linear1", "backward", 9.0, 1, 9e12, 3e10)]}
    assert "more than the 100 that was measured as the limit here (300 FLOP" in sentences([side_of(denser)])[0]


def test_names_and_microseconds_are_plain():
    assert [us_text(us) for us in (0.01234, 12.34, 2345.0)] == ["0.0123 us", "12.3 us", "2.35 ms"]
    assert plain_name("forward", ["conv1", "relu1"]) == "conv1 relu1 forward"
    assert plain_name("backward", ["residual1.linear1.rows"]) == "layout for residual1.linear1 backward"
    assert plain_name("forward", ["residual1.conv1"]) == "residual1.conv1 forward"
    assert plain_name("update", ["parameters"]) == "updating the parameters"
