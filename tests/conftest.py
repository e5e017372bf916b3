"""What all tests share: 8 virtual devices, exact matmuls, values recorded from other systems."""

import json
import os
import pathlib

# Before JAX starts. Compiling, not running, is what the tests spend their time on.
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = (
    '--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0'
)

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

jax.config.update('jax_default_matmul_precision', 'highest')

REFERENCE = pathlib.Path(__file__).parent.parent / 'third_party' / 'reference'


@pytest.fixture(scope='session')
def reference():
    """reference('name') gives the arrays of third_party/reference/name.npz, `args` parsed."""

    def load(name: str) -> dict:
        with np.load(REFERENCE / f'{name}.npz') as file:
            arrays = dict(file)
        if 'args' in arrays:
            arrays['args'] = json.loads(str(arrays['args']))
        return arrays

    return load
