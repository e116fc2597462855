"""Every command samples a folder as it recommends unless told otherwise, and says which."""

import asyncio
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from command_kit import words_task

import loragate as lg
from loragate.cli.main import main
from loragate.data import describe_form
from loragate.evaluation.prepared import Request
from loragate.evaluation.settings import TaskSettings
from loragate.gates import recommended
from loragate.models import Loading, resolve
from loragate.models.export import export_adapter
from loragate.serving import frontend
from loragate.serving.explore import explorer_of
from loragate.serving.hooks import replace_method
from loragate.serving.settings import ServerSettings
from loragate.serving.vllm_server import print_forms, print_sampling, served_adapters
from tiny import run, tiny_adapter, tiny_base, tiny_tokenizer, write_base, write_rows

SETTINGS = [
    {"name": "[-3,2]", "temperature": 0.3, "mean": 0.521, "low": 0.48, "high": 0.562},
    {"name": "[-3,2]", "temperature": 1.0, "mean": 0.382, "low": 0.341, "high": 0.42},
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """cool/ recommends temperature 0.3, greedy/ greedy decoding, plain/ nothing; exported/ is cool/ as a plain adapter."""
    root = tmp_path_factory.mktemp("recommended")
    write_base(root / "base")
    model = lg.attach_gates(
        tiny_adapter(base=tiny_base()), lg.GateConfig(-3, 2, granularity="module")
    )  # which can be exported
    with torch.no_grad():
        for parameter in lg.gate_parameters(model).values():
            parameter.fill_(0.4)
    evidence = {"selection": {"accepted": True, "picked": "[-3,2]", "settings": SETTINGS}}
    for name, temperature in (("cool", 0.3), ("greedy", 0.0), ("plain", None)):
        lg.save_gates(model, root / name, base_id=str(root / "base"), evidence=evidence, temperature=temperature)
    export_adapter(str(root / "cool"), str(root / "exported"))
    return root


@pytest.fixture(autouse=True)
def nobody_was_warned(monkeypatch):
    monkeypatch.setattr(recommended, "_warned", set())


def generated(capsys, folder, *more):
    capsys.readouterr()
    argv = ["generate", "--model", str(folder), "--prompt", "w1 w2 w3", "--max-new-tokens", "8", *more]
    assert main(argv) == 0
    return capsys.readouterr()


def test_another_form_of_prompts_is_named(place, tmp_path, capsys):
    """Of a choice on plain texts: in `generate`, `eval` and `serve`, and in none of them where the forms are alike."""
    raw, chat = describe_form(True), describe_form(False)
    for name, form in (("raw", raw), ("chat", chat), ("kept", describe_form(False, system="keep"))):
        shutil.copytree(place / "plain", tmp_path / name)
        record = json.loads((tmp_path / name / "gate_config.json").read_text())
        record["selection"] = {"dev": {"form": form}}
        (tmp_path / name / "gate_config.json").write_text(json.dumps(record))
    said = generated(capsys, tmp_path / "raw").err
    assert f"raw was chosen on questions asked {raw}, and here prompts are put {chat}" in said
    assert "was chosen on" not in generated(capsys, tmp_path / "raw", "--raw").err
    assert f"asked {chat}, and here prompts are put {raw}" in generated(capsys, tmp_path / "chat", "--raw").err
    assert "was chosen on" not in generated(capsys, tmp_path / "chat").err
    assert "was chosen on" not in generated(capsys, tmp_path / "kept").err, "the template adds no system message"
    (tmp_path / "words.yaml").write_text(words_task(samples=1))
    write_rows(tmp_path / "words.jsonl", [{"prompt": "w1 w2", "answer": "w3"}])
    for name, words in (
        ("raw", f"raw was chosen on questions asked {raw}, and here prompts are put {chat}"),
        ("chat", ""),
    ):
        evaluated = ["eval", "--model", tmp_path / name, "--tasks", tmp_path / "words.yaml", "--controls", "alone"]
        run(*evaluated, "--out", tmp_path / f"{name}-scores")
        out = " ".join(capsys.readouterr().out.split())
        assert (words in out, "was chosen on" in out) == (True, bool(words))
    settings = ServerSettings(model=str(tmp_path / "raw"), adapters=f"more={tmp_path / 'chat'}")
    print_forms(served_adapters(settings)[1], tiny_tokenizer(), "none")
    out = " ".join(capsys.readouterr().out.split())
    assert "warning: gated was chosen on questions asked as plain text" in out
    assert "more was chosen" not in out


def test_generate(place, capsys):
    samples = ["--samples", "3"]
    cool, usual = (generated(capsys, place / "plain", *samples, "--temperature", heat) for heat in ("0.3", "1"))
    assert cool.out != usual.out, "or the temperature shows nowhere"
    assert generated(capsys, place / "plain", *samples).out == usual.out
    assert "recommend" not in usual.err
    said = generated(capsys, place / "plain").err
    assert said.startswith("loragate: sampling at temperature 1; --temperature 0 is greedy\n")
    assert "sampling" not in usual.err
    found = generated(capsys, place / "cool", *samples)
    assert found.out == cool.out
    assert "sampling at temperature 0.3, as" in found.err
    told = generated(capsys, place / "cool", *samples, "--temperature", "1")
    assert told.out == usual.out
    assert "is recommended at temperature 0.3" in told.err
    plain = generated(capsys, f"{place / 'plain'}@unit", *samples, "--temperature", "1")
    for override in ("unit", "constant=1"):
        unit = generated(capsys, f"{place / 'cool'}@{override}", *samples)
        assert (unit.out, "recommend" in unit.err) == (plain.out, False), "an override was not asked"
    exported = generated(capsys, place / "exported", *samples, "--base", str(place / "base"))
    assert exported.out == found.out, "the exported adapter is the gated one"
    assert "sampling at temperature 0.3, as" in exported.err
    greedy = generated(capsys, place / "greedy")
    assert greedy.out == generated(capsys, place / "plain", "--temperature", "0").out
    assert "sampling greedily, as" in greedy.err
    assert main(["generate", "--model", str(place / "greedy"), "--prompt", "w1", *samples]) == 2
    assert "give --temperature" in " ".join(capsys.readouterr().err.split())


def test_doctor_and_export(place, tmp_path, capsys):
    assert main(["doctor", str(place / "cool"), "--quick", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measures"]["static"]["gates"]["temperature"] == 0.3
    assert main(["doctor", str(place / "greedy"), "--quick"]) == 0
    assert "recommended sampling: greedily" in capsys.readouterr().out
    for name, more, wanted in (("cool", [], True), ("cool", ["--constant", "0.5"], False), ("plain", [], False)):
        out = tmp_path / f"{name}{len(more)}"
        assert main(["export", str(place / name), "--out", str(out), *more]) == 0
        printed, card = capsys.readouterr().out, (out / "README.md").read_text()
        assert [
            (out / "generation_config.json").exists(),
            "generation_config.json" in printed,
            "temperature 0.3" in card,
        ] == [wanted] * 3


def test_the_server_says_which_folders_are_sampled_how(place, capsys):
    more = f"more={place / 'greedy'}, calm={place / 'greedy'}@unit"
    settings = ServerSettings(model=str(place / "cool"), adapters=more)
    print_sampling(served_adapters(settings)[1])
    out = " ".join(capsys.readouterr().out.split())
    assert "sampling at temperature 0.3, as gated recommends" in out
    assert "sampling greedily, as more recommends" in out
    assert out.count("recommends") == 2, "neither the plain adapter nor an override"


def test_vllm_samples_each_name_as_its_own_folder_recommends(place):
    class Request(SimpleNamespace):
        """What a client left open is None, as in vLLM's own requests."""

    paths = {
        "gated": place / "cool",
        "more": place / "greedy",
        "plain": place / "plain",
        "adapter": place / "cool" / "adapter",
        "exported": place / "exported",
        "gated@unit": f"{place / 'cool'}@unit",
        "elsewhere": "owner/name",
    }

    def look_up(_, request):
        return SimpleNamespace(lora_path=str(paths[request.model])) if request.model in paths else None

    def adapters(_, request):
        served = SimpleNamespace(models=SimpleNamespace(lora_requests={}))
        return frontend.find_adapter(lambda _, request: look_up(_, request), served, request)

    def asked(model, **given):
        request = Request(model=model, **{"temperature": None, "top_p": None, "top_k": None, **given})
        assert adapters(None, request) == look_up(None, request)
        return request.temperature, request.top_p, request.top_k

    found = {name: asked(name)[0] for name in ("base", *paths)}
    assert found == dict.fromkeys(found) | {"gated": 0.3, "more": 0.0, "exported": 0.3}
    assert asked("gated") == (0.3, 1.0, 0)
    assert asked("gated", top_p=0.9) == (0.3, 0.9, 0)
    assert asked("gated", temperature=1.0) == (1.0, None, None), (
        "the rest is the server's default, as the client expects"
    )
    assert adapters(None, SimpleNamespace(model="gated")).lora_path, "a request of another kind samples nothing"


def of_server(place, **fields):
    """A request after vLLM's own check of its model, which comes before sampling parameters are made of it; or the error."""

    async def known(self, request):
        return None

    names = {name: SimpleNamespace(lora_name=name, lora_path=str(place / name)) for name in ("cool", "greedy", "plain")}
    served = SimpleNamespace(
        models=SimpleNamespace(lora_requests=names), create_error_response=lambda message, param: message
    )
    request = SimpleNamespace(**fields)
    with pytest.raises(StopIteration) as done:
        frontend.check_model(known, served, request).send(None)
    return done.value.value or request


def test_every_endpoint_of_vllm_samples_as_recommended(place):
    """A batch of conversations is taken apart before its adapter is looked up; token ids come with vLLM's own parameters."""
    assert of_server(place, model="greedy", temperature=None).temperature == 0.0
    assert of_server(place, model="cool", temperature=None, model_extra={"lora_scale": 0.5}).temperature is None
    assert of_server(place, model="cool@unit", temperature=None).temperature is None
    assert not hasattr(of_server(place, model="cool", input="embedded"), "temperature")
    for given, wanted in (((), (0.3, 1.0, 0)), (("top_k",), (0.3, 1.0, 5)), (("temperature",), (1.0, 0.9, 5))):
        sampling = SimpleNamespace(temperature=1.0, top_p=0.9, top_k=5, extra_args=None)
        of_server(place, model="cool", sampling_params=sampling, is_sampling_param_provided=given.__contains__)
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == wanted
        assert not hasattr(sampling, "do_sample")
    sampling = SimpleNamespace(temperature=1.0, extra_args={"lora_scale": 0.5})
    of_server(place, model="cool", sampling_params=sampling, is_sampling_param_provided=lambda key: False)
    assert sampling.temperature == 1.0


def test_vllm_refuses_several_greedy_answers_that_nobody_asked_for(place):
    told = of_server(place, model="greedy", temperature=None, n=4)
    assert told.startswith("n = 4 without a temperature: greedy is recommended greedily")
    assert of_server(place, model="greedy", temperature=0.7, n=4).temperature == 0.7
    assert of_server(place, model="greedy", temperature=0.0, n=4).temperature == 0.0, "vLLM's own error"
    assert of_server(place, model="cool", temperature=None, n=4).temperature == 0.3
    assert of_server(place, model="greedy", temperature=None, n=4, use_beam_search=True).temperature == 0.0


def test_vllm_samples_a_folder_written_anew_as_it_recommends_now(place, tmp_path):
    def temperature(folder):
        request = SimpleNamespace(model="g", temperature=None)
        served = SimpleNamespace(models=SimpleNamespace(lora_requests={}))
        frontend.find_adapter(lambda *_: SimpleNamespace(lora_path=str(folder)), served, request)
        return request.temperature

    moving = tmp_path / "moving"
    for name, wanted in (("cool", 0.3), ("greedy", 0.0), ("plain", None), ("exported", 0.3)):
        shutil.rmtree(moving, ignore_errors=True)
        shutil.copytree(place / name, moving)
        assert temperature(moving) == wanted
    (moving / "generation_config.json").unlink()
    assert temperature(moving) is None


def test_vllm_warns_once(place, tmp_path, caplog):
    class Server:
        model_config = SimpleNamespace(served_model_name="base")
        errored = False
        input_processor = SimpleNamespace(lora_config=SimpleNamespace(enable_tower_connector_lora=False))

        async def add_lora(self, lora_request):
            return True

        async def generate(self, prompt, sampling_params, request_id, *, lora_request=None):
            yield SimpleNamespace(outputs=[], finished=True)

    replace_method(Server, "generate", frontend.answer)
    server = Server()
    (tmp_path / "gate_config.json").write_text("{")

    async def answered(path, temperature):
        lora = path and SimpleNamespace(lora_name="g", lora_path=str(path), lora_int_id=1)
        sampling = SimpleNamespace(temperature=temperature, output_kind=None)
        return [one async for one in server.generate("w1", sampling, "id", lora_request=lora)]

    def ask(path, temperature):
        assert len(asyncio.run(answered(path, temperature))) == 1

    ask(place / "cool", 0.3)
    for path in (None, place / "plain", place / "cool" / "adapter", f"{place / 'cool'}@unit", "owner/name"):
        ask(path, 1.0)
    with pytest.raises(ValueError, match="gate_config"):
        ask(tmp_path, 1.0)
    assert not caplog.messages
    ask(place / "cool", 1.0)
    ask(place / "cool", 0.0)
    assert [message.count("recommended at temperature 0.3") for message in caplog.messages] == [1]


def test_the_explorer_begins_there(place):
    pytest.importorskip("gradio", reason="gradio is not installed (pip install loragate[explore])")
    for name, value, says in (("cool", 0.3, True), ("plain", 1.0, False)):
        page = explorer_of(str(place / name), Loading())
        (heat,) = (one for one in page.blocks.values() if getattr(one, "label", "") == "Temperature")
        assert heat.value == value
        assert ("recommends" in (heat.info or "")) == says


@pytest.mark.parametrize(
    ("name", "asked", "controls", "tasks", "added", "words"),
    [
        ("cool", "", "none", [1.0], [0.3], "every variant is scored at that temperature as well"),
        ("greedy", "", "alone", [0.0, 1.0], [0.0], "as well"),
        ("cool", "", "none", [0.3], [], "sampling at temperature 0.3, as"),
        ("cool", "", "cheap", [1.0], [0.6, 0.3, 0.0], "as well"),
        ("greedy", "", "cheap", [0.6], [0.3, 0.0], "as well"),
        ("plain", "", "full", [0.6], [0.3, 0.0], ""),
        ("plain", "", "cheap", [0.6, 1.0], [0.6, 0.3, 0.0], ""),
        ("cool", "1", "cheap", [1.0], [], "is recommended at temperature 0.3"),
        ("cool", "0.9,1", "cheap", [1.0], [0.9], "sampling at temperature 1, but"),
        ("cool", "1,0.3", "none", [1.0], [0.3], "as well"),
        ("cool", "", "none", [], [], ""),
        ("plain", "", "none", [1.0], [], ""),
    ],
)
def test_what_an_evaluation_adds_and_says(place, name, asked, controls, tasks, added, words):
    found = resolve(place / name)
    loaded = SimpleNamespace(kind=found.kind, model_source=found, recommended_temperature=found.recommended_temperature)
    request = Request(str(place / name), place, TaskSettings(temperature=asked))
    plain = SimpleNamespace(harness=None)
    prepared = [SimpleNamespace(task=plain, sampling=SimpleNamespace(temperature=heat)) for heat in tasks]
    assert request.added_temperatures(prepared, loaded, controls) == added
    note = request.sampling_note(prepared, loaded)
    assert words in note
    assert bool(words) == bool(note)
