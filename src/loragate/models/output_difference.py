"""Whether what was written is what was in memory: a model's log-probabilities on a few prompts, a tokenizer's ids of a few texts.

Export and merging rest on identities (λ·B in place of B, W + BA in place of W). What breaks them, a tensor that was left out,
a weight that is tied or not, an adapter of another base, shows in the output of the files that were written, and there alone.
A tokenizer is read by a class that transformers chooses by the model beside it, which may be another one than before.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from loragate.data.chat import active_template
from loragate.errors import LoragateError
from loragate.files import read_json, write_json
from loragate.hub_names import cached_file, cached_folder
from loragate.models.source import ModelRef

PROMPTS, PROMPT_TOKENS, SEED = 4, 40, 0


@dataclass(frozen=True)
class OutputDifference:
    """How far a written model is from the one that it stands for."""

    mean_difference: float  # E_p |log p − log q| per token; infinite where a log-probability is no number
    limit: float  # the square root of the dtype's precision: 3e-4 in float32, 0.03 in float16, 0.09 in bfloat16
    tokens: int
    dtype: str
    adapter_effect: float | None = None  # nats between the original and its base; None where not measured
    storage: str = ""  # "8bit" or "4bit": of the base of `packed_difference`
    packed_difference: float | None = None  # nats from the adapter on a packed base, which no limit bounds

    def __str__(self) -> str:
        apart = f"{self.mean_difference:.2g} nats per token apart"
        of = (
            ""
            if self.adapter_effect is None
            else f", of {self.adapter_effect:.2g} by which the adapter moves its base,"
        )
        text = f"{apart}{of} on {self.tokens} tokens in {self.dtype} (up to {self.limit:.2g} is rounding)"
        if self.packed_difference is None:
            return text
        packed = f"{self.packed_difference:.2g} from the adapter on the {self.storage} base as it runs here"
        return f"{text}, with the base unpacked; {packed}"


def is_base_available_offline(base: ModelRef) -> bool:
    """Whether a base can be loaded without a download."""
    if not base.name:
        return False
    if Path(base.name).exists() or cached_file(base.name, base.revision) is not None:
        return True
    folder = cached_folder(base.name, base.revision)
    return folder is not None and any((*folder.glob("*.safetensors"), *folder.glob("*.bin")))


def make_probe_prompts(config: Any, adapter_config: Mapping[str, Any]) -> list[list[int]]:
    """Token ids, the same on every machine: random ones, and those that the adapter trained or that begin and end texts."""
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None) or PROMPT_TOKENS
    draw, length = random.Random(SEED), min(PROMPT_TOKENS, positions)
    prompts = [[draw.randrange(text.vocab_size) for _ in range(length)] for _ in range(PROMPTS)]
    trained = adapter_config.get("trainable_token_indices") or []
    special = [getattr(text, name, None) for name in ("bos_token_id", "eos_token_id")]
    named = [*_flatten_ints(trained), *_flatten_ints(special)]
    return [*prompts, *(named[at : at + length] for at in range(0, min(len(named), PROMPTS * length), length))]


def _flatten_ints(value: Any) -> Iterable[int]:
    if isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _flatten_ints(inner)
    elif isinstance(value, int):
        yield value


def compute_log_probs(model: Any, prompts: Iterable[list[int]]) -> list[torch.Tensor]:
    """Of the next token after every token of each prompt, [T, V] fp32 on the CPU."""
    device = next(model.parameters()).device
    with torch.no_grad():
        return [model(torch.tensor([ids], device=device)).logits[0].float().log_softmax(-1).cpu() for ids in prompts]


def compare(expected: list[torch.Tensor], found: list[torch.Tensor], dtype: torch.dtype) -> OutputDifference:
    """Compare log-probs `expected`, of the model in memory, with `found`, of the written one, computed in `dtype`."""
    apart, tokens = 0.0, 0
    for p_TV, q_TV in zip(expected, found, strict=True):
        if p_TV.shape != q_TV.shape:
            apart = math.inf
            continue
        # a token without probability may differ as it likes
        difference_TV = torch.where(p_TV.isneginf(), torch.zeros(()), (p_TV - q_TV).abs())
        apart += float((p_TV.exp() * difference_TV).sum())
        tokens += len(p_TV)
    nats = apart / max(tokens, 1)
    return OutputDifference(
        nats if math.isfinite(nats) else math.inf,
        math.sqrt(torch.finfo(dtype).eps),
        tokens,
        str(dtype).removeprefix("torch."),
    )


def require_agreement(found: OutputDifference, written: str, original: str) -> None:
    """Refuse (LoragateError) a written model that computes something else."""
    if not found.mean_difference <= found.limit:
        raise LoragateError(
            f"{written} does not compute what {original} does: {found}. Nothing was kept; please report it with both "
            "adapter_config.json and the versions that `loragate env` prints"
        )


ANY_MODEL = {"AutoTokenizer": [None, None]}
"""With this auto_map AutoTokenizer reads tokenizer.json as it is beside a model that has a class of tokenizers; else it fails."""
TEXTS = (
    "What is 7 * 8?  It's 1,234.5 + 90%.\n\n\tdef f(x_1): return x-1  # No",
    " a leading and a trailing space ",
    "naïve Übung — 東京 🙂",
)


def write_tokenizer(tokenizer: Any, folder: Path) -> str:
    """Save a tokenizer so that AutoTokenizer reads the same ids from the folder, with or without a model in it.

    Returns:
        What it reads otherwise, in a sentence; empty where it reads the same.
    """
    tokenizer.save_pretrained(str(folder))
    path = folder / "tokenizer_config.json"
    record = read_json(path)
    forms = [record]
    if record.get("auto_map") in (None, ANY_MODEL):  # else its code is on the hub
        without = {key: value for key, value in record.items() if key != "auto_map"}
        forms = [without, {**without, "auto_map": ANY_MODEL}]
    found = []
    for form in forms:
        write_json(path, form)
        found.append(_read_otherwise(tokenizer, folder))
        if not found[-1]:
            return ""
    write_json(path, record)
    return found[0]


def _read_otherwise(tokenizer: Any, folder: Path) -> str:
    """What AutoTokenizer reads otherwise from a folder than a tokenizer, in a sentence; empty where nothing is."""
    code = type(tokenizer).__module__.startswith("transformers_modules")  # which was trusted, and ran
    try:
        read = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=code)
    except Exception as error:  # what the library tokenizers raises has no narrower class
        return f"the tokenizer that was written cannot be read with AutoTokenizer ({str(error)[:200]})"
    draw = random.Random(SEED)
    drawn = [draw.randrange(len(tokenizer)) for _ in range(PROMPT_TOKENS)]
    texts = [*TEXTS, " ".join(tokenizer.all_special_tokens)]
    with suppress(Exception):  # of ids that stand for no token
        texts.append(tokenizer.decode(drawn))
    for text in texts:
        expected, ids = (_ids(one, text) for one in (tokenizer, read))
        if expected is not None and expected != ids:
            ids = ids or []
            at = [*(own == other for own, other in zip(expected, ids)), False].index(False)
            return (
                f"AutoTokenizer reads other token ids from the tokenizer that was written ({type(read).__name__}) than "
                f"the given one ({type(tokenizer).__name__}): {ids[at : at + 5]} and not {expected[at : at + 5]} in {text[:40]!r}"
            )
    if _template(read) != _template(tokenizer):
        return "AutoTokenizer reads another chat template from the tokenizer that was written than was given"
    return ""


def _ids(tokenizer: Any, text: str) -> list[int] | None:
    """The token ids of a text; None where it is refused, as by a tokenizer of few words without one for the unknown."""
    try:
        return list(tokenizer(text)["input_ids"])
    except Exception:  # the library tokenizers raises nothing narrower
        return None


def _template(tokenizer: Any) -> str:
    """The chat template as it renders: of several the default one, with line ends as files are read."""
    return "\n".join(re.split(r"\r\n?|\n", active_template(tokenizer) or ""))
