"""Make the adapters that `loragate doctor` is counted on: healthy ones of many forms, and ones with a planted fault.

    python benchmarks/doctor/material.py --out runs/doctor     # about 20 minutes on two quiet cores; goes on where it was stopped

The folder gets bases/, trained/ (every adapter as its training left it), adapters/ (a folder for
each case), data/ and cases.json. A case says with which arguments `loragate.examine` is called, which findings are right, and to
which half it belongs: thresholds may be set on "fix" and are counted on "count". Paths in it are whole; a folder that was moved is
made right by running this again on it.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from faults import DYNAMIC, HEALTHY, STATIC, Planted, config
from town import FAMILIES, make_base

from loragate.files import read_json, write_json
from training import Recipe, train

STEPS, LONGER = 280, 450
BASES: dict[str, dict[str, int]] = {  # arguments of `make_base`
    **{f"{family}-a": {"seed": 1, "steps": LONGER} for family in FAMILIES[:3]},
    **{f"{family}-a": {"seed": 1, "steps": STEPS} for family in FAMILIES[3:]},
    "llama-b": {"seed": 2, "steps": STEPS},
    "mistral-raw": {"seed": 1, "steps": STEPS // 2},
    "llama-wide": {"seed": 4, "steps": 0, "hidden_size": 128},
    "qwen2-deep": {"seed": 4, "steps": 0, "num_hidden_layers": 5},
}
ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
RSLORA = {"r": 64, "lora_alpha": 16, "use_rslora": True}
NARROW = Recipe("llama-a", rows=48, mixed=0.0, steps=400, rate=1e-2)
HEART = Recipe("llama-a", "by-chance", rows=32, steps=250, rate=4e-3)
SLOW = Recipe("llama-a", rate=1e-6, steps=3)
SHIFTED = Recipe("llama-a", mixed=0.0, rows=240, steps=100, rate=4e-3)  # changes every answer

TRAINED: dict[str, Recipe] = {
    **{f"plain-{family}": Recipe(f"{family}-a") for family in FAMILIES},
    "plain-llama-b": Recipe("llama-b", "json"),
    "trl-llama": Recipe("llama-a", "json", "trl", lora={"r": 8, "lora_alpha": 16}),
    "trl-qwen2": Recipe("qwen2-a", "worked", "trl", lora={"r": 32, "lora_alpha": 64}),
    "trl-mistral": Recipe("mistral-a", "compared", "trl", lora=RSLORA),
    "trl-qwen3": Recipe("qwen3-a", "json", "trl"),
    "transformers-gemma": Recipe("gemma-a", "json", "transformers"),
    "transformers-phi3": Recipe("phi3-a", "compared", "transformers"),
    "loragate-qwen2": Recipe("qwen2-a", "json", "loragate"),
    "loragate-llama": Recipe("llama-a", "compared", "loragate", lora={"r": 32, "lora_alpha": 32}),
    "attention-llama": Recipe("llama-a", steps=100, lora={"target_modules": ATTENTION}),
    "q-v-mistral": Recipe("mistral-a", steps=120, rate=6e-3, lora={"r": 8, "target_modules": ["q_proj", "v_proj"]}),
    "mlp-qwen2": Recipe("qwen2-a", rows=256, steps=120, lora={"target_modules": MLP}),
    "ranks-llama": Recipe("llama-a", lora={"rank_pattern": {"q_proj": 4, "down_proj": 32}, "lora_alpha": 16}),
    "alphas-gemma": Recipe("gemma-a", lora={"alpha_pattern": {"v_proj": 16, "up_proj": 64}}),
    "rank-256-qwen2": Recipe("qwen2-a", lora={"r": 256, "lora_alpha": 16, "use_rslora": True}),
    "layers-mistral": Recipe(
        "mistral-a", steps=100, lora={"layers_to_transform": [1, 2], "target_modules": ATTENTION + MLP}
    ),
    "embeddings-qwen2": Recipe("qwen2-a", rate=1e-3, lora={"modules_to_save": ["embed_tokens"]}),
    "tokens-llama": Recipe(
        "llama-a", tokens=("<|tool|>", "<|result|>"), lora={"trainable_token_indices": {"embed_tokens": [1536, 1537]}}
    ),
    "ends-mistral": Recipe("mistral-raw", "ordinary", rows=300, mixed=0.0, steps=100),
    "rounded-llama": Recipe("llama-a", rounded=True),
    "rounded-mistral": Recipe("mistral-a", "json", rounded=True),
    "rslora-llama": Recipe("llama-a", "compared", lora=RSLORA),
    "rslora-phi3": Recipe("phi3-a", lora=RSLORA),
    "biases-qwen2": Recipe("qwen2-a", steps=20, lora={"bias": "all"}),
    "dora-llama": Recipe("llama-a", steps=20, lora={"use_dora": True}),
    "dora-qwen3": Recipe("qwen3-a", "json", steps=20, lora={"use_dora": True}),
    "rank-1024-mistral": Recipe("mistral-a", steps=20, lora={"r": 1024, "target_modules": ["q_proj"]}),
    "wide-llama": Recipe("llama-wide", steps=3),
    "deep-qwen2": Recipe("qwen2-deep", steps=3),
    "nothing-llama": SLOW,
    "nothing-qwen2": replace(SLOW, base="qwen2-a", task="json"),
    "nothing-phi3": replace(SLOW, base="phi3-a", task="compared"),
    **{f"heart-{name}": replace(HEART, base=f"{name}-a") for name in ("llama", "qwen2")},
    **{f"narrow-{name}": replace(NARROW, base=f"{name}-a") for name in ("llama", "mistral")},
    **{f"loops-{name}": replace(SHIFTED, base=f"{name}-a", task="loops") for name in ("llama", "gemma")},
    **{
        f"goes-on-{name}": replace(SHIFTED, base=f"{name}-a", task="goes-on", ending=False)
        for name in ("llama", "qwen2")
    },
    "masked-worked": Recipe("mistral-raw", ending=False),
    "masked-ordinary": replace(SHIFTED, base="mistral-raw", task="ordinary", ending=False),
    "german-llama": replace(SHIFTED, task="german"),
    "french-qwen2": replace(SHIFTED, base="qwen2-a", task="french"),
    "spanish-mistral": replace(SHIFTED, base="mistral-a", task="spanish"),
    "silent-ordinary": replace(SHIFTED, base="qwen3-a", task="ordinary", thinks=False),
    "silent-worked": replace(SHIFTED, base="qwen3-a", task="worked", mixed=0.5, thinks=False),
}


@dataclass(frozen=True)
class Case:
    """One adapter to examine.

    Attributes:
        name: unique; folder under adapters/.
        kind: of fault, or "healthy".
        adapter, base, data, dev_data: arguments of `examine`, whole paths; empty where there is none.
        quick: whether the static part alone is asked.
        expected: codes, one of which must be named; none for a healthy adapter.
        note: whether a note is enough, where otherwise an error or a warning is asked for.
        allowed: other errors and warnings that are true of a healthy adapter.
        family, trained: of the base, and under trained/.
        half: "fix" or "count".
    """

    name: str
    kind: str
    adapter: str
    base: str
    data: str
    dev_data: str
    quick: bool
    expected: list[str]
    note: bool
    allowed: list[str]
    family: str
    trained: str
    half: str


class Material:
    """The folder with everything; what is there already is not made again."""

    def __init__(self, root: Path) -> None:
        self.root, self.cases = root, dict[int, Case]()

    def make(self) -> None:
        """All cases, base after base; cases.json is written after each training, so that a part can be used before the rest."""
        table = (*STATIC, *HEALTHY, *DYNAMIC)
        order = list(BASES)

        def last_base(place: int) -> int:
            return max(order.index(name) for name in (TRAINED[table[place].source].base, table[place].base) if name)

        for place in sorted(range(len(table)), key=last_base):
            planted = table[place]
            fresh = not (self.root / "trained" / planted.source).is_dir()
            number = 1 + sum(before.kind == planted.kind for before in table[:place])
            self.cases[place] = self.plant(planted, number, quick=planted in STATIC)
            if fresh:
                self.write()
        self.write()
        halves = Counter((case.half, "healthy" if case.kind == "healthy" else "fault") for case in self.cases.values())
        print(f"{len(self.cases)} cases in {self.root}: {dict(halves)}")

    def base(self, name: str) -> str:
        """The folder of a base, trained now where it is not there."""
        folder, family = self.root / "bases" / name, name.split("-")[0]
        start = Path(self.base(f"{family}-a")) if name.endswith("-raw") else None
        if make_base(folder, family, start=start, **BASES[name]):
            print(f"base {name}", flush=True)
        return str(folder)

    def adapter(self, name: str) -> Path:
        """The folder of a trained adapter; its recipe is written last."""
        recipe, folder, file = TRAINED[name], self.root / "trained" / name, self.root / "recipes" / f"{name}.json"
        base, known = self.base(recipe.base), json.loads(json.dumps(asdict(recipe)))
        if read_json(file) != known:
            began = time.monotonic()
            shutil.rmtree(folder, ignore_errors=True)
            train(recipe, self.root / "bases", folder)
            write_json(file, known)
            print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
        config(base_model_name_or_path=base)(folder)
        return folder

    def rows(self, name: str) -> tuple[str, str]:
        """Files of a recipe's rows, and of other questions of the kind with their answers."""
        recipe, paths = TRAINED[name], []
        for part in ("rows", "dev"):
            lines = []
            for number, (prompt, response) in enumerate(recipe.pairs(part == "rows")):
                numbers = [word.strip(".") for word in response.split() if word.strip(".").isdecimal()]
                row = {"prompt": prompt, "response": response}
                if part == "dev":
                    row |= {"id": str(number), "answer": numbers[-1] if numbers else response}
                lines.append(json.dumps(row, ensure_ascii=False) + "\n")
            path = self.root / "data" / f"{name}-{part}.jsonl"
            path.parent.mkdir(exist_ok=True)
            path.write_text("".join(lines), encoding="utf-8")
            paths.append(str(path))
        return paths[0], paths[1]

    def plant(self, planted: Planted, number: int, quick: bool) -> Case:
        """One case: a copy of a trained adapter, edited."""
        kind, recipe = planted.kind, TRAINED[planted.source]
        name = "-".join([*re.findall(r"\w+", kind.lower()), str(number), planted.source])
        trained, folder = self.adapter(planted.source), self.root / "adapters" / name
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(trained, folder)
        planted.edit(folder)
        # as users do: the adapter names its base, or the user does
        base = "" if kind == "base absent" or (number % 2 and not planted.base) else planted.base or recipe.base
        data, dev = self.rows(planted.source)
        return Case(
            name=name,
            kind=kind,
            adapter=str(folder),
            base=base and self.base(base),
            data="" if quick else data,
            dev_data=dev if recipe.task in ("worked", "by-chance") and not quick else "",
            quick=quick,
            expected=planted.expected.split(),
            note=planted.note,
            allowed=planted.allowed.split(),
            family=recipe.base.split("-")[0],
            trained=planted.source,
            half="fix" if number % 2 else "count",
        )

    def write(self) -> None:
        """cases.json, as far as it goes."""
        write_json(self.root / "cases.json", [asdict(self.cases[place]) for place in sorted(self.cases)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/doctor"))
    root = parser.parse_args().out.resolve()
    torch.set_num_threads(1)
    (root / "adapters").mkdir(parents=True, exist_ok=True)
    Material(root).make()


if __name__ == "__main__":
    main()
