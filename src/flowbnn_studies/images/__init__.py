"""The comparison on images of Xiong's report: one study with three configurations."""
