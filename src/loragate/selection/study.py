"""What a study consists of: its candidates, and everything else that its numbers depend on.

`loragate calibrate` is a study of a few candidates, `loragate sweep` one of many. Both are written to `sweep.json` before
anything runs. A resumed study must be the same study.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from loragate.errors import ConfigError, DataError, GateError
from loragate.files import require_same, write_json
from loragate.records import read_object
from loragate.selection.candidate import Candidate

RECORD = "sweep.json"


@dataclass(frozen=True)
class Study:
    """All candidates, in the order in which they are tried, and what their numbers depend on.

    Attributes:
        candidates: an adapter comes before the gates on it.
        identity: JSON-able; equal identities give equal numbers.
    """

    candidates: tuple[Candidate, ...]
    identity: Mapping[str, Any]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the identity; every result carries it."""
        return digest(self.identity)

    def as_dict(self) -> dict[str, Any]:
        """The content of sweep.json."""
        content = {
            "format": "loragate sweep",
            "version": 1,
            **self.identity,
            "fingerprint": self.fingerprint,
            "trials": {one.slug: one.as_record() for one in self.candidates},
        }
        return json.loads(json.dumps(content))

    @classmethod
    def read(cls, folder: Path) -> Study:
        """The study that was begun in `folder`.

        Raises:
            DataError: if there is none, or it cannot be read.
        """
        path = folder / RECORD
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            candidates = tuple(map(Candidate.from_record, record.pop("trials").values()))
            fingerprint = record.pop("fingerprint")
            study = cls(candidates, {key: value for key, value in record.items() if key not in ("format", "version")})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, GateError) as error:
            raise DataError(
                f"{path}: not the record of a sweep ({error}); give the --out of `loragate sweep`"
            ) from None
        if study.fingerprint != fingerprint:
            raise DataError(f"{path} was changed by hand: its fingerprint is of other settings; restore it")
        return study

    def begin(self, folder: Path, resume: bool) -> None:
        """Write down what is being tried, or check that a resumed study is the same.

        Raises:
            ConfigError: for a study that is not to be resumed, or another one; it names the first difference.
            DataError: if the stored record cannot be read.
        """
        path, wanted = folder / RECORD, self.as_dict()
        if not path.exists():
            write_json(path, wanted)
            return
        if not resume:
            raise ConfigError(
                f"{folder} holds candidates of an earlier run; go on with --resume, or choose another --out"
            )
        remedy = "repeat the command with the same settings, rows and loragate, or choose another --out"
        stored = read_object(path, "choose another --out")
        for known in ({"fingerprint": None}, {}):  # it follows from the rest, and alone says nothing to a person
            require_same(path, {**stored, **known}, {**wanted, **known}, remedy)


def digest(value: Any) -> str:
    """SHA-256 over a JSON-able value, whatever the order of its keys."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
