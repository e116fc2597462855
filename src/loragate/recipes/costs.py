"""What the stages of a recipe need of the GPU that it is made for, memory and hours, before anything is loaded.

Hours are estimates: of a training its FLOPs (`training.plan`) at a share of the card's peak, of answers drawn by vLLM the bytes
that a step of decoding reads at a share of its bandwidth, of answers drawn by transformers measured times of a layer. Rows and
answers are taken to be as long as their limits; shorter ones cost less in proportion.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from loragate.analysis.gates import PAPER
from loragate.display import duration
from loragate.errors import ConfigError, LoragateError
from loragate.evaluation.prepared import select_tasks
from loragate.evaluation.settings import parse_constants
from loragate.evaluation.variants import control_temperatures, variants_for
from loragate.gates.range import parse_ranges
from loragate.losses.objectives import make_objective
from loragate.models.loading import base_config
from loragate.models.source import Kind, ModelRef
from loragate.recipes.recipe import GPUS, TRAINS, Gpu, Recipe, Stage, drop_unset, options_of
from loragate.training.plan import GIB, Estimate, estimate
from loragate.training.settings import DEFAULT_BATCH_SIZE, MAX_MICRO_BATCH_SIZE
from loragate.validate import comma_list

ASSUMED_MFU, OF_BANDWIDTH = 0.4, 0.5
"""Shares that are reached; assumed, and printed beside every estimate."""
SEQUENCES = 256
"""Answers that vLLM decodes at a time."""
LAYER_S = {"base": 0.94e-3, "adapter": 1.87e-3, "gated": 3.0e-3}
"""Seconds of a layer in a step of transformers' decoding, which waits for the processor whatever the batch: batch 128 at
Qwen2.5-1.5B's shape in benchmarks/results/gpu.json."""


@dataclass(frozen=True)
class Cost:
    """Of one stage: what it does to the GPU's memory, in words, and hours; None where nothing says how much there is to do."""

    memory: str
    hours: float | None
    needed: float = 0.0  # bytes on one card; 0 where unknown, or where vLLM takes what there is

    def sentence(self) -> str:
        """ "about 8.2 GiB of GPU memory (…), about 1 h 12 min"."""
        return f"{self.memory}, {'time unknown' if self.hours is None else f'about {duration(3600 * self.hours)}'}"


def costs(recipe: Recipe) -> dict[str, Cost]:
    """{stage: what it needs} with every row and answer as long as its limit; empty without an architecture.

    Several processes each need as much memory, less what FSDP2 shards.
    """
    if (model := _model_of(recipe)) is None:
        return {}
    stages = list(map(_with_defaults, recipe.stages))
    return {one.name: _cost(one, stages[:number], model, GPUS[recipe.machine]) for number, one in enumerate(stages)}


def memory_warnings(recipe: Recipe, names: Collection[str] = ()) -> Iterator[str]:
    """A line for each stage that needs more memory than the machine has, and what to set; of the stages `names`, or of all."""
    if (gpu := GPUS.get(recipe.machine)) is None or (model := _model_of(recipe)) is None:
        return
    stages = list(map(_with_defaults, recipe.stages))
    for number, stage in enumerate(stages):
        cost = _cost(stage, stages[:number], model, gpu)
        if (names and stage.name not in names) or cost.needed <= gpu.memory:
            continue
        size = "per_device_train_batch_size" if stage.command in TRAINS else "batch_size"
        rows, remedy = int(stage.options.get(size) or 0), ""
        while rows > 1 and not remedy:
            rows //= 2
            smaller = replace(stage, options=stage.options | {size: rows})
            if _cost(smaller, stages[:number], model, gpu).needed <= gpu.memory:
                same = "the steps stay the same" if stage.command in TRAINS else "in more batches"
                remedy = f"--set {stage.name}.{size}={rows} would fit, {same}"
        if not remedy:
            shorter = f" or --set {stage.name}.max_length=N" if stage.command in TRAINS else ""
            given = f"--set {stage.name}.quantization=4bit{shorter}"
            remedy = f"{given} needs less, with other results; or take a larger card"
        sizes = f"{cost.needed / GIB:.0f} GiB of GPU memory, of which one {recipe.machine} has {gpu.memory / GIB:.0f}"
        yield f"warning: {stage.name} may need {sizes}: {remedy}"


def _cost(stage: Stage, before: Sequence[Stage], model: Any, gpu: Gpu) -> Cost:
    """What a stage needs that follows those `before`, all of them with what is left to the command."""
    if stage.command in TRAINS:
        return _training(stage, model, gpu)
    if stage.command == "mask":
        # base and reference, one after the other; nothing is kept for a way back
        longest, rows = int(stage.options["max_length"]), int(stage.options["per_device_train_batch_size"])
        read = estimate(model, base=_stored_as(stage), sequence=longest, rows=rows, gradient_checkpointing=True)
        needed = read.weights + read.activations + GIB
        memory = f"about {needed / GIB:.1f} GiB of GPU memory, one model at a time"
        return Cost(memory, _hours(2 * read.forward * _tokens(stage), gpu), needed)
    return _generation_cost(stage, before, model, gpu)


def _with_defaults(stage: Stage) -> Stage:
    """The stage with what it leaves to the command."""
    return replace(stage, options=drop_unset(vars(options_of(stage, stage.name))) | stage.options)


def _model_of(recipe: Recipe) -> Any:
    """The backbone on the meta device: that of the files, or that in the folder that is named in its place; else None."""
    folder = Path(str(recipe.stages[0].options.get("model", "")))
    try:
        if recipe.architecture:
            return build_meta_model(json.dumps(recipe.architecture))
        if (folder / "config.json").is_file():
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(base_config(ModelRef(str(folder))))
    except (LoragateError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        if recipe.architecture:
            raise ConfigError(f"{recipe.name}: architecture is none that transformers knows ({error})") from error
    return None


@cache
def build_meta_model(architecture: str) -> Any:
    """A model of this architecture, in the words of transformers as JSON, on the meta device."""
    values = json.loads(architecture)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))


def summary(recipe: Recipe, found: dict[str, Cost]) -> str:
    """The hours of all stages, and what they rest upon; or that nothing was estimated."""
    if not found:
        return "memory and hours unknown: the recipe has no architecture of this model, and it is no folder with a config.json"
    hours = sum(cost.hours or 0.0 for cost in found.values())
    cards = max(int(stage.options.get("processes") or 1) for stage in recipe.stages)
    return (
        f"about {duration(3600 * hours)} in all on {cards} {recipe.machine}, grading aside: with every row and answer "
        f"as long as its limit, products at {ASSUMED_MFU:g} of the card's peak and vLLM at {OF_BANDWIDTH:g} of its bandwidth, "
        "both assumed"
    )


def estimate_of(stage: Stage, model: Any) -> Estimate:
    """Memory and cost of a step of a training."""
    options, sft = stage.options, stage.command == "sft"
    processes = int(options.get("processes") or 1)
    rows = int(options["per_device_train_batch_size"]) or MAX_MICRO_BATCH_SIZE
    return estimate(
        model,
        "sft" if sft else "calibrate",
        sequence=int(options["max_length"]),
        rows=rows,
        adapter=int(options.get("rank") or 16),
        base=_stored_as(stage),
        autocast=options.get("precision") != "fp32",
        gradient_checkpointing=bool(options.get("gradient_checkpointing")),
        objective=make_objective(options["objective"], options.get("objective_options")) if sft else None,
        dora=bool(options.get("dora")),
        k=int(options.get("k", 100)),
        passes=(int(options["batch_size"]) or DEFAULT_BATCH_SIZE) // rows // processes,
    )


def _stored_as(stage: Stage) -> Any:
    """Dtype or quantisation of the base's weights, as `estimate` takes it; the checkpoint's is taken to be bfloat16."""
    stored, dtype = stage.options.get("quantization") or "none", stage.options.get("dtype") or "auto"
    if stored != "none":
        return stored
    return "bfloat16" if dtype == "auto" else dtype


def _trials(options: Mapping[str, Any]) -> int:
    """How many gates, or adapters, a training stage trains."""
    axes = (comma_list(str(options.get(name, ""))) for name in ("seeds", "objectives", "learning_rates"))
    return math.prod((len(axis) or 1 for axis in axes), start=len(parse_ranges(options.get("ranges", "0,1"))))


def _training(stage: Stage, model: Any, gpu: Gpu) -> Cost:
    options, need = stage.options, estimate_of(stage, model)
    runs = _trials(options)
    processes = int(options.get("processes") or 1)
    sharded = need.weights * (1 - 1 / processes) if options.get("strategy") == "fsdp2" else 0.0
    hours = _hours(runs * need.flops * _tokens(stage) / processes, gpu)
    return Cost(need.sentence(), hours, need.peak - sharded + GIB)


def _tokens(stage: Stage) -> float:
    """Tokens that a training or a mask reads, at most; 0 where the recipe does not say how many rows there are."""
    options = stage.options
    rows = int(options.get("max_rows") or 0) * float(options.get("num_train_epochs") or 1)
    if steps := int(options.get("max_steps") or 0):
        rows = steps * (int(options["batch_size"]) or DEFAULT_BATCH_SIZE)
    return rows * int(options["max_length"])


def _hours(flops: float, gpu: Gpu) -> float | None:
    return flops / (gpu.flops * ASSUMED_MFU) / 3600 if flops else None


def _generation_cost(stage: Stage, before: Sequence[Stage], model: Any, gpu: Gpu) -> Cost:
    """Of an evaluation or a diagnosis that draws answers, or reads those of one."""
    options, what = stage.options, stage.options.get("what")
    trained = {name: one for one in before if one.command in TRAINS for name in (one.name, "last")}
    if "run" in options:  # a forward pass over answers that were drawn
        sources = [one for one in before if options["run"] == f"{{{one.name}}}"]
        if not sources:
            return Cost("memory unknown, as its answers are not of this recipe", None)
        (source,) = sources
        work = _work(source)
        # nothing is kept for a way back: one layer at a time, as where a training recomputes them
        rows, longest = int(options.get("batch_size") or 1), max(limit for *_, limit in work)
        read = estimate(model, base=_stored_as(stage), sequence=longest, rows=rows, gradient_checkpointing=True)
        most = int(options.get("answers", 4))
        tokens = sum(questions * min(samples, most) * limit for _, questions, samples, limit in work)
        needed = read.weights + read.activations + GIB
        return Cost(f"about {needed / GIB:.1f} GiB of GPU memory", _hours(read.forward * tokens, gpu), needed)
    work, size = _work(stage), int(options.get("batch_size", 64))
    last = trained.get(str(options.get("model") or "").strip("{}"))
    kind: Kind = "base" if last is None else "adapter" if last.command == "sft" else "gated"
    # each variant as the times that its answers take: suppression by ΔH asks base and adapter beside itself
    heats = [1.0]
    if "sweep" in options and str(options["sweep"]).strip("{}") not in trained:
        return Cost("memory unknown, as its sweep is not of this recipe", None)
    if "sweep" in options:
        cells = trained[str(options["sweep"]).strip("{}")].options
        plain, controls = ["adapter"], ["gated"] * _trials(cells)
    elif what == "interventions":
        plain = ["adapter", "base", "gated"]
        controls = ["gated"] * (len(comma_list(str(options.get("interventions", "")))) or len(PAPER) - 1)
    elif what == "entropy":
        plain = ["adapter", "base"]
        controls = ["suppressed"] * len(comma_list(str(options.get("suppress", "negative,positive"))))
    else:
        constants = parse_constants(str(options.get("constants", "0.5")))
        named = options.get("controls", "cheap")
        wanted = variants_for(kind, named, constants)
        plain = [one.weights for one in wanted if one.control is None]
        controls = [one.weights for one in wanted if one.control is not None]
        heats += control_temperatures(kind, named)
    heats = options_of(stage, stage.name).temperatures or heats
    need = estimate(model, base=_stored_as(stage))
    parts: list[tuple[list[str], int, int]] = []
    for is_harness, questions, samples, limit in work:
        if is_harness:  # no controls, and always greedy
            parts.append((plain, questions * samples, limit))
            continue
        greedy = heats.count(0)
        parts.append(((plain + controls) * (len(heats) - greedy), questions * samples, limit))
        parts.append(((plain + controls) * greedy, questions, limit))
    drawn, longest = sum(len(names) * answers for names, answers, _ in parts), max(limit for _, _, limit in parts)
    said = f"{drawn:,} answers of at most {longest:,} tokens"
    seconds = 0.0
    for names, answers, limit in parts:
        if options.get("engine") == "vllm":
            together = min(SEQUENCES, answers)
            step = (need.weights + together * limit / 2 * need.cache) / (gpu.bandwidth * OF_BANDWIDTH)
            seconds += len(names) * answers * limit / together * step
        else:
            layers = model.config.get_text_config().num_hidden_layers
            passes = {**LAYER_S, "suppressed": LAYER_S["base"] + 2 * LAYER_S["adapter"]}
            seconds += sum(passes[one] for one in names) * layers * -(-answers // size) * limit
    memory, needed = "vLLM fills 0.9 of the GPU", 0.0
    if options.get("engine") != "vllm":
        streams = 3 if what == "entropy" else 1
        needed = need.weights + streams * size * longest * need.cache + GIB
        memory = f"about {needed / GIB:.1f} GiB of GPU memory on transformers"
    return Cost(f"{memory}; {said}", seconds / 3600, needed)


def _work(stage: Stage) -> list[tuple[bool, int, int, int]]:
    """(whether it is of the harness, questions, samples of each, token limit) of each task of an evaluation."""
    options, found = stage.options, []
    for task in select_tasks(options_of(stage, stage.name)):
        own, rows, subsets = task.generation, task.dataset.rows or 0, len(task.harness.subsets) if task.harness else 0
        limit = int(options.get("limit") or rows) * max(1, subsets)  # it is of each subset
        samples = own.samples if task.harness else int(options.get("samples") or own.samples)
        longest = int(options.get("max_new_tokens") or own.max_new_tokens)
        found.append((task.harness is not None, min(rows, limit), samples, longest))
    return found
