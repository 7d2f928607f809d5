"""Real megatron-core training from a planned configuration; scripts/train.py is its command."""
