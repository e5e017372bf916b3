"""A page about one recycling: what was important, what was taken, how alike the experts are.

One HTML file with its pictures in it. The numbers come from the record and the statistics alone;
the relative errors are given (recycling/replacement.py defines them).
"""

import base64
import html
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jetmoe_jax.recycling.record import ByBlock, Record
from jetmoe_jax.recycling.statistics import Statistics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNITS = {'channels': 'mlp_input', 'neurons': 'mlp_act'}  # kind of unit -> position it is measured
SHOWN_EXPERTS = 32  # of a block, in the picture of overlaps

Sets = Sequence[np.ndarray]  # of each expert: the units it has

_STYLE = """
body { font: 16px/1.45 system-ui, sans-serif; max-width: 44rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
img { width: 100%; height: auto; } div { overflow-x: auto; }
table { border-collapse: collapse; } th, td { padding: .2rem .7rem .2rem 0; text-align: left; }
th { font-weight: 600; } td, th { border-bottom: 1px solid #ddd; vertical-align: top; }
td { overflow-wrap: anywhere; }
"""


def experts_of(sets: ByBlock, block: str) -> list[np.ndarray]:
    """The units of every expert of a block, path after path; a shared expert is none of them."""
    paths = sets.get(block, {})
    return [units for path, e in paths.items() if path != 'shared_expert' for units in e]


def taken_by(sets: Sets, size: int) -> np.ndarray:
    """The share of experts that have each of `size` units: (size,)."""
    return _membership(sets, size).mean(axis=0)


def overlaps(sets: Sets, size: int) -> np.ndarray:
    """Jaccard's overlap |A and B| / |A or B| of any two experts' units: (e e)."""
    has = _membership(sets, size)
    both = has @ has.T
    count = has.sum(axis=1)
    return both / (count[:, None] + count - both)


def mean_overlap(overlap: np.ndarray) -> float:
    """The mean over all pairs of different experts; 1 for a single one."""
    e = len(overlap)
    return (overlap.sum() - np.trace(overlap)) / (e * (e - 1)) if e > 1 else 1.0


def community_shares(labels: np.ndarray, sets: Sets) -> tuple[np.ndarray, np.ndarray]:
    """Of each community its share of all units, and the share of experts that took any of it."""
    sizes = np.bincount(labels)
    took = [np.bincount(labels[units], minlength=len(sizes)) > 0 for units in sets]
    return sizes / len(labels), np.mean(took, axis=0)


def write_summary(
    path: str | Path,
    *,
    facts: Mapping[str, str],
    record: Record,
    units: Mapping[str, tuple[int, int]],
    statistics: Statistics | None = None,
    metric: str = 'L2',
    errors: Mapping[str, float] | None = None,
    images: int = 0,
) -> None:
    """Writes the page.

    Args:
      facts: name -> value, for the table at its top.
      record: of the recycling.
      units: block's path -> channels and neurons of the model that the record's indices are of.
      statistics, metric: that model's, for the curves of importance.
      errors, images: block's path -> mean relative error over so many images.
    """
    taken = {
        kind: {
            block: (sets, units[block][i])
            for block in getattr(record, kind)
            if (sets := experts_of(getattr(record, kind), block))
        }
        for i, kind in enumerate(UNITS)
    }
    sections = [_table([(name, value) for name, value in facts.items()])]
    if errors:
        sections.append(_errors(errors, images))
    blocks = list(taken['neurons']) or list(errors or {})
    if statistics is not None:
        sections.append(_importance(statistics, metric, blocks))
    if taken['neurons']:
        sections += [_usage(taken), _overlap(taken)]
    else:
        sections.append('<p>The experts are fresh: none of their weights were taken over.</p>')
    if record.communities:
        sections.append(_communities(record, taken))
    Path(path).write_text(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>Recycling</title><style>{_STYLE}</style></head><body>\n'
        '<h1>Recycling</h1>\n' + '\n'.join(sections) + '\n</body></html>\n',
        encoding='utf-8',
    )


def _errors(errors: Mapping[str, float], images: int) -> str:
    rows = [(block, f'{error:.3f}') for block, error in errors.items()]
    return (
        '<h2>MoE layers against the dense MLPs they replace</h2>\n'
        '<p>|moe(x) &minus; mlp(x)| / |mlp(x)|, with x the input of the MLP in the dense model of '
        f'the same width, mean over {images} images. 0: the same output; 1: as far off as no '
        'output at all. The router is fresh, so experts are mixed without regard to what they '
        'hold.</p>\n' + _table(rows, ('block', 'relative error'))
    )


def _importance(statistics: Statistics, metric: str, blocks: Sequence[str]) -> str:
    curves = {
        kind: {
            block: np.sort(values / values.mean())[::-1]
            for block in blocks
            if (values := statistics.values.get(block, {}).get(position, {}).get(metric))
            is not None
        }
        for kind, position in UNITS.items()
    }
    if not any(curves.values()):
        return ''
    return (
        '<h2>Importance</h2>\n'
        f'<p>The mean {metric} of each unit over {statistics.images} images, sorted and divided by '
        'its mean over the block. A steep curve: few units carry most of the activation.</p>\n'
        + _curves(curves, 'importance / mean', logarithmic=True)
    )


def _usage(taken: Mapping[str, Mapping[str, tuple[Sets, int]]]) -> str:
    shares = {
        kind: {block: taken_by(*of_block) for block, of_block in of_kind.items()}
        for kind, of_kind in taken.items()
    }
    curves = {
        kind: {block: np.sort(share)[::-1] for block, share in of_kind.items()}
        for kind, of_kind in shares.items()
    }
    rows = []
    for block, (sets, _) in taken['neurons'].items():
        never = (f'{np.mean(shares[kind][block] == 0):.1%}' for kind in UNITS)
        rows.append((block, str(len(sets)), *never))
    return (
        '<h2>How often each unit was taken</h2>\n'
        '<p>The share of the experts of a block that have a unit, sorted. A flat curve: all units '
        'were taken alike; where it is zero, units were left behind.</p>\n'
        + _curves(curves, 'share of experts')
        + _table(rows, ('block', 'experts', 'channels never taken', 'neurons never taken'))
    )


def _overlap(taken: Mapping[str, Mapping[str, tuple[Sets, int]]]) -> str:
    matrices = {
        kind: {block: overlaps(*of_block) for block, of_block in of_kind.items()}
        for kind, of_kind in taken.items()
    }
    rows = [
        (block, *(f'{mean_overlap(matrices[kind][block]):.3f}' for kind in UNITS))
        for block in taken['neurons']
    ]
    shown = {}
    for block, matrix in matrices['neurons'].items():
        some = np.unique(np.linspace(0, len(matrix) - 1, SHOWN_EXPERTS).round().astype(int))
        shown[block] = matrix[np.ix_(some, some)]
    fig, axes = _grid(len(shown), columns=3)
    for ax, (block, matrix) in zip(axes, shown.items(), strict=False):
        picture = ax.imshow(matrix, vmin=0, vmax=1, cmap='viridis', interpolation='nearest')
        ax.set_title(block, fontsize=8)
        ax.set_xticks([])
        ax.set_yticks([])
    bar = fig.colorbar(picture, ax=axes, orientation='horizontal', shrink=0.6)
    bar.ax.tick_params(labelsize=7)
    return (
        '<h2>How alike the experts are</h2>\n'
        '<p>The overlap |A and B| / |A or B| of the units of any two experts (Jaccard). Pictures: '
        f'neurons, of at most {SHOWN_EXPERTS} evenly chosen experts; universal ones come last '
        'and have fewer. Table: the mean over all pairs.</p>\n'
        + _image(fig, 'overlap of experts')
        + _table(rows, ('block', 'channels', 'neurons'))
    )


def _communities(record: Record, taken: Mapping[str, Mapping[str, tuple[Sets, int]]]) -> str:
    fig, axes = _grid(2 * len(record.communities), columns=2, height=1.3)
    panels = iter(axes)
    for block, of_block in record.communities.items():
        for kind, position in UNITS.items():
            ax, labels = next(panels), of_block[position]
            sizes, took = community_shares(labels, taken[kind][block][0])
            number = np.arange(len(sizes))
            ax.bar(number - 0.2, sizes, 0.4, color='0.6', label='of all units')
            ax.bar(number + 0.2, took, 0.4, color='C0', label='of experts')
            ax.set_title(f'{block}: {kind}', fontsize=8)
            ax.set(ylim=(0, 1), xlim=(-0.7, len(sizes) - 0.3))
            ax.xaxis.get_major_locator().set_params(integer=True)
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc='outside lower center', ncols=2, fontsize=7)
    return (
        '<h2>Communities</h2>\n'
        '<p>Units that are active together, by number. Grey: the share of all units that a '
        'community has; blue: the share of experts that took any of it.</p>\n'
        + _image(fig, 'communities')
    )


def _curves(
    curves: Mapping[str, Mapping[str, np.ndarray]], label: str, logarithmic: bool = False
) -> str:
    """One panel a kind of unit, one line a block."""
    import matplotlib
    from matplotlib.ticker import LogLocator, NullFormatter

    kinds = [kind for kind in curves if curves[kind]]
    fig, axes = _grid(len(kinds), columns=1, height=2.2)
    for ax, kind in zip(axes, kinds, strict=True):
        colours = matplotlib.colormaps['viridis'](np.linspace(0, 0.9, len(curves[kind])))
        for colour, (block, values) in zip(colours, curves[kind].items(), strict=True):
            x = np.linspace(0, 1, len(values))
            ax.plot(x, values, color=colour, linewidth=1.2, label=block)
        ax.set_ylabel(label, fontsize=8)
        ax.set_xlabel(f'share of {kind}, sorted', fontsize=8)
        ax.grid(alpha=0.3)
        if logarithmic:
            ax.set_yscale('log')
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.yaxis.set_major_formatter('{x:g}')
            ax.yaxis.set_minor_formatter(NullFormatter())
        else:
            ax.set_ylim(bottom=0)
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc='outside lower center', ncols=3, fontsize=7)
    return _image(fig, label)


def _grid(panels: int, columns: int, height: float = 1.6) -> tuple['Figure', list]:
    """A figure as wide as a phone, with panels in rows."""
    from matplotlib.figure import Figure  # takes a second to import, and only pictures need it

    columns = min(columns, panels)
    rows = -(-panels // columns)
    fig = Figure(figsize=(4.5, height * rows + 0.8), layout='constrained')
    axes = list(fig.subplots(rows, columns, squeeze=False).flat)
    for ax in axes:
        ax.tick_params(which='both', labelsize=7)
    for ax in axes[panels:]:
        ax.axis('off')
    return fig, axes


def _image(fig: 'Figure', alt: str) -> str:
    buffer = io.BytesIO()
    fig.savefig(buffer, format='png', dpi=200)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<p><img alt="{html.escape(alt)}" src="data:image/png;base64,{data}"></p>\n'


def _table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return '<tr>' + ''.join(f'<{tag}>{html.escape(c)}</{tag}>' for c in cells) + '</tr>\n'

    lines = row(head, 'th') if head else ''
    return '<div><table>\n' + lines + ''.join(row(r, 'td') for r in rows) + '</table></div>\n'


def _membership(sets: Sets, size: int) -> np.ndarray:
    has = np.zeros((len(sets), size), np.float32)
    for expert, units in zip(has, sets, strict=True):
        expert[units] = 1
    return has
