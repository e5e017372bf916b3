"""Curves of runs, as a picture and as a table: how fast does each get where?"""

from collections.abc import Mapping, Sequence
from pathlib import Path

Curve = Sequence[tuple[int, float]]


def steps_to_reach(curve: Curve, accuracy: float) -> int | None:
    """The first step at which a curve of (step, accuracy) is at `accuracy` or above."""
    return next((step for step, value in curve if value >= accuracy), None)


def comparison_table(curves: Mapping[str, Curve], rows: int = 8) -> str:
    """Validation accuracy of two runs, side by side, and how much sooner the first is there.

    Args:
      curves: name -> [(step, accuracy), ...], evaluated at the same steps; the second one
        is the baseline.
      rows: about how many steps to show; early ones and the last always.
    """
    (name, curve), (baseline_name, baseline) = curves.items()
    at, baseline_at = dict(curve), dict(baseline)
    steps = [step for step in at if step in baseline_at]
    stride = max(len(steps) // rows, 1)
    shown = sorted({*steps[:2], *steps[::stride], steps[-1]})
    lines = [f'{"step":>6}  {name:>10}  {baseline_name:>10}']
    lines += [f'{step:>6}  {at[step]:>10.1%}  {baseline_at[step]:>10.1%}' for step in shown]
    final_step, final = baseline[-1]
    reached = steps_to_reach(curve, final)
    if reached is None:
        lines.append(
            f"The {name} model did not reach the {baseline_name} one's final {final:.1%} "
            f'within {curve[-1][0]} steps.'
        )
    else:
        times = final_step / max(reached, 1)
        lines.append(
            f"The {name} model reaches the {baseline_name} one's final {final:.1%} at step "
            f'{reached} of {final_step}: {times:.1f} times sooner.'
        )
    return '\n'.join(lines)


def plot_curves(curves: Mapping[str, Curve], path: str | Path, title: str) -> None:
    """Draws accuracy over steps, a line for each run, as a PNG."""
    import matplotlib  # takes a second to import, and only pictures need it

    matplotlib.use('Agg')
    from matplotlib import pyplot as plt
    from matplotlib.ticker import PercentFormatter

    fig, ax = plt.subplots(figsize=(6.4, 4), layout='constrained')
    for name, curve in curves.items():
        steps, values = zip(*curve, strict=True)
        ax.plot(steps, values, label=f'{name}: {values[-1]:.1%}', linewidth=1.8)
    ax.set(xlabel='step', ylabel='validation accuracy', title=title, ylim=(0, 1))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.grid(alpha=0.3)
    ax.legend(loc='lower right')
    fig.savefig(path, dpi=150)
    plt.close(fig)
