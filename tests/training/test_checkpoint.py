"""Checkpoints of another run, another optimizer, other options: resumed to the bit, or one line and nothing changed."""

import json

import pytest
import torch
from checkpoint_runs import batches, halving, make, refused, run, snapshot

from flowbnn.errors import FlowBNNError
from flowbnn.training import EarlyStop, load_tensors


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
    refused(tmp_path, make(torch.optim.SGD, schedule=halving), "optimizer Adam", "has SGD")
    refused(tmp_path, make(torch.optim.AdamW, schedule=halving), "optimizer Adam", "has AdamW")
    refused(tmp_path, make(), "schedule StepLR", "has none")
    falling = make(schedule=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9))
    refused(tmp_path, falling, "schedule StepLR", "has ExponentialLR")
    network, _, _ = make()
    single = torch.optim.Adam(network.parameters())
    refused(tmp_path, (network, single, halving(single)), "with parameter groups")


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
    words = f"written with batches per epoch 4 and this run has {count}"
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
    words = ("early stopping by loss (min)", "log_likelihood (max)")
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


def test_a_rule_that_watches_validation_needs_one():
    def never(model, batch, clock):
        raise AssertionError("training began")

    with pytest.raises(FlowBNNError, match="'validation_nll', but this run has no validation"):
        run(make(), None, step=never, early_stop=EarlyStop())


@pytest.mark.parametrize("every", [None, 3])
@pytest.mark.parametrize("fault", ["raises", "monitor"])
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
            return {"accuracy": 1.0}
        seen.append(value)
        return {"nll": value}

    seen = []
    options = {"early_stop": EarlyStop(), "epochs": 4, "checkpoint_every": every}
    with pytest.raises(FlowBNNError) as caught:
        run(make(schedule=halving), tmp_path, validate=validate, **options)
    assert "\n" not in str(caught.value)
    stored = load_tensors(tmp_path / "last.safetensors")[1]
    assert (stored["position"]["epoch"], stored["position"]["step"]) == (1, 8)
    assert len(stored["position"]["history"]["records"]) == 1

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
    facts = {"optimizer": "Adam", "learning-rate schedule": "StepLR", "batches per epoch": 4}
    assert facts.items() <= document["facts"].items()
