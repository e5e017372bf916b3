"""Checkpoint recycling (MoE Jetpack, section 3.1): a MoE model's weights out of dense checkpoints."""
