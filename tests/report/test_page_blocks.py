"""Sections of diagnoses, from records as `loragate diagnose` writes them (cut down)."""

import pytest

from loragate.report.blocks import DIAGNOSES, Banner, Section, build_page, diagnosis_blocks


def interval(mean):
    return {"mean": mean, "low": mean - 0.1, "high": mean + 0.1}


def score(name, mean, difference=None, **more):
    row = {"name": name, "task": "t", "score": {**interval(mean), "questions": 9}, "difference": None}
    if difference is not None:
        row |= {"difference": {**interval(difference), "p": 0.001}, "adjusted_p": 0.02, "verdict": "better"}
    return {"adjusted_p": None, "verdict": None, **row, **more}


SHARES = {
    "count": 100,
    "mean": -0.5,
    "std": 1.0,
    "below_zero": 0.5,
    "zero_to_one": 0.3,
    "above_one": 0.2,
    "at_lower": 0.01,
    "at_upper": 0.0,
}
TERMS = {"angle": 60.0, "cosine": interval(0.5), "rho": interval(0.8), "verdict": "holds"}
POINT = {"name": "all", "total": TERMS, "stopped_error": 0.05, "tail_error": None}
WANTED = {"raised": 0.5, "value_raised": 0.25}
RECORDS = {
    "delta entropy": {
        "classes": [
            {
                "name": "all",
                "tokens": 1234,
                "base": interval(0.5),
                "adapter": interval(1.0),
                "gated": None,
                "delta": interval(0.5),
                "negative": interval(0.2),
                "positive": interval(0.7),
            }
        ],
        "distribution": {"edges": [-1.0, 0.0, 1.0], "counts": [25, 75]},
        "interventions": [score("adapter negative", 0.4, 0.2, suppressed=0.25)],
    },
    "realised gates": {
        "lower": -6.0,
        "upper": 3.0,
        "all": SHARES,
        "by_class": {"digits": SHARES},
        "by_type": {"up_proj": SHARES},
        "by_layer": {"0": SHARES},
        "modules": [{"module": "model.layers.0.mlp.up_proj", "layer": 0, "type": "up_proj", "all": SHARES}],
        "histogram": {"edges": [-6.0, 0.0, 3.0], "counts": [1, 3]},
    },
    "interventions": {
        "rows": [score("gated", 0.3), score("unit", 0.4, 0.2)],
    },
    "alignment": {
        "value_of": "reward",
        "tokens": 10,
        "rows": 2,
        "k": 100,
        "all": POINT,
        "modules": [{**POINT, "name": "m", "total": {**TERMS, "rho": None, "cosine": None, "angle": None}}],
        "coordinates": [{"name": "all", "coordinates": 7, "share": interval(0.9), "weighted": None, **WANTED}],
    },
}


@pytest.mark.parametrize("kind", sorted(DIAGNOSES))
def test_each_kind_has_its_section(kind):
    record = {**RECORDS[kind], "kind": kind, "conclusion": ["It does <b>this</b>.", "And that."]}
    page = build_page(
        "t", Banner(record["conclusion"][0]), [Section("d", DIAGNOSES[kind][0], diagnosis_blocks(record))]
    )
    assert page.count("It does &lt;b&gt;this&lt;/b&gt;.") == 2
    assert page.count("And that.") == 1
    shown = {
        "delta entropy": [
            "1,234",
            "0.500 (0.400 to 0.600)",
            "20.0",
            "70.0",
            "0 or less",
            "0 or more",
            "75",
            "everything beyond them",
            "+20.0, p=0.020 (+10.0 to +30.0; better)",
            "off at 25.0 % of the tokens",
        ],
        "realised gates": ["−0.50", "digits", "50.0", "30.0", "Distribution of λ"],
        "interventions": ["unit", "+20.0, p=0.020 (+10.0 to +30.0; better)"],
        "alignment": [
            "60°",
            "0.50 (0.40 to 0.60)",
            "0.80 (0.70 to 0.90)",
            "5.0",
            "90.0 (80.0–100.0)",
            "25.0",
        ],
    }[kind]
    for text in shown:
        assert text in page, text
