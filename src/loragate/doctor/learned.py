"""Losses on the examples: is this the adapter's base, is its strength right, did it learn, did it learn by heart?

The adapter is read at several strengths s (its delta times s; s = 0 is the base where nothing but LoRA's factors was trained).
All losses are nats per response token on the same rows, so that differences are paired. A threshold is met by that end of an
interval which is nearer to 0, not by the mean: few or unlike rows give no warning.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from loragate.analysis.rows import Interval, Row
from loragate.data import EncodedRows, load_rows
from loragate.data.formats import FORMATS
from loragate.display import pluralize
from loragate.doctor.exam_context import STRENGTHS, ExamContext, Losses, all_plain, high_end, low_end
from loragate.doctor.record import Learned
from loragate.errors import DataError
from loragate.gates.adapter_rules import Finding
from loragate.gates.control import base_unavailable_reason
from loragate.gates.strength import scales_exactly
from loragate.losses.head import IGNORE_INDEX
from loragate.selection.dev import read_dev

SCALES = tuple(f"{strength:g}" for strength in STRENGTHS)
WEAKER, STRONGER = ("0.125", "0.0625"), ("4", "8", "16")
"""Read as well where even the weakest or the strongest of these is not enough: a wrong alpha is off by such factors."""
HELDOUT_SECONDS = 20.0
"""For reading held-out questions: beside the answers within ten minutes."""
FEWEST = 4
"""Examples that differ; an interval over fewer means nothing."""
MATTERS = 0.05
"""Nats per token: a smaller difference of losses, 5 % in the probability of each token, is worth no warning."""
SHARE_WEAKER, SHARE_STRONGER = 0.1, 0.5
"""Of what the adapter gains over the base, the share that another strength must gain more. Training stops before the loss on its
own rows is at its least, so a healthy adapter gains somewhat more above 1; one whose scale was lost gains as much again."""
WORSE = 0.02
"""Nats per token by which an adapter must be worse than its base on its own examples, to be called one of another base."""
FITS = 0.05
"""Share of the base's loss that an adapter which is too strong takes away at a lower strength; noise takes almost nothing."""
FOR_MOVES, MOVES = 0.75, 0.01
"""Nats gained on its own examples for each nat of KL(adapter‖base) there: a model that was fitted to them gains 1 or more, one
that moves at random almost none. It is looked at where the KL is above MOVES nats per token."""
NOTHING = 0.01
"""Nats per token: an adapter that gains less on its examples has learnt nothing there."""
MEMORIZED_GAP_NATS, MEMORIZED_LOSS_RATIO, MIN_TRANSFERRED_GAIN = 0.2, 10.0, 0.2
"""Learnt by heart: questions of the same kind have a loss that is higher than the examples' by the first, in nats per token,
and either the second times as high or with less than the third, a share, of the gain on the examples. Adapters as people train
them have 1.1 to 5 times the loss there, and carry over 0.4 or more of the gain."""
SIMILAR = 2.0
"""Up to this ratio of lengths are answers of the same kind."""
BY_HEART, ANSWER, VARIED = 0.05, 20.0, 0.9
"""Perhaps learnt by heart, without such questions: share of the base's loss that is left, nats that the base needs for a whole
answer, and the share of the answers that are different. It may as well be an answer that follows from its question."""


@dataclass
class LossCurve:
    """The examples read at several strengths.

    Attributes:
        base: of the base as it is; None where it cannot be had.
        losses_by_strength: {strength: losses}.
    """

    exam: ExamContext
    base: Losses | None = None
    losses_by_strength: dict[str, Losses] = field(default_factory=dict)

    def read(self, *strengths: str) -> None:
        """Read the rows at more strengths."""
        with self.exam.job("the examples at every strength", len(strengths), "strengths") as on_progress:
            for done, strength in enumerate(strengths, 1):
                self.losses_by_strength[strength] = self.exam.cached_losses(
                    "examples", strength, self.exam.scaled(float(strength))
                )
                on_progress(done, len(strengths))

    @property
    def rows(self) -> list[Row]:
        """The examples that are read."""
        return self.exam.scoring_rows["examples"]

    @property
    def applied(self) -> bool:
        """Whether the adapter moves the losses at all; one that does not is not-applied, and has no chance to learn."""
        return self.base is None or bool((self.base.sums != self.losses_by_strength["1"].sums).any())

    def loss(self, strength: str) -> float:
        """Mean nats per token at a strength."""
        return self.losses_by_strength[strength].mean().mean

    @property
    def gain(self) -> Interval | None:
        """Base minus adapter, nats per token."""
        return None if self.base is None else self.base.paired_difference(self.losses_by_strength["1"])

    def best(self, *, above: bool) -> str:
        """The strength of the lowest loss above 1, or between 0 and 1."""
        side = [s for s in self.losses_by_strength if (float(s) > 1 if above else 0 < float(s) < 1)]
        return min(side, key=self.loss)

    def improvement(self, strength: str) -> Interval:
        """Adapter as it is minus adapter at another strength, nats per token."""
        return self.losses_by_strength["1"].paired_difference(self.losses_by_strength[strength])

    def beats_base(self, strength: str) -> bool:
        """Whether the adapter at this strength is clearly better than the base; True where the base cannot be had."""
        least = 0.0 if self.base is None else max(MATTERS, FITS * self.base.mean().mean)
        return self.base is None or low_end(self.base.paired_difference(self.losses_by_strength[strength])) > least

    def evidence(self, **more: Any) -> dict[str, Any]:
        """Mean losses, by strength."""
        base = None if self.base is None else self.base.mean().mean
        return {"base": base, "scales": {s: self.loss(s) for s in self.losses_by_strength}, **more}


def examine_learned(exam: ExamContext) -> tuple[Learned | None, list[Finding]]:
    """See `Learned`; None without examples."""
    if exam.examples is None or not exam.rows:
        return None, []
    if not exam.has_base:
        exam.say(f"the examples are not compared with the base: {base_unavailable_reason(exam.model)}")
    if not scales_exactly(exam.model):
        exam.say(
            "between 0 and 1, and above, a DoRA adapter is weakened or strengthened in its direction, not its magnitude"
        )
    curve = LossCurve(exam)
    if exam.has_base:
        curve.base = exam.cached_losses("examples", "base", exam.acting("base"))
    curve.read(*SCALES)
    if not all(np.isfinite(losses.sums).all() for losses in curve.losses_by_strength.values()):
        exam.say("the examples are not judged by: the model computes no finite predictions for them at every strength")
        return None, []
    adapter, heldout = curve.losses_by_strength["1"], _heldout(exam, curve)
    learned = Learned(
        source=exam.examples.source,
        rows=len(curve.rows),
        tokens=int(adapter.tokens.sum()),
        base=None if curve.base is None else curve.base.mean(),
        adapter=adapter.mean(),
        gain=curve.gain,
        scales={s: curve.losses_by_strength[s].mean() for s in SCALES},
        heldout=None if heldout is None else heldout[1].mean(),
        heldout_base=None if heldout is None or heldout[0] is None else heldout[0].mean(),
    )
    if (different := len(np.unique(adapter.texts))) < FEWEST:
        exam.say(f"{pluralize(different, 'different example')}: too few to judge the adapter by; {FEWEST} are needed")
        return learned, []
    return learned, [
        *_check_system_message(curve),
        *_check_strength_and_base(curve),
        *_check_memorization(curve, heldout),
    ]


def _heldout(exam: ExamContext, curve: LossCurve) -> tuple[Losses | None, Losses] | None:
    """Losses of base and adapter on the dev set's questions with their answers, where these are of the examples' kind."""
    if exam.dev_data is None:
        return None
    try:
        given = load_rows(exam.dev_data, limit=exam.settings.max_rows)
        if not any(form.matches(given[0]) for form in FORMATS.values()):
            asked = read_dev(exam.dev_data, exam.settings.dev).questions.questions[: exam.settings.max_rows]
            given = load_rows([{"question": one.prompt, "answer": one.gold} for one in asked])
        rows = exam.encode_examples(given)
    except DataError as error:
        exam.say(f"the dev set is not read for memorisation: {error}")
        return None
    if all_plain(exam.rows) != all_plain(rows):
        exam.say(
            "the dev set is not read for memorisation: of it and the examples, one is text to complete and the other a "
            "conversation; give it the columns of the examples beside its answers"
        )
        return None
    rows = exam.subsample_to_budget(rows, 1 + exam.has_base, HELDOUT_SECONDS)
    with exam.acting("adapter"):
        adapter = exam.losses(rows)
    lengths = [float(one.tokens.mean()) for one in (adapter, curve.losses_by_strength["1"])]
    if max(lengths) > SIMILAR * min(lengths):
        exam.say(
            f"the dev set's answers ({lengths[0]:.0f} tokens) are of another kind than the examples' ({lengths[1]:.0f} tokens), "
            "so the two are not compared"
        )
        return None
    if not exam.has_base:
        return None, adapter
    with exam.acting("base"):
        return exam.losses(rows), adapter


def _check_system_message(curve: LossCurve) -> list[Finding]:
    """system-message: are the examples likelier with the chat template's own one (without it, where --system keep is given)?

    An adapter is mostly best as it was trained. One of a few steps need not be, and then this says how to ask it all the same.
    """
    exam, now = curve.exam, curve.losses_by_strength["1"]
    if not isinstance(exam.rows, EncodedRows) or exam.examples is None:  # texts without a template
        return []
    other = "none" if exam.settings.system == "keep" else "keep"
    given = [exam.examples[row["row"]] for row in curve.rows]
    try:
        rows = exam.encode_examples(load_rows(given), other)
    except DataError:  # too long with it, for instance
        return []
    same = all(one["input_ids"] == own["input_ids"] for one, own in zip(rows, curve.rows))
    if same or [row["row"] for row in rows] != list(range(len(curve.rows))):
        return []
    with exam.acting("adapter"):
        losses = exam.losses(rows)
    less = now.paired_difference(losses)
    if not np.array_equal(losses.tokens, now.tokens) or low_end(less) <= WORSE:
        return []
    words = {"keep": "with", "none": "without"}
    return [
        Finding(
            "system-message",
            "warning",
            f"the adapter's loss on {pluralize(len(rows), 'example')} is lower {words[other]} the chat template's own system "
            f"message: {losses.mean().mean:.2f} nats per token, {now.mean().mean:.2f} {words[exam.settings.system]} it (lower by "
            f"{less.mean:.2f}{less.ends()})",
            f"give every command --system {other}, this one as well",
            {other: losses.mean().mean, exam.settings.system: now.mean().mean, "low": less.low, "high": less.high},
        )
    ]


def _check_strength_and_base(curve: LossCurve) -> list[Finding]:
    """wrong-base, too-strong, too-weak or nothing-learned, at the most one of them."""
    gain, exam = curve.gain, curve.exam
    own, rows = curve.losses_by_strength["1"].mean(), pluralize(len(curve.rows), "example")
    if curve.base is not None and low_end(loss := curve.losses_by_strength["1"].paired_difference(curve.base)) > WORSE:
        curve.read(*WEAKER)
        weaker = curve.best(above=False)
        worse = (
            f"the adapter is worse than its base on its own examples: {own.mean:.2f} nats per token where the base alone has "
            f"{curve.base.mean().mean:.2f}, worse by {loss.mean:.2f}{loss.ends()} on {rows}"
        )
        evidence = curve.evidence(worse=loss.mean, low=loss.low, high=loss.high)
        if curve.beats_base(weaker):
            return [
                Finding(
                    "too-strong",
                    "error",
                    f"{worse}. At {weaker} times its strength it has {curve.loss(weaker):.2f}: it acts too strongly",
                    _strength_remedy(weaker),
                    {**evidence, "best": weaker},
                )
            ]
        return [
            Finding(
                "wrong-base",
                "error",
                f"{worse}; an adapter on the base that it was trained on is below it, and this one is not at a lower strength "
                "either",
                _base_remedy(exam),
                evidence,
            )
        ]
    gained = 0.0 if gain is None else max(0.0, gain.mean)
    weaker = curve.best(above=False)
    if low_end(curve.improvement(weaker)) > max(MATTERS, SHARE_WEAKER * gained) and curve.beats_base(weaker):
        return [_other_strength("too-strong", curve, weaker, rows)]
    moved = 0.0 if exam.measures.effect is None else exam.measures.effect.classes[0].kl.mean
    if gain is not None and moved > MOVES and high_end(gain) < FOR_MOVES * moved:
        return [
            Finding(
                "wrong-base",
                "warning",
                f"the adapter changes the predictions on its own examples by {moved:.2f} nats per token (KL) and gains "
                f"only {gain.mean:.2f}{gain.ends()} nats of loss on {rows}; fitted to them on this base, it would gain as much",
                _base_remedy(exam),
                curve.evidence(gain=gain.mean, low=gain.low, high=gain.high, kl=moved),
            )
        ]
    if low_end(curve.improvement("2")) > 0:
        curve.read(*STRONGER)
    stronger = curve.best(above=True)
    if low_end(curve.improvement(stronger)) > max(MATTERS, SHARE_STRONGER * gained):
        return [_other_strength("too-weak", curve, stronger, rows)]
    if gain is not None and high_end(gain) < NOTHING and curve.applied:
        return [
            Finding(
                "nothing-learned",
                "warning",
                f"the adapter is no better than its base on the examples: {own.mean:.3f} nats per token, {gain.mean:+.3f}"
                f"{gain.ends('+.3f')} below the base on {rows}; training on them lowers it by 0.1 or more",
                "check that these are the examples that it was trained on, in the same chat template, and that the loss fell in "
                "training (learning rate, number of steps, labels that are not masked)",
                curve.evidence(gain=gain.mean, low=gain.low, high=gain.high),
            )
        ]
    return []


def _other_strength(code: str, curve: LossCurve, strength: str, rows: str) -> Finding:
    found = curve.improvement(strength)
    return Finding(
        code,
        "warning",
        f"at {strength} times its strength the adapter has a loss of {curve.loss(strength):.2f} nats per token on its own "
        f"examples, as it is {curve.loss('1'):.2f}: {found.mean:.2f}{found.ends()} better on {rows}, where training should have "
        "left the best strength at 1",
        "train longer or with a higher learning rate; or " * (code == "too-weak") + _strength_remedy(strength),
        curve.evidence(best=strength, better=found.mean, low=found.low, high=found.high),
    )


def _base_remedy(exam: ExamContext) -> str:
    return (
        f"check that {exam.model_source.base.name} is the very model that it was trained on (the same version and fine-tune, not "
        "only the same shape; name another with --base), and that these examples, in this chat template, are what it was "
        "trained on by imitation: preference tuning (DPO, GRPO) need not make its chosen answers likelier"
    )


def _strength_remedy(strength: str) -> str:
    return (
        "compare lora_alpha, r and use_rslora in adapter_config.json with those of the training; where they are not known, "
        f"multiply lora_alpha by {strength}"
    )


def _check_memorization(curve: LossCurve, heldout: tuple[Losses | None, Losses] | None) -> list[Finding]:
    """memorised: a warning where the dev set shows it, a note where the examples alone let one suspect it."""
    if curve.base is None:
        return []
    own, base, rows = curve.losses_by_strength["1"].mean(), curve.base.mean(), len(curve.rows)
    remedy = "take an earlier checkpoint, or train for fewer steps, at a lower learning rate or on more examples"
    evidence = {"adapter": own.mean, "base": base.mean}
    if heldout is not None and heldout[0] is not None:
        held, held_base, carried = heldout[1].mean(), heldout[0].mean(), heldout[0].paired_difference(heldout[1])
        by_heart = low_end(held) > MEMORIZED_LOSS_RATIO * high_end(own) or high_end(carried) < MIN_TRANSFERRED_GAIN * (
            base.mean - own.mean
        )
        if by_heart and low_end(held) - high_end(own) > MEMORIZED_GAP_NATS:
            return [
                Finding(
                    "memorised",
                    "warning",
                    f"the examples were learnt by heart: of the base's {base.mean:.2f} nats per token {own.mean:.2f}{own.ends()} "
                    f"are left on them, and {held.mean:.2f}{held.ends()} of {held_base.mean:.2f} on questions of the same kind "
                    "that it has not seen",
                    remedy,
                    {**evidence, "heldout": held.mean, "heldout_base": held_base.mean},
                )
            ]
        return []
    whole = float(curve.base.sums.mean())
    answers = {tuple(label for label in row["labels"] if label != IGNORE_INDEX) for row in curve.rows}
    if high_end(own) < BY_HEART * base.mean and whole > ANSWER and len(answers) > VARIED * rows:
        return [
            Finding(
                "memorised",
                "note",
                f"of the base's {base.mean:.2f} nats per token {own.mean:.3f}{own.ends('.3f')} are left on "
                f"{pluralize(rows, 'example')}: the answers ({whole:.0f} nats each for the base) "
                "follow from their questions, or they were learnt by heart",
                f"give other questions of the same kind with answers (--dev-data) to know; if by heart, {remedy}",
                {**evidence, "answer": whole},
            )
        ]
    return []
