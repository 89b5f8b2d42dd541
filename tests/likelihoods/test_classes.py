"""Tests of the likelihoods of class labels."""

import json
import math

import pytest
import torch
from torch.nn import functional as F

from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Bernoulli, Categorical, make_likelihood


def test_log_prob_agrees_with_torch():
    logits, labels = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    expected = torch.distributions.Categorical(logits=logits).log_prob(labels)
    torch.testing.assert_close(Categorical().log_prob(logits, labels), expected)
    logits, labels = torch.randn(6, 1), torch.tensor([0, 1, 1, 0, 1, 1])
    expected = torch.distributions.Bernoulli(logits=logits[:, 0]).log_prob(labels.float())
    torch.testing.assert_close(Bernoulli().log_prob(logits, labels), expected)
    assert Bernoulli().predictive(logits[None]).probabilities.shape == (6, 2)


def test_floating_point_labels_can_be_compiled_and_vectorized():
    outputs, labels = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    expected = Categorical().log_prob(outputs, labels)
    compiled = torch.compile(Categorical().log_prob, fullgraph=True, backend="eager")
    assert torch.equal(compiled(outputs, labels.float()), expected)
    vectorized = torch.func.vmap(lambda row, label: Categorical().log_prob(row[None], label[None])[0])
    assert torch.equal(vectorized(outputs, labels.float()), expected)


@pytest.mark.parametrize(
    ("likelihood", "outputs", "targets", "argument"),
    [
        (Categorical(), torch.zeros(2, 3), torch.tensor([0, 3]), "targets"),
        (Categorical(), torch.zeros(2, 3), torch.tensor([-1, 2]), "targets"),
        (Categorical(), torch.zeros(2, 3), torch.zeros(2), "targets"),
        (Categorical(), torch.zeros(2, 3), torch.zeros(5).long(), "targets"),
        (Categorical(), torch.zeros(2, 3), torch.zeros(2, 1).long(), "targets"),
        (Categorical(), torch.zeros(2, 3), torch.eye(3).long()[:2], "targets"),
        (Categorical(), torch.zeros(2, 3), torch.tensor([[1, 1, 0], [0, 0, 0]]), "targets"),
        (Categorical(), torch.zeros(2, 3, 4), torch.zeros(2), "outputs"),
        (Categorical(), torch.zeros(2, 3, 4), torch.full((2, 4), 3), "targets"),
        (Categorical(), torch.zeros(2, 3, 4), torch.full((2, 4), -100), "targets"),
        (Categorical(), torch.zeros(2, 3, 4), torch.zeros(2, 1, 4).long(), "outputs"),
        (Categorical(), torch.zeros(2, 3), torch.tensor([-100, 2]), "targets"),
        (Bernoulli(), torch.zeros(2, 3), torch.full((2, 3), -100), "targets"),
        (Bernoulli(), torch.zeros(2, 3), torch.full((2, 3), 0.5), "targets"),
        (Bernoulli(), torch.zeros(2, 1, 4, 4), torch.zeros(2, 4), "targets"),
        (Bernoulli(), torch.zeros(2, 1), torch.tensor([0, -100]), "targets"),
        (Bernoulli(), torch.zeros(2, 1), torch.tensor([0, 2]), "targets"),
        (Bernoulli(), torch.zeros(2, 3), torch.tensor([0, 1]), "outputs"),
    ],
)
def test_outputs_and_targets_that_do_not_fit_are_refused(likelihood, outputs, targets, argument):
    with pytest.raises(FlowBNNError) as caught:
        likelihood.check(outputs, targets)
    assert (caught.value.kind, caught.value.argument) == (argument, argument)
    assert "\n" not in str(caught.value)


def test_soft_labels_are_expectations_over_labels():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    soft = torch.rand(5, 3, generator=generator).softmax(-1)
    likelihood, labels = Categorical(), torch.arange(3)
    values = torch.stack([likelihood.log_prob(logits, label.expand(5)) for label in labels], -1)
    expected = (soft * values).sum(-1)
    torch.testing.assert_close(likelihood.log_prob(logits, soft), expected)
    one_hot = torch.eye(3)[[0, 2, 1, 1, 0]]
    torch.testing.assert_close(
        likelihood.log_prob(logits, one_hot), likelihood.log_prob(logits, one_hot.argmax(1))
    )
    predictive = likelihood.predictive(logits[None])
    for name, value in predictive.evaluate(soft).items():
        # the other scores are sums over examples, so that their expectation is a sum over labels
        if name != "ece":
            single = [
                [
                    likelihood.predictive(logits[None, i : i + 1]).evaluate(label[None])[name]
                    for label in labels
                ]
                for i in range(5)
            ]
            assert value == pytest.approx(float((soft * torch.tensor(single)).sum(-1).mean()), abs=1e-6)
    assert predictive.evaluate(one_hot) == pytest.approx(predictive.evaluate(one_hot.argmax(1)))


@pytest.mark.parametrize("targets", [torch.tensor([[0.5, 0.6]]), torch.tensor([[1.5, -0.5]])])
def test_rows_that_are_no_probabilities_are_refused(targets):
    with pytest.raises(FlowBNNError) as caught:
        Categorical().check(torch.zeros(1, 2), targets)
    assert (caught.value.kind, caught.value.argument) == ("targets", "targets")


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()])
def test_labels_with_fractions_are_refused(likelihood):
    with pytest.raises(FlowBNNError) as caught:
        likelihood.canonical_targets(torch.tensor([0.0, 0.9]))
    assert (caught.value.kind, caught.value.argument) == ("targets", "targets")


def segmentation(*shape, classes=5, seed=0):
    """Returns logits ``[B, C, *shape]`` and masks with ignored positions."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, classes, *shape, generator=generator, dtype=torch.float64)
    masks = torch.randint(classes, (3, *shape), generator=generator)
    return logits, masks.masked_fill(torch.rand(3, *shape, generator=generator) < 0.2, -100)


@pytest.mark.parametrize("shape", [(7,), (4, 6), (2, 3, 4)])
@pytest.mark.parametrize("weights", [None, [1.0, 0.5, 2.0, 3.0, 0.1]])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_positions_are_summed_as_in_the_cross_entropy_of_torch(shape, weights, smoothing):
    logits, masks = segmentation(*shape)
    tensor = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    options = {"weight": tensor, "label_smoothing": smoothing, "reduction": "none"}
    expected = -F.cross_entropy(logits, masks, **options).flatten(1).sum(1)
    likelihood = Categorical(class_weights=weights, label_smoothing=smoothing)
    torch.testing.assert_close(likelihood.log_prob(logits, masks), expected)
    torch.testing.assert_close(likelihood.log_prob(logits.movedim(1, -1), masks), expected)
    other = Categorical(ignore_index=255, class_weights=weights, label_smoothing=smoothing)
    torch.testing.assert_close(other.log_prob(logits, masks.masked_fill(masks == -100, 255)), expected)
    torch.testing.assert_close(other.log_prob(logits, masks), expected)  # canonical targets
    # a = target_weights gives the same loss for hard and soft labels
    last = logits.movedim(1, -1)
    a = likelihood.target_weights(masks, last)
    torch.testing.assert_close((a * last.log_softmax(-1)).flatten(1).sum(1), expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_soft_labels_at_positions_agree_with_torch(smoothing):
    logits, _ = segmentation(4, 6)
    soft = torch.randn(3, 5, 4, 6, generator=torch.Generator().manual_seed(1)).double().softmax(1)
    weights = [1.0, 0.5, 2.0, 3.0, 0.1]
    options = {"weight": torch.tensor(weights).double(), "label_smoothing": smoothing, "reduction": "none"}
    expected = -F.cross_entropy(logits, soft, **options).flatten(1).sum(1)
    likelihood = Categorical(class_weights=weights, label_smoothing=smoothing)
    likelihood.check(logits, soft)
    likelihood.initialize(logits, soft)
    assert likelihood.class_axis == 1
    torch.testing.assert_close(likelihood.log_prob(logits, soft), expected)
    torch.testing.assert_close(likelihood.log_prob(logits, likelihood.canonical_targets(soft)), expected)
    predictive = likelihood.predictive(logits[None])
    plain = -F.cross_entropy(logits, soft, reduction="none").mean()
    assert predictive.evaluate(likelihood.canonical_targets(soft))["nll"] == pytest.approx(-float(plain))


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("weight", [None, 3.0, [1.0, 2.0, 0.5, 4.0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_several_labels_agree_with_the_binary_cross_entropy_of_torch(smoothing, weight, dtype):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    labels = torch.rand(6, 4, generator=generator) < 0.4
    likelihood = Bernoulli(pos_weight=weight, label_smoothing=smoothing)
    tensor = None if weight is None else torch.as_tensor(weight, dtype=torch.float64)
    targets = (1.0 - smoothing) * labels.double() + 0.5 * smoothing
    values = -F.binary_cross_entropy_with_logits(logits, targets, pos_weight=tensor, reduction="none")
    likelihood.check(logits, labels.to(dtype))
    torch.testing.assert_close(likelihood.log_prob(logits, labels.to(dtype)), values.sum(1))
    if dtype != torch.bool:
        missing = torch.rand(6, 4, generator=generator) < 0.3
        unknown = labels.to(dtype).masked_fill(missing, -100)
        likelihood.check(logits, unknown)
        expected = values.masked_fill(missing, 0.0).sum(1)
        torch.testing.assert_close(likelihood.log_prob(logits, unknown), expected)


@pytest.mark.parametrize(
    "shapes", [((2, 1, 4, 5), (2, 1, 4, 5)), ((2, 1, 4, 5), (2, 4, 5)), ((2, 4, 5), (2, 4, 5))]
)
def test_masks_with_and_without_a_channel(shapes):
    outputs, targets = torch.randn(shapes[0]), (torch.rand(shapes[1]) < 0.5).float()
    likelihood = Bernoulli()
    likelihood.check(outputs, targets)
    flat = outputs.flatten(1), targets.flatten(1)
    expected = -F.binary_cross_entropy_with_logits(*flat, reduction="none").sum(1)
    torch.testing.assert_close(likelihood.log_prob(outputs, targets), expected)
    predictive, canonical = likelihood.predictive(outputs[None]), likelihood.canonical_targets(targets)
    assert predictive.labels.shape == canonical.shape == (2, 4, 5)
    torch.testing.assert_close(predictive.nll(canonical), -expected)


@pytest.mark.parametrize(
    ("outputs", "targets", "axis"),
    [
        ((2, 3, 4), (2, 4), 1),
        ((2, 4, 3), (2, 4), -1),
        ((2, 3, 4, 4), (2, 4, 4), 1),
        ((2, 4, 5, 3), (2, 4, 5), -1),
    ],
)
def test_the_class_axis_is_found_from_the_shapes(outputs, targets, axis):
    likelihood = Categorical()
    likelihood.initialize(torch.zeros(outputs), torch.zeros(targets).long())
    assert likelihood.class_axis == axis
    assert likelihood.to_dict()["class_axis"] == axis
    assert likelihood.predictive(torch.zeros(1, *outputs)).probabilities.shape == (*targets, 3)


@pytest.mark.parametrize("use", ["check", "log_prob", "predictive", "average_outputs"])
def test_an_ambiguous_class_axis_is_refused(use):
    outputs, targets = torch.zeros(2, 4, 4), torch.zeros(2, 4).long()
    arguments = {"predictive": (outputs[None],), "average_outputs": ([outputs[None]],)}.get(
        use, (outputs, targets)
    )
    with pytest.raises(FlowBNNError) as caught:
        getattr(Categorical(), use)(*arguments)
    assert (caught.value.kind, caught.value.argument) == ("outputs", "class_axis")
    assert "\n" not in str(caught.value)
    getattr(Categorical(class_axis=-1), use)(*arguments)


@pytest.mark.parametrize(
    ("likelihood", "outputs", "targets", "argument"),
    [
        (Categorical(class_weights=[1.0, 2.0]), torch.zeros(2, 3), torch.tensor([0, 1]), "class_weights"),
        (Bernoulli(pos_weight=[1.0, 2.0]), torch.zeros(2, 3), torch.zeros(2, 3), "pos_weight"),
    ],
)
def test_weights_that_do_not_fit_are_refused(likelihood, outputs, targets, argument):
    with pytest.raises(FlowBNNError) as caught:
        likelihood.check(outputs, targets)
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    "likelihood",
    [
        Categorical(),
        Categorical(-1, 255, [1.0, 2.0], 0.1),
        Bernoulli(),
        Bernoulli(-1, 3.0, 0.1),
        Bernoulli(pos_weight=[0.1, 2.0]),
    ],
)
def test_settings_are_saved_and_shown(likelihood):
    copy = make_likelihood(json.loads(json.dumps(likelihood.to_dict())))
    assert copy.to_dict() == likelihood.to_dict()
    assert repr(copy) == repr(likelihood)
    assert repr(Categorical()) == "Categorical()"


def test_average_outputs_of_positions_have_the_mean_probabilities():
    outputs = torch.randn(3, 2, 2, 5, 4, 6, dtype=torch.float64)  # views, samples, inputs, classes, positions
    for axis, moved in ((1, outputs), (-1, outputs.movedim(3, -1))):
        classes = -1 if axis < 0 else 2
        average = Categorical(class_axis=axis).average_outputs(list(moved))
        expected = moved.softmax(-1 if axis < 0 else 3).mean(0)
        torch.testing.assert_close(average.softmax(classes), expected)


# -------------------- labels of pixels as bytes


@pytest.mark.parametrize(("likelihood", "channels", "classes"), [(Categorical, 3, 3), (Bernoulli, 1, 2)])
def test_ignored_label_of_bytes(likelihood, channels, classes):
    outputs = torch.zeros(2, channels, 2, 2)
    masks = torch.tensor([[[255, 255], [0, 1]], [[1, 1], [0, 0]]], dtype=torch.uint8)
    model = likelihood(ignore_index=255)
    model.check(outputs, masks)
    model.initialize(outputs, masks)
    assert torch.allclose(model.log_prob(outputs, masks), -math.log(classes) * torch.tensor([2.0, 4.0]))
