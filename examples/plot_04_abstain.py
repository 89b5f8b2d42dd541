"""
Abstain, and detect unknown inputs
==================================

A classifier of digits has never seen an eight. It may refuse to answer. The risk-coverage curve shows what
refusing is worth, and histograms show how well the entropy separates eights from known digits.
"""

import os

import matplotlib.pyplot as plt
import torch

import flowbnn as fb

QUICK = bool(os.environ.get("FLOWBNN_EXAMPLES_QUICK"))

# %%
# Train with noise
# ----------------
torch.manual_seed(0)
digits = fb.data.load_digits(novel=8)
train = fb.data.TensorLoader(*digits.train, batch_size=128, shuffle=True)
method = fb.NodeNoise("gaussian", epochs=2 if QUICK else 40, lr=0.01)
posterior = method.fit(fb.models.SmallConv(1, 9), train, seed=0, progress=False)
scores = fb.evaluate(posterior, digits.test, novel=digits.novel, samples=8 if QUICK else 64, progress=False)
print({name: round(value, 3) for name, value in scores.items()})

# %%
# Decide
# ------
# ``decide`` abstains from inputs whose normalized entropy exceeds the limit.
known = posterior.predict(digits.test[0], samples=8 if QUICK else 64, seed=0)
eights = posterior.predict(digits.novel[0], samples=8 if QUICK else 64, seed=0)
for name, prediction in {"known digits": known, "eights": eights}.items():
    decision = prediction.decide(abstain_above=0.1)
    print(f"{name}: {decision.abstained.float().mean():.0%} are not answered")

# %%
# What abstaining is worth
# ------------------------
# The left curve has the error rate among the answered known digits. On the right, the entropy separates eights from known digits.
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
known.plot_risk_coverage(digits.test[1], ax=left)
fb.plots.plot_novelty(known, eights, by="entropy", ax=right)
plt.show()
