"""docs/install.md says of each way to start Python what the Pythons of this machine do."""

import pytest
from bootstrap_matrix import DOCUMENT, HEAD, PLACE, VERSIONS, WAYS, row, seen
from documents import Document

ROWS = [tuple(cells) for cells in Document(DOCUMENT).rows]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_the_table_says_what_this_python_does(way, version, tmp_path):
    expected = row(way, seen(way, version, tmp_path))
    assert expected in ROWS, "`python tests/bootstrap_matrix.py` writes the table"


def test_the_table_is_where_it_will_be_written():
    (place,) = PLACE.findall(DOCUMENT.read_text())
    assert place.count("|\n") == len(WAYS) + 2 and "\n\nSeen on Python 3." in place


def test_the_table_has_these_ways_and_no_other():
    start = ROWS.index(HEAD) + 2
    names = [cells[0] for cells in ROWS[start : start + len(WAYS)]]
    assert names == [way.name for way in WAYS]
    assert len(ROWS) == start + len(WAYS), "another table follows: end this test where ours ends"
