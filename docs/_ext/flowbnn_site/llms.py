"""``llms.txt``: the pages of the site with their titles and addresses, for language models."""

from pathlib import Path

from sphinx.application import Sphinx

HEAD = """# flowbnn

> flowbnn turns a trained PyTorch network into a Bayesian one, so that its predictions come with calibrated uncertainty.

Import it as `import flowbnn as fb`. `fb.calibrate(network, held_out)` calibrates a trained network. `fb.fit(fb.to_stochastic(network, rules), train)`
trains noise and weights together. Both return a posterior with `predict(x, samples)`, `save(path)` and the rest of `fb.Posterior`.
`fb.evaluate(posterior, data)` returns scores, `fb.compare(network, train, test)` compares all methods. Calibrate on held-out data only.
"""
SECTIONS = (  # titles, and how the names of their pages begin
    ("Guides", ""),
    ("Examples", "generated/gallery/plot_"),
    ("Methods", "generated/methods/"),
    ("Flows", "generated/flows/"),
    ("API", "generated/api/"),
    ("Studies", "generated/studies/"),
)


def write_llms(app: Sphinx, error: Exception | None) -> None:
    """Writes ``llms.txt`` next to the pages."""
    if error or app.builder.format != "html":
        return
    lines = [HEAD]
    for section, prefix in SECTIONS:
        lines += [f"## {section}", ""]
        for name in sorted(app.env.found_docs):
            belongs = name.startswith(prefix) if prefix else not name.startswith("generated/")
            if belongs and name in app.env.titles and not name.endswith("sg_execution_times"):
                lines.append(f"- [{app.env.titles[name].astext()}]({app.builder.get_target_uri(name)})")
        lines.append("")
    (Path(app.outdir) / "llms.txt").write_text("\n".join(lines), encoding="utf-8")
