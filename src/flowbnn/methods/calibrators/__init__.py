"""Post-hoc calibrators: they take a trained network and held-out data, and do not change its weights.

``calibrator.fit(network, held_out)`` returns a posterior. The file ``base.py`` holds what all of them share.
"""
