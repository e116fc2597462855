"""How a token is drawn, so that a sample can be drawn again.

Every draw is a pure function of (run seed, question, sample, position): a counter-based hash takes the place of a random
generator with state, so the batch size, the order of the questions and the point at which a run was resumed do not
change what is sampled. `SeededSampler` carries this into `transformers` and measures the entropy of the untouched
distribution on the way. Nothing here knows tasks, gates or adapters.

The guarantee is exact for equal logits. Kernels may round differently for another batch shape (about 1e-6 in fp32, far
more in bf16), and a draw that falls within that distance of a boundary between two tokens can then differ.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import LogitsProcessor

from loragate.errors import ConfigError, LoragateError


@dataclass(frozen=True)
class SamplingConfig:
    """What is drawn from each prompt.

    `temperature` 0 is greedy decoding; `top_p` keeps the smallest set of most likely tokens that holds this mass (after
    the temperature); `max_new_tokens` counts the stop token; `samples` is the number of samples per prompt; `seed` names
    the random stream; `stop` are texts that end an answer, itself not part of it, for prompts that are completed
    without a chat template.

    Raises `ConfigError` for a value that cannot be used.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 256
    samples: int = 1
    seed: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", tuple(self.stop))  # JSON gives a list
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ConfigError(f"stop is {self.stop!r}; give texts that are not empty.")
        for name in ("max_new_tokens", "samples", "seed"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"{name} is {value!r}; it must be a whole number.")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(
                f"temperature is {self.temperature}; give 0 for greedy decoding or a positive number such as 1.0."
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; it must lie in (0, 1], and 1 keeps the whole distribution.")
        for name in ("max_new_tokens", "samples"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give at least 1.")
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


def _shift_right(bits: Tensor, places: int) -> Tensor:
    """Logical shift; `>>` on int64 copies the sign bit."""
    return (bits >> places) & ((1 << (64 - places)) - 1)


def _mix(bits: Tensor) -> Tensor:
    """The finaliser of splitmix64 on int64, whose products wrap modulo 2^64."""
    bits = (bits ^ _shift_right(bits, 30)) * _FIRST
    bits = (bits ^ _shift_right(bits, 27)) * _SECOND
    return bits ^ _shift_right(bits, 31)


def _hash(seed: int, *counters: Tensor | int) -> Tensor:
    """64 mixed bits as int64, one value for each combination of the broadcast counters."""
    state = _mix(torch.tensor(_signed(seed)) + _GAMMA)
    for counter in counters:
        state = _mix((state ^ torch.as_tensor(counter, dtype=torch.int64)) + _GAMMA)
    return state


def uniform(seed: int, question: Tensor | int, sample: Tensor | int, position: Tensor | int) -> Tensor:
    """Return draws in [0, 1), float64 with 53 random bits, one for each (question, sample, position).

    The three counters broadcast against one another. Only integer arithmetic modulo 2^64 and one exact conversion are
    used, so every platform returns the same bits.
    """
    return _shift_right(_hash(seed, question, sample, position), 11).to(torch.float64) * 2.0**-53


def request_seed(seed: int, question: int, sample: int) -> int:
    """Return a seed in [0, 2^63) for the stream of one sample, for engines with a random generator per request."""
    return int(_shift_right(_hash(seed, question, sample), 1))


def keep_nucleus(probs_BV: Tensor, top_p: float) -> Tensor:
    """Zero all but the smallest set of most likely tokens whose mass reaches `top_p`; the result is not renormalised.

    Of equally likely tokens the one with the lower id is kept first.
    """
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    mass_before_BV = pad(sorted_BV.cumsum(dim=-1)[..., :-1], (1, 0))
    kept_BV = torch.where(mass_before_BV < top_p, sorted_BV, 0.0)
    return torch.zeros_like(probs_BV).scatter_(-1, order_BV, kept_BV)


def draw(scores_BV: Tensor, uniforms_B: Tensor, temperature: float, top_p: float) -> Tensor:
    """Return one token id per row, [B] int64, by inverting the cumulative distribution at `uniforms_B` in float64."""
    scores_BV = scores_BV.double()
    # The maximum goes first so that a tiny temperature gives 0 and -inf, not inf - inf.
    probs_BV = ((scores_BV - scores_BV.amax(dim=-1, keepdim=True)) / temperature).softmax(dim=-1)
    if top_p < 1:
        probs_BV = keep_nucleus(probs_BV, top_p)
    cumulative_BV = probs_BV.cumsum(dim=-1)
    # right=True finds the first token whose cumulative mass exceeds the target: a token of mass 0 is never drawn.
    target_B1 = uniforms_B[:, None] * cumulative_BV[:, -1:]
    return torch.searchsorted(cumulative_BV, target_B1, right=True)[:, 0]


class SeededSampler(LogitsProcessor):
    """Choose the next token of every row and measure the entropy of the distribution it came from.

    The returned scores hold 0 at the chosen token and -inf elsewhere, so that `generate(do_sample=False)` takes exactly
    this token. Make a new sampler for every call of `generate`, with no other logits processor before it.

    After the call, `tokens_B` counts the generated tokens of each row, its stop token included, `stopped_B` says whether
    it ended at a stop token, and `mean_entropy()` is the mean, over these tokens, of the entropy in nats of the
    full-vocabulary distribution at temperature 1, whatever the temperature and top-p of the draw.
    """

    def __init__(
        self,
        config: SamplingConfig,
        questions_B: Tensor,
        samples_B: Tensor,
        prompt_length: int,
        stop_token_ids: Collection[int],
        spells_stop: Callable[[list[int]], bool] | None = None,
    ) -> None:
        self.config = config
        self.spells_stop = spells_stop
        # Counters and state stay on the CPU: some accelerators have neither int64 products nor float64.
        self.questions_B = questions_B
        self.samples_B = samples_B
        self.prompt_length = prompt_length
        self.stop_ids = torch.tensor(sorted(stop_token_ids), dtype=torch.int64)
        self.stopped_B = torch.zeros(len(questions_B), dtype=torch.bool)
        self.ended_by_text_B = torch.zeros(len(questions_B), dtype=torch.bool)
        self.tokens_B = torch.zeros(len(questions_B), dtype=torch.int64)
        self.entropy_B = torch.zeros(len(questions_B), dtype=torch.float64)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._end_rows_at_stop_texts(input_ids)
        entropy_B = torch.special.entr(scores.float().softmax(dim=-1)).sum(dim=-1).cpu().double()
        running_B = ~self.stopped_B
        self._refuse_non_finite(entropy_B, running_B)
        self.entropy_B += torch.where(running_B, entropy_B, 0.0)
        self.tokens_B += running_B

        if self.config.temperature == 0:
            chosen_B = scores.argmax(dim=-1)
        else:
            position = input_ids.shape[1] - self.prompt_length
            uniforms_B = uniform(self.config.seed, self.questions_B, self.samples_B, position)
            device = "cpu" if scores.device.type == "mps" else scores.device
            chosen_B = draw(scores.to(device), uniforms_B.to(device), self.config.temperature, self.config.top_p)
        if self.ended_by_text_B.any():
            chosen_B = torch.where(self.ended_by_text_B.to(chosen_B.device), int(self.stop_ids[0]), chosen_B)
        self.stopped_B |= torch.isin(chosen_B.cpu(), self.stop_ids)
        return torch.full_like(scores, -torch.inf).scatter_(-1, chosen_B.to(scores.device)[:, None], 0.0)

    def mean_entropy(self) -> Tensor:
        """Return the mean entropy per generated token of each row, [B] float64, in nats."""
        return self.entropy_B / self.tokens_B

    def _end_rows_at_stop_texts(self, input_ids: Tensor) -> None:
        """A row whose text is complete is done: `generate` is given a stop token for it, which nobody counts."""
        if self.spells_stop is None:
            return
        for row, ids in enumerate(input_ids[:, self.prompt_length :].tolist()):
            if not self.stopped_B[row] and self.spells_stop(ids):
                self.stopped_B[row] = self.ended_by_text_B[row] = True

    def _refuse_non_finite(self, entropy_B: Tensor, running_B: Tensor) -> None:
        broken_B = running_B & ~entropy_B.isfinite()
        if broken_B.any():
            row = int(broken_B.nonzero()[0])
            raise LoragateError(
                f"The model returned NaN or infinite logits at token {int(self.tokens_B[row])} of question "
                f"{int(self.questions_B[row])}, sample {int(self.samples_B[row])}. Nothing can be sampled from them: "
                "check the adapter and the gates for non-finite weights, or load the model in bfloat16 or float32 "
                "instead of float16."
            )
