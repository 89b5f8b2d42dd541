"""Tests that answers follow from the numbers."""

from flowbnn_studies import SeedResults
from flowbnn_studies.digits import answer as digits_answer
from flowbnn_studies.flow_length import answer as length_answer
from flowbnn_studies.flow_length import describe_convergence
from flowbnn_studies.two_clusters import answer as clusters_answer

SEEDS = [0, 1, 2, 3]
WOBBLE = [0.0, 0.0002, -0.0001, 0.0001]


def parts(**values):
    """Returns parts with a little noise: ``parts(plain={"ece": 0.1})``."""
    content = {
        (variant, seed): {
            "values": {name: value + WOBBLE[seed] * (index + 1) for name, value in metrics.items()}
        }
        for index, (variant, metrics) in enumerate(values.items())
        for seed in SEEDS
    }
    return SeedResults(SEEDS, content)


def clusters(plain, flow, gaussian, longer):
    results = parts(
        **{
            key: {"ece": ece, "accuracy": 0.96}
            for key, ece in (("plain", plain), ("flow", flow), ("gaussian", gaussian), ("longer", longer))
        }
    )
    return clusters_answer(results, parts(exact={"ece": 0.002, "accuracy": 0.961}))


def test_answer_of_two_clusters():
    good = clusters(plain=0.09, flow=0.004, gaussian=0.02, longer=0.03)
    assert good.startswith("Yes")
    assert "at most the published 0.009" in good
    assert "beyond the effect of longer training" in good
    assert "worse than flow noise" in good
    same = clusters(plain=0.09, flow=0.004, gaussian=0.004, longer=0.004)
    assert "may therefore be due to longer training" in same
    assert "not significant" in same
    bad = clusters(plain=0.01, flow=0.05, gaussian=0.02, longer=0.005)
    assert bad.startswith("No:")
    assert "above the published 0.009" in bad
    assert "0.0052, which is better than flow noise" in bad
    assert "better than flow noise." in bad


def lengths(**bounds):
    values = {f"length-{name[1:]}": {"negative_elbo": bound} for name, bound in bounds.items()}
    return length_answer(parts(**values), tuple(int(name[1:]) for name in bounds))


def test_answer_of_flow_length():
    published = lengths(n0=0.13, n3=0.11, n12=0.10)
    assert "length 12 has the best ELBO" in published
    assert "no flow is the worst" in published
    assert "also the best here" in published
    other = lengths(n0=0.10, n3=0.11, n12=0.13)
    assert "length 0 has the best ELBO" in other
    assert "length 12 the worst" in other
    assert "no flow is not the worst" in other
    assert "rank 3 of 3" in other
    close = lengths(n0=0.1001, n3=0.1, n12=0.1)
    assert "not significant" in close


LABELS = {key: key.title() for key in ("plain", "dropout", "gaussian", "flow")}


def digits(**changes):
    base = {"nll": 0.1, "auroc": 0.9, "accuracy": 0.98}
    return digits_answer(parts(**{key: {**base, **changes.get(key, {})} for key in LABELS}), LABELS)


def test_answer_of_digits():
    flow = digits(flow={"nll": 0.05, "auroc": 0.95})
    assert "(NLL, 4 splits): flow has the best mean, significantly better than all others" in flow
    assert "flow noise is better than Gaussian noise" in flow
    gaussian = digits(gaussian={"nll": 0.05, "auroc": 0.95})
    assert "(NLL, 4 splits): Gaussian has the best mean" in gaussian
    assert "flow noise is worse than Gaussian noise" in gaussian
    level = digits()
    assert "flow and Gaussian noise is not significant" in level
    assert "not significantly better than any other" in level


def test_flow_length_describes_convergence():
    def results_with(fall_without_flow):
        content = {}
        for key, fall in (("length-0", fall_without_flow), ("length-3", 0.001)):
            for seed in SEEDS:
                content[key, seed] = {"history": {"elbo": [-0.2] * 5 + [-0.2 + fall] * 5}}
        return SeedResults(SEEDS, content)

    (slow,) = describe_convergence(results_with(0.01), (0, 3))
    assert "0.0100 at length 0, 0.0010 at length 3" in slow
    assert "had not converged" in slow
    (done,) = describe_convergence(results_with(0.0), (0, 3))
    assert "does not favour" in done
    assert describe_convergence(results_with(0.0), (0, 3), window=6) == []


def test_answers_of_one_seed_claim_no_significance(monkeypatch):
    monkeypatch.setitem(globals(), "SEEDS", [0])
    values = {"nll": 0.1, "auroc": 0.9, "accuracy": 0.98}
    answers = [
        clusters(plain=0.09, flow=0.004, gaussian=0.004, longer=0.004),
        lengths(n0=0.1001, n3=0.1, n12=0.1),
        digits_answer(parts(**dict.fromkeys(LABELS, values)), LABELS),
    ]
    for answer in answers:
        assert "significant" not in answer
        assert "seeds" not in answer
