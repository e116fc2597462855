"""The house: arrows between rooms point down, optional libraries stay in their rooms."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import loragate

SOURCE = Path(loragate.__file__).parent
# lowest floor first; a room may import rooms before it. LOW are single modules that every room may know
LOW = ["errors", "version", "validate", "effects", "files", "records", "strict_yaml", "printable", "hub_names"]
LOW += ["display", "modes", "selection_record", "signals"]
FLOORS = [*LOW, "gates", "losses", "data", "models", "world", "generation", "training", "evaluation"]
FLOORS += ["selection", "analysis", "doctor", "report", "serving", "quickstart", "cli", "recipes"]
# heavy or optional libraries, and the rooms that may import them at module level or inside functions
RESERVED = {
    "trl": {"training"},
    "datasets": {"data", "training"},
    "accelerate": {"training", "cli"},
    "matplotlib": {"report"},
    "gradio": {"serving"},
    "pydantic": {"validate"},
    "pydantic_core": {"gates"},
    "jinja2": {"report", "evaluation", "gates"},
    "ray": {"generation", "selection"},
    "vllm": {"generation", "serving"},
    "lm_eval": {"evaluation"},
    "math_verify": {"evaluation"},
    "llama_cpp": {"serving"},
}
SIDEWAYS = {("report", "*"), ("world", "*"), ("gates", "losses"), ("data", "gates"), ("generation", "gates")}
# what of serving/ runs inside vLLM knows gates and the files that hold them alone
PLUGIN = {f"serving/{name}.py" for name in ("plugin", "hooks", "layers", "placing", "__init__")}
PLUGIN_MAY_KNOW = {*LOW, "gates", "models"}


def room_of(path):
    parts = path.relative_to(SOURCE).parts
    return parts[0].removesuffix(".py")


@cache
def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path):
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.append(node.module)
    return found


def test_arrows_point_down():
    checked = 0
    for path in SOURCE.rglob("*.py"):
        room = room_of(path)
        if room in ("__init__", "__main__"):
            continue
        assert room in FLOORS, f"{path} lies in no known room"
        for name in imports(path):
            parts = name.split(".")
            if parts[0] != "loragate" or len(parts) < 2 or parts[1] == room:
                continue
            checked += 1
            target = parts[1]
            assert FLOORS.index(target) < FLOORS.index(room) or target in LOW, (
                f"{path.relative_to(SOURCE)} imports {name}: {target} is not below {room}"
            )
            low = target in LOW
            inside = str(path.relative_to(SOURCE)) in PLUGIN
            assert not inside or target in PLUGIN_MAY_KNOW, f"{path.relative_to(SOURCE)} must not know {target}"
            assert low or not {(room, "*"), (room, target)} & SIDEWAYS, (
                f"{path.relative_to(SOURCE)} must not know {target}"
            )
    assert checked > 50


def test_reserved_libraries_stay_in_their_rooms():
    for path in SOURCE.rglob("*.py"):
        for name in imports(path):
            allowed = RESERVED.get(name.split(".")[0])
            assert allowed is None or room_of(path) in allowed, f"{path.relative_to(SOURCE)} imports {name}"


def test_files_stay_readable():
    for path in SOURCE.rglob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 650, f"{path} is two ideas"
        assert ast.get_docstring(tree_of(path)), f"{path} does not say what lives there"


def test_imports_stand_at_the_top():
    """Inside a function they are for what is optional, or too heavy for `--help`. The bound may only fall."""
    inside = {
        (path, node.lineno)
        for path in SOURCE.rglob("*.py")
        for function in ast.walk(tree_of(path))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert len(inside) <= 90


# what is imported, one after the other, and what must not have come with it
LIGHT = {
    "loragate loragate.cli.main loragate.cli.serve": "torch transformers trl yaml",
    "loragate.gates.range loragate.selection.select loragate.selection.settings": "torch",
    "loragate.validate loragate.training.settings": "pydantic",  # which is imported with the first value
    "loragate.serving.plugin": "peft transformers vllm",  # inside vLLM, which does without PEFT
    "loragate.cli.evaluation_runs": "trl",  # `eval` runs beside vLLM, where TRL need not be
}


def test_importing_loads_nothing_heavy():
    code = (
        "import importlib, sys\n"
        f"for names, heavy in {LIGHT!r}.items():\n"
        "    for name in names.split(): importlib.import_module(name)\n"
        "    print(*(name for name in heavy.split() if name in sys.modules), end='')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""


def test_public_names():
    for name in loragate.__all__:
        assert getattr(loragate, name) is not None, name
    assert loragate.objectives["dft"].name == "dft"
