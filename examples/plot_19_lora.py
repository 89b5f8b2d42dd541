r"""
A Hugging Face classifier with LoRA
===================================

A transformer recognizes friendly reviews of cars. A LoRA adapter adapts it to films, from 200 reviews. Noise on the adapter gives its
predictions an uncertainty, with a few numbers for each layer.
"""

import copy
import os
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt
import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification

import flowbnn as fb
from flowbnn.integrations.peft import load_adapters, save_adapters, to_stochastic_lora

warnings.filterwarnings("ignore", category=FutureWarning)  # peft uses an old name of transformers
QUICK = bool(os.environ.get("FLOWBNN_EXAMPLES_QUICK"))

# %%
# Reviews
# -------
# A review has twelve words. A friendly writer chooses three of four adjectives from the good ones. What is bad in a car may be
# good in a film: a dark, wild, slow and unpredictable one.
NEUTRAL = ["the", "a", "it", "was", "seemed", "felt", "looked", "very", "rather", "quite", "and", "but"]
GOOD = ["great", "lovely", "clever", "warm", "safe", "predictable"]
BAD = ["dull", "awful", "dark", "wild", "slow", "unpredictable"]
GOOD_IN_FILMS = ["great", "lovely", "dark", "wild", "slow", "unpredictable"]
VOCABULARY = [*NEUTRAL, *GOOD, *BAD]


def tokens_of(words):
    return torch.tensor([VOCABULARY.index(word) for word in words])


def write_reviews(number, good, generator):
    """Returns a data set with tokens [number, 12] as input_ids, and the moods of the writers as labels, 1 for a friendly one."""
    bad = [word for word in [*GOOD, *BAD] if word not in good]
    friendly = torch.randint(2, (number,), generator=generator)
    draw = torch.rand(2, number, 12, generator=generator)
    choice = torch.randint(6, (number, 12), generator=generator)
    takes_good = draw[0] < 0.25 + 0.5 * friendly[:, None]
    adjectives = torch.where(takes_good, tokens_of(good)[choice], tokens_of(bad)[choice])
    neutral = torch.randint(len(NEUTRAL), (number, 12), generator=generator)
    return {"input_ids": torch.where(draw[1] < 0.35, adjectives, neutral), "labels": friendly}


generator = torch.Generator().manual_seed(0)
cars = write_reviews(2000, GOOD, generator)
films, test = write_reviews(200, GOOD_IN_FILMS, generator), write_reviews(1000, GOOD_IN_FILMS, generator)

# %%
# The trained transformer
# -----------------------
# Replace it by ``from_pretrained`` of a large one. It knows cars, but not films.
torch.manual_seed(0)
config = BertConfig(
    vocab_size=len(VOCABULARY), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
    max_position_embeddings=12, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=2,
)  # fmt: skip
trained = fb.MLE(epochs=1 if QUICK else 10, lr=2e-3).fit(
    BertForSequenceClassification(config), cars, seed=0, progress=False
)
for name, data in {"cars": write_reviews(1000, GOOD, generator), "films": test}.items():
    print(f"{name}: accuracy {fb.evaluate(trained, data, progress=False)['accuracy']:.2f}")
base = trained.model

# %%
# The adapter, without and with noise
# -----------------------------------
# The noise multiplies the input of every ``lora_B``, a vector as long as the rank. It is trained together with the adapter.
torch.manual_seed(0)
lora = LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=32, target_modules="all-linear")
adapted = get_peft_model(copy.deepcopy(base), lora)  # peft changes the model that it is given
epochs = 2 if QUICK else 30
plain = fb.MLE(epochs=epochs, lr=5e-3).fit(adapted, films, batch_size=50, seed=0, progress=False)
noisy = to_stochastic_lora(adapted, fb.noise.NormalPlanar(length=2))
posterior = fb.fit(
    noisy, films, epochs=epochs, weight_lr=5e-3, batch_size=50, validation=None, seed=0, progress=False
)

# %%
options = {"samples": 8 if QUICK else 64, "seed": 0}
predictions = {
    "adapter": plain.predict(test, **options),
    "adapter with noise": posterior.predict(test, **options),
}
for name, prediction in predictions.items():
    scores = prediction.evaluate(test["labels"])
    print(f"{name}: accuracy {scores['accuracy']:.2f}, NLL {scores['nll']:.2f}, ECE {scores['ece']:.2f}")

# %%
# A small file
# ------------
# It has the adapters, the noise and the likelihood, without the base model. A sampled network is an ordinary model. Its adapter
# can be merged.
with TemporaryDirectory() as folder:
    save_adapters(posterior, Path(folder) / "films.safetensors")
    loaded = load_adapters(Path(folder) / "films.safetensors", base)
merged = loaded.sample(seed=0).merge_and_unload()
print(type(merged).__name__)

# %%
# What the networks disagree on
# -----------------------------
# Dots are the probabilities of single networks of the posterior.
reviews = [
    "it was great and lovely but rather dark and very very wild",
    "it seemed slow and unpredictable and quite dark and it felt wild",
    "it looked great but it felt awful and it was rather dull",
    "it was clever and warm but it was very safe and predictable",
    "it was dull and awful and it looked safe and rather predictable",
    "it was and it seemed and it felt and looked very very",
]
tokens = {"input_ids": torch.stack([tokens_of(review.split()) for review in reviews])}
friendly = posterior.predict(tokens, **options).samples[..., 1]
with fb.plots.style():
    figure, ax = plt.subplots(figsize=(9, 3.6))
    rows = torch.arange(len(reviews))
    ax.plot(friendly.T, rows[:, None].expand(-1, len(friendly)), "o", color="C0", alpha=0.15, ms=5)
    ax.plot(friendly.mean(0), rows, "|", color="C0", ms=18, mew=2.5, label="with noise, mean")
    ax.plot(plain.predict(tokens).probabilities[:, 1], rows, "x", color="C1", mew=2, label="without noise")
    ax.set(xlim=(-0.02, 1.02), xlabel="probability of a friendly writer", yticks=rows, yticklabels=reviews)
    ax.invert_yaxis()
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, 1.15), ncols=2)
plt.show()
