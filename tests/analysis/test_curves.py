"""The table and the picture of two runs."""

import pytest
from PIL import Image

from jetmoe_jax.analysis.curves import comparison_table, plot_curves, steps_to_reach

FAST = [(0, 0.125), (10, 0.5), (20, 0.75), (30, 0.7), (40, 0.875)]
SLOW = [(0, 0.125), (10, 0.25), (20, 0.375), (30, 0.5), (40, 0.75)]


@pytest.mark.parametrize(
    'accuracy, step', [(0.0, 0), (0.125, 0), (0.126, 10), (0.75, 20), (0.875, 40), (0.876, None)]
)
def test_steps_to_reach_is_the_first_step_at_or_above(accuracy, step):
    assert steps_to_reach(FAST, accuracy) == step


def test_no_curve_reaches_nothing():
    assert steps_to_reach([], 0.5) is None


def test_the_table_has_both_runs_and_how_much_sooner_the_first_is_there():
    assert comparison_table({'recycled': FAST, 'random': SLOW}).splitlines() == [
        '  step    recycled      random',
        '     0       12.5%       12.5%',
        '    10       50.0%       25.0%',
        '    20       75.0%       37.5%',
        '    30       70.0%       50.0%',
        '    40       87.5%       75.0%',
        "The recycled model reaches the random one's final 75.0% at step 20 of 40: "
        '2.0 times sooner.',
    ]


def test_the_table_says_when_the_first_run_never_gets_there():
    last = comparison_table({'recycled': SLOW, 'random': FAST}).splitlines()[-1]
    assert last == "The recycled model did not reach the random one's final 87.5% within 40 steps."


def test_a_long_table_shows_some_steps_with_the_first_two_and_the_last():
    curve = [(step, step / 100) for step in range(0, 101)]
    lines = comparison_table({'a': curve, 'b': curve}, rows=5).splitlines()[1:-1]
    steps = [int(line.split()[0]) for line in lines]
    assert steps == [0, 1, 20, 40, 60, 80, 100]


def test_only_steps_that_both_runs_have_are_shown():
    lines = comparison_table({'a': FAST, 'b': [SLOW[0], (7, 0.3), SLOW[2]]}).splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == ['0', '20']


def test_the_picture_is_a_png_with_a_line_for_each_run(tmp_path):
    plot_curves({'recycled': FAST, 'random': SLOW}, tmp_path / 'two.png', 'digits')
    plot_curves({'recycled': FAST}, tmp_path / 'one.png', 'digits')
    colours = []
    for name in ('one.png', 'two.png'):
        with Image.open(tmp_path / name) as image:
            image.load()
            assert image.format == 'PNG'
            assert min(image.size) >= 400
            counts = image.convert('RGB').getcolors(maxcolors=1 << 24)
        # Fully saturated enough to be a line, and not text, grid or the soft edge of a line.
        colours.append(sum(n > 500 and max(c) - min(c) > 100 for n, c in counts))
    assert colours == [1, 2]
