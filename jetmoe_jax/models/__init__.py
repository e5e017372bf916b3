"""Models: the vision transformer, dense or with MoE blocks, and the registry of names."""
