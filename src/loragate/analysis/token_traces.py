"""Token by token through a few answers: what each model thought of them and what every gate did.

Every text is read by the model that wrote it (log-probability, entropy, top candidates), by base and plain adapter on the
same prefixes (ΔH, the paper's diagnostic) and by the gated model for its λ. The record is what the report's token view
draws; it is JSON through and through, λ as bytes in base64.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from loragate.analysis.context import DiagnosticContext
from loragate.analysis.rows import no_progress, require_finite
from loragate.analysis.settings import DiagnoseSettings
from loragate.display import pluralize
from loragate.errors import ConfigError
from loragate.evaluation.answers import Grade
from loragate.evaluation.variants import ModelVariant, activate_variant
from loragate.gates import attached_config, trace_gates
from loragate.gates.attach import gate_modules
from loragate.generation import OnProgress, Sample
from loragate.models.source import Kind

SCHEMA = 1
CANDIDATES = 5
MAX_TOKENS, QUESTIONS = 512, 8
STREAMS: tuple[Kind, ...] = ("base", "adapter", "gated")


@dataclass(frozen=True)
class Answer:
    """One sample with what wrote it and what the grader said, if it was graded."""

    variant: str
    sample: Sample
    grade: Grade | None = None


@dataclass(frozen=True)
class Question:
    """A prompt as it was rendered, its gold answer if there is one, and the answers to look at."""

    id: str
    prompt: str
    gold: str
    answers: list[Answer]


def diagnose_tokens(context: DiagnosticContext, settings: DiagnoseSettings) -> dict[str, Any]:
    """Traces of the first answers of base, adapter and gated model to the first questions of each task; says their means and
    writes tokens.json.

    Raises:
        ConfigError: where there is no run, or one without answers, and as `DiagnosticContext.begin`.
    """
    context.require_answers(settings)
    loaded, limit = context.begin(drawing=False), context.request.tasks.limit or QUESTIONS
    asked: dict[tuple[str, int], Question] = {}
    for of in STREAMS:
        for one in context.answers(of, replace(settings, answers=1))[0]:
            name, questions = one.prepared.task.name, one.prepared.questions
            for sample, grade in one.graded:
                at = sample.question
                if at < limit:
                    item = questions[at]
                    whole = Question(f"{name}/{item.id}", one.prepared.prompts[at], str(item.gold), [])
                    asked.setdefault((name, at), whole).answers.append(Answer(of, sample, grade))
    if not any(answer.sample.token_ids for question in asked.values() for answer in question.answers):
        raise ConfigError(f"--run {settings.run}: it holds no answers to trace")
    with context.job("reading the answers token by token", len(asked), "question") as on_progress:
        record = trace_answers(
            loaded.model,
            loaded.tokenizer,
            list(asked.values()),
            max_tokens=min(settings.max_length, MAX_TOKENS),
            on_progress=on_progress,
        )
    for question in record["questions"]:
        context.say(f"{question['id']}: {'; '.join(_means(answer, record) for answer in question['answers'])}")
    context.write("tokens", record)
    return record


def _means(answer: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """An answer of the trace record in a line: length, verdict, and means over its tokens."""
    verdict, count = answer["verdict"], len(answer["tokens"])
    said = f"{answer['variant']} {pluralize(count, 'token')}"
    said += "" if verdict is None else ", right" if verdict["correct"] else ", wrong"
    if not count:
        return said
    log_p, entropy, apart = (sum(answer[name]) / count for name in ("log_prob", "entropy", "delta_entropy"))
    shares = base64.b64decode(answer["gates"])
    lam = record["lower"] + (record["upper"] - record["lower"]) * sum(shares) / len(shares) / 255
    return f"{said}, log p {log_p:.3f}, entropy {entropy:.3f}, ΔH {apart:+.3f} nats, λ {lam:.3f}"


def trace_answers(
    peft_model: Any,
    tokenizer: Any,
    questions: Sequence[Question],
    *,
    max_tokens: int = MAX_TOKENS,
    on_progress: OnProgress = no_progress,
) -> dict[str, Any]:
    """The trace record of some answers.

    Args:
        peft_model: base with a gated adapter, the active one, in memory and in evaluation mode.
        tokenizer: the base's; prompts are tokenised without added special tokens, as for generation.
        questions: prompts with answers of "base", "adapter" or "gated".
        max_tokens: of an answer that is traced; what lies beyond is left out and counted in "cut".
        on_progress: called with (questions done, of).

    Returns:
        {"schema", "kind", "lower", "upper", "modules", "questions"}; per answer "tokens", "log_prob", "entropy",
        "delta_entropy" (nats), "top" and "gates": uint8 [modules, tokens] in base64, λ = L + (U − L) · byte / 255.
    """
    bounds, modules = attached_config(peft_model).range, list(gate_modules(peft_model))
    records: list[dict[str, Any]] = []
    for question in questions:
        prompt = tokenizer(question.prompt, add_special_tokens=False)["input_ids"]
        answers = []
        for answer in question.answers:
            ids = list(answer.sample.token_ids)[:max_tokens]
            tokens = torch.tensor([[*prompt, *ids]], device=next(peft_model.parameters()).device)
            log_p: dict[str, torch.Tensor] = {}
            for stream in STREAMS:
                acts = activate_variant(peft_model, ModelVariant(stream), "gated")
                with torch.no_grad(), trace_gates(peft_model) as traced, acts:
                    # of the positions that chose the tokens, [T, V]
                    logits = peft_model(input_ids=tokens, logits_to_keep=len(ids) + 1).logits[0, :-1]
                log_p[stream] = torch.log_softmax(logits.float(), -1)
            # `traced` is of the last stream, the gates; the λ that chose a token stand at the position before it, so the T answer
            # tokens have those from the prompt's last token to the answer's last but one
            lam_MT = torch.stack([traced[path][0].reshape(-1)[-len(ids) - 1 : -1] for path in modules])
            share_MT = (lam_MT - bounds.lower) / (bounds.upper - bounds.lower)
            answers.append(_record(tokenizer, answer, ids, log_p, share_MT))
        records.append({"id": question.id, "prompt": question.prompt, "gold": question.gold, "answers": answers})
        on_progress(len(records), len(questions))
    return {
        "schema": SCHEMA,
        "kind": "token traces",
        "lower": bounds.lower,
        "upper": bounds.upper,
        "modules": modules,
        "questions": records,
    }


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that each token adds, so that joined they give the answer with its spaces.

    A token that ends inside a character adds nothing by itself; its own decoding is shown instead.
    """
    texts, before = [], ""
    # a tokenizer may join or drop spaces between tokens, so each is read as what the whole text gains by it
    for count in range(1, len(ids) + 1):
        now = tokenizer.decode(list(ids[:count]), clean_up_tokenization_spaces=False)
        whole = now.startswith(before) and not now.endswith("\ufffd")
        texts.append(now[len(before) :] if whole else tokenizer.decode([ids[count - 1]]))
        before = now
    return texts


def _record(
    tokenizer: Any, answer: Answer, ids: Sequence[int], log_p: Mapping[str, torch.Tensor], share_MT: torch.Tensor
) -> dict[str, Any]:
    """One answer out of log-probabilities [T, V] of each stream, and of each λ how far it is from L to U."""
    own = log_p[answer.variant]
    entropy = {stream: -(values.exp() * values).sum(-1) for stream, values in log_p.items()}
    for stream, values in entropy.items():
        require_finite(values.cpu(), f"entropies of the {stream} model, token by token")
    top = own.topk(min(CANDIDATES, own.shape[-1]), -1)
    return {
        "variant": answer.variant,
        "verdict": answer.grade and {"correct": answer.grade.correct, "reason": answer.grade.reason},
        "finish_reason": answer.sample.finish_reason,
        "cut": len(answer.sample.token_ids) - len(ids),
        "tokens": token_texts(tokenizer, ids),
        "log_prob": _rounded(
            own.gather(-1, torch.tensor(ids, dtype=torch.long, device=own.device).unsqueeze(-1)).squeeze(-1)
        ),
        "entropy": _rounded(entropy[answer.variant]),
        "delta_entropy": _rounded(entropy["adapter"] - entropy["base"]),
        "top": [
            [[tokenizer.decode([token]), round(value, 4)] for token, value in zip(tokens, probabilities, strict=True)]
            for tokens, probabilities in zip(top.indices.tolist(), top.values.exp().tolist(), strict=True)
        ],
        "gates": base64.b64encode((share_MT * 255).round().clamp(0, 255).to(torch.uint8).numpy().tobytes()).decode(),
    }


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]
