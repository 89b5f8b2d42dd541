"""Tests of the estimators for scikit-learn."""

import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.calibration import CalibrationDisplay, calibration_curve
from sklearn.compose import TransformedTargetRegressor, make_column_transformer
from sklearn.datasets import load_iris, make_classification
from sklearn.ensemble import HistGradientBoostingClassifier, StackingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.multioutput import RegressorChain
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import flowbnn as fb
from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import make_likelihood
from flowbnn.methods import METHODS
from flowbnn.sklearn import BayesianClassifier, BayesianRegressor, log_likelihood_score
from flowbnn.sklearn.base import CALIBRATORS, find_method

CHEAP = {"method": "map", "hidden_sizes": (16,), "epochs": 20, "lr": 0.03, "batch_size": 32}


def classifier(**changes):
    return BayesianClassifier(**{**CHEAP, "random_state": 0, **changes})


def regressor(**changes):
    return BayesianRegressor(**{**CHEAP, "random_state": 0, **changes})


@pytest.fixture(scope="module")
def curve():
    """Returns 120 points of a parabola with noise of standard deviation 20 in large units."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-2.0, 2.0, (120, 2))
    return X, 1000.0 + 100.0 * X[:, 0] ** 2 + rng.normal(0.0, 20.0, 120)


# the checks fit more than a hundred times
CHEAPEST = CHEAP | {"epochs": 5, "lr": 0.1}


# scikit-learn skips check_array_api_input unless SCIPY_ARRAY_API is set. No check is expected to fail.
@parametrize_with_checks([BayesianClassifier(**CHEAPEST), BayesianRegressor(**CHEAPEST)])
def test_estimators_pass_all_checks_of_scikit_learn(estimator, check):
    check(estimator)


# -------------------- use inside scikit-learn


def test_pipeline_with_strings_and_categories():
    """Labels may be strings. Columns of strings are encoded in a pipeline, as for all estimators."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"size": rng.normal(size=90), "colour": rng.choice(["red", "blue"], 90)})
    labels = np.where(frame["colour"] == "red", "yes", "no")
    encode = make_column_transformer((OneHotEncoder(), ["colour"]), remainder="passthrough")
    model = make_pipeline(encode, classifier()).fit(frame, labels)
    assert model.score(frame, labels) == 1.0
    assert model.classes_.tolist() == ["no", "yes"]
    with pytest.raises(ValueError, match="could not convert string to float"):
        classifier().fit(frame, labels)


def test_cross_validation_and_grid_search(curve):
    X, y = load_iris(return_X_y=True)
    assert cross_val_score(classifier(), X, y, cv=3, scoring="neg_log_loss").mean() > -0.3
    search = GridSearchCV(
        regressor(epochs=10), {"method": ["map", fb.DeepEnsemble(2)]}, cv=2, scoring=log_likelihood_score
    ).fit(*curve)
    assert search.best_estimator_.predict(curve[0]).shape == (120,)
    assert len(search.cv_results_["params"]) == 2


def test_calibration_display():
    import matplotlib

    matplotlib.use("Agg")
    X, y = make_classification(300, random_state=0)
    model = classifier().fit(X[:200], y[:200])
    display = CalibrationDisplay.from_estimator(model, X[200:], y[200:], n_bins=3)
    expected = calibration_curve(y[200:], model.predict_proba(X[200:])[:, 1], n_bins=3)
    np.testing.assert_array_equal(display.prob_true, expected[0])


def test_stacking_with_other_estimators():
    X, y = load_iris(return_X_y=True)
    members = [("net", classifier()), ("trees", HistGradientBoostingClassifier(max_iter=5))]
    model = StackingClassifier(members, LogisticRegression(), cv=2).fit(X, y)
    assert model.score(X, y) > 0.9


def test_regressor_in_compositions(curve):
    X, y = curve
    model = TransformedTargetRegressor(regressor(), func=np.log, inverse_func=np.exp).fit(X, y)
    assert model.score(X, y) > 0.5
    chain = RegressorChain(regressor()).fit(X, np.column_stack([y, -y]))
    assert chain.predict(X).shape == (120, 2)


@pytest.mark.parametrize("make", [classifier, regressor])
def test_clones_and_pickles_predict_the_same(make, curve):
    X, y = curve
    y = y > 1100.0 if make is classifier else y
    model = make(
        method=fb.MAP(prior_scale=2.0),
        network=torch.nn.Sequential(torch.nn.Linear(2, 2 if make is classifier else 1)),
    )
    first, second = clone(model).fit(X, y), pickle.loads(pickle.dumps(clone(model).fit(X, y)))
    np.testing.assert_array_equal(first.predict(X), second.predict(X))
    assert first.get_params()["method"] == fb.MAP(prior_scale=2.0)
    assert clone(model).set_params(epochs=3).fit(X, y).n_iter_ == 3


# -------------------- predictions


def test_regressor_predicts_in_the_units_of_the_data(curve):
    X, y = curve
    model = regressor(epochs=60).fit(X, y)
    mean, std = model.predict(X, return_std=True)
    assert model.score(X, y) > 0.8
    assert 10.0 < std.mean() < 60.0
    predictive = model.predict_dist(X)
    np.testing.assert_allclose(mean, predictive.mean, rtol=1e-5)
    np.testing.assert_allclose(std, predictive.std, rtol=1e-5)
    interval = model.predict_interval(X, level=0.8)
    np.testing.assert_allclose(interval.low, predictive.interval(0.8).low, rtol=1e-5)
    draws = model.sample_y(X[:5], 2000, random_state=1)
    assert draws.shape == (5, 2000)
    np.testing.assert_allclose(draws.mean(1), mean[:5], atol=4.0 * std.max() / np.sqrt(2000))
    np.testing.assert_array_equal(draws, model.sample_y(X[:5], 2000, random_state=1))
    scaled = make_pipeline(StandardScaler(), regressor(epochs=60)).fit(X, y)
    assert log_likelihood_score(scaled, X, y) == log_likelihood_score(scaled[-1], scaled[0].transform(X), y)
    assert log_likelihood_score(model, X, y) == pytest.approx(
        float(predictive.log_prob(torch.tensor(y)).mean())
    )


@pytest.mark.parametrize("name", ["Poisson", "NegativeBinomial", "Survival", "Quantiles"])
def test_units_of_likelihoods_with_a_log_link(curve, name):
    X, y = curve
    times = np.round(y / 20.0)
    targets = np.column_stack([times, np.ones_like(times)]) if name == "Survival" else times
    model = regressor(likelihood=getattr(fb.likelihoods, name)(), epochs=1, lr=1e-5).fit(X, targets)
    # an untrained network predicts about the mean of the targets
    assert 0.5 < model.predict(X).mean() / times.mean() < 2.0


@pytest.mark.parametrize(
    "likelihood", ["gaussian", "heteroscedastic", "mixture", "flow", fb.likelihoods.Mixture(2, dim=2)]
)
def test_several_targets_and_likelihoods(curve, likelihood):
    """Two targets, of which one is constant."""
    X, y = curve
    targets = (
        np.column_stack([y, np.full(120, 7.0)]) if likelihood == "gaussian" else np.column_stack([y, 5.0 * y])
    )
    model = regressor(likelihood=likelihood, epochs=40).fit(X, targets)
    mean, std = model.predict(X[:9], return_std=True)
    assert mean.shape == std.shape == (9, 2)
    assert model.sample_y(X[:9], 3).shape == (9, 2, 3)
    low, high = model.predict_interval(X[:9])
    assert (low < high).all()
    assert (low.shape, high.shape) == ((9, 2), (9, 2))
    assert model.score(X, targets) > 0.3
    assert np.isfinite(log_likelihood_score(model, X, targets))


def test_classifier_predictions_agree():
    X, y = load_iris(return_X_y=True)
    labels = np.array(["c", "a", "b"])[y]
    model = classifier(method=fb.DeepEnsemble(2), samples=2).fit(X, labels)
    probabilities = model.predict_proba(X)
    np.testing.assert_allclose(probabilities.sum(1), 1.0, rtol=1e-12)
    np.testing.assert_allclose(np.exp(model.predict_log_proba(X)), probabilities)
    assert (model.classes_[probabilities.argmax(1)] == model.predict(X)).all()
    sets = model.predict_set(X, level=0.95)
    assert ((probabilities * sets).sum(1) >= 0.95 - 1e-5).all()
    draws = model.sample_y(X[:3], 4000)
    shares = np.stack([(draws == label).mean(1) for label in model.classes_], 1)
    np.testing.assert_allclose(shares, probabilities[:3], atol=0.05)
    assert -log_likelihood_score(model, X, labels) == pytest.approx(log_loss(labels, probabilities), rel=1e-4)
    with pytest.raises(FlowBNNError) as caught:
        log_likelihood_score(model, X[:2], ["a", "z"])
    assert (caught.value.kind, caught.value.argument) == ("targets", "y")


def test_rows_are_predicted_in_chunks(monkeypatch, curve):
    X, y = curve
    model = regressor(method="mc-dropout", network=_dropout_network, samples=4).fit(X, y)
    whole = model.predict(X, return_std=True)
    monkeypatch.setattr("flowbnn.sklearn.base.BayesianEstimator._max_rows", 50)
    np.testing.assert_allclose(model.predict(X, return_std=True), whole, rtol=1e-6)


def _dropout_network(inputs, outputs):
    return torch.nn.Sequential(
        torch.nn.Linear(inputs, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, outputs)
    )


# -------------------- parameters


@pytest.mark.parametrize(
    "name", ["ensemble", "laplace", "node-noise", "swag", "temperature", "bayes_by_backprop"]
)
def test_methods_by_name(name):
    X, y = make_classification(200, flip_y=0.1, random_state=0)
    model = classifier(method=name, epochs=12).fit(X, y)
    assert model.score(X, y) > 0.75
    assert type(model._make_method()).name == {"ensemble": "deep-ensemble"}.get(name, name.replace("_", "-"))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("vector", fb.VectorScaling),
        ("matrix_scaling", fb.MatrixScaling),
        ("refit", fb.LastLayerRefit),
        ("last-layer-refit", fb.LastLayerRefit),
    ],
)
def test_calibrators_have_the_names_of_candidates_and_classes(name, kind):
    X, y = load_iris(return_X_y=True)
    model = BayesianClassifier("mle", epochs=3, hidden_sizes=(8,), calibrate=name, random_state=0)
    expected = clone(model).set_params(calibrate=kind())
    assert np.array_equal(model.fit(X, y).predict_proba(X), expected.fit(X, y).predict_proba(X))
    assert not np.array_equal(
        model.predict_proba(X), clone(model).set_params(calibrate=False).fit(X, y).predict_proba(X)
    )


def test_unknown_calibrators_are_refused_with_all_names(curve):
    with pytest.raises(FlowBNNError) as caught:
        regressor(calibrate="isotonic").fit(*curve)
    assert all(name in str(caught.value) for name in CALIBRATORS)


@pytest.mark.parametrize("calibrate", [True, "temperature", fb.Temperature(validation_fraction=0.3)])
def test_calibration_on_held_out_rows(calibrate, curve):
    model = regressor(calibrate=calibrate).fit(*curve)
    assert isinstance(model.posterior_, fb.methods.TemperedPosterior)
    assert model.n_iter_ == model.posterior_.posterior.history.epochs == 20


def test_functions_of_flowbnn_take_the_data_of_a_regressor(curve):
    X, y = curve
    model = regressor(network=None).fit(X[:60], y[:60])
    rmse = np.sqrt(np.mean((model.predict(X) - y) ** 2))
    assert fb.evaluate(model.posterior_, model.to_tensors(X, y))["rmse"] == pytest.approx(rmse, rel=1e-4)
    intervals = fb.conformalize(model.posterior_, model.to_tensors(X[60:], y[60:]), score="absolute")
    low, high = (end.double().numpy() for end in intervals.predict_interval(model.to_tensors(X)))
    np.testing.assert_allclose((low + high) / 2, model.predict(X), rtol=1e-5)
    residuals = np.sort(np.abs(model.predict(X[60:]) - y[60:]))
    np.testing.assert_allclose((high - low) / 2, residuals[54], rtol=1e-3)  # ceil(61 * 0.9) = 55th


def test_functions_of_flowbnn_take_the_data_of_a_classifier():
    X, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    model = classifier().fit(100.0 + 1e3 * X, names)
    data = model.to_tensors(100.0 + 1e3 * X, names)
    assert fb.evaluate(model.posterior_, data)["accuracy"] == model.score(100.0 + 1e3 * X, names) > 0.9
    for function, argument in (
        (fb.evaluate, "posterior"),
        (fb.conformalize, "posterior"),
        (fb.calibrate, "network"),
    ):
        for estimator, advice in ((model, "to_tensors"), (classifier(), "fit(X, y)")):
            with pytest.raises(FlowBNNError) as caught:
                function(estimator, (X, y))
            assert caught.value.argument == argument
            assert advice in str(caught.value)
    with pytest.raises(FlowBNNError) as caught:
        model.to_tensors(X[:1], ["rose"])
    assert (caught.value.kind, caught.value.argument) == ("targets", "y")


def test_a_network_of_the_user(curve):
    X, y = curve
    network = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    before = [value.clone() for value in network.parameters()]
    model = regressor(network=network).fit(X, y)
    assert all(map(torch.equal, before, network.parameters()))
    assert isinstance(model.posterior_.model[1], torch.nn.Tanh)
    factory = regressor(network=lambda inputs, outputs: torch.nn.Linear(inputs, outputs)).fit(X, y)
    assert isinstance(factory.posterior_.model, torch.nn.Linear)
    trained = BayesianRegressor(fb.MAP(epochs=0), network=model.posterior_.model, standardize=False)
    np.testing.assert_allclose(
        trained.fit(model.scaler_.transform(X), y).predict(model.scaler_.transform(X)),
        model.predict(X),
        rtol=1e-5,
    )


def test_periodic_embedding_learns_a_function_that_changes_quickly():
    X = np.random.default_rng(0).uniform(-1.0, 1.0, (300, 1))
    y = np.sin(15.0 * X[:, 0])
    plain, periodic = (regressor(embedding=name).fit(X, y).score(X, y) for name in (None, "periodic"))
    assert periodic > plain + 0.3


def test_random_numbers_of_the_caller_are_preserved(curve):
    np.random.seed(3)  # noqa: NPY002
    expected = np.random.rand(), torch.rand(1)  # noqa: NPY002
    np.random.seed(3)  # noqa: NPY002
    torch.manual_seed(0)
    regressor().fit(*curve)
    assert (np.random.rand(), torch.rand(1)) == expected  # noqa: NPY002


# -------------------- invalid input


@pytest.mark.parametrize(
    ("parameters", "argument"),
    [
        ({"method": "ensembel"}, "method"),
        ({"hidden_sizes": (0,)}, "hidden_sizes"),
        ({"activation": "swish"}, "activation"),
        ({"embedding": "fourier"}, "embedding"),
        ({"network": 3}, "network"),
        ({"network": lambda inputs, outputs: None}, "network"),
        ({"epochs": -1}, "epochs"),
        ({"calibrate": "map"}, "calibrate"),
        ({"calibrate": True, "method": "temperature"}, "calibrate"),
        ({"likelihood": "gausian"}, "likelihood"),
        ({"samples": 0}, "samples"),
    ],
)
def test_invalid_parameters_are_named(parameters, argument, curve):
    with pytest.raises(FlowBNNError) as caught:
        regressor(**parameters).fit(*curve)
    assert caught.value.argument == argument


def test_invalid_data_have_the_messages_of_scikit_learn(curve):
    X, y = curve
    frame = pd.DataFrame(X, columns=["a", "b"])
    model = regressor().fit(frame, y)
    assert model.feature_names_in_.tolist() == ["a", "b"]
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(frame.rename(columns={"b": "c"}))
    with pytest.raises(ValueError, match="is expecting 2 features"):
        regressor().fit(X, y).predict(X[:, :1])
    with pytest.raises(ValueError, match="contains NaN"):
        model.predict(frame.mask(frame > 0))
    with pytest.raises(ValueError, match="could not convert string"):
        regressor().fit(np.array([["x"], ["y"]], dtype=object), [0.0, 1.0])
    with pytest.raises(FlowBNNError) as caught:
        classifier().fit(X, np.zeros(120))
    assert (caught.value.kind, caught.value.argument) == ("targets", "y")
    with pytest.raises(FlowBNNError) as caught:
        model.predict_interval(X, level=1.0)
    assert caught.value.argument == "level"


def test_all_methods_have_names_that_the_estimators_find():
    assert all(find_method(name) is METHODS[name] for name in METHODS)
    assert find_method("deep_ensemble") is fb.DeepEnsemble


def test_standard_scaling_is_inside(curve):
    """Inputs in other units give the same predictions."""
    X, y = curve
    scaled = StandardScaler().fit_transform(X)
    inner, outer = regressor().fit(1e4 * X + 3.0, y), regressor(standardize=False).fit(scaled, y)
    np.testing.assert_allclose(inner.predict(1e4 * X + 3.0), outer.predict(scaled), rtol=1e-3)


@pytest.mark.parametrize("name", ["poisson", "negative_binomial", "quantiles", "survival"])
def test_names_of_likelihoods_are_their_objects(curve, name):
    X, y = curve
    targets = (
        np.column_stack([np.round(y) + 1.0, np.arange(len(y)) % 2]) if name == "survival" else np.round(y)
    )
    likelihood = make_likelihood(name)
    by_name, by_object = (
        regressor(likelihood=value, epochs=2).fit(X, targets) for value in (name, likelihood)
    )
    np.testing.assert_array_equal(by_name.predict(X), by_object.predict(X))
    assert by_name.score(X, targets) == by_object.score(X, targets)


def test_the_score_of_censored_times_is_their_concordance(curve):
    X, y = curve
    targets = np.column_stack([np.round(y) + 1.0, np.arange(len(y)) % 2])
    model = regressor(likelihood=fb.likelihoods.Survival(), epochs=2).fit(X, targets)
    expected = model.predict_dist(X).evaluate(torch.from_numpy(targets))["concordance"]
    assert model.score(X, targets) == pytest.approx(expected)
