"""Hydra plugins of NEST for Megatron; imported by every Hydra app, so nothing heavy here."""
