"""Fitting and judging the constants of the step-time model."""
