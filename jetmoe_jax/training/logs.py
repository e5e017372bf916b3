"""What a run writes while it goes: metrics.jsonl, TensorBoard events, and a line a while."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

METRICS_FILE = 'metrics.jsonl'


class RunLog:
    """Writes metrics of steps. A restart from step k drops what was written of later steps.

    Args:
      keep_until: the step that the run goes on from; None for a new run.
    """

    def __init__(self, workdir: str | Path, keep_until: int | None = None):
        keep_until = -1 if keep_until is None else keep_until
        self.path = Path(workdir) / METRICS_FILE
        kept = [record for record in read_metrics(workdir) if record['step'] <= keep_until]
        partial = self.path.with_suffix('.partial')
        partial.write_text(''.join(json.dumps(record) + '\n' for record in kept))
        partial.replace(self.path)
        self._file = self.path.open('a')
        self._events = SummaryWriter(str(workdir), purge_step=keep_until + 1)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends one record, {'step': step, name: value}."""
        self._file.write(json.dumps({'step': step, **metrics}) + '\n')
        self._file.flush()
        for name, value in metrics.items():
            self._events.add_scalar(name, value, step)

    def close(self) -> None:
        """Closes the files."""
        self._file.close()
        self._events.close()


def read_metrics(workdir: str | Path) -> list[dict[str, Any]]:
    """The records of a workdir's metrics.jsonl; a last line that a kill cut off is left out."""
    path = Path(workdir) / METRICS_FILE
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def read_curve(workdir: str | Path, name: str = 'val_top1') -> list[tuple[int, float]]:
    """[(step, value), ...] of one metric."""
    return [(r['step'], r[name]) for r in read_metrics(workdir) if name in r]


class Rate:
    """Images a second since the last call, and the time left."""

    def __init__(self, step: int, steps: int, batch_size: int):
        self._last = (step, time.monotonic())
        self._steps, self._batch_size = steps, batch_size

    def __call__(self, step: int) -> tuple[float, str]:
        """(images a second, time left as h:mm:ss) at a step."""
        (last_step, last_time), now = self._last, time.monotonic()
        self._last = (step, now)
        rate = (step - last_step) / max(now - last_time, 1e-9)
        left = round((self._steps - step) / rate) if rate else 0
        return rate * self._batch_size, f'{left // 3600}:{left // 60 % 60:02}:{left % 60:02}'
