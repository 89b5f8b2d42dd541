"""Checkpoints that are damaged, hostile or of another run: one line, and nothing is changed."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from flowbnn.errors import FlowBNNError
from flowbnn.training import EarlyStop, TrainingOptions, load_tensors, load_weights, save_tensors, train


def step(model, batch, clock):
    loss = (model(batch[0]) - batch[1]).square().mean()
    return loss, {"log_likelihood": -loss}


def batches(count=4):
    source = torch.Generator().manual_seed(2)
    inputs = [torch.randn(3, 2, generator=source) for _ in range(count)]
    return [(x, x[:, :1]) for x in inputs]


def make(kind=torch.optim.Adam, schedule=None, **settings):
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.3), nn.Linear(3, 1))
    outside = nn.Parameter(torch.zeros(2))
    groups = [{"params": network.parameters()}, {"params": [outside], "lr": 0.02}]
    optimizer = kind(groups, **({"lr": 0.01} | settings))
    return network, optimizer, None if schedule is None else schedule(optimizer)


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def run(made, folder, loader=None, validate=None, step=step, **options):
    network, optimizer, schedule = made
    asked = {"epochs": 2, "checkpoint": folder, "accelerator": "cpu", "seed": 4} | options
    data = batches() if loader is None else loader
    settings = TrainingOptions(**asked)
    return train(network, step, optimizer, data, settings, schedule=schedule, validate=validate)


def snapshot(made):
    network, optimizer, schedule = made
    tensors = [
        parameter.detach().clone() for group in optimizer.param_groups for parameter in group["params"]
    ]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return (
        tensors + [value.clone() for value in network.state_dict().values()],
        repr((groups, dict(optimizer.state), None if schedule is None else schedule.state_dict())),
    )


def refused(folder, made, *words, **options):
    """The one line that a resumed run gives; the model, the optimizer and the schedule stay as they are."""
    before = snapshot(made)
    random = torch.get_rng_state()
    with pytest.raises(FlowBNNError) as caught:
        run(made, folder, **({"resume": True, "epochs": 3} | options))
    text, after = str(caught.value), snapshot(made)
    assert "\n" not in text
    assert len(text) < 500
    for word in (*words, "last.safetensors"):
        assert word in text, text
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    assert before[1] == after[1]
    assert torch.equal(random, torch.get_rng_state())
    return text


def stop_at(number):
    def stopping(model, batch, clock):
        if clock.step == number:
            raise KeyboardInterrupt
        return step(model, batch, clock)

    return stopping


@pytest.fixture
def stopped(tmp_path):
    """The checkpoint of a run that was interrupted in its second epoch."""
    with pytest.raises(KeyboardInterrupt):
        run(make(schedule=halving), tmp_path, step=stop_at(6), early_stop=EarlyStop("loss"))
    return tmp_path


def edit(folder, way, value):
    """Change one place of the document; ``...`` removes it."""
    path = folder / "last.safetensors"
    tensors, document = load_tensors(path)
    *first, last = way
    place = document
    for part in first:
        place = place[part]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    save_tensors(path, tensors, document)


DAMAGE = [
    (["position", "epoch"], "x", "position.epoch"),
    (["position", "epoch"], -5, "position.epoch"),
    (["position", "epoch"], True, "position.epoch"),
    (["position", "epoch"], 2, "position.epoch is 2"),
    (["position", "batches"], 1.5, "position.batches"),
    (["position", "batches"], 0, "averages"),
    (["position", "step"], None, "position.step"),
    (["position", "step"], 1, "position.step"),
    (["position", "step"], 10**400, "position.step"),
    (["position", "best"], "q", "position.best"),
    (["position", "best"], float("nan"), "position.best"),
    (["position", "best"], None, "best"),
    (["position", "waited"], [], "position.waited"),
    (["position", "waited"], ..., "'waited'"),
    (["position", "surprise"], 1, "'surprise'"),
    (["position", "monitor"], 3, "position.monitor"),
    (["position", "mode"], None, "position.mode"),
    (["position", "batches_per_epoch"], "four", "position.batches_per_epoch"),
    (["position"], [1, 2], "position"),
    (["averages"], "none", "averages"),
    (["averages", "totals"], "none", "averages.totals"),
    (["averages", "totals", "loss"], "1.0", "averages.totals"),
    (["averages", "weights", "loss"], 0, "averages.weights"),
    (["averages", "weights", "loss"], ..., "averages"),
    (["history", "seconds"], "long", "history.seconds"),
    (["history", "seconds"], float("inf"), "history.seconds"),
    (["history", "steps"], -1, "history.steps"),
    (["history", "records"], 3, "history.records"),
    (["history", "records", 0, "loss"], None, "history.records"),
    (["history", "stopped_early"], "no", "history.stopped_early"),
    (["history", "best_epoch"], 7, "history.best_epoch"),
    (["history", "title"], "x", "'title'"),
    (["groups"], [["a"], 3], "groups"),
    (["groups"], ..., "'groups'"),
    (["optimizer"], None, "optimizer"),
    (["torch"], 2, "torch"),
    (["state"], None, "state"),
    (["state", "scaler"], {"scale": "x"}, "state.scaler"),
    (["state", "scaler"], {"scale": -1.0}, "state.scaler"),
    (["state", "random"], {}, "does not decode"),
    (["state", "random", "now"], [], "does not decode"),
    (["state", "random", "epoch_start"], {}, "random state"),
    (["state", "random", "now", "python"], ..., "random state"),
    (["state", "random", "now", "numpy", "state", "pos"], 10**6, "random state"),
    (["state", "random", "now", "numpy", "state", "pos"], -1, "random state"),
    (["state", "weights"], ..., "'weights'"),
    (["state", "weights", "outside"], ..., "weights"),
    (["state", "weights", "outside"], [], "of the optimizer alone"),
    (["state", "weights", "outside"], [3.0], "of the optimizer alone"),
    (["state", "weights", "model"], [], "weights"),
    (["state", "weights", "model", "0.weight"], 3, "0.weight"),
    (["state", "best_weights", "model"], ..., "weights"),
    (["state", "best_weights", "outside"], 5, "weights"),
    (["state", "optimizer"], [], "state.optimizer"),
    (["state", "optimizer"], {}, "Adam"),
    (["state", "optimizer", "state"], [1], "Adam"),
    (["state", "optimizer", "state", "items", 0, 0], 99, "parameter 99"),
    (["state", "optimizer", "state", "items", 0, 0], "x", "parameter 'x'"),
    (["state", "optimizer", "state", "items", 0, 1], 5, "parameter 0"),
    (["state", "optimizer", "state", "items", 0, 1, "exp_avg"], ..., "'exp_avg' of '0.weight' is missing"),
    (["state", "optimizer", "state", "items", 0, 1, "exp_avg"], 0.5, "'exp_avg' of '0.weight'"),
    (["state", "optimizer", "state", "items", 0, 1, "step"], "x", "'step' of '0.weight'"),
    (["state", "optimizer", "param_groups"], {}, "parameter groups"),
    (["state", "optimizer", "param_groups", 0], 7, "parameter group"),
    (["state", "optimizer", "param_groups", 0, "params"], [0, 0, 0, 0], "parameter group"),
    (["state", "optimizer", "param_groups", 0, "lr"], "x", "'lr'"),
    (["state", "optimizer", "param_groups", 0, "lr"], -1.0, "learning rate is -1.0"),
    (["state", "optimizer", "param_groups", 0, "lr"], float("inf"), "learning rate is inf"),
    (["state", "optimizer", "param_groups", 0, "lr"], ..., "no learning rate"),
    (["state", "optimizer", "param_groups", 0, "betas"], 3, "'betas'"),
    (["state", "optimizer", "param_groups", 0, "betas"], [0.9], "'betas'"),
    (["state", "optimizer", "param_groups", 0, "betas"], [2.0, 2.0], "stored settings"),
    (["state", "optimizer", "param_groups", 0, "amsgrad"], True, "'max_exp_avg_sq' of '0.weight' is missing"),
    (["state", "optimizer", "param_groups", 0, "eps"], None, "'eps'"),
    (["state", "schedule"], None, "StepLR"),
    (["state", "schedule", "last_epoch"], "x", "'last_epoch'"),
    (["state", "schedule", "last_epoch"], ..., "'last_epoch' is missing"),
    (["state", "schedule", "base_lrs"], [0.1], "'base_lrs'"),
    (["state", "schedule", "step"], 3, "'step'"),
    (["state", "schedule", "optimizer"], 3, "'optimizer'"),
]


@pytest.mark.parametrize(("way", "value", "word"), DAMAGE)
def test_a_damaged_document_gives_one_line_and_changes_nothing(stopped, way, value, word):
    edit(stopped, way, value)
    refused(stopped, make(schedule=halving), word, early_stop=EarlyStop("loss"))


def test_what_was_not_damaged_is_resumed_to_the_bit(stopped):
    resumed, straight = make(schedule=halving), make(schedule=halving)
    history = run(resumed, stopped, resume=True, epochs=4, early_stop=EarlyStop("loss"))
    expected = run(straight, None, epochs=4, early_stop=EarlyStop("loss"))
    assert history.records == expected.records
    assert all(torch.equal(a, b) for a, b in zip(snapshot(resumed)[0], snapshot(straight)[0], strict=True))


def change_tensor(folder, name, value):
    path = folder / "last.safetensors"
    tensors, document = load_tensors(path)
    assert name in tensors
    save_tensors(path, {**tensors, name: value}, document)


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("optimizer/state/0/exp_avg", torch.zeros(1), "'exp_avg' of '0.weight' is (1,), not (3, 2)"),
        ("optimizer/state/0/exp_avg", torch.zeros(3, 2, dtype=torch.int64), "torch.int64"),
        (
            "optimizer/state/0/exp_avg_sq",
            torch.full((3, 2), torch.nan),
            "'exp_avg_sq' of '0.weight' holds NaN",
        ),
        ("optimizer/state/4/exp_avg", torch.zeros(3), "'exp_avg' of '(not in the model)' is (3,), not (2,)"),
        ("optimizer/state/0/step", torch.zeros(2), "'step' of '0.weight' is (2,), not ()"),
        ("optimizer/state/0/step", torch.tensor(-1.0), "step count of '0.weight' is -1.0"),
        ("optimizer/state/0/step", torch.tensor(torch.inf), "step count of '0.weight' is inf"),
        ("weights/model/2.bias", torch.tensor([torch.nan]), "NaN or infinite weights in '2.bias'"),
        ("weights/outside/0", torch.tensor([0.0, torch.inf]), "NaN or infinite weights"),
        ("weights/outside/0", torch.zeros(3), "(3,) there, (2,) here"),
        ("best_weights/model/0.weight", torch.full((3, 2), -torch.inf), "weights in '0.weight'"),
        ("random/now/torch", torch.zeros(5, dtype=torch.uint8), "random state"),
    ],
)
def test_hostile_tensors_give_one_line_and_change_nothing(tmp_path, name, value, word):
    def uses_all(model, batch, clock):
        loss, logs = step(model, batch, clock)
        return loss + (made[1].param_groups[1]["params"][0] ** 2).sum(), logs

    made = make(fused=True)
    run(made, tmp_path, step=uses_all, early_stop=EarlyStop("loss"))
    change_tensor(tmp_path, name, value)
    refused(tmp_path, make(fused=True), word, early_stop=EarlyStop("loss"))


HOSTILE_SIZE = """
import sys, torch
from torch import nn
from flowbnn.errors import FlowBNNError
from flowbnn.training import TrainingOptions, load_tensors, save_tensors, train

def fit(epochs):
    model = nn.Linear(600, 600)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    options = TrainingOptions(epochs=epochs, checkpoint=sys.argv[1], resume=epochs > 1, accelerator="cpu")
    train(model, lambda m, b, c: (m(b).square().mean(), {}), optimizer, [torch.ones(2, 600)], options)

fit(1)
path = sys.argv[1] + "/last.safetensors"
tensors, document = load_tensors(path)
save_tensors(path, {**tensors, "optimizer/state/0/exp_avg": torch.zeros(1)}, document)
try:
    fit(3)
except FlowBNNError as error:
    print(error)
"""


def test_a_moment_of_the_wrong_size_does_not_end_the_process(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", HOSTILE_SIZE, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "'exp_avg' of 'weight' is (1,), not (600, 600)" in done.stdout


def test_weights_that_are_not_finite_are_not_loaded(stopped):
    model = make()[0]
    before = [value.clone() for value in model.state_dict().values()]
    change_tensor(stopped, "best_weights/model/0.bias", torch.full((3,), torch.nan))
    with pytest.raises(FlowBNNError, match="NaN or infinite weights in '0.bias'"):
        load_weights(model, stopped / "last.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.NAdam, {}),
        (torch.optim.RAdam, {}),
        (torch.optim.Adamax, {}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Adadelta, {}),
        (torch.optim.ASGD, {}),
        (torch.optim.Rprop, {}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.Adafactor, {}),
    ],
)
def test_every_optimizer_of_torch_resumes_to_the_bit(tmp_path, kind, settings):
    run(make(kind, **settings), tmp_path)
    resumed, straight = make(kind, **settings), make(kind, **settings)
    run(resumed, tmp_path, resume=True, epochs=4)
    run(straight, None, epochs=4)
    assert snapshot(resumed)[1] == snapshot(straight)[1]
    assert all(torch.equal(a, b) for a, b in zip(snapshot(resumed)[0], snapshot(straight)[0], strict=True))


class Factored(torch.optim.Optimizer):
    """An optimizer from elsewhere: its state has shapes of its own, and it counts in the group."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    rows = p.grad.reshape(p.shape[0], -1).square().mean(1)
                    state["rows"] = state.get("rows", torch.zeros_like(rows)) + rows
                    p -= group["lr"] * p.grad / (1 + state["rows"].mean() / group["count"])


def test_an_optimizer_from_elsewhere_resumes_to_the_bit(tmp_path):
    run(make(Factored), tmp_path)
    resumed, straight = make(Factored), make(Factored)
    run(resumed, tmp_path, resume=True, epochs=4)
    run(straight, None, epochs=4)
    assert snapshot(resumed)[1] == snapshot(straight)[1]


def test_a_run_resumes_on_another_kind_of_kernel(tmp_path):
    run(make(fused=True), tmp_path)
    made = make(foreach=True)
    run(made, tmp_path, resume=True, epochs=3)
    assert made[1].param_groups[0]["fused"] is None
    assert made[1].param_groups[0]["foreach"] is True


def test_another_optimizer_or_schedule_is_named(tmp_path):
    run(make(schedule=halving), tmp_path)
    refused(tmp_path, make(torch.optim.SGD, schedule=halving), "the optimizer Adam", "has SGD")
    refused(tmp_path, make(torch.optim.AdamW, schedule=halving), "the optimizer Adam", "has AdamW")
    refused(tmp_path, make(), "the learning-rate schedule StepLR", "has none")
    falling = make(schedule=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9))
    refused(tmp_path, falling, "the learning-rate schedule StepLR", "has ExponentialLR")
    network, _, _ = make()
    single = torch.optim.Adam(network.parameters())
    refused(tmp_path, (network, single, halving(single)), "other parameter groups")


def test_fewer_epochs_than_are_done(tmp_path):
    run(make(), tmp_path, epochs=3)
    refused(tmp_path, make(), "epoch 3 already and only 2 are asked for", epochs=2)
    assert run(make(), tmp_path, epochs=3, resume=True).epochs == 3


def test_fewer_epochs_than_are_begun(stopped):
    made = make(schedule=halving)
    refused(stopped, made, "epoch 2 already", epochs=1, early_stop=EarlyStop("loss"))


@pytest.mark.parametrize("count", [3, 5])
def test_another_number_of_batches(tmp_path, count):
    run(make(), tmp_path)
    words = f"written with 4 batches per epoch, this loader has {count}"
    refused(tmp_path, make(), words, loader=batches(count))


def test_another_seed_changes_nothing(tmp_path):
    run(make(), tmp_path)
    kept = (tmp_path / "last.safetensors").read_bytes()
    records = []
    for seed in (4, 5):
        (tmp_path / "last.safetensors").write_bytes(kept)
        records.append(run(make(), tmp_path, resume=True, epochs=4, seed=seed).records)
    assert records[0] == records[1]


def test_another_rule_for_stopping_early(stopped):
    made = make(schedule=halving)
    words = ("watched 'loss' (min)", "watches 'log_likelihood' (max)")
    refused(stopped, made, *words, early_stop=EarlyStop("log_likelihood", mode="max"))
    # without a rule the run goes on, and ends with its last weights, not with the best of the first epoch
    history = run(made, stopped, resume=True, epochs=3)
    straight = make(schedule=halving)
    run(straight, None, epochs=3)
    assert history.best_epoch is None
    assert all(torch.equal(a, b) for a, b in zip(snapshot(made)[0], snapshot(straight)[0], strict=True))


def test_more_patience_lets_a_stopped_run_go_on(tmp_path):
    def validate(model):
        return {"nll": 1.0}

    stopped = run(make(), tmp_path, epochs=9, early_stop=EarlyStop(patience=2), validate=validate)
    assert (stopped.epochs, stopped.stopped_early) == (3, True)
    again = run(make(), tmp_path, epochs=9, resume=True, early_stop=EarlyStop(patience=4), validate=validate)
    assert (again.epochs, again.stopped_early, again.best_epoch) == (5, True, 0)


def test_a_schedule_that_is_too_short(tmp_path):
    def cycle(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)

    run(make(schedule=cycle), tmp_path)
    with pytest.raises(FlowBNNError, match="OneCycleLR goes no further .* all 4 epochs") as caught:
        run(make(schedule=cycle), tmp_path, resume=True, epochs=4)
    assert "\n" not in str(caught.value)


def test_a_rule_that_watches_validation_needs_one():
    def never(model, batch, clock):
        raise AssertionError("training began")

    with pytest.raises(FlowBNNError, match="watches 'validation_nll', but this run has no validation"):
        run(make(), None, step=never, early_stop=EarlyStop())


@pytest.mark.parametrize("every", [None, 3])
@pytest.mark.parametrize("fault", ["raises", "no mapping", "no number", "monitor"])
def test_an_epoch_whose_validation_fails_is_not_lost(tmp_path, every, fault):
    failing = {"left": 1}

    def validate(model):
        value = torch.rand(()).item()
        if model.training or torch.is_grad_enabled():
            raise AssertionError("validation runs in evaluation mode")
        if len(seen) == 1 and failing["left"]:
            failing["left"] = 0
            if fault == "raises":
                raise FlowBNNError("the validation data hold NaN")
            return {"no mapping": None, "no number": {"nll": "x"}, "monitor": {"accuracy": 1.0}}[fault]
        seen.append(value)
        return {"nll": value}

    seen = []
    options = {"early_stop": EarlyStop(), "epochs": 4, "checkpoint_every": every}
    with pytest.raises(FlowBNNError) as caught:
        run(make(schedule=halving), tmp_path, validate=validate, **options)
    assert "\n" not in str(caught.value)
    stored = load_tensors(tmp_path / "last.safetensors")[1]
    assert (stored["position"]["epoch"], stored["position"]["step"]) == (1, 8)
    assert len(stored["history"]["records"]) == 1

    resumed = make(schedule=halving)
    history = run(resumed, tmp_path, validate=validate, resume=True, **options)
    straight, seen = make(schedule=halving), []
    expected = run(straight, None, validate=validate, **(options | {"checkpoint_every": None}))
    assert history.records == expected.records
    assert history.best_epoch == expected.best_epoch
    assert all(torch.equal(a, b) for a, b in zip(snapshot(resumed)[0], snapshot(straight)[0], strict=True))


def test_the_document_of_a_run_is_plain_json(stopped):
    document = load_tensors(stopped / "last.safetensors")[1]
    assert json.loads(json.dumps(document)) == document
    assert document["position"]["batches_per_epoch"] == 4
    assert (document["optimizer"], document["schedule"]) == ("Adam", "StepLR")
