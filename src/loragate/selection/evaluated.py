"""The cells of a sweep as rows of an evaluation on whole suites: what `loragate eval --sweep` asks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from loragate.errors import ConfigError, DataError
from loragate.evaluation.evaluate import Evaluation
from loragate.evaluation.session import Request, Session
from loragate.evaluation.tasks import Task
from loragate.evaluation.variants import Variant
from loragate.gates.schema import read_gate_config
from loragate.selection.candidate import Candidate
from loragate.selection.outcome import summarise
from loragate.selection.store import GATED, Store, Study


@dataclass(frozen=True)
class SweptCells:
    """The finished cells of a sweep, which are rows of one evaluation beside its adapter.

    Attributes:
        study: of the sweep.
        trials: the gated folder of every finished cell.
        request: of the evaluation: its model is the adapter of the cells.
        tasks: what is asked.
        stop_token_ids: that end an answer, as the cells record them.
        choice: what the sweep chose on its probe, as `summarise` records it; empty where it chose nothing.
    """

    study: Study
    trials: dict[Candidate, Path]
    request: Request
    tasks: list[Task]
    stop_token_ids: tuple[int, ...]
    choice: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, sweep: Path, request: Request) -> SweptCells:
        """Those of a sweep with a finished cell (DataError); ConfigErrors as of `Request.check`, and for retention suites."""
        store = Store.open(sweep)
        done = store.finished()
        trials = {
            one: store.place(one) / GATED
            for one in store.study.candidates
            if one.range is not None and one.slug in done
        }
        if not trials:
            raise DataError(f"{sweep} has no finished cell yet; go on with the sweep first (loragate sweep … --resume)")
        # without a probe nothing was chosen
        choices = summarise(store.study, done)["choices"] if store.study.identity.get("probe") else []
        first = next(iter(trials.values()))
        gates = read_gate_config(first)
        base, revision = gates["base"]["id"], gates["base"].get("revision")
        own = replace(
            request,
            model=str(first / "adapter"),
            base=request.base or (f"{base}@{revision}" if revision else base),
        )
        tasks = own.check()
        if asked := [task.name for task in tasks if task.harness is not None]:
            raise ConfigError(f"--sweep: {', '.join(asked)} are retention suites, which are scored one model at a time")
        endings = tuple(gates.get("stop_token_ids") or ())
        return cls(store.study, trials, own, tasks, endings, choices[0] if choices else {})

    def evaluation(self, session: Session) -> Evaluation:
        """The adapter and a row for each cell."""
        expected = [one for one in self.study.candidates if one.range is not None]
        left = [trial.name for trial in expected if trial not in self.trials]
        notes = [f"cells that are not finished, and not scored: {', '.join(left)}"] if left else []
        rows = [Variant("gated", trial.name, gates=str(place)) for trial, place in self.trials.items()]
        return session.evaluation([Variant("adapter"), *rows], notes=notes, kind="sweep", sweep=self.study.fingerprint)
