"""jetmoe_jax: recycle a dense vision checkpoint into a mixture of experts, and fine-tune it."""

__version__ = '0.1.0'
