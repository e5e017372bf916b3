"""Checkpoint recycling (MoE Jetpack, section 3.1): a MoE's weights out of dense checkpoints."""
