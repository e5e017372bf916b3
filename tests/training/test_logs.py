"""metrics.jsonl over restarts and kills, TensorBoard's events, and the rate."""

import json

import pytest

from jetmoe_jax.training import logs
from jetmoe_jax.training.logs import METRICS_FILE, Rate, RunLog, read_curve, read_metrics


@pytest.fixture
def workdir(tmp_path):
    """A run that was evaluated at step 2 and got to step 4."""
    log = RunLog(tmp_path)
    log.write(1, {'loss': 0.5})
    log.write(2, {'loss': 0.25})
    log.write(2, {'val_top1': 0.125})
    log.write(3, {'loss': 0.1})
    log.write(4, {'loss': 0.3, 'lr': 1e-3})
    log.close()
    return tmp_path


def steps(workdir):
    return [record['step'] for record in read_metrics(workdir)]


def test_records_are_json_lines_that_come_back_exactly(workdir):
    lines = (workdir / METRICS_FILE).read_text().splitlines()
    assert json.loads(lines[-1]) == {'step': 4, 'loss': 0.3, 'lr': 0.001}
    assert read_metrics(workdir) == [json.loads(line) for line in lines]
    assert len(lines) == 5


def test_a_record_is_in_the_file_as_soon_as_it_is_written(tmp_path):
    log = RunLog(tmp_path)
    log.write(1, {'loss': 0.5})
    assert steps(tmp_path) == [1]
    log.close()


def test_a_restart_drops_later_records_and_goes_on(workdir):
    log = RunLog(workdir, keep_until=2)
    assert steps(workdir) == [1, 2, 2]
    log.write(3, {'loss': 0.7})
    log.close()
    assert read_metrics(workdir) == [
        {'step': 1, 'loss': 0.5},
        {'step': 2, 'loss': 0.25},
        {'step': 2, 'val_top1': 0.125},
        {'step': 3, 'loss': 0.7},
    ]


def test_a_restart_from_step_0_keeps_the_evaluation_there_and_a_new_run_keeps_nothing(tmp_path):
    log = RunLog(tmp_path)
    log.write(0, {'val_top1': 0.1})
    log.write(1, {'loss': 0.5})
    log.close()
    RunLog(tmp_path, keep_until=0).close()
    assert read_metrics(tmp_path) == [{'step': 0, 'val_top1': 0.1}]
    RunLog(tmp_path).close()
    assert read_metrics(tmp_path) == []


def test_a_last_line_that_a_kill_cut_off_is_left_out(workdir):
    path = workdir / METRICS_FILE
    whole = path.read_text()
    for cut in range(1, len(whole.splitlines()[-1])):
        path.write_text(whole[: -1 - cut])
        assert steps(workdir) == [1, 2, 2, 3], f'{cut} characters are missing'
    RunLog(workdir, keep_until=9).close()
    assert path.read_text() == ''.join(line + '\n' for line in whole.splitlines()[:-1])


def test_no_file_means_no_records(tmp_path):
    assert read_metrics(tmp_path) == []
    assert read_curve(tmp_path) == []


def test_a_curve_is_one_metric_by_step(workdir):
    assert read_curve(workdir) == [(2, 0.125)]
    assert read_curve(workdir, 'loss') == [(1, 0.5), (2, 0.25), (3, 0.1), (4, 0.3)]
    assert read_curve(workdir, 'nothing') == []


def test_tensorboard_gets_every_value_under_its_name(workdir):
    events = b''.join(path.read_bytes() for path in workdir.glob('events.out.tfevents.*'))
    for name in (b'loss', b'val_top1', b'lr'):
        assert name in events


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(logs.time, 'monotonic', lambda: now[0])
    return now


def test_the_rate_is_of_the_time_since_the_last_call(clock):
    rate = Rate(step=10, steps=100, batch_size=6)
    clock[0] += 4
    assert rate(30) == (30.0, '0:00:14')  # 20 steps in 4 s, 5 a second: 70 steps in 14 s
    clock[0] += 10
    assert rate(40) == (6.0, '0:01:00')  # 10 steps in 10 s: 60 steps in a minute
    clock[0] += 1
    assert rate(100)[1] == '0:00:00'


def test_the_time_left_has_hours(clock):
    rate = Rate(step=0, steps=3601 + 7384, batch_size=1)
    clock[0] += 3601
    assert rate(3601) == (1.0, '2:03:04')


def test_no_step_since_the_last_call_is_a_rate_of_zero(clock):
    rate = Rate(step=3, steps=9, batch_size=2)
    clock[0] += 5
    assert rate(3)[0] == 0.0
