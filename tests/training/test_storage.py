"""Files that appear whole or not at all, and files that are not what they say."""

import json
import math
import os
import pickle
import struct
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from torch import nn

import flowbnn as fb
from flowbnn.errors import FlowBNNError
from flowbnn.training import check_writable, load_tensors, save_tensors, storage
from flowbnn.training.storage import decode_state, encode_state


def one_line(caught, *words):
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 450
    for word in words:
        assert word in text


def raw_bytes(tensor):
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def test_every_dtype_and_shape_comes_back_to_the_bit(tmp_path):
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


def test_tied_weights_are_stored_once_and_views_apart(tmp_path):
    table = torch.randn(100, 100)
    tensors = {"a": table, "b": table, "same": table.view(100, 100), "row": table[3], "flat": table.view(-1)}
    path = save_tensors(tmp_path / "a.safetensors", tensors, {})
    loaded, _ = load_tensors(path)
    assert loaded["a"] is loaded["b"] is loaded["same"]
    assert loaded["row"] is not loaded["a"]
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert path.stat().st_size < 2.2 * 4 * 100 * 100


def test_tied_module_round_trips(tmp_path):
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


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.7, 0.999])
def test_a_file_cut_short(tmp_path, share):
    path = save_tensors(tmp_path / "a.safetensors", {"x": torch.randn(50)}, {"epoch": 1})
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(FlowBNNError) as caught:
        load_tensors(path)
    one_line(caught, "a.safetensors", "cut short")


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def header(text):
    raw = json.dumps({"__metadata__": {"flowbnn": text}}).encode()
    return struct.pack("<Q", len(raw)) + raw


HOSTILE = {
    "zip pickle": (None, "pickle"),
    "pickle": (pickle.dumps(Bomb()), "no safetensors"),
    "old pickle": (pickle.dumps(Bomb(), protocol=0), "no safetensors"),
    "absurd length": (struct.pack("<Q", 2**62) + b"{}", "no safetensors"),
    "large length": (struct.pack("<Q", 10**9) + b"{}" * 100, "no safetensors"),
    "no json": (struct.pack("<Q", 8) + b"not json", "no safetensors"),
    "text": (b"hello, I am a text file of some length", "no safetensors"),
    "offsets": (
        struct.pack("<Q", 57) + b'{"x":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}  ' + b"0" * 4,
        "no safetensors",
    ),
    "document no json": (header("not json"), "damaged"),
    "document a list": (header("[1, 2]"), "damaged"),
    "no checksum": (header('{"format": 3, "content": "{}"}'), "damaged"),
    "no content": (header('{"format": 3, "checksum": 0}'), "damaged"),
    "deep": (header("[" * 200_000), "damaged"),
    "newer": (header('{"format": 99, "aliases": {}, "document": {}}'), "format 99"),
    "foreign": (safetensors.torch.save({"x": torch.ones(2)}), "did not write"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    content, word = HOSTILE[kind]
    path = tmp_path / "a.safetensors"
    if content is None:
        torch.save({"x": torch.ones(2)}, path)
    else:
        path.write_bytes(content)
    with pytest.raises(FlowBNNError) as caught:
        load_tensors(path)
    one_line(caught, "a.safetensors", word)
    assert not (tmp_path / "exploded").exists()


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(FlowBNNError) as caught:
        load_tensors(tmp_path / "none.safetensors")
    one_line(caught, "there is no file")
    with pytest.raises(FlowBNNError) as caught:
        load_tensors(tmp_path)
    one_line(caught, str(tmp_path))


@pytest.mark.parametrize("culprit", ["save_file", "replace", "fsync"])
def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch, culprit):
    path = save_tensors(tmp_path / "a.safetensors", {"x": torch.ones(2)}, {"epoch": 1})

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    if culprit == "save_file":
        monkeypatch.setattr(storage, "save_file", fail)
    else:
        monkeypatch.setattr(os, culprit, fail)
    with pytest.raises(FlowBNNError) as caught:
        save_tensors(path, {"x": torch.zeros(2)}, {"epoch": 2})
    one_line(caught, "No space left", "kept")
    monkeypatch.undo()
    tensors, document = load_tensors(path)
    assert tensors["x"].tolist() == [1.0, 1.0]
    assert document == {"epoch": 1}
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_what_cannot_be_stored(tmp_path):
    with pytest.raises(FlowBNNError) as caught:
        save_tensors(tmp_path / "a.safetensors", {}, {"x": object()})
    one_line(caught, "JSON")
    with pytest.raises(FlowBNNError) as caught:
        save_tensors(tmp_path / "a.safetensors", {"x": torch.eye(2).to_sparse()}, {})
    one_line(caught, "a.safetensors", "cannot write")
    with pytest.raises(FlowBNNError) as caught:
        save_tensors(
            tmp_path / "a.safetensors", {}, encode_state({"schedule": {"function": print}}, "run", {})
        )
    one_line(caught, "function")
    assert os.listdir(tmp_path) == []


def test_unwritable_places(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(FlowBNNError) as caught:
        check_writable(tmp_path / "file" / "last.safetensors")
    one_line(caught, "cannot write in folder")
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(FlowBNNError) as caught:
        check_writable(tmp_path / "folder.safetensors")
    one_line(caught, "is a folder")
    check_writable(tmp_path / "a.safetensors")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder.safetensors"]


def test_only_what_nobody_writes_any_more_is_cleared(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    here, path = storage._this_machine(), tmp_path / "a.safetensors"
    elsewhere = f"{int(here, 16) ^ 1:08x}"
    kept = [f".a.safetensors.{here}-{os.getppid()}-0.part", f".a.safetensors.{elsewhere}-{ended.pid}-0.part"]
    for name in (*kept, f".a.safetensors.{here}-{ended.pid}-0.part"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("half of a checkpoint")
    check_writable(path)
    assert sorted(os.listdir(tmp_path)) == sorted(kept)


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_a_link_and_its_target_is_written(tmp_path, there):
    (tmp_path / "disk").mkdir()
    target, link = tmp_path / "disk" / "real.safetensors", tmp_path / "a.safetensors"
    if there:
        save_tensors(target, {"x": torch.zeros(1)}, {})
    link.symlink_to("disk/real.safetensors")
    check_writable(link)
    save_tensors(link, {"x": torch.ones(1)}, {})
    assert link.is_symlink()
    assert load_tensors(target)[0]["x"].item() == 1.0
    assert os.listdir(tmp_path / "disk") == ["real.safetensors"]


def test_pipes_and_devices_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        for act in (load_tensors, check_writable, lambda path: save_tensors(path, {}, {})):
            with pytest.raises(FlowBNNError) as caught:
                act(path)
            one_line(caught, "device")
    assert not os.path.isfile("/dev/zero")


def sparse(path, tensors, document):
    """A file that says it holds zeros of these shapes, and takes no room on the disk."""
    place, entries = 0, {}
    for name, shape in tensors.items():
        stop = place + 4 * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [place, stop]}
        place = stop
    content = json.dumps({"aliases": {}, "document": document})
    text = json.dumps({"format": storage.FORMAT, "checksum": 0, "content": content})
    raw = json.dumps({"__metadata__": {"flowbnn": text}, **entries}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + place)


@pytest.mark.parametrize("width", [2, 2**9])
@pytest.mark.parametrize("name", ["network.weight", "network.other", "posterior.other"])
def test_a_huge_file_is_refused_before_its_tensors_are_read(tmp_path, monkeypatch, name, width):
    network, path = nn.Linear(width, width), tmp_path / "a.safetensors"
    fit = fb.MLE(epochs=1).fit(network, [(torch.zeros(2, width), torch.zeros(2, width))], progress=False)
    shapes = {one: tuple(value.shape) for one, value in fit.tensors().items()}
    sparse(path, {**shapes, name: (2**30,)}, fit.document())
    monkeypatch.setattr(storage.TensorFile, "tensors", property(lambda self: pytest.fail("it was read")))
    with pytest.raises(FlowBNNError) as caught:
        fb.load_posterior(path, network)
    one_line(caught, "a.safetensors")


@pytest.mark.parametrize("kind", ["chains", "noise-chains", "members"])
def test_a_list_of_no_networks_is_refused(tmp_path, kind):
    network, path = nn.Linear(2, 2), tmp_path / "a.safetensors"
    fit = fb.MLE(epochs=1).fit(network, [(torch.zeros(2, 2), torch.zeros(2, 2))], progress=False)
    save_tensors(path, fit.tensors(), {**fit.document(), "kind": kind})
    with pytest.raises(FlowBNNError) as caught:
        fb.load_posterior(path, network)
    one_line(caught, "at least one, of every weight")


def test_too_many_names_are_refused_at_once(tmp_path):
    sparse(tmp_path / "a.safetensors", {str(number): (0,) for number in range(100_001)}, {})
    with pytest.raises(FlowBNNError) as caught:
        load_tensors(tmp_path / "a.safetensors")
    one_line(caught, "more than 100,000 tensors")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(FlowBNNError) as caught:
        check_writable(tmp_path / "a.safetensors")
    one_line(caught, "Permission denied")


def test_nested_state_keeps_its_types():
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
    back = decode_state(tree, tensors)
    assert list(tensors) == ["s/inner/x"]
    assert torch.equal(back["inner"].pop("x"), value["inner"].pop("x"))
    assert back == value
    assert type(back["milestones"]) is type(value["milestones"])
    assert isinstance(back[1], tuple)


@pytest.mark.parametrize("piece", [5, 2**24])
def test_a_flipped_bit_is_noticed_by_one_checksum(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(storage, "PIECE", piece)  # bytes are checked in pieces from the disk
    tensors = {
        "weight": torch.randn(40, 3),
        "half": torch.randn(7).bfloat16(),
        "flag": torch.tensor(True),
        "none": torch.empty(0, 4),
        "complex": torch.randn(3, dtype=torch.complex64),
    }
    path = save_tensors(tmp_path / "a.safetensors", tensors, {"epoch": 3})
    whole = path.read_bytes()
    assert torch.equal(load_tensors(path)[0]["weight"], tensors["weight"])
    for name in ("weight", "half", "flag", "complex"):
        where = whole.rindex(raw_bytes(tensors[name]))
        spoilt = bytearray(whole)
        spoilt[where] ^= 1
        path.write_bytes(spoilt)
        with pytest.raises(FlowBNNError) as caught:
            load_tensors(path)
        one_line(caught, "is damaged: its bytes")
    where = whole.index(b"epoch")
    path.write_bytes(whole[:where] + b"Epoch" + whole[where + 5 :])
    with pytest.raises(FlowBNNError) as caught:
        load_tensors(path)
    one_line(caught, "is damaged")


def test_a_file_that_is_replaced_while_it_is_opened_is_opened_anew(tmp_path, monkeypatch):
    path, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_tensors(path, {"a": torch.zeros(3)}, {"number": 1})
    save_tensors(other, {"a": torch.ones(3)}, {"number": 2})
    opened = storage.safe_open

    def replacing(name, **options):
        file = opened(name, **options)
        if other.exists():
            other.replace(path)
        return file

    monkeypatch.setattr(storage, "safe_open", replacing)
    tensors, document = load_tensors(path)
    assert document == {"number": 2}
    assert torch.equal(tensors["a"], torch.ones(3))


def test_a_file_that_takes_the_name_meanwhile_spoils_nothing(tmp_path, monkeypatch):
    path, identity = save_tensors(tmp_path / "a.safetensors", {"x": torch.ones(3)}, {}), storage._identity

    def replaced(file):
        found = identity(file)
        save_tensors(path, {"x": torch.zeros(3)}, {})
        return found

    file = storage.TensorFile(path)
    monkeypatch.setattr(storage, "_identity", replaced)  # between the look at the file and its reading
    assert file.tensors["x"].tolist() == [1.0, 1.0, 1.0]
    assert load_tensors(path)[0]["x"].tolist() == [0.0, 0.0, 0.0]
