"""Training: config, initial parameters, optimiser, sharding, step, loop and evaluation."""
