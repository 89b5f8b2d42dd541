"""Tests of atomic files of tensors, and of damaged, hostile and huge files."""

import json
import math
import os
import pickle
import struct
import subprocess
import sys
import zlib
from contextlib import contextmanager

import pytest
import safetensors.torch
import torch
from torch import nn

import flowbnn as fb
from flowbnn.errors import FlowBNNError
from flowbnn.training import check_writable, load_tensors, save_tensors, storage
from flowbnn.training.storage import decode_state, encode_state


@contextmanager
def refused(path=None):
    """Context manager that expects an error about a file, of one line that contains its path."""
    with pytest.raises(FlowBNNError) as caught:
        yield caught
    assert caught.value.kind == "file"
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 450
    assert path is None or str(path) in message


def raw_bytes(tensor):
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def test_all_dtypes_and_shapes_are_restored_bitwise(tmp_path):
    kinds = [
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.uint8,
        torch.bool,
    ]
    tensors = {str(kind): torch.tensor([[0, 1, 2], [3, 4, 5]]).to(kind) for kind in kinds}
    tensors |= {
        "scalar": torch.tensor(0.1, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "none": torch.zeros(0),
    }
    tensors["special"] = torch.tensor([float("nan"), float("inf"), -0.0])
    tensors["transposed"] = torch.arange(6.0).reshape(2, 3).T
    document = {
        "pi": 0.1 + 0.2,
        "nothing": None,
        "text": 'quotes " and ü',
        "list": [1, [2.5]],
        "inf": float("inf"),
    }
    loaded, stored = load_tensors(save_tensors(tmp_path / "deep" / "a.safetensors", tensors, document))
    assert stored == document
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert raw_bytes(loaded[name]) == raw_bytes(tensor)


def test_tied_weights_are_stored_once(tmp_path):
    table = torch.randn(100, 100)
    tensors = {"a": table, "b": table, "same": table.view(100, 100), "row": table[3], "flat": table.view(-1)}
    path = save_tensors(tmp_path / "a.safetensors", tensors, {})
    loaded, _ = load_tensors(path)
    assert loaded["a"] is loaded["b"] is loaded["same"]
    assert loaded["row"] is not loaded["a"]
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert path.stat().st_size < 2.2 * 4 * 100 * 100


def test_tied_modules_are_restored(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(5, 3), nn.Linear(3, 5)
            self.out.weight = self.embed.weight

    source, target = Tied(), Tied()
    path = save_tensors(tmp_path / "tied.safetensors", source.state_dict(), {})
    target.load_state_dict(load_tensors(path)[0])
    assert torch.equal(target.embed.weight, source.out.weight)
    assert target.out.weight is target.embed.weight


@pytest.mark.parametrize("fraction", [0.0, 0.02, 0.3, 0.7, 0.999])
def test_truncated_files_are_refused(tmp_path, fraction):
    path = save_tensors(tmp_path / "a.safetensors", {"x": torch.randn(50)}, {"epoch": 1})
    content = path.read_bytes()
    path.write_bytes(content[: int(fraction * len(content))])
    with refused(path):
        load_tensors(path)


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def header(text):
    raw = json.dumps({"__metadata__": {"flowbnn": text}}).encode()
    return struct.pack("<Q", len(raw)) + raw


FORMAT = storage.TensorFile.format
HOSTILE = {
    "zip pickle": None,  # a file of torch.save
    "pickle": pickle.dumps(Bomb()),
    "old pickle": pickle.dumps(Bomb(), protocol=0),
    "absurd length": struct.pack("<Q", 2**62) + b"{}",
    "large length": struct.pack("<Q", 10**9) + b"{}" * 100,
    "no json": struct.pack("<Q", 8) + b"not json",
    "text": b"hello, this is a text file of a certain length",
    "offsets": struct.pack("<Q", 57)
    + b'{"x":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}  '
    + b"0" * 4,
    "document no json": header("not json"),
    "document a list": header("[1, 2]"),
    "no checksum": header(f'{{"format": {FORMAT}, "content": "{{}}"}}'),
    "no content": header(f'{{"format": {FORMAT}, "checksum": 0}}'),
    "deep": header("[" * 200_000),
    "newer": header('{"format": 99, "aliases": {}, "document": {}}'),
    "foreign": safetensors.torch.save({"x": torch.ones(2)}),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files_are_refused(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    content = HOSTILE[kind]
    path = tmp_path / "a.safetensors"
    if content is None:
        torch.save({"x": torch.ones(2)}, path)
    else:
        path.write_bytes(content)
    with refused(path):
        load_tensors(path)
    assert not (tmp_path / "exploded").exists()


def test_missing_files_and_folders_are_refused(tmp_path):
    for path in (tmp_path / "none.safetensors", tmp_path):
        with refused(path):
            load_tensors(path)


@pytest.mark.parametrize("function", ["save_file", "replace", "fsync"])
def test_failed_writes_keep_the_old_file(tmp_path, monkeypatch, function):
    path = save_tensors(tmp_path / "a.safetensors", {"x": torch.ones(2)}, {"epoch": 1})

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    if function == "save_file":
        monkeypatch.setattr(storage, "save_file", fail)
    else:
        monkeypatch.setattr(os, function, fail)
    with refused(path) as caught:
        save_tensors(path, {"x": torch.zeros(2)}, {"epoch": 2})
    assert "No space left" in str(caught.value)
    monkeypatch.undo()
    tensors, document = load_tensors(path)
    assert tensors["x"].tolist() == [1.0, 1.0]
    assert document == {"epoch": 1}
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_values_that_cannot_be_stored_are_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    schedule = encode_state({"schedule": {"function": print}}, "run", {})
    for tensors, document in (({}, {"x": object()}), ({"x": torch.eye(2).to_sparse()}, {}), ({}, schedule)):
        with refused(path):
            save_tensors(path, tensors, document)
    assert os.listdir(tmp_path) == []


def test_unwritable_paths_are_refused(tmp_path):
    (tmp_path / "file").write_text("a file instead of a folder")
    (tmp_path / "folder.safetensors").mkdir()
    with refused(tmp_path / "file"):
        check_writable(tmp_path / "file" / "last.safetensors")
    with refused(tmp_path / "folder.safetensors"):
        check_writable(tmp_path / "folder.safetensors")
    check_writable(tmp_path / "a.safetensors")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder.safetensors"]


def test_only_files_of_dead_processes_are_removed(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    machine, path = storage._machine_id(), tmp_path / "a.safetensors"
    other = f"{int(machine, 16) ^ 1:08x}"
    foreign = [f".a.safetensors.{machine}-{os.getppid()}-0.part", f".a.safetensors.{other}-{dead.pid}-0.part"]
    for name in (*foreign, f".a.safetensors.{machine}-{dead.pid}-0.part"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("half of a checkpoint")
    check_writable(path)
    assert sorted(os.listdir(tmp_path)) == sorted(foreign)


@pytest.mark.parametrize("exists", [True, False])
def test_links_are_kept_and_their_target_is_written(tmp_path, exists):
    (tmp_path / "disk").mkdir()
    target, link = tmp_path / "disk" / "real.safetensors", tmp_path / "a.safetensors"
    if exists:
        save_tensors(target, {"x": torch.zeros(1)}, {})
    link.symlink_to("disk/real.safetensors")
    check_writable(link)
    save_tensors(link, {"x": torch.ones(1)}, {})
    assert link.is_symlink()
    assert load_tensors(target)[0]["x"].item() == 1.0
    assert os.listdir(tmp_path / "disk") == ["real.safetensors"]


def test_pipes_and_devices_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        for function in (load_tensors, check_writable, lambda path: save_tensors(path, {}, {})):
            with refused(path):
                function(path)
    assert not os.path.isfile("/dev/zero")


def sparse(path, tensors, document):
    """Writes a file with zeros of the given shapes that takes no space on the disk."""
    start, entries = 0, {}
    for name, shape in tensors.items():
        stop = start + 4 * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    content = json.dumps({"aliases": {}, "document": document})
    document_checksum = zlib.crc32(content.encode())
    header = {"format": FORMAT, "document_checksum": document_checksum, "checksum": 0, "content": content}
    text = json.dumps(header)
    raw = json.dumps({"__metadata__": {"flowbnn": text}, **entries}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + start)


@pytest.mark.parametrize("width", [2, 2**9])
@pytest.mark.parametrize("name", ["network.weight", "network.other", "posterior.other"])
def test_huge_files_are_refused_before_their_tensors_are_read(tmp_path, monkeypatch, name, width):
    network, path = nn.Linear(width, width), tmp_path / "a.safetensors"
    fit = fb.MLE(epochs=1).fit(network, [(torch.zeros(2, width), torch.zeros(2, width))], progress=False)
    shapes = {key: tuple(value.shape) for key, value in fit.tensors().items()} | {name: (2**30,)}
    listed = {key: ["float32", *shape] for key, shape in shapes.items()}
    sparse(path, shapes, {**fit.document(), "tensors": listed})
    monkeypatch.setattr(storage.TensorFile, "tensors", property(lambda self: pytest.fail("it was read")))
    with pytest.raises(FlowBNNError) as caught:
        fb.load_posterior(path, network)
    assert caught.value.kind in ("file", "architecture")
    assert "a.safetensors" in str(caught.value)


@pytest.mark.parametrize("kind", ["chains", "noise-chains", "members"])
def test_posteriors_without_networks_are_refused(tmp_path, kind):
    network, path = nn.Linear(2, 2), tmp_path / "a.safetensors"
    fit = fb.MLE(epochs=1).fit(network, [(torch.zeros(2, 2), torch.zeros(2, 2))], progress=False)
    tensors, document = load_tensors(fit.save(path))
    save_tensors(path, tensors, {**document, "kind": kind})
    with pytest.raises(FlowBNNError) as caught:
        fb.load_posterior(path, network)
    assert caught.value.kind == "file"
    assert "members must be one or more" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_too_many_names_are_refused(tmp_path):
    sparse(tmp_path / "a.safetensors", {str(number): (0,) for number in range(100_001)}, {})
    with refused(tmp_path / "a.safetensors"):
        load_tensors(tmp_path / "a.safetensors")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folders_without_permission_are_refused(tmp_path):
    tmp_path.chmod(0o500)
    with refused(tmp_path) as caught:
        check_writable(tmp_path / "a.safetensors")
    assert "Permission denied" in str(caught.value)


def test_nested_states_keep_their_types():
    schedule_parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([schedule_parameter], lr=1.0)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
    value = {
        "milestones": schedule.state_dict()["milestones"],
        1: (1, [2.0, None], {"a": True}),
        "__kind__": "a user's own word",
        "inner": {"x": torch.arange(3)},
    }
    tensors = {}
    tree = json.loads(json.dumps(encode_state(value, "s", tensors)))
    decoded = decode_state(tree, tensors)
    assert list(tensors) == ["s/inner/x"]
    assert torch.equal(decoded["inner"].pop("x"), value["inner"].pop("x"))
    assert decoded == value
    assert type(decoded["milestones"]) is type(value["milestones"])
    assert isinstance(decoded[1], tuple)


@pytest.mark.parametrize("chunk", [5, 2**24])
def test_checksum_detects_a_flipped_bit(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(storage.TensorFile, "chunk_bytes", chunk)
    tensors = {
        "weight": torch.randn(40, 3),
        "half": torch.randn(7).bfloat16(),
        "flag": torch.tensor(True),
        "none": torch.empty(0, 4),
        "complex": torch.randn(3, dtype=torch.complex64),
    }
    path = save_tensors(tmp_path / "a.safetensors", tensors, {"epoch": 3})
    content = path.read_bytes()
    assert torch.equal(load_tensors(path)[0]["weight"], tensors["weight"])
    for name in ("weight", "half", "flag", "complex"):
        changed = bytearray(content)
        changed[content.rindex(raw_bytes(tensors[name]))] ^= 1
        path.write_bytes(changed)
        with refused(path):
            load_tensors(path)
    offset = content.index(b"epoch")
    path.write_bytes(content[:offset] + b"Epoch" + content[offset + 5 :])
    with refused(path):
        load_tensors(path)


def test_files_replaced_during_opening_are_opened_again(tmp_path, monkeypatch):
    path, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_tensors(path, {"a": torch.zeros(3)}, {"number": 1})
    save_tensors(other, {"a": torch.ones(3)}, {"number": 2})
    safe_open = storage.safe_open

    def open_and_replace(name, **options):
        file = safe_open(name, **options)
        if other.exists():
            other.replace(path)
        return file

    monkeypatch.setattr(storage, "safe_open", open_and_replace)
    tensors, document = load_tensors(path)
    assert document == {"number": 2}
    assert torch.equal(tensors["a"], torch.ones(3))


def test_files_replaced_during_reading_are_read_from_memory(tmp_path, monkeypatch):
    path, identity = save_tensors(tmp_path / "a.safetensors", {"x": torch.ones(3)}, {}), storage._identity

    def identify_and_replace(file):
        result = identity(file)
        save_tensors(path, {"x": torch.zeros(3)}, {})
        return result

    file = storage.TensorFile(path)
    monkeypatch.setattr(storage, "_identity", identify_and_replace)
    assert file.tensors["x"].tolist() == [1.0, 1.0, 1.0]
    assert load_tensors(path)[0]["x"].tolist() == [0.0, 0.0, 0.0]


def test_sparse_tensors_are_refused_by_name(tmp_path):
    with pytest.raises(FlowBNNError) as caught:
        save_tensors(
            tmp_path / "a.safetensors", {"w": torch.ones(2), "adjacency": torch.eye(3).to_sparse()}, {}
        )
    assert (caught.value.kind, caught.value.fields["tensor"]) == ("file", "adjacency")
    assert not (tmp_path / "a.safetensors").exists()
