"""Comparison on images after Xiong's report: one study with several configurations."""
