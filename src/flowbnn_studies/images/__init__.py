"""What the studies on images share: settings, recipes, training, measures, findings and figures."""
