import io

import pytest
from rich.console import Console
from tables import each

from cnnexp.system.table import Group, Table, as_html, as_markdown, as_screen, number

TABLE = Table((Group("time", ("paper", "ours")), Group("a < b")), (("one", "1", "2", "<3>"), ("two", "", "5", "6")))


def test_every_form_shows_the_same_table_and_without_headings_one_line_of_titles():
    assert as_markdown(TABLE) == [
        "|  | time: paper | time: ours | a < b |",
        "| --- | --: | --: | --: |",
        "| one | 1 | 2 | <3> |",
        "| two |  | 5 | 6 |",
    ]
    assert as_html(TABLE) == (
        '<table><thead><tr><th></th><th colspan="2">time</th><th>a &lt; b</th></tr>'
        "<tr><th></th><th>paper</th><th>ours</th><th></th></tr></thead>"
        "<tbody><tr><th>one</th><td>1</td><td>2</td><td>&lt;3&gt;</td></tr>"
        "<tr><th>two</th><td></td><td>5</td><td>6</td></tr></tbody></table>"
    )
    screen = as_screen(TABLE, "title", 80)
    assert [column.header for column in screen.columns] == ["", "time\npaper", "time\nours", "a < b"]
    assert [list(column.cells) for column in screen.columns] == [["one", "two"], ["1", ""], ["2", "5"], ["<3>", "6"]]
    assert as_html(Table((Group("1"), Group("2")), ())).count("<tr>") == 1


@each((7341, "7,341"), (262.4, "262.4"), (4.0561, "4.056"), (0.01234, "0.0123"), (0, "0"), (None, ""))
def test_numbers_are_read_at_a_glance(value, text):
    assert number(value) == text


@pytest.mark.parametrize("columns", [1, 3, 6])
def test_a_table_fits_the_screen_and_breaks_no_word(columns):
    titles = [Group(f"accuracy of the {i}. (%)", ("paper", "ours")) for i in range(columns // 2)] or [Group("one")]
    count = sum(len(group.headings) for group in titles)
    rows = [[f"unrolled conv, parallel, {i} cores: unrolled-parallel", *["not on this machine"] * count] for i in "ab"]
    rows.append(["ours", *["0.000123"] * count])
    out = io.StringIO()
    Console(file=out, width=80).print(as_screen(Table(titles, rows), "title", 80))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    words = " ".join(lines).split()
    assert (words.count("0.000123"), words.count("machine")) == (count, 2 * count)
    assert words.count("unrolled-parallel") == 2
