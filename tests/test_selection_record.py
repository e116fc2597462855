"""One record of a selection, one wording of it, and sentences that agree with the intervals in them."""

import json

import pytest

from loragate.errors import DataError
from loragate.evaluation.judging import CODE_GRADERS
from loragate.selection_record import (
    PROGRAM_GRADERS,
    ScoreDifference,
    count_unparsed_answers,
    format_choice_reason,
    read_selection_record,
)
from pages import selection_record


def test_a_record_survives_its_file(tmp_path):
    record = read_selection_record(selection_record())
    path = tmp_path / "selection.json"
    path.write_text(json.dumps(record.to_json()))
    assert read_selection_record(path) == record
    assert ("schema" in selection_record(), json.loads(path.read_text())["schema"]) == (False, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record.pop("baseline"), "the key 'baseline' is missing"),
        (lambda record: record["recommendation"].update(weigths="base"), "unknown key 'recommendation.weigths'"),
        (
            lambda record: record["variants"][1].update(mean="high"),
            r"variants\[1\].mean must be a number, found 'high'",
        ),
    ],
)
def test_it_is_read_strictly_by_file_and_key(tmp_path, change, message):
    record, path = selection_record(), tmp_path / "selection.json"
    change(record)
    path.write_text(json.dumps(record))
    with pytest.raises(DataError, match=rf"selection\.json: .*{message}"):
        read_selection_record(path)


@pytest.mark.parametrize(
    ("weights", "scale", "temperature", "label", "said"),
    [
        (
            "scale",
            0.0,
            0.0,
            "adapter upper λ=0 greedy",
            "Use λ = 0 in the upper third of the layers and the adapter as it is in the others, greedily",
        ),
        ("adapter", None, 0.0, "adapter greedy", "Use the adapter alone, greedily"),
        ("base", None, 0.0, "base greedy", "Use the base without the adapter, greedily"),
        ("scale", 0.5, 0.0, "adapter λ=0.5 greedy", "Use one λ = 0.5 for all modules, greedily"),
        ("gates", None, 0.3, "gated [-3,1] T=0.3", "Use the gates [-3,1], at temperature 0.3"),
    ],
)
def test_the_advice_names_what_acts_and_how(weights, scale, temperature, label, said):
    record = selection_record()
    record["recommendation"] |= {"weights": weights, "scale": scale, "temperature": temperature, "label": label}
    record["recommendation"]["part"] = "upper" if "upper" in label else None
    assert read_selection_record(record).recommendation.format_advice() == said


@pytest.mark.parametrize(
    ("low", "z", "accepted", "words"),
    [
        (0.01, 2.4, True, "it beats adapter greedy by +5.0 points (95 % interval +1.0 to +9.0, z = 2.40)"),
        (-0.01, 1.6, True, "likely a gain, but the interval does not exclude none"),
        (
            -0.02,
            1.0,
            False,
            "best is above it by +5.0 points (95 % interval -2.0 to +9.0, z = 1.00), which may be chance",
        ),
        (0.01, None, True, "it beats adapter greedy by +5.0 points (95 % interval +1.0 to +9.0)"),
    ],
)
def test_nothing_beats_the_adapter_whose_interval_holds_zero(low, z, accepted, words):
    said = format_choice_reason("best", "adapter greedy", ScoreDifference(0.05, low, 0.09, p=0.1, z=z), accepted)
    assert words in said
    assert ("beats" in said) == (low > 0)


def test_answers_that_were_cut_off_are_named():
    record = selection_record()
    assert "cut off" not in " ".join(read_selection_record(record).sentences())
    for one, share in zip(record["variants"], (0.688, 0.04, 0.9, 0.05), strict=True):
        one["truncated"] = share
    assert (
        "68.8 % of the answers of adapter greedy, 5.0 % of the answers of gated [-6,3] greedy met the limit of 32 tokens and "
        "were cut off; a larger --dev-max-new-tokens lets them end."
    ) in read_selection_record(record).sentences(), "the baseline and the best of each kind, from 5 % on"


def test_of_programs_only_those_are_unread_that_are_none():
    assert set(PROGRAM_GRADERS) == set(CODE_GRADERS)
    reasons = {"ok": 1, "wrong": 2, "error": 4, "timeout": 8, "no_code": 16, "syntax": 32}
    assert count_unparsed_answers(reasons, "mbpp") == 48
    assert count_unparsed_answers(reasons, "default") == 60, "a grader that ran out of time has judged nothing"
