"""What the soak has found once in mutated files, and a few new ones."""

import logging
import tracemalloc

import pytest
from hypothesis import given, settings

from soak import files

MOST_BYTES = 1 << 26
FOUND = [(path.parent.name, path) for path in sorted(files.CORPUS.glob("*/*"))]


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(("format_", "path"), FOUND, ids=[f"{name}-{path.name}" for name, path in FOUND])
def test_what_was_found_stays_mended(tmp_path, format_, path):
    kind = files.FORMATS[format_]
    kind.read(files._written(tmp_path / kind.name, kind.sound()[0]))  # loads what it needs
    copy = files._written(tmp_path / kind.name, path.read_bytes())
    tracemalloc.start()
    try:
        assert files.fault_of(kind, copy) is None
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("format_", files.FORMATS)
def test_sound_files_are_read_and_mutated_ones_are_read_or_refused_in_a_line(tmp_path, format_):
    kind = files.FORMATS[format_]
    sound = kind.sound()
    for content in sound:
        kind.read(files._written(tmp_path / kind.name, content))

    @settings(max_examples=20, database=None)
    @given(files.mutations(sound))
    def read(content):
        for made in (content, kind.seal(content)):
            assert files.fault_of(kind, files._written(tmp_path / kind.name, made)) is None

    read()


def test_a_fault_is_seen(tmp_path):
    path = files._written(tmp_path / "x", b"")
    assert files.fault_of(files.Format("x", list, lambda path: 1 / 0), path).startswith("ZeroDivisionError")
