import pytest

from cnnexp.papers.table import Group, Table, as_html, as_markdown, as_screen, number

TABLE = Table((Group("time", ("paper", "ours")), Group("a < b")), (("one", "1", "2", "<3>"), ("two", "", "5", "6")))


def test_every_form_shows_the_same_table():
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
    screen = as_screen(TABLE, "title")
    assert [column.header for column in screen.columns] == ["", "time\npaper", "time\nours", "a < b"]
    assert [list(column.cells) for column in screen.columns] == [["one", "two"], ["1", ""], ["2", "5"], ["<3>", "6"]]


def test_a_table_without_headings_under_its_titles_has_one_line_of_them():
    assert as_html(Table((Group("1"), Group("2")), ())).count("<tr>") == 1


@pytest.mark.parametrize(
    ("value", "text"), [(7341, "7,341"), (262.4, "262.4"), (4.0561, "4.056"), (0.01234, "0.0123"), (0, "0"), (None, "")]
)
def test_numbers_are_read_at_a_glance(value, text):
    assert number(value) == text
