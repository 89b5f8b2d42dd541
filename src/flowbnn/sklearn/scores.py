"""Scores of predictive distributions, as ``scoring`` functions of scikit-learn."""

from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, is_classifier
from sklearn.pipeline import Pipeline

from flowbnn.errors import value_error


def log_likelihood_score(estimator: BaseEstimator, X: Any, y: Any) -> float:
    """Returns the mean predictive log-likelihood of data, as a ``scoring`` function of scikit-learn. Larger is better.

    For several targets it is the log-density of all of them.

    Args:
        estimator: Fitted :class:`~flowbnn.sklearn.BayesianClassifier` or :class:`~flowbnn.sklearn.BayesianRegressor`, or a
            pipeline that ends with one.
        X: Inputs ``[N, F]``.
        y: Labels, or targets in the units of the data.

    Raises:
        FlowBNNError: If a label was not in the training data.

    >>> from sklearn.model_selection import cross_val_score
    >>> from flowbnn.sklearn import BayesianRegressor
    >>> X = np.linspace(-1.0, 1.0, 60)[:, None]
    >>> model = BayesianRegressor("map", hidden_sizes=(8,), epochs=20, lr=0.01, random_state=0)
    >>> cross_val_score(model, X, X[:, 0] ** 2, cv=3, scoring=log_likelihood_score).shape
    (3,)
    """
    if isinstance(estimator, Pipeline):
        X, estimator = estimator[:-1].transform(X), estimator[-1]
    predictive = estimator.predict_dist(X)
    if not is_classifier(estimator):
        return float(predictive.log_prob(torch.from_numpy(np.array(y, dtype=np.float64))).mean())
    unknown = np.setdiff1d(y, estimator.classes_)
    if len(unknown):
        raise value_error("y", "in estimator.classes_", unknown[:5].tolist(), kind="targets")
    labels = np.searchsorted(estimator.classes_, np.asarray(y))
    return float(predictive.log_prob(torch.from_numpy(labels)).mean())
