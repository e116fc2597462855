"""Answers that the gated model gives to the training prompts, their rewards, and the two losses over them. Not SCALE.

What is drawn is a function of the seed, the number of the refresh and the gates at that moment, so that a resumed run
meets the same answers. Sampling arrives as a callable: any engine of `loragate.generation`, or a server that holds the
same gates. The reward arrives as a callable too; what makes an answer right is not known here. The losses take the answers as
given: the dependence of later prefixes on the gates enters through the policy gradient only.

An anchor is made from two distributions that the gated model carries in itself: the base (λ = 0) and the adapter (λ = 1),
checked by the parity test before training, so that it needs no second copy of the model. Per position the anchored loss is
H(p) + β · KL(p ‖ r) over the full vocabulary, in nats, with p the gated model and r the anchor. At β = 1 the term in log p
drops out: the loss is the cross-entropy of p against r, and no longer entropy minimisation.

Shapes: T response tokens of a batch in row order, D hidden, V vocabulary, P forward passes of an anchor.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from loragate.data import EncodedRows, Rows
from loragate.errors import DataError, TrainingError
from loragate.gates import gate_override
from loragate.generation import Sample, SamplingConfig
from loragate.losses import StatisticsRequest
from loragate.losses.causal_head import Batch, ResponseScorer
from loragate.losses.divergence import Combine, Reference
from loragate.losses.head import IGNORED
from loragate.training.settings import GateTrainingSettings

logger = logging.getLogger("loragate")

Sampler = Callable[[Sequence[str], SamplingConfig], Sequence[Sample]]
"""Samples of rendered prompts, ordered by (question, sample), drawn with the gates as they are at the call."""

Reward = Callable[[Mapping[str, Any], str, bool], float]
"""(row with all its columns, answer text, whether the model ended it) to a number."""


@dataclass(frozen=True)
class Prompt:
    """What an answer is sampled from: the row's index, the text for the engine and the ids it must become."""

    row: int
    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """One sampled answer.

    Attributes:
        prompt: index into the run's prompts.
        token_ids: generated tokens, the stop token included.
        text: decoded, without the stop token.
        finished: whether the model ended it.
        reward, advantage: zero unless a reward is given.
    """

    prompt: int
    token_ids: tuple[int, ...]
    text: str
    finished: bool
    reward: float = 0.0
    advantage: float = 0.0


def training_prompts(
    encoded: EncodedRows, rows: Rows, tokenizer: Any, max_new_tokens: int, positions: int | None
) -> list[Prompt]:
    """The prompt of each row's last response, in training order.

    Engines take text, so only rows count whose prompt survives the way ids → text → ids, and leaves room for an answer.

    Raises:
        DataError: if no row is left.
    """
    found, lossy, long = [], 0, 0
    for item in encoded:
        ids, labels = item["input_ids"], item["labels"]
        # a conversation has several responses, each of which begins where labels do; the last one is asked for again
        starts = [at for at in range(1, len(labels)) if labels[at] != IGNORED and labels[at - 1] == IGNORED]
        prompt_ids = list(ids[: starts[-1]]) if starts else []
        if positions is not None and len(prompt_ids) + max_new_tokens > positions:
            long += 1
            continue
        # the chat template is part of the ids: the text is what an engine is given, special tokens and all
        text = tokenizer.decode(prompt_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if not prompt_ids or tokenizer(text, add_special_tokens=False)["input_ids"] != prompt_ids:
            lossy += 1
            continue
        found.append(Prompt(item["row"], text, tuple(prompt_ids)))
    account = (
        f"{long} of {len(encoded)} prompts leave no room for {max_new_tokens} new tokens in the model's {positions} "
        f"positions, and {lossy} change when their tokens are written as text"
    )
    if not found:
        raise DataError(f"{rows.source}: nothing can be sampled: {account}. Lower max_new_tokens or change the rows")
    if long or lossy:
        logger.warning("left out: %s", account)
    return found


def draw_answers(
    prompts: Sequence[Prompt], chosen: Sequence[int], sampler: Sampler, settings: GateTrainingSettings, refresh: int
) -> list[Answer]:
    """Answers to the chosen prompts, `answers_per_prompt` each, in their order; a pure function of gates and arguments.

    Raises:
        TrainingError: if the sampler returns something else than was asked for.
    """
    each = settings.answers_per_prompt
    config = SamplingConfig(
        temperature=settings.temperature,
        max_new_tokens=settings.max_new_tokens,
        samples=each,
        seed=stream_seed(settings.seed, refresh),
    )
    samples = sampler([prompts[index].text for index in chosen], config)
    # groups of answers are told apart by their place alone from here on
    pairs = [(sample.question, sample.sample) for sample in samples]
    if pairs != [(question, sample) for question in range(len(chosen)) for sample in range(each)]:
        raise TrainingError(
            f"the sampler returned {len(pairs)} answers for {len(chosen)} prompts × {each}, or in another order; it must "
            "return them ordered by (question, sample)"
        )
    return [replace(answer, prompt=chosen[answer.prompt]) for answer in as_answers(samples)]


def as_answers(samples: Sequence[Sample]) -> list[Answer]:
    """Samples of an engine as answers; `prompt` is the index of the question."""
    return [
        Answer(sample.question, tuple(sample.token_ids), sample.text, sample.finish_reason == "stop")
        for sample in samples
    ]


def stream_seed(seed: int, refresh: int) -> int:
    """The seed of one refresh's random stream, in [0, 2⁶³)."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{refresh}".encode()).digest()[:8], "little") >> 1


def rewarded(
    answers: Sequence[Answer],
    prompts: Sequence[Prompt],
    rows: Rows,
    reward: Reward,
    settings: GateTrainingSettings,
) -> list[Answer]:
    """The answers with rewards and advantages; each `answers_per_prompt` answers in a row belong to one prompt.

    Raises:
        TrainingError: for a reward that is not a finite number.
    """
    scored: list[Answer] = []
    group = settings.answers_per_prompt
    for at in range(0, len(answers), group):
        members = answers[at : at + group]
        rewards = []
        for answer in members:
            row = prompts[answer.prompt].row
            value = float(reward(rows[row], answer.text, answer.finished))
            if not math.isfinite(value):
                raise TrainingError(f"the reward of an answer to {rows.where(row)} is {value}; it must be finite")
            rewards.append(value)
        scored += [
            replace(answer, reward=value, advantage=gain)
            for answer, value, gain in zip(members, rewards, group_advantages(rewards, settings.advantage), strict=True)
        ]
    return scored


def group_advantages(rewards: Sequence[float], kind: str) -> list[float]:
    """Reward minus the group's mean, divided by the group's deviation for "std"; zero where all are equal."""
    mean = sum(rewards) / len(rewards)
    centred = [value - mean for value in rewards]
    deviation = math.sqrt(sum(value * value for value in centred) / len(rewards))  # of the group itself, not estimated
    if deviation < 1e-12:
        return [0.0] * len(rewards)
    return [value / deviation for value in centred] if kind == "std" else centred


def as_training_row(answer: Answer, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """An answer as an encoded row: labels on its tokens, none on the prompt."""
    prompt = prompts[answer.prompt]
    return {
        "input_ids": [*prompt.ids, *answer.token_ids],
        "labels": [IGNORED] * len(prompt.ids) + list(answer.token_ids),
        "row": prompt.row,
    }


@dataclass(frozen=True)
class Anchor:
    """How an anchor is made.

    Attributes:
        strengths: the constant λ of each forward pass it needs.
        combine: log-probabilities of these passes, [P, ..., V], to those of the anchor, [..., V].
    """

    strengths: tuple[float, ...]
    combine: Combine

    @torch.no_grad()
    def reference(self, scorer: ResponseScorer, batch: Batch, adapter_name: str) -> Reference:
        """The anchor's distributions at the response tokens of a batch: one forward pass for each λ."""
        passes = []
        for strength in self.strengths:
            with gate_override(scorer.model, constant=strength, adapter_name=adapter_name):
                passes.append(scorer.states(batch))
        return Reference(torch.stack(passes), scorer.head() if scorer.fused else None, self.combine)


anchors: dict[str, Anchor] = {
    "base": Anchor((0.0,), lambda logs: logs[0]),
    "adapter": Anchor((1.0,), lambda logs: logs[0]),
    # log ((p + q) / 2), and log √(p q) made to sum to 1 again
    "mixture": Anchor((0.0, 1.0), lambda logs: torch.logaddexp(logs[0], logs[1]) - math.log(2.0)),
    "product": Anchor((0.0, 1.0), lambda logs: torch.log_softmax((logs[0] + logs[1]) / 2.0, -1)),
}


# per response token [T], with a gradient; detached sums over the tokens, for the log
Terms = tuple[torch.Tensor, dict[str, float]]


@dataclass(frozen=True)
class AnchoredEntropy:
    """H + β · KL(gated ‖ anchor) over the full vocabulary, in nats, mean over the response tokens of the step."""

    settings: GateTrainingSettings
    adapter_name: str

    def denominator(self, answers: Sequence[Answer]) -> int:
        """What the summed loss of a step is divided by."""
        return max(1, sum(len(answer.token_ids) for answer in answers))

    def useful(self, answers: Sequence[Answer]) -> list[int]:
        """Indices of the answers whose gradient is not zero beforehand."""
        return list(range(len(answers)))

    def terms(
        self, scorer: ResponseScorer, batch: Batch, answers: Sequence[Answer], before_T: torch.Tensor | None
    ) -> Terms:
        """The loss of a batch; `before_T` are log-probabilities at the time of sampling, where they differ."""
        reference = anchors[self.settings.anchor].reference(scorer, batch, self.adapter_name)
        found = scorer.statistics(scorer.states(batch), batch, StatisticsRequest(reference=reference))
        assert found.kl is not None
        sums = {"entropy": float(found.entropy.detach().sum()), "kl": float(found.kl.detach().sum())}
        return found.entropy + self.settings.beta * found.kl, sums


@dataclass(frozen=True)
class GroupReward:
    """Policy gradient with the group's mean as baseline, optionally with a KL to the anchor; methods as in `AnchoredEntropy`.

    The loss of a step is its sum over tokens divided by the number of answers, so that its expectation over samples is
    the gradient of the expected reward (times (G − 1)/G, as an answer is part of its own baseline).
    """

    settings: GateTrainingSettings
    adapter_name: str

    def denominator(self, answers: Sequence[Answer]) -> int:
        return max(1, len(answers))

    def useful(self, answers: Sequence[Answer]) -> list[int]:
        if self.settings.reward_kl > 0:
            return list(range(len(answers)))
        return [index for index, answer in enumerate(answers) if answer.advantage != 0.0]

    def terms(
        self, scorer: ResponseScorer, batch: Batch, answers: Sequence[Answer], before_T: torch.Tensor | None
    ) -> Terms:
        states = scorer.states(batch)
        stats = scorer.statistics(states, batch, sampled_request(self.settings.k))
        log_prob_T = stats.log_prob
        advantages = [answer.advantage for answer in answers for _ in answer.token_ids]
        advantage_T = torch.tensor(advantages, dtype=log_prob_T.dtype, device=log_prob_T.device)
        losses_T, clipped_T = policy_loss(log_prob_T, advantage_T, before_T, self.settings.clip_ratio)
        sums = {"topk_entropy": float(stats.topk_entropy.sum()), "clipped": float(clipped_T.sum())}
        if self.settings.reward_kl > 0:
            reference = anchors[self.settings.anchor].reference(scorer, batch, self.adapter_name)
            # the same states under the head once more: the body, which costs the most, has run once
            kl_T = scorer.statistics(states, batch, StatisticsRequest(reference=reference)).kl
            assert kl_T is not None
            losses_T = losses_T + self.settings.reward_kl * kl_T
            sums["kl"] = float(kl_T.detach().sum())
        return losses_T, sums


def sampled_request(k: int) -> StatisticsRequest:
    """log p of the sampled tokens with a gradient, and their top-k entropy without, for the log."""
    return StatisticsRequest(k, ("log_prob", "topk_entropy"), ("log_prob",))


def policy_loss(
    log_prob_T: torch.Tensor, advantage_T: torch.Tensor, before_T: torch.Tensor | None, clip_ratio: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """−min(ρ A, clip(ρ, 1 ± ε) A) per token with ρ = p / p at sampling time.

    Args:
        log_prob_T: log p of the sampled tokens, with a gradient.
        advantage_T: advantage of the answer a token belongs to.
        before_T: log p at sampling time; None for "the same", when the gradient is −A ∇ log p.
        clip_ratio: ε.

    Returns:
        (loss [T], bool [T]: the clipped side was taken, so that the token has no gradient).
    """
    # in the first step after sampling ρ is 1, and its gradient that of log p
    before_T = log_prob_T.detach() if before_T is None else before_T.to(log_prob_T.device)
    ratio_T = torch.exp(log_prob_T - before_T)
    free_T = ratio_T * advantage_T
    bounded_T = ratio_T.clamp(1.0 - clip_ratio, 1.0 + clip_ratio) * advantage_T
    return -torch.minimum(free_T, bounded_T), (bounded_T < free_T).detach()


losses: dict[str, type[AnchoredEntropy | GroupReward]] = {"anchored": AnchoredEntropy, "reward": GroupReward}
