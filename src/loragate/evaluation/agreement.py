"""Does another engine compute what transformers computes? Log-probs of the same tokens, side by side.

Nothing else shows that vLLM used the right λ: its answers look like answers whichever model gave them. `loragate verify` checks
a server by `check_logprobs`. An evaluation on vLLM asks for the log-probs of a few of its own answers while the engine still acts
as the variant (`score_stored_answers`), and reads them again with transformers when vLLM has freed its memory. A variant
disagrees where it is off by more than rounding, or where another of the models explains what was served better.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from loragate.errors import LoragateError
from loragate.evaluation.engines import EngineContext, EngineProvider, load
from loragate.evaluation.prepared import PreparedTask
from loragate.evaluation.results import VariantAgreement
from loragate.evaluation.variants import ModelVariant, activate_variant
from loragate.files import read_json, write_json
from loragate.generation import Engine
from loragate.generation.engine import read_samples, tokenize_prompts
from loragate.models import Loaded
from loragate.models.source import Kind

ANSWERS, TOKENS = 4, 32
"""How many answers of a variant are read again, and how many tokens of each."""
LOGPROB_TOLERANCES = {"float32": 1e-3, "16 bits": 0.1}
"""Largest mean difference of a log-prob, in nats, that is put down to rounding whatever the model."""
ROUNDING_FACTOR = 4.0
"""And how many times the difference of transformers in 16 bits to itself in float32: strong gates amplify rounding."""
OTHER_MODEL_FACTOR = 2.0
"""Another model explains what was served better if its mean difference is this many times smaller."""


@dataclass(frozen=True)
class ServedAnswer:
    """One answer of an engine; log-probs in nats."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # of the answer
    prompt_logprobs: tuple[float, ...]  # of prompt tokens 1 onwards, as the first has none; empty where not asked for
    logprobs: tuple[float, ...]  # of the answer's tokens


@dataclass(frozen=True)
class LogprobDifference:
    """How far served answers lie from the reference.

    Attributes:
        prompt, generated: largest absolute difference of a log-prob of a prompt's, an answer's token, in nats; infinite where one
            is no number.
        mean: mean absolute difference over the answers' tokens, likewise.
        tokens: answers' tokens that were compared.
    """

    prompt: float
    generated: float
    mean: float
    tokens: int


def compare_logprobs(model: Any, served: Sequence[ServedAnswer]) -> LogprobDifference:
    """The served answers against a transformers model (base, PeftModel or gated PeftModel) as it acts now."""
    prompt = generated = total = 0.0
    tokens = 0
    for answer in served:
        own_T = _compute_logprobs(model, answer)
        cut = len(answer.prompt_ids) - 1  # of `own_T`, which says nothing of the first token
        if answer.prompt_logprobs:
            prompt = max(prompt, *_differences(own_T[:cut], answer.prompt_logprobs))
        differences = _differences(own_T[cut:], answer.logprobs)
        generated, total = max(generated, *differences), total + sum(differences)
        tokens += len(answer.token_ids)
    return LogprobDifference(prompt, generated, total / max(tokens, 1), tokens)


def _compute_logprobs(model: Any, answer: ServedAnswer) -> Tensor:
    """Log-probs [T-1] of the tokens of prompt and answer from the second on, fp32 on the CPU."""
    ids = torch.tensor([answer.prompt_ids + answer.token_ids], device=next(model.parameters()).device)
    with torch.no_grad():
        logits_TV = model(ids).logits[0].float().cpu()
    # position t predicts token t + 1
    return logits_TV.log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None].cpu()).squeeze(-1)


def _differences(reference_T: Tensor, found: Sequence[float]) -> list[float]:
    # NaN is below no bound, and `max` would let it pass
    return [one if math.isfinite(one) else math.inf for one in (reference_T - torch.tensor(found)).abs().tolist()]


def rescore_answers(model: Any, served: Sequence[ServedAnswer]) -> list[ServedAnswer]:
    """The same answers with the log-probs that a transformers model gives them, as it acts now."""
    found = []
    for answer in served:
        own_T = _compute_logprobs(model, answer)[len(answer.prompt_ids) - 1 :]
        found.append(replace(answer, prompt_logprobs=(), logprobs=tuple(own_T.tolist())))
    return found


def strip_sampling(variant: ModelVariant) -> ModelVariant:
    """The variant without what only sampling reads: variants that share the rest are one model."""
    return replace(variant, control=None, temperature=None)


def score_stored_answers(engine: Engine, tokenizer: Any, samples: Mapping[Path, PreparedTask]) -> list[ServedAnswer]:
    """The log-probs that an engine gives to the first answers on file, a few of each task; as it acts now.

    Args:
        samples: {file of answers: their task}. Of a task whose options are compared, these are read.
    """
    texts: list[tuple[list[int], tuple[int, ...]]] = []
    for path, prepared in samples.items():
        if prepared.option_pairs:
            texts += [
                ([*before], (*after,)) for before, after in (pairs[0] for pairs in prepared.option_pairs[:ANSWERS])
            ]
            continue
        first = [one for one in read_samples(path) if one.sample == 0 and one.token_ids][:ANSWERS]
        if first:
            ids, _ = tokenize_prompts(tokenizer, [prepared.prompts[one.question] for one in first], 1, None)
            texts += [(before, one.token_ids) for before, one in zip(ids, first, strict=True)]
    # evenly apart, over all tasks
    indices = sorted({at * len(texts) // ANSWERS for at in range(ANSWERS)} if texts else ())
    rows = [(texts[at][0], texts[at][1][:TOKENS]) for at in indices]
    pairs = [([*before, *after[:at]], [after[at]]) for before, after in rows for at in range(len(after))]
    found = iter([logprob for logprob, _ in engine.log_likelihoods(pairs)])
    return [ServedAnswer(tuple(before), tuple(after), (), tuple(next(found) for _ in after)) for before, after in rows]


class EngineCheck:
    """The log-probs that vLLM gave to a few answers, kept in `folder`/agreement, and their comparison.

    Args:
        engines: that answer; nothing is checked where they are not vLLM.
        folder: of the evaluation.
        variants: those of the evaluation; of those that only sample differently, the first is checked.
    """

    def __init__(self, engines: EngineContext | None, folder: Path, variants: Sequence[ModelVariant]) -> None:
        self.engines = engines if isinstance(engines, EngineProvider) and engines.settings.engine == "vllm" else None
        first: dict[ModelVariant, ModelVariant] = {}
        for variant in variants if self.engines else ():
            first.setdefault(strip_sampling(variant), variant)
        self.paths = {one: folder / "agreement" / f"{one.slug}.json" for one in first.values()}

    def is_pending(self, variant: ModelVariant) -> bool:
        """Whether the engine is still to be asked as this variant."""
        return variant in self.paths and not self.paths[variant].is_file()

    def record_logprobs(self, engine: Engine, variant: ModelVariant, samples: Mapping[Path, PreparedTask]) -> None:
        """Keep what the engine gives as this variant to a few of its answers; {file of answers: their task}."""
        assert self.engines is not None, "it waits for no variant of another engine"
        served = score_stored_answers(engine, self.engines.loaded.tokenizer, samples)
        write_json(self.paths[variant], {"answers": [asdict(one) for one in served]})

    def compare_with_transformers(self) -> dict[str, VariantAgreement]:
        """{label: how far vLLM lies from transformers}, which takes the memory that vLLM leaves; empty for other engines."""
        if self.engines is None:
            return {}
        self.engines.close()
        served = {
            one: [ServedAnswer(**{key: tuple(value) for key, value in row.items()}) for row in rows]
            for one, path in self.paths.items()
            if (rows := read_json(path)["answers"])
        }
        model, base, how = self.engines.model, self.engines.base, self.engines.loaded.loading
        try:
            return check_logprobs(load(model, base, how), served, how.dtype)
        except torch.OutOfMemoryError:  # a base that vLLM had split over several devices
            return check_logprobs(load(model, base, replace(how, device="cpu")), served, how.dtype)


def check_logprobs(
    loaded: Loaded, served: Mapping[ModelVariant, Sequence[ServedAnswer]], dtype: str
) -> dict[str, VariantAgreement]:
    """{label: how far what was served as a variant lies from transformers}.

    Args:
        loaded: with its weights in memory.
        served: what `score_stored_answers` gave.
        dtype: of the engine; "auto" may be any of 16 bits.
    """
    kinds: tuple[Kind, ...] = get_args(Kind)  # each with those before it beneath it
    usual = LOGPROB_TOLERANCES.get(dtype, LOGPROB_TOLERANCES["16 bits"])
    limits = dict.fromkeys(served, usual)
    own: dict[ModelVariant, LogprobDifference] = {}
    others: dict[ModelVariant, dict[str, float]] = {}
    doubtful: dict[ModelVariant, list[ServedAnswer]] = {}
    for variant, answers in served.items():
        with activate_variant(loaded.model, variant, loaded.kind):
            own[variant] = compare_logprobs(loaded.model, answers)
            if usual < own[variant].mean < math.inf and dtype != "float32":
                doubtful[variant] = rescore_answers(loaded.model, answers)
        others[variant] = {
            kind: _mean(loaded, kind, answers)
            for kind in kinds[: kinds.index(loaded.kind) + 1]
            if strip_sampling(variant) != ModelVariant(kind)
        }
    if doubtful:
        loaded.model.float()  # last, as nothing makes 16 bits of it again
    for variant, rounded in doubtful.items():
        with activate_variant(loaded.model, variant, loaded.kind):
            limits[variant] = max(usual, ROUNDING_FACTOR * compare_logprobs(loaded.model, rounded).mean)
    found: dict[str, VariantAgreement] = {}
    for variant, one in own.items():
        nearest = min(others[variant], key=others[variant].__getitem__, default="")
        other = (
            bool(nearest)
            and others[variant][nearest] * OTHER_MODEL_FACTOR < one.mean
            and one.mean > LOGPROB_TOLERANCES["float32"]
        )
        finite = math.isfinite(one.generated)
        found[variant.label] = VariantAgreement(
            mean=one.mean if finite else None,
            largest=one.generated if finite else None,
            tokens=one.tokens,
            limit=limits[variant],
            nearest=nearest if other else variant.label,
            agrees=one.mean <= limits[variant] and not other,
        )
    return found


def _mean(loaded: Loaded, kind: Kind, answers: Sequence[ServedAnswer]) -> float:
    with activate_variant(loaded.model, ModelVariant(kind), loaded.kind):
        return compare_logprobs(loaded.model, answers).mean


def require_logprob_agreement(found: Mapping[str, VariantAgreement], folder: Path) -> None:
    """Refuse the scores of an engine that did not compute what transformers computes (LoragateError)."""
    wrong = {label: one for label, one in found.items() if not one.agrees}
    if not wrong:
        return
    lines = []
    for label, one in wrong.items():
        mean = "no number" if one.mean is None else f"off by {one.mean:.2g} nats a token"
        other = f", and nearer to the model {one.nearest}" if one.nearest != label else ""
        lines.append(f"{label} is {mean} (limit {one.limit:g}){other}")
    raise LoragateError(
        f"vLLM did not compute what transformers computes, so the scores in {folder} are those of other models: "
        f"{'; '.join(lines)}. Evaluate with --engine transformers, or with the vLLM that the extra [vllm] names, into another "
        "folder; `loragate verify` on a server measures more"
    )
