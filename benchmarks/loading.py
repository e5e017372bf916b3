"""Seconds and peak memory from a ViT-B's `.safetensors` file to arrays on the device.

    python benchmarks/loading.py

Each round loads in a process of its own, after the imports; memory is the rise of its peak.
"""

import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from jetmoe_jax.checkpoints.load import Checkpoint, LoadReport, load_checkpoint, save_checkpoint
from jetmoe_jax.checkpoints.workdir import to_device
from jetmoe_jax.models.parameters import param_shapes
from jetmoe_jax.models.registry import create_model

ROUNDS = 5


def main() -> None:
    """Writes a file, loads it in fresh processes, prints the medians."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / 'vit_b.safetensors'
        model = create_model('vit_base_patch16_224')
        params = {k: np.ones(v.shape, np.float32) for k, v in param_shapes(model).items()}
        save_checkpoint(path, Checkpoint(model, params, LoadReport('made')))
        mebibytes = path.stat().st_size / 2**20
        rounds = []
        for _ in range(ROUNDS):
            out = subprocess.check_output([sys.executable, __file__, str(path)], text=True)
            rounds.append([float(word) for word in out.split()])
    seconds, peak = (statistics.median(column) for column in zip(*rounds, strict=True))
    print(f'file                {mebibytes:7.0f} MiB')
    print(f'to device arrays    {seconds:7.2f} s    (limit 3 s)')
    limit = 1.3 * mebibytes + mebibytes
    print(f'peak memory rose by {peak:7.0f} MiB  (limit {limit:.0f}: 1.3 files and the parameters)')


def load(path: str) -> None:
    """One round: prints seconds and the rise of the peak in MiB."""
    import jax

    jax.devices()
    before, began = _peak(), time.perf_counter()
    params = to_device(load_checkpoint(path).params)
    jax.block_until_ready(params)
    print(time.perf_counter() - began, _peak() - before)


def _peak() -> float:
    """Peak resident memory in MiB. getrusage would count what the parent had before the fork."""
    status = Path('/proc/self/status').read_text()
    return int(re.search(r'VmHWM:\s+(\d+)', status)[1]) / 1024


if __name__ == '__main__':
    load(sys.argv[1]) if len(sys.argv) > 1 else main()
