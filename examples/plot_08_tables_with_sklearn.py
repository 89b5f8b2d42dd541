"""
Tables with scikit-learn
========================

``BayesianClassifier`` and ``BayesianRegressor`` are estimators of scikit-learn. They work in pipelines and
searches, and their predictions carry uncertainties.
"""

import os

import matplotlib.pyplot as plt
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split

from flowbnn.sklearn import BayesianClassifier, BayesianRegressor

QUICK = bool(os.environ.get("FLOWBNN_EXAMPLES_QUICK"))

# %%
# Classification
# --------------
# ``method`` is the name of a method or a method with settings. Inputs are standardized by the estimator.
X, y = load_breast_cancer(return_X_y=True)
X_train, X_test, y_train, y_test = train_test_split(X, y, random_state=0)
losses = {}
for method in ("map",) if QUICK else ("map", "mc-dropout", "laplace", "ensemble"):
    model = BayesianClassifier(method, epochs=2 if QUICK else 40, lr=0.005, random_state=0).fit(
        X_train, y_train
    )
    losses[method] = log_loss(y_test, model.predict_proba(X_test))
    print(f"{method}: accuracy {model.score(X_test, y_test):.3f}, NLL {losses[method]:.3f}")

# %%
# Regression
# ----------
# Intervals and standard deviations are in the units of the target.
X, y = load_diabetes(return_X_y=True)
X_train, X_test, y_train, y_test = train_test_split(X, y, random_state=0)
regressor = BayesianRegressor("ensemble", epochs=2 if QUICK else 40, lr=0.005, random_state=0).fit(
    X_train, y_train
)
mean, std = regressor.predict(X_test, return_std=True)
low, high = regressor.predict_interval(X_test, level=0.9)
print(f"coverage of 90 % intervals: {((low < y_test) & (y_test < high)).mean():.2f}")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
left.barh(list(losses), list(losses.values()), color="#0072B2")
left.set(xlabel="NLL on test data (lower is better)", title="Breast cancer")
order = mean.argsort()
right.errorbar(
    range(len(mean)),
    mean[order],
    yerr=[(mean - low)[order], (high - mean)[order]],
    fmt="none",
    color="#0072B2",
    alpha=0.5,
)
right.scatter(range(len(mean)), y_test[order], s=8, color="black", zorder=3)
right.set(
    xlabel="patients, ordered by prediction", ylabel="disease progression", title="Diabetes: 90 % intervals"
)
plt.show()
