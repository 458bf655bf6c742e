"""Evaluations of a loaded model: perplexity, divergence from a baseline, and MMLU through lm-eval."""
