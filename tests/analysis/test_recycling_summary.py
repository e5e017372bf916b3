"""The summary of a recycling: its numbers, and a page that stands alone."""

import base64
import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from jetmoe_jax.analysis.recycling_summary import (
    community_shares,
    experts_of,
    mean_overlap,
    overlaps,
    taken_by,
    write_summary,
)
from jetmoe_jax.recycling.record import Record
from jetmoe_jax.recycling.statistics import Statistics

SETS = [np.array(units) for units in ([0, 1, 2], [1, 2, 3], [4])]


def test_how_often_a_unit_was_taken_is_a_share_of_experts():
    np.testing.assert_allclose(taken_by(SETS, 6), np.array([1, 2, 2, 1, 1, 0]) / 3)


def test_overlap_is_that_of_sets_whatever_their_sizes():
    expected = [[1, 2 / 4, 0], [2 / 4, 1, 0], [0, 0, 1]]
    np.testing.assert_allclose(overlaps(SETS, 6), expected)
    assert mean_overlap(overlaps(SETS, 6)) == pytest.approx(0.5 / 3)
    assert mean_overlap(overlaps(SETS[:1], 6)) == 1


def test_communities_tell_their_sizes_and_who_took_from_them():
    sizes, took = community_shares(np.array([0, 0, 0, 1, 2, 2]), SETS)
    np.testing.assert_allclose(sizes, [3 / 6, 1 / 6, 2 / 6])
    np.testing.assert_allclose(took, [2 / 3, 1 / 3, 1 / 3])


def test_a_shared_expert_is_none_of_the_experts():
    sets = {
        'blocks_0': {'experts': np.arange(6).reshape(2, 3), 'shared_expert': np.arange(9)[None]}
    }
    np.testing.assert_array_equal(experts_of(sets, 'blocks_0'), [[0, 1, 2], [3, 4, 5]])


class Page(HTMLParser):
    """Tags that are open, table rows as lists of cells, pictures, and every address."""

    def __init__(self, text):
        super().__init__()
        self.open, self.rows, self.pictures, self.addresses = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.addresses += [v for k, v in attributes if k in ('src', 'href')]
        if tag == 'img':
            self.pictures.append(values['src'])
        if tag == 'tr':
            self.rows.append([])
        if tag not in ('img', 'meta'):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ('td', 'th'):
            self.rows[-1].append(data)


def record_of(blocks, communities=False):
    rng = np.random.default_rng(0)

    def draw(e, size, k):
        return np.sort(rng.permuted(np.tile(np.arange(size), (e, 1)), axis=1)[:, :k])

    record = Record()
    for block in blocks:
        for path, e, k in (('core_experts', 3, 8), ('universal_experts', 40, 2)):
            record.add_experts(block, path, draw(e, 6, 3), draw(e, 12, k), ['dense'])
        if communities:
            labels = {'mlp_input': np.arange(6) % 2, 'mlp_act': np.arange(12) % 3}
            record.communities[block] = labels
    return record


def statistics_of(blocks):
    at = {'mlp_input': {'L2': np.arange(1, 7.0)}, 'mlp_act': {'L2': np.arange(12.0)}}
    return Statistics(dict.fromkeys(blocks, at), 5, 'f')


def test_the_page_stands_alone_and_has_every_section(tmp_path):
    blocks = ['blocks_0', 'blocks_1']
    write_summary(
        tmp_path / 's.html',
        facts={'experts from': '<a & b>'},
        record=record_of(blocks, communities=True),
        units=dict.fromkeys(blocks, (6, 12)),
        statistics=statistics_of(blocks),
        errors={'blocks_0': 0.25, 'blocks_1': 1.5},
        images=7,
    )
    text = (tmp_path / 's.html').read_text()
    page = Page(text)
    assert not page.open
    assert page.addresses == page.pictures and len(page.pictures) == 4
    assert 'http' not in text.lower()
    for picture in page.pictures:
        kind, data = picture.split(',')
        assert kind == 'data:image/png;base64'
        with Image.open(io.BytesIO(base64.b64decode(data))) as image:
            assert len(image.convert('RGB').getcolors(1 << 24)) > 10
    assert ['experts from', '<a & b>'] in page.rows
    assert ['blocks_1', '1.500'] in page.rows
    assert [row[:2] for row in page.rows if row[0] == 'blocks_0'][1:2] == [['blocks_0', '43']]
    assert 'mean over 7 images' in text and 'over 5 images' in text
    assert len(re.findall('<h2>', text)) == 5


def test_only_what_is_known_is_shown(tmp_path):
    blocks = ['stages_2/blocks_1']
    write_summary(
        tmp_path / 's.html', facts={}, record=record_of(blocks), units={blocks[0]: (6, 12)}
    )
    assert len(Page((tmp_path / 's.html').read_text()).pictures) == 2
    write_summary(tmp_path / 's.html', facts={}, record=Record(), units={})
    text = (tmp_path / 's.html').read_text()
    assert not Page(text).pictures
    assert 'The experts are fresh' in text
