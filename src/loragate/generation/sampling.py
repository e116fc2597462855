"""How a token is drawn, so that a sample can be drawn again.

Every draw is a pure function of (run seed, question, sample, position): a counter-based hash takes the place of a random
generator with state, so the batch size, the order of the questions and the point at which a run was resumed do not
change what is sampled. `SeededSampler` carries this into `transformers` and measures the entropy of the untouched
distribution on the way. Nothing here knows tasks, gates or adapters.

The guarantee is exact for equal logits. Kernels may round differently for another batch shape (about 1e-6 in fp32, far
more in bf16), and a draw that falls within that distance of a boundary between two tokens can then differ.

Shapes: B rows, b of them still in the batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Gt, Le, Len
from torch import Tensor
from torch.nn.functional import pad, threshold
from transformers import LogitsProcessor

from loragate.errors import ConfigError, LoragateError
from loragate.validate import NonNegativeFloat, PositiveInt, check_fields


@dataclass(frozen=True)
class SamplingConfig:
    """What is drawn from each prompt.

    `temperature` 0 is greedy decoding; `top_p` keeps the smallest set of most likely tokens that holds this mass (after
    the temperature); `max_new_tokens` counts the stop token; `samples` is the number of samples per prompt; `seed` names
    the random stream; `stop` are texts that end an answer, itself not part of it, for prompts that are completed
    without a chat template.

    Raises `ConfigError` for a value that cannot be used.
    """

    temperature: NonNegativeFloat = 1.0
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    max_new_tokens: PositiveInt = 256
    samples: PositiveInt = 1
    seed: int = 0
    stop: tuple[Annotated[str, Len(1)], ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        # two settings that no annotation holds against one another
        if self.temperature == 0 and self.samples > 1:
            raise ConfigError(
                f"temperature 0 decodes greedily, so all {self.samples} samples of a prompt would be the same; "
                "set samples to 1 or give a positive temperature."
            )


def _signed(value: int) -> int:
    """The int64 with the low 64 bits of `value`; torch has no unsigned arithmetic."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


# Constants of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
_GAMMA = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical shift; `>>` on int64 copies the sign bit."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _mix(bits: Tensor) -> Tensor:
    """The finaliser of splitmix64 on int64, whose products wrap modulo 2^64."""
    bits = (bits ^ _shift_right(bits, 30)) * _FIRST
    bits = (bits ^ _shift_right(bits, 27)) * _SECOND
    return bits ^ _shift_right(bits, 31)


def _hash(seed: int, *counters: Tensor | int) -> Tensor:
    """64 mixed bits as int64, one value for each combination of the broadcast counters."""
    # a chain, not a sum of the counters: (question 1, sample 2) and (2, 1) must have nothing in common
    state = _mix(torch.tensor(_signed(seed)) + _GAMMA)
    for counter in counters:
        state = _mix((state ^ torch.as_tensor(counter, dtype=torch.int64)) + _GAMMA)
    return state


def uniform(seed: int, question: Tensor | int, sample: Tensor | int, position: Tensor | int) -> Tensor:
    """Return draws in [0, 1), float64 with 53 random bits, one for each (question, sample, position).

    The three counters broadcast against one another. Only integer arithmetic modulo 2^64 and one exact conversion are
    used, so every platform returns the same bits.
    """
    # the top 53 of 64 bits: as many as fp64 holds, so that the conversion rounds nothing and 1 is never reached
    return _shift_right(_hash(seed, question, sample, position), 11).to(torch.float64) * 2.0**-53


def request_seed(seed: int, question: int, sample: int) -> int:
    """Return a seed in [0, 2^63) for the stream of one sample, for engines with a random generator per request."""
    return int(_shift_right(_hash(seed, question, sample), 1))


BLOCK = 128
"""Tokens whose masses are added up together before a draw."""
SCORES_AT_ONCE = 1 << 20
"""Scores that a CPU works on at a time. What is made of larger ones costs fresh pages at each step, up to ten times the work."""


def keep_nucleus(probs_BV: Tensor, top_p: float) -> Tensor:
    """Zero all but the smallest set of most likely tokens whose mass reaches `top_p`; the result is not renormalised.

    Of equally likely tokens the one with the lower id is kept first.
    """
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    # what stands before a token decides, so that the one that reaches the mass is kept
    mass_before_BV = pad(sorted_BV.cumsum(dim=-1)[..., :-1], (1, 0))
    kept_BV = torch.where(mass_before_BV < top_p, sorted_BV, 0.0)
    return torch.zeros_like(probs_BV).scatter_(-1, order_BV, kept_BV)


def sample_tokens(scores_BV: Tensor, uniforms_B: Tensor, temperature: float, top_p: float) -> Tensor:
    """Return one token id per row, [B] int64, by inverting the cumulative distribution at `uniforms_B` [B] fp64.

    Masses are exponentials in fp32, as exact as logits are, and 0 below 2e-38; they are added up in fp64. Only the block that
    holds the token is added up token by token, so a draw reads the vocabulary a few times and not a few dozen.
    """
    masses_BV = scores_BV.float() - scores_BV.amax(dim=-1, keepdim=True)
    # The largest score is 0 now; a tiny temperature gives 0 and -inf.
    masses_BV.mul_(min(1 / temperature, torch.finfo(torch.float32).max))
    # An exponential that underflows takes a CPU twelve times as long, and at T = 0.3 a third of a vocabulary does.
    threshold(masses_BV.clamp_(min=-87).exp_(), 2e-38, 0.0, inplace=True)  # e^-87 is 1.6e-38
    if top_p < 1:
        probs_BV = masses_BV.double()
        masses_BV = keep_nucleus(probs_BV / probs_BV.sum(dim=-1, keepdim=True), top_p)
    if masses_BV.shape[-1] <= BLOCK:
        return _invert(masses_BV, uniforms_B[:, None])[:, 0]
    # [B, N blocks, W = BLOCK], filled up with tokens of mass 0
    masses_BNW = pad(masses_BV, (0, -masses_BV.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    mass_BN = masses_BNW.sum(dim=-1).double()
    end_BN = mass_BN.cumsum(dim=-1)
    target_B1 = uniforms_B[:, None] * end_BN[:, -1:]
    # a row of NaN, which nobody counts once it has ended, is in no block
    block_B1 = torch.searchsorted(end_BN, target_B1, right=True).clamp(max=end_BN.shape[-1] - 1)
    mass_B1 = mass_BN.gather(-1, block_B1)
    # how far into its block; sums in another order may differ by a rounding, hence a share that stays below 1
    share_B1 = ((target_B1 - (end_BN.gather(-1, block_B1) - mass_B1)) / mass_B1).clamp(0, 1 - 2.0**-53)
    within_BW = masses_BNW.take_along_dim(block_B1[:, :, None], 1)[:, 0]
    return (block_B1 * BLOCK + _invert(within_BW, share_B1))[:, 0]


def _invert(masses_BW: Tensor, share_B1: Tensor) -> Tensor:
    """Where this share of the mass is reached, [B, 1]: the first whose cumulative mass exceeds it, so never one of mass 0."""
    cumulative_BW = masses_BW.double().cumsum(dim=-1)
    return torch.searchsorted(cumulative_BW, share_B1 * cumulative_BW[:, -1:], right=True)


def entropy(scores_BV: Tensor) -> Tensor:
    """Return the entropy in nats of softmax(scores), [B] fp32; not finite where a row holds NaN or infinity, or -inf alone."""
    shifted_BV = scores_BV.float() - scores_BV.amax(dim=-1, keepdim=True)
    masses_BV = shifted_BV.exp()
    total_B = masses_BV.sum(dim=-1)
    # -inf has mass 0, and 0 · -inf is NaN; exp(-104) is 0 already
    return total_B.log() - masses_BV.mul_(shifted_BV.clamp_(min=-104)).sum(dim=-1) / total_B


class SeededSampler(LogitsProcessor):
    """Choose the next token of every row and measure the entropy of the distribution it came from.

    As a logits processor it returns scores that hold 0 at the chosen token and -inf elsewhere, so that
    `generate(do_sample=False)` takes exactly this token; `choose` returns the token itself. Make a new sampler for every
    batch, with no other logits processor before it.

    After the call, `tokens_B` counts the generated tokens of each row, its stop token included, `ended_by_token_B`
    says whether it ended there, `stopped_B` whether it has ended at all (`limits_B` holds each row's token limit), and
    `mean_entropy()` is the mean, over these tokens, of the entropy in nats of the
    full-vocabulary distribution at temperature 1, whatever the temperature and top-p of the draw. `rows_b` are the rows
    that are asked for: all, until `keep` leaves some out.
    """

    def __init__(
        self,
        config: SamplingConfig,
        questions_B: Tensor,
        samples_B: Tensor,
        prompt_length: int,
        stop_token_ids: Collection[int],
        completes_stop_text: Callable[[list[int]], bool] | None = None,
        limits_B: Tensor | None = None,
    ) -> None:
        self.config = config
        self.completes_stop_text = completes_stop_text
        # Counters and state stay on the CPU: some accelerators have neither int64 products nor float64.
        self.questions_B = questions_B
        self.samples_B = samples_B
        self.prompt_length = prompt_length
        self.stop_ids = torch.tensor(sorted(stop_token_ids), dtype=torch.int64)
        self.stopped_B = torch.zeros(len(questions_B), dtype=torch.bool)
        self.ended_by_token_B = torch.zeros(len(questions_B), dtype=torch.bool)
        self.limits_B = torch.full((len(questions_B),), config.max_new_tokens) if limits_B is None else limits_B
        self.tokens_B = torch.zeros(len(questions_B), dtype=torch.int64)
        self.entropy_B = torch.zeros(len(questions_B), dtype=torch.float64)
        self.rows_b = torch.arange(len(questions_B))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        chosen_b = self.choose(input_ids[:, self.prompt_length :], scores)
        return torch.full_like(scores, -torch.inf).scatter_(-1, chosen_b.to(scores.device)[:, None], 0.0)

    def keep(self, kept: Tensor) -> None:
        """From now on only these of the present rows are asked for; `kept` indexes `rows_b`."""
        self.rows_b = self.rows_b[kept]

    def choose(self, new_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the next token of each row of `rows_b`, [b] int64, given its tokens so far [b, T] and scores [b, V]."""
        rows_b = self.rows_b
        if self.completes_stop_text is not None:
            for row, ids in zip(rows_b.tolist(), new_ids.tolist()):
                # its text is complete: seen one step after the token that completed it, so that this step counts no more
                if not self.stopped_B[row] and self.completes_stop_text(ids):
                    self.stopped_B[row] = True
        # rows at a time; each is drawn by itself, so that the number changes no token
        rows = max(1, SCORES_AT_ONCE // scores.shape[-1]) if scores.device.type == "cpu" else len(scores)
        parts = scores.split(rows)
        entropy_b = torch.cat([entropy(part_bV) for part_bV in parts]).cpu().double()
        running_b = ~self.stopped_B[rows_b]
        broken_b = running_b & ~entropy_b.isfinite()
        if broken_b.any():
            row = int(rows_b[broken_b.nonzero()[0]])
            raise LoragateError(
                f"The model returned NaN or infinite logits at token {int(self.tokens_B[row])} of question "
                f"{int(self.questions_B[row])}, sample {int(self.samples_B[row])}. Nothing can be sampled from them: "
                "check the adapter and the gates for non-finite weights, or load the model in bfloat16 or float32 "
                "instead of float16."
            )
        self.entropy_B[rows_b] += torch.where(running_b, entropy_b, 0.0)
        self.tokens_B[rows_b] += running_b

        if self.config.temperature == 0:  # of equal scores the lowest id
            chosen_b = scores.argmax(dim=-1)
        else:
            uniforms_b = uniform(self.config.seed, self.questions_B[rows_b], self.samples_B[rows_b], new_ids.shape[1])
            device = "cpu" if scores.device.type == "mps" else scores.device
            temperature, top_p = self.config.temperature, self.config.top_p
            by_part = zip(parts, uniforms_b.to(device).split(rows))
            chosen_b = torch.cat(
                [sample_tokens(part_bV.to(device), u_b, temperature, top_p) for part_bV, u_b in by_part]
            )
        if not running_b.all():  # a row that has ended without a stop token is given one, which nobody counts
            chosen_b = torch.where(running_b.to(chosen_b.device), chosen_b, int(self.stop_ids[0]))
        self.ended_by_token_B[rows_b] |= running_b & torch.isin(chosen_b.cpu(), self.stop_ids)
        self.stopped_B |= self.ended_by_token_B | (self.tokens_B >= self.limits_B)
        return chosen_b

    def mean_entropy(self) -> Tensor:
        """Return the mean entropy per generated token of each row, [B] float64, in nats."""
        return self.entropy_B / self.tokens_B
