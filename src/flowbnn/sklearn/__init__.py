"""Estimators for scikit-learn: :class:`BayesianClassifier` and :class:`BayesianRegressor`.

They fit any method of flowbnn to tables, and work in pipelines, cross-validation and grid searches. Inputs and targets are standardized
inside, and predictions are in the units of the data.

>>> from sklearn.datasets import load_iris
>>> from sklearn.pipeline import make_pipeline
>>> from sklearn.preprocessing import PolynomialFeatures
>>> X, y = load_iris(return_X_y=True)
>>> model = make_pipeline(PolynomialFeatures(2), BayesianClassifier("map", epochs=20, lr=0.01, random_state=0)).fit(X, y)
>>> model.predict_proba(X[:2]).shape, bool(model.score(X, y) > 0.9)
((2, 3), True)

The module needs scikit-learn, which ``import flowbnn`` does not: ``pip install flowbnn[sklearn]``.
"""

from flowbnn.errors import optional_import

with optional_import("flowbnn.sklearn", "scikit-learn", "flowbnn[sklearn]"):
    import sklearn.base  # noqa: F401

from flowbnn.sklearn.classifier import BayesianClassifier
from flowbnn.sklearn.regressor import BayesianRegressor
from flowbnn.sklearn.scores import log_likelihood_score

__all__ = ["BayesianClassifier", "BayesianRegressor", "log_likelihood_score"]
