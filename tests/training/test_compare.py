"""The quickstart, cut short: recycled beside random, with its table and picture."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from jetmoe_jax.training.logs import read_curve

REPOSITORY = Path(__file__).parents[2]


def test_the_quickstart_trains_both_and_compares_them(tmp_path):
    done = subprocess.run(
        [sys.executable, '-m', 'jetmoe_jax.main', f'--workdir={tmp_path}',
         '--config=configs/quickstart.py:epochs=0.5'],
        cwd=REPOSITORY,
        env=os.environ | {'XLA_FLAGS': '--xla_backend_optimization_level=0'},
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    recycled, random = read_curve(tmp_path), read_curve(tmp_path / 'random')
    assert [step for step, _ in recycled] == [step for step, _ in random] == [0, 11]
    assert f'{11:>6}  {recycled[-1][1]:>10.1%}  {random[-1][1]:>10.1%}' in done.stdout
    assert recycled[-1][1] > random[-1][1]
    assert Image.open(tmp_path / 'curves.png').size == (960, 600)
    with np.load(tmp_path / 'recycling' / 'record.npz') as record:
        assert record['channels/blocks_5/core_experts'].shape == (8, 48)
