"""`ebbflow.export` and `ebbflow.initial`: what other programs read, and where a model begins."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import needs

torch = needs("torch")

import ebbflow  # noqa: E402
from ebbflow import errors, export, initial  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

LOSS = nn.CrossEntropyLoss()


def network(seed: int = 7) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3)
    )


def data() -> TensorDataset:
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long())


def trained(model: Any, **options: Any) -> ebbflow.Session:
    tensors = [tensor for tensor in model.parameters() if tensor.requires_grad]
    optimizer = torch.optim.Adam(tensors, lr=0.01)
    with ebbflow.join(model, optimizer, data(), micro=8, epochs=2, **options) as job:
        for epoch in job.epochs():
            for x, y in epoch:
                job.step(LOSS(model(x), y))
    return job


def outputs(model: Any, x: Any) -> Any:
    training = model.training
    model.eval()
    with torch.no_grad():
        found = model(x)
    model.train(training)
    return found


def test_a_trained_model_computes_the_same_as_onnx(tmp_path: Path) -> None:
    onnxruntime = needs("onnxruntime", "onnx", "onnxscript")
    model = network()
    trained(model)
    x, _ = data().tensors
    path = export.onnx(model, x[:2], tmp_path / "of/model.onnx")
    assert model.training, "it is as it was"
    runner = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (found,) = runner.run(None, {runner.get_inputs()[0].name: x.numpy()})
    assert found == pytest.approx(outputs(model, x).numpy(), abs=1e-5)
    assert [path.name for path in path.parent.iterdir()] == ["model.onnx"]


class Two(nn.Module):  # type: ignore[misc]
    """Adds two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(4, 4)

    def forward(self, one: Any, other: Any) -> Any:
        return self.part(one) - other


def test_several_inputs_are_given_by_position_or_by_name(tmp_path: Path) -> None:
    onnxruntime = needs("onnxruntime", "onnx", "onnxscript")
    model = Two()
    one, other = torch.randn(3, 4), torch.randn(3, 4)
    for inputs in ((one, other), {"other": other, "one": one}):
        path = export.onnx(model, inputs, tmp_path / "model.onnx")
        runner = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        (found,) = runner.run(None, {"one": one.numpy(), "other": other.numpy()})
        assert found == pytest.approx(model(one, other).detach().numpy(), abs=1e-5)
    with pytest.raises(TypeError, match="expected a tensor, a tuple of tensors"):
        export.onnx(model, [1.0], tmp_path / "model.onnx")


class Noisy(nn.Module):  # type: ignore[misc]
    """Computes another thing in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        return self.part(x) + torch.rand(())


def test_an_onnx_file_with_other_outputs_is_refused(tmp_path: Path) -> None:
    needs("onnxruntime", "onnx", "onnxscript")
    path = tmp_path / "model.onnx"
    path.write_text("the file of before")
    with pytest.raises(errors.ExportError, match="output 0 of the ONNX file differs by"):
        export.onnx(Noisy(), torch.zeros(2, 6), path)
    assert path.read_text() == "the file of before"
    assert list(tmp_path.iterdir()) == [path]


def test_without_its_packages_onnx_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"`onnx`: pip install 'ebbflow\[onnx\]'"):
        export.onnx(network(), torch.zeros(2, 6), tmp_path / "model.onnx")


def test_a_trained_model_computes_the_same_as_torchscript(tmp_path: Path) -> None:
    model = network()
    trained(model)
    x, _ = data().tensors
    for inputs in (None, x[:2]):
        loaded = torch.jit.load(str(export.torchscript(model, tmp_path / "model.pt", inputs)))
        assert torch.equal(outputs(loaded, x), outputs(model, x))
        assert not loaded.training and model.training
    with pytest.raises(errors.ExportError, match="torch cannot script; pass inputs to trace it"):
        export.torchscript(Unscriptable(), tmp_path / "no.pt")


class Unscriptable(nn.Module):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        return [*x.shape, x.__class__.__mro__]


def test_names_of_weights_are_those_of_the_module_that_was_compiled(tmp_path: Path) -> None:
    model = network()
    compiled = torch.compile(model, backend="aot_eager", dynamic=False)
    saved = torch.load(export.state_dict(compiled, tmp_path / "model.pt"), weights_only=True)
    assert saved.keys() == model.state_dict().keys()
    assert torch.jit.load(str(export.torchscript(compiled, tmp_path / "script.pt"))) is not None


def saved_files(model: Any, folder: Path) -> list[Path]:
    """Return files and folders with the weights of a model, in every form that is read."""
    folder.mkdir(exist_ok=True)
    export.state_dict(model, folder / "plain.pt")
    torch.save({"state_dict": model.state_dict(), "epoch": 3}, folder / "below.pt")
    export.pretrained(model, folder / "whole", {"model_type": "mine"})
    parts = folder / "parts"
    parts.mkdir()
    weights = dict(model.state_dict())
    halves = {"a.bin": dict(list(weights.items())[:3]), "b.bin": dict(list(weights.items())[3:])}
    for name, half in halves.items():
        torch.save(half, parts / name)
    index = {"weight_map": {name: part for part, half in halves.items() for name in half}}
    (parts / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    whole = folder / "whole"
    return [folder / "plain.pt", folder / "below.pt", whole, whole / "model.safetensors", parts]


# S2-40
def test_a_job_begins_with_saved_weights_whatever_the_file(tmp_path: Path) -> None:
    first = network()
    trained(first)
    expected = trained(network_of(first)).model_sha256
    assert expected != trained(network()).model_sha256
    for source in saved_files(first, tmp_path / "saved"):
        model = network(8)
        assert len(initial.load(model, source)) == len(first.state_dict()), source
        assert trained(model).model_sha256 == expected, source


def network_of(other: Any) -> Any:
    model = network(8)
    model.load_state_dict(other.state_dict())
    return model


# S2-40
def test_a_frozen_part_keeps_its_saved_weights(tmp_path: Path) -> None:
    first = network()
    path = export.state_dict(first, tmp_path / "model.pt")
    model = network(8)
    initial.load(model, path)
    model[0].requires_grad_(False)
    trained(model)
    assert torch.equal(model[0].weight, first[0].weight)
    assert not torch.equal(model[4].weight, first[4].weight)


def test_weights_that_do_not_fit_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = export.state_dict(network(), tmp_path / "model.pt")
    other = network(8)
    other[4] = nn.Linear(16, 5)
    other.append(nn.Linear(5, 5))
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(ValueError, match=r"4\.weight \(3, 16\) instead of \(5, 16\)"):
        initial.load(other, path)
    after = other.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    with caplog.at_level(logging.WARNING, "ebbflow"):
        found = initial.load(other, path, strict=False)
    assert "0.weight" in found and "4.weight" not in found
    assert "not in the file: 5.weight, 5.bias" in caplog.text
    assert torch.equal(other[0].weight, network()[0].weight)
    with pytest.raises(ValueError, match="no tensor fits"):
        initial.load(nn.Linear(2, 2), path, strict=False)


def test_files_without_weights_are_named(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"name": "x"}, tmp_path / "text.pt")
    (tmp_path / "broken.pt").write_bytes(b"no weights")
    (tmp_path / "broken.safetensors").write_bytes(b"no weights")
    (tmp_path / "empty").mkdir()
    for name, expected in [
        ("none.pt", "No such file"),
        ("list.pt", "expected a state_dict, found list"),
        ("text.pt", "`name` is str and no tensor"),
        ("broken.pt", "no file of weights alone"),
        ("broken.safetensors", "no safetensors file"),
        ("empty", "a folder with weights has one of model.safetensors"),
    ]:
        with pytest.raises(errors.OutputError, match=expected):
            initial.load(network(), tmp_path / name)


def test_a_result_becomes_a_folder_with_the_settings_of_another_one(tmp_path: Path) -> None:
    job = str(Path(__file__).parents[2] / "examples/digits/job.toml")
    result = ebbflow.run(job, changes={"epochs": 1})
    before = tmp_path / "before"
    before.mkdir()
    (before / "config.json").write_text('{"model_type": "mine"}')
    (before / "tokenizer.json").write_text("{}")
    (before / "notes.txt").write_text("mine")
    folder = export.pretrained(result, tmp_path / "after", before)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    found, expected = initial.read(folder), result.state_dict("torch")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    with pytest.raises(TypeError, match="Result has no configuration of its own"):
        export.pretrained(result, tmp_path / "other")
    with pytest.raises(errors.OutputError, match=r"it has no config\.json"):
        export.pretrained(result, tmp_path / "other", tmp_path / "after/..")


def bert(transformers: Any) -> Any:
    torch.manual_seed(7)
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        num_labels=2,
    )
    return transformers.BertForSequenceClassification(config)


@pytest.mark.parametrize("settings", ["own", "given"])
def test_a_model_of_transformers_is_read_by_from_pretrained(tmp_path: Path, settings: str) -> None:
    transformers = needs("transformers")
    words = torch.randint(40, (24, 8), generator=torch.Generator().manual_seed(3))
    source = TensorDataset(words, (words[:, 0] > 20).long())
    model = bert(transformers)
    model.bert.embeddings.requires_grad_(False)
    tensors = [tensor for tensor in model.parameters() if tensor.requires_grad]
    optimizer = torch.optim.AdamW(tensors, lr=1e-3)
    with ebbflow.join(model, optimizer, source, micro=8, epochs=1) as job:
        for epoch in job.epochs():
            for x, y in epoch:
                job.step(model(input_ids=x, labels=y).loss)
    given = None if settings == "own" else model.config
    folder = export.pretrained(model, tmp_path / "model", given)
    kind = transformers.AutoModelForSequenceClassification
    loaded = kind.from_pretrained(folder, local_files_only=True)
    read: Callable[[Any], Any] = lambda model: outputs(model, words).logits  # noqa: E731
    assert torch.equal(read(loaded), read(model))
    fresh = bert(transformers)
    assert not torch.equal(read(fresh), read(model))
    assert "classifier.weight" in initial.load(fresh, folder)
    assert torch.equal(read(fresh), read(model))
