"""Arrays that differ have other fingerprints, wherever they differ; batches are read once."""

import numpy as np
import pytest

from meshwright.data.fingerprint import arrays_text, fingerprint, noting_first
from meshwright.data.rows import HostRows, LocalBatch


@pytest.mark.parametrize("rows", [16384, 18432, 20480, 65536])
@pytest.mark.parametrize("column", [0, 1, 300, 783])
def test_every_column_counts(rows, column):
    array = np.zeros([rows, 784], "uint8")
    before = fingerprint(array)
    array[:, column] = 1
    assert fingerprint(array) != before


def test_small_arrays_count_whole():
    array = np.zeros([16383])
    before = fingerprint(array)
    array[4711] = 1
    assert fingerprint(array) != before
    assert fingerprint(np.zeros([0, 3])) == "00000000"


def test_the_first_batch_is_described_and_still_there():
    facts: dict[str, str] = {}
    batches = noting_first(iter([(np.zeros(2), np.ones(2)), "the second"]), facts)
    assert facts == {}
    assert [len(batch) for batch in batches] == [2, 10]
    assert facts == {"first batch": arrays_text((np.zeros(2), np.ones(2)))}


def test_rows_of_one_process_are_not_described_and_row_numbers_are():
    own: dict[str, str] = {}
    list(noting_first([LocalBatch(np.zeros(2)), np.zeros(2)], own))
    assert own == {}
    table, orders = np.arange(8), ([1, 2], [2, 1])
    texts = []
    for order in orders:
        facts: dict[str, str] = {}
        list(noting_first([HostRows(table.__getitem__, np.array(order), ())], facts))
        texts.append(facts["first batch"])
    assert texts[0] != texts[1]
