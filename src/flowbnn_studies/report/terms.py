"""Words of the studies that need an explanation, which the report gives where a word appears first."""

import re
from collections.abc import Iterable

# pattern of a word, name in the explanation, and explanation
# fmt: off
TERMS = (
    (r"Xiong's (report|recipe)", "Xiong's report",
     "a project report by Weijiang Xiong on normalizing flows for implicit Bayesian neural networks, which some studies repeat"),
    (r"Ravenda's report", "Ravenda's report", "a report by Federico Ravenda on probabilistic deep learning"),
    (r"Ahn and Lee's lecture", "Ahn and Lee's lecture", "slides by Sungsoo Ahn and Kimin Lee on Bayesian deep learning"),
    (r"Nielsen's lecture", "Nielsen's lecture", "slides by Didrik Nielsen on normalizing flows"),
    (r"[Rr]ecipes?", "Recipe",
     "the settings of a training. Xiong's recipe follows his report, and the best recipe was chosen on validation images"),
    (r"[Ee]lephant", "Elephant", "Ravenda's picture of an input that a network was not taught and should notice"),
    (r"(?<!\w)[Nn]oise", "Noise", "random factors on the inputs of layers. Predictions average over draws"),
    (r"[Ff]lows?\b", "Flow", "a chain of invertible maps that turns a simple distribution into a flexible one"),
    (r"[Pp]lanar", "Planar flow", "a flow of simple maps, each of which bends the space along one plane"),
    (r"[Nn]ode noise", "Node noise", "noise on the inputs of the layers of a network"),
    (r"\bseeds?\b", "Seed", "a number that fixes the random choices of a run. Several seeds show the effect of chance"),
    (r"[Ss]ignificant", "Significant", "the 95 % confidence interval of the difference over seeds excludes zero"),
    (r"\bECE\b|calibration error", "ECE",
     "expected calibration error, the average difference of confidence and accuracy. 0 is perfect"),
    (r"\bNLL\b|negative log-likelihood", "NLL", "negative log-likelihood of the correct answer. Lower is better"),
    (r"\bAUROC\b", "AUROC", "probability that a novel input is more uncertain than a familiar one. 0.5 is chance, 1 is perfect"),
    (r"\bnats?\b", "Nat", "unit of information and of log-probabilities, 1.44 bits"),
    (r"\bELBO\b", "ELBO", "evidence lower bound, the objective of variational inference"),
    (r"\bKL\b", "KL", "Kullback-Leibler divergence, a distance of two distributions. 0 means that they are equal"),
    (r"\bHMC\b|\bNUTS\b", "HMC and NUTS", "Markov chains that sample from the exact posterior, slowly"),
    (r"[Tt]emperature scaling", "Temperature scaling", "division of the outputs by a number that is fitted to held-out data"),
    (r"[Dd]eep ensemble", "Deep ensemble", "several networks that are trained from different starts and averaged"),
    (r"Laplace", "Laplace", "a Gaussian around the trained weights, from the curvature of the loss"),
    (r"Bayes by Backprop", "Bayes by Backprop", "a factorized Gaussian over the weights"),
    (r"[Mm]ultiplicative flows", "Multiplicative flows", "a distribution over weights that multiplies them by noise from a flow"),
    (r"k-hat", "k-hat", "diagnostic of importance sampling. Above 0.7 an approximation is poor"),
    (r"joint (Gaussian|posterior|noise)", "Joint", "with correlations between all noise dimensions, as opposed to factorized"),
    (r"bits per dimension", "Bits per dimension", "negative log2-likelihood for each colour value of each pixel. Lower is better"),
)
# fmt: on


def explain_terms(texts: Iterable[str], known: set[str]) -> list[tuple[str, str]]:
    """Returns name and explanation of the terms that texts use for the first time.

    Args:
        texts: Texts in the order of the page.
        known: Names that were explained before; the new ones are added.

    >>> known = set()
    >>> [name for name, _ in explain_terms(["The ECE of the noise"], known)], explain_terms(["The ECE"], known)
    (['Noise', 'ECE'], [])
    """
    text = " ".join(texts)
    new_terms = [
        (name, words) for pattern, name, words in TERMS if name not in known and re.search(pattern, text)
    ]
    known.update(name for name, _ in new_terms)
    return new_terms
