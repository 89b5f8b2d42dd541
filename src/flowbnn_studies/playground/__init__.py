"""Interactive page: draw points, fit a Bayesian network to them, and see where it is certain.

``flowbnn playground`` serves the page on the loopback address. One process per page fits and predicts
(:mod:`~flowbnn_studies.playground.worker`), the server checks requests and passes them on
(:mod:`~flowbnn_studies.playground.server`), and the folder ``static`` has the page.
"""
