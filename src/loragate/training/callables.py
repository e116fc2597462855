"""The callables that a calibration may be given, and which of them its objective would use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from loragate.data import EncodedRows
from loragate.errors import ConfigError
from loragate.generation import Sample
from loragate.training.guards import Guard, GuardCallback, saturation
from loragate.training.rollouts import Reward, Sampler, as_answers
from loragate.training.run import collator_for
from loragate.training.strategy import launch_of


@dataclass(frozen=True)
class Callables:
    """As in `calibrate`; None where none was given."""

    sampler: Sampler | None
    reward: Reward | None
    guard: Guard | None
    probe: Callable[[], Sequence[Sample]] | None

    def check(self, objective: str, on_policy: bool) -> None:
        """Raises ConfigError for one without effect, and for a guard that has nothing to read."""
        if self.reward is not None and objective != "reward":
            raise ConfigError(f"a reward has no effect on the objective {objective!r}; set objective='reward'")
        if self.sampler is not None and not on_policy:
            raise ConfigError(f"a sampler has no effect on the objective {objective!r}, which trains on the given rows")
        if self.probe is not None and (on_policy or self.guard is None):
            why = "its guard reads the answers that it samples anyway" if on_policy else "no guard would read it"
            raise ConfigError(f"a probe has no effect here: {why}")
        if self.guard is not None and not on_policy and self.probe is None:
            raise ConfigError(f"a guard of the objective {objective!r} needs a probe: a callable that returns samples")
        if self.probe is not None and (launch := launch_of()).sharded:
            raise ConfigError(
                f"under {launch.strategy} no process holds a model that a guard's probe could sample from: launch with ddp, or "
                "leave guard and probe out"
            )

    def guarding(self, model: Any, tokenizer: Any, encoded: EncodedRows, name: str) -> tuple[GuardCallback, ...]:
        """The guard of a trainer run, its first reading taken from the gates as they start."""
        guard, probe = self.guard, self.probe
        if guard is None or probe is None:
            return ()
        device = next(model.parameters()).device
        batch = {key: value.to(device) for key, value in collator_for(tokenizer)(encoded[:16]).items()}

        def read(step: int) -> None:
            guard.observe(step, as_answers(probe()), lambda: saturation(model, [batch], name), complete=True)

        read(0)
        return (GuardCallback(guard, read, guard.limits.every),)
