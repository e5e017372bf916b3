"""What all tests share: exact matmuls, and the values recorded from other systems."""

import json
import pathlib

import jax
import numpy as np
import pytest

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
