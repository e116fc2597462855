"""What gates, and the LoRA as their control, learn from on trial: a model's scores of unseen rows, the losses of a step, and
the evolution of a dozen λ.

`trial.py` has it on tiny worlds, `real.py` on a cell of the study on the real model. Nothing here knows where rows come
from, how an answer is judged, or what is asked afterwards.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer

from loragate.data import Collator
from loragate.files import write_json
from loragate.gates.attach import gate_modules
from loragate.gates.override import Override
from loragate.generation import Sample, SamplingConfig, TransformersEngine
from loragate.losses.causal_head import Batch, ResponseScorer, counted
from loragate.losses.head import IGNORED
from objectives import losses

RANGE = (-6.0, 3.0)
LIMITS = (-3.0, 6.0)  # of a dozen λ
HEAT, GROUP = 0.8, 8  # temperature and number of the samples of a prompt
Loss = Callable[[float], torch.Tensor]
"""The loss of one step, from the share of the run that is done."""


@dataclass
class Scored:
    """What a model says at the response tokens of some rows: logits [T, V], labels [T] and the row of each token [T]."""

    logits: torch.Tensor
    labels: torch.Tensor
    owner: torch.Tensor

    @classmethod
    def of(cls, states: torch.Tensor, scorer: ResponseScorer, batch: Batch) -> Scored:
        """From the final states at the positions before the response tokens."""
        logits = scorer.head().logits(states, torch.float32) if scorer.fused else states.float()
        place = counted(batch)
        return cls(logits, batch["labels"][:, 1:][place], place.nonzero()[:, 0])

    def log_probs(self, temperature: float = 1.0) -> torch.Tensor:
        """log p of each label, [T]."""
        return (self.logits / temperature).log_softmax(-1).gather(-1, self.labels.unsqueeze(-1)).squeeze(-1)

    def summed(self, values_T: torch.Tensor, rows: int) -> torch.Tensor:
        """Sums over the tokens of each row, [N]."""
        return values_T.new_zeros(rows).index_add(0, self.owner, values_T)


class Learner:
    """An adapter, rows that it never saw, and its own answers to their prompts.

    A subclass sets these attributes and says in `judge` what an answer is worth.

    Attributes:
        tokenizer: the adapter's.
        seed: of batches, samples and gates.
        frozen: the adapter that everything starts from.
        practice: prompts of unseen rows, as the model reads them.
        references: unseen rows with their references, encoded.
        sequences: rows of a step.
        max_new_tokens: of an answer.
        answers_at_once: decoded together.
        precision: of a training step, "fp32" or "bf16" (autocast).
    """

    tokenizer: Any
    seed: int
    frozen: Any
    practice: list[str]
    references: list[dict[str, Any]]
    sequences: int
    max_new_tokens: int
    answers_at_once: int
    precision = "fp32"

    def judge(self, sample: Sample, question: int) -> tuple[bool, str | None]:
        """Whether an answer is right for the prompt of `practice` at `question`, and what it states; None for nothing."""
        raise NotImplementedError

    def draw(self, model: Any, prompts: list[str], temperature: float, samples: int, seed: int) -> list[Sample]:
        """Samples ordered by (question, sample)."""
        config = SamplingConfig(
            temperature=temperature,
            max_new_tokens=self.max_new_tokens,
            samples=samples if temperature else 1,
            seed=seed,
        )
        return TransformersEngine(model, self.tokenizer, batch_size=self.answers_at_once).generate(prompts, config)

    @cached_property
    def practised(self) -> list[tuple[Sample, list[Sample]]]:
        """Per prompt of `practice` the adapter's greedy answer and its samples."""
        greedy = self.draw(self.frozen, self.practice, 0.0, 1, 0)
        return with_samples(greedy, self.draw(self.frozen, self.practice, HEAT, GROUP, self.seed))

    @cached_property
    def practice_ids(self) -> list[list[int]]:
        """Token ids of the prompts of `practice`."""
        return self.tokenizer(self.practice, add_special_tokens=False)["input_ids"]

    def row(self, question: int, sample: Sample) -> dict[str, Any]:
        """An answer to a prompt of `practice`, encoded."""
        prompt, answer = self.practice_ids[question], list(sample.token_ids)
        return {"input_ids": [*prompt, *answer], "labels": [IGNORED] * len(prompt) + answer, "row": question}

    def batches(self, rows: list[Any], size: int) -> Iterator[list[Any]]:
        """Endless batches, shuffled by the seed; all rows at once where there are fewer than `size`."""
        size = min(size, len(rows))
        if not size:
            raise ValueError("there is nothing to learn from: no prompt has a pair of answers of which one is right")
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            order = torch.randperm(len(rows), generator=generator).tolist()
            for at in range(0, len(order) - size + 1, size):
                yield [rows[index] for index in order[at : at + size]]

    # scores

    def scorer(self, model: Any) -> ResponseScorer:
        """What `score` reads a model by; its head is verified once."""
        return ResponseScorer(model, precision=self.precision)

    def score(self, scorer: ResponseScorer, rows: list[dict[str, Any]]) -> Scored:
        """One forward pass; the head reads the response positions alone."""
        batch = self.collate(rows)
        return Scored.of(scorer.states(batch), scorer, batch)

    def scored_by_adapter(self, rows: list[dict[str, Any]]) -> Scored:
        """The same by the adapter that everything started from, which reads each row once."""
        scorer, keys = self._frozen_scorer, [tuple(row["input_ids"]) for row in rows]
        new = {key: row for key, row in zip(keys, rows, strict=True) if key not in self._states}
        with torch.no_grad():
            if new:
                batch = self.collate(list(new.values()))
                lengths = counted(batch).sum(1).tolist()
                self._states |= zip(new, scorer.states(batch).split(lengths), strict=True)
            return Scored.of(torch.cat([self._states[key] for key in keys]), scorer, self.collate(rows))

    @cached_property
    def collate(self) -> Collator:
        return Collator(self.tokenizer.pad_token_id)

    @cached_property
    def _frozen_scorer(self) -> ResponseScorer:
        return self.scorer(self.frozen)

    @cached_property
    def _states(self) -> dict[tuple[int, ...], torch.Tensor]:
        """The adapter's final states at the response tokens of a row, [T, D] each, by its token ids."""
        return {}


def with_samples(greedy: list[Sample], sampled: list[Sample]) -> list[tuple[Sample, list[Sample]]]:
    """Each prompt's greedy answer with its GROUP samples."""
    return [(one, sampled[GROUP * at : GROUP * (at + 1)]) for at, one in enumerate(greedy)]


# the losses of a step


def cross_entropy(learner: Learner, scorer: ResponseScorer) -> Loss:
    """On the references of unseen rows."""
    batches = learner.batches(learner.references, learner.sequences)
    return lambda _: -learner.score(scorer, next(batches)).log_probs().mean()


def entropy(learner: Learner, scorer: ResponseScorer, temperature: float) -> Loss:
    """The paper's, on softmax(z/T)."""
    batches = learner.batches(learner.references, learner.sequences)
    return lambda _: losses.entropy_at(learner.score(scorer, next(batches)).logits, temperature).mean()


def margins(learner: Learner, scorer: ResponseScorer, kappa: float = 0.02) -> Loss:
    """Margins of references, with a KL."""
    batches = learner.batches(learner.references, learner.sequences)

    def loss(_: float) -> torch.Tensor:
        rows = next(batches)
        found, before = learner.score(scorer, rows), learner.scored_by_adapter(rows)
        hinge_T = losses.margin(found.logits, found.labels)
        return (hinge_T + kappa * losses.kl_from(before.logits, found.logits)).mean()

    return loss


def verdicts(learner: Learner, labels: str) -> list[list[bool]]:
    """[greedy, *samples] of each prompt: right by "gold", by the verdicts of another prompt ("shuffled") or by "votes".

    A prompt whose vote is too close, or all but unanimous, has none.
    """
    judged = [
        [learner.judge(one, question) for one in (greedy, *sampled)]
        for question, (greedy, sampled) in enumerate(learner.practised)
    ]
    if labels == "votes":
        elected = [losses.vote([stated for _, stated in answers[1:]]) for answers in judged]
        return [
            [stated == winner for _, stated in answers] if 0.35 <= agreed <= 0.9 else []
            for answers, (winner, agreed) in zip(judged, elected, strict=True)
        ]
    right = [[verdict for verdict, _ in answers] for answers in judged]
    if labels == "shuffled":
        generator = torch.Generator().manual_seed(learner.seed)
        return [right[index] for index in torch.randperm(len(right), generator=generator).tolist()]
    return right


def pairs(learner: Learner, labels: str) -> list[tuple[dict[str, Any], dict[str, Any], float]]:
    """(better, worse, weight) of the unseen prompts, whose answers are right by `labels`, see `verdicts`."""
    found = []
    for question, right in enumerate(verdicts(learner, labels)):
        greedy, sampled = learner.practised[question]
        rows = [learner.row(question, one) for one in (*sampled, greedy)]  # GREEDY points at the last
        # a verdict unlike the greedy answer's, each answer once
        other = {tuple(rows[at]["input_ids"]): at for at, verdict in enumerate(right[1:]) if verdict != right[0]}
        other.pop(tuple(rows[-1]["input_ids"]), None)  # as verdicts of another prompt may have it
        if not other:
            continue
        offered = list(other.values())
        log_probs = [0.0]
        if len(offered) > 1:  # one needs no likelihood to be chosen
            before = learner.scored_by_adapter([rows[at] for at in offered])
            log_probs = before.summed(before.log_probs(), len(offered)).tolist()
        pair = losses.flip_pair(right[0], dict(zip(offered, log_probs, strict=True)))
        found.append((rows[pair.better], rows[pair.worse], pair.weight))
    return found


def flips(learner: Learner, scorer: ResponseScorer, labels: str, kappa: float = 0.02) -> Loss:
    """Greedy-flip preference over the adapter's own answers."""
    batches = learner.batches(pairs(learner, labels), learner.sequences // 2)

    def loss(_: float) -> torch.Tensor:
        batch = next(batches)
        rows = [better for better, _, _ in batch] + [worse for _, worse, _ in batch]
        found, before = learner.score(scorer, rows), learner.scored_by_adapter(rows)
        now_N = found.summed(found.log_probs(), len(rows))
        better_P, worse_P = (now_N - before.summed(before.log_probs(), len(rows))).chunk(2)
        lengths_N = found.summed(torch.ones_like(found.labels, dtype=torch.float), len(rows))
        mean_P = (now_N / lengths_N)[: len(batch)]
        weight_P = torch.tensor([weight for _, _, weight in batch])
        kl = losses.kl_from(before.logits, found.logits).mean()
        return losses.preference(better_P, worse_P, mean_P, weight_P) + kappa * kl

    return loss


def reward(learner: Learner, scorer: ResponseScorer, random: bool = False, kappa: float = 0.01) -> Loss:
    """Policy gradient on the verdict, sampled and differentiated at a temperature that falls from 1 to 0.5."""
    prompts = learner.practice
    batches = learner.batches(list(range(len(prompts))), learner.sequences // 4)
    generator = torch.Generator().manual_seed(learner.seed)

    def loss(progress: float) -> torch.Tensor:
        heat, asked = 1.0 - 0.5 * progress, next(batches)
        seed = int(1e6 * progress) + learner.seed
        drawn = learner.draw(scorer.model, [prompts[index] for index in asked], heat, GROUP, seed)
        right = torch.tensor([learner.judge(sample, asked[sample.question])[0] for sample in drawn])
        if random:
            right = torch.rand(len(drawn), generator=generator) < 0.5
        advantages = torch.cat([losses.leave_one_out(group) for group in right.float().split(GROUP)])
        used = advantages.nonzero()[:, 0].tolist()
        if not used:
            return sum(parameter.sum() * 0 for parameter in scorer.model.parameters() if parameter.requires_grad)  # type: ignore
        rows = [learner.row(asked[drawn[index].question], drawn[index]) for index in used]
        found, before = learner.score(scorer, rows), learner.scored_by_adapter(rows)
        log_prob_N = found.summed(found.log_probs(heat), len(rows))
        kl = losses.kl_from(before.logits, found.logits).mean()
        return losses.policy_gradient(log_prob_N, advantages[used]) + kappa * kl

    return loss


OBJECTIVES: dict[str, Callable[[Any, ResponseScorer], Loss]] = {
    "entropy": partial(entropy, temperature=1.0),
    "CE": cross_entropy,
    "a flips": partial(flips, labels="gold"),
    "a shuffled": partial(flips, labels="shuffled"),
    "b reward": reward,
    "b random": partial(reward, random=True),
    "c margin": margins,
    "d votes": partial(flips, labels="votes"),
    "e entropy T=0.3": partial(entropy, temperature=0.3),
}


def fit(
    loss: Loss, parameters: list[torch.nn.Parameter], rate: float, steps: int, adam_beta2: float = 0.999
) -> list[float]:
    """AdamW with a cosine and clipping at 1; returns the losses."""
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, adam_beta2), weight_decay=0.0)
    found = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * step / steps))
        value = loss(step / steps)
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        found.append(float(value.detach()))
    return found


# a dozen λ


def kind_of(path: str, layers: int) -> str:
    """Depth and kind of a module, such as "0 v o": a third of the layers, one of four kinds."""
    layer, module = int(path.split("layers.")[1].split(".")[0]), path.rsplit(".", 1)[-1]
    kinds = {"q": "q k", "k": "q k", "v": "v o", "o": "v o", "gate": "gate up", "up": "gate up", "down": "down"}
    return f"{3 * layer // layers} {kinds[module.removesuffix('_proj')]}"


def set_constants(model: Any, values: dict[str, float]) -> None:
    """One λ for every module of a kind."""
    for path, gate in gate_modules(model).items():
        gate.override = Override(constant=values[kind_of(path, model.config.num_hidden_layers)])


@contextmanager
def merged(lora: Any, values: dict[str, float]) -> Iterator[None]:
    """A LoRA merged at one λ for every module of a kind, which is quicker than gates; taken out again afterwards."""
    layers = {path: layer for path, layer in lora.named_modules() if isinstance(layer, LoraLayer)}
    before = {path: dict(layer.scaling) for path, layer in layers.items()}
    for path, layer in layers.items():
        by = values[kind_of(path, lora.config.num_hidden_layers)]
        layer.scaling.update({name: by * scale for name, scale in layer.scaling.items()})
    lora.merge_adapter()
    try:
        yield
    finally:
        lora.unmerge_adapter()
        for path, layer in layers.items():
            layer.scaling.update(before[path])


def evolved(
    learner: Learner, lora: Any, generations: int = 12, members: int = 12, asked: int = 128, kept: Path | None = None
) -> dict[str, Any]:
    """f: an evolution strategy on greedy accuracy, in which every generation meets other prompts of `practice`.

    Args:
        learner: who judges.
        lora: the adapter, without gates.
        generations, members, asked: rounds, candidates of a round, prompts that they are asked.
        kept: file of the scores of finished rounds; the search goes on from it.

    Returns:
        The λ by kind, within `LIMITS`, and the mean score of each round.
    """
    generator = torch.Generator().manual_seed(learner.seed)
    layers = lora.config.num_hidden_layers
    kinds = sorted({kind_of(path, layers) for path, one in lora.named_modules() if isinstance(one, LoraLayer)})
    centre_C = torch.ones(len(kinds))
    rounds: list[list[float]] = json.loads(kept.read_text(encoding="utf-8")) if kept and kept.is_file() else []
    for generation in range(generations):
        chosen = torch.randperm(len(learner.practice), generator=generator)[:asked].tolist()
        sigma = 0.5 * (1 - generation / generations) + 0.1
        points_MC = (centre_C + sigma * torch.randn(members, len(kinds), generator=generator)).clamp(*LIMITS)
        if generation == len(rounds):
            scores = []
            for point_C in points_MC.tolist():
                with merged(lora, dict(zip(kinds, point_C, strict=True))):
                    drawn = learner.draw(lora, [learner.practice[index] for index in chosen], 0.0, 1, 0)
                scores.append(sum(learner.judge(one, chosen[one.question])[0] for one in drawn) / len(drawn))
            rounds.append(scores)
            if kept:
                kept.parent.mkdir(parents=True, exist_ok=True)
                write_json(kept, rounds)
            print(f"round {generation + 1} of {generations}: {sum(scores) / members:.1%} right", flush=True)
        centre_C = losses.recombined(points_MC, torch.tensor(rounds[generation]))
    return {
        "constants": dict(zip(kinds, centre_C.tolist(), strict=True)),
        "rounds": [sum(scores) / members for scores in rounds],
    }
