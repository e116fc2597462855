"""Overrides by name: what each means, what stands before the @, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from loragate.errors import ConfigError, GateError
from loragate.gates.override import Override, constant_name, parse_override, split_folder, split_name

KNOWN = {
    "off": Override(constant=1.0),
    "unit": Override(0.0, 1.0),
    "noreverse": Override(minimum=0.0),
    "noextrapolate": Override(maximum=1.0),
    "constant=-0.5": Override(constant=-0.5),
    "lower=0.5": Override(constant=0.5, part="lower"),
    "mlp=0": Override(constant=0.0, part="mlp"),
    "q_proj=-1": Override(constant=-1.0, part="q_proj"),
    "clip=-1:2": Override(-1.0, 2.0),
    "clip=:1": Override(maximum=1.0),
    "clip=0.5:": Override(minimum=0.5),
}


@pytest.mark.parametrize("text", KNOWN)
def test_what_a_name_means(text: str) -> None:
    assert parse_override(text) == KNOWN[text]
    assert split_name(f"math@{text}") == ("math", KNOWN[text])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("unti", "did you mean 'unit'"),
        ("", "no known override"),
        ("constant", "no known override"),
        ("constant=nan", "finite number"),
        ("constant=1e39", "finite number"),
        ("constant=", "@constant=: constant takes a number, as in @constant=0.5, found ''"),
        ("clip=2:1", "minimum 2 is above maximum 1"),
        ("clip=a:1", "@clip=a:1: clip takes one or two numbers"),
        ("clip=:", "no known override"),
        ("clip=1", "no known override"),
        ("off=1", "no known override"),
        ("lowwer=0.5", "did you mean 'lower'"),
        ("lower", "no known override"),
        ("upper=x", "@upper=x: upper takes a number"),
        ("mlp=inf", "finite number"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_override(text)


def test_a_folder_may_have_an_at_sign_of_its_own(tmp_path: Path) -> None:
    own = tmp_path / "gates@unit"
    own.mkdir()
    assert split_folder(own) == (str(own), None)
    assert split_folder(f"{own}@off") == (str(own), KNOWN["off"])
    assert split_folder(tmp_path / "no@where" / "x") == (str(tmp_path / "no@where" / "x"), None)
    assert split_folder(f"{tmp_path}@unit") == (str(tmp_path), KNOWN["unit"])
    assert split_folder("owner/name@constant=2") == ("owner/name", Override(constant=2.0))
    assert split_folder("owner/name@upper=0") == ("owner/name", Override(constant=0.0, part="upper"))
    assert split_folder("owner/name@v2") == ("owner/name@v2", None)
    with pytest.raises(ConfigError, match="did you mean 'unit'"):
        split_folder(f"{tmp_path}@unitt")


def test_a_part_takes_a_constant_and_has_no_one_limit() -> None:
    for part in (None, "lower", "q_proj"):
        assert parse_override(constant_name(0.5, part)) == Override(constant=0.5, part=part)
    with pytest.raises(GateError, match="for lower takes a constant"):
        Override(0.0, 1.0, part="lower")
    with pytest.raises(GateError, match=r"λ = 0.5 for lower alone is no one limit"):
        _ = Override(constant=0.5, part="lower").limits
