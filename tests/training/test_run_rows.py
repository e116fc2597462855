"""The rows of a training: which are taken, and what is said when a run is to go on with others."""

import json
from dataclasses import replace

import pytest

from loragate.errors import ConfigError, TrainingError
from loragate.training.rows import read_rows
from loragate.training.run_folder import prepare_folder
from loragate.training.settings import RowsSettings

ROWS = [{"prompt": f"w{n}", "completion": f"w{n + 1}"} for n in range(8)]


@pytest.fixture
def write(tmp_path):
    def write(rows):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return RowsSettings(data=str(tmp_path / "rows.jsonl"))

    return write


@pytest.mark.parametrize(
    ("content", "change"),
    [
        (ROWS[:-1], "data.rows = 8, now it is 7"),
        (ROWS[::-1], "data.order_sha256"),
        ([*ROWS[:-1], ROWS[0]], "data.content_sha256"),
    ],
    ids=["fewer", "another order", "other rows"],
)
def test_a_resumed_run_names_what_has_changed_in_the_rows(write, tmp_path, content, change):
    prepare_folder({"data": read_rows(write(ROWS), 0).as_record()}, tmp_path, resume=False)
    prepare_folder({"data": read_rows(write(ROWS), 0).as_record()}, tmp_path, resume=True)
    with pytest.raises(TrainingError, match=change):
        prepare_folder({"data": read_rows(write(content), 0).as_record()}, tmp_path, resume=True)


def test_which_rows_are_taken(write):
    asked = write(ROWS)
    assert list(read_rows(asked, 3)) == ROWS[:3]
    drawn = replace(asked, select="shuffled")
    whole = read_rows(drawn, 0)
    assert list(whole) == list(read_rows(drawn, 3)) == ROWS  # without a seed the subset is left to the caller
    assert list(read_rows(drawn, 3, seed=5)) == list(whole.shuffled(5).take(3))
    assert list(read_rows(replace(drawn, select_seed=7), 3, seed=5)) == list(whole.shuffled(7).take(3))
    with pytest.raises(ConfigError, match="select-seed"):
        read_rows(replace(drawn, select_seed=7), 0)
