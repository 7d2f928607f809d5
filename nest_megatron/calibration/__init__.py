"""What one measured run teaches about a machine and a software stack, kept for later plans."""
