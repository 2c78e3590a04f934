"""Heat maps, parsed as a browser would."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from rich.console import Console

from diffscore_fast.errors import InputError
from diffscore_fast.scoring import heatmap
from diffscore_fast.scoring.heatmap import heatmap_html, heatmap_terminal
from diffscore_fast.scoring.table import TokenScores

TEXTS = ['<script>alert("x")</script> & {braces}\n  two  spaces', "plain words \x1b[31m red", None, "Paris"]


@pytest.fixture(scope="module")
def table(mini):
    return mini.score(None, TEXTS, direction="marginal", draws=4, mask_ratios="stratified", token_scores=True)


class Page(HTMLParser):
    """Collects the texts, the titles and every tag and attribute of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.titles: list[list[str]] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self._inside = False
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        self.tags.add(tag)
        self.attributes.update(named)
        if named.get("class") == "text":
            self._inside = True
            self.texts.append("")
            self.titles.append([])
        elif self._inside and "title" in named:
            self.titles[-1].append(named["title"])

    def handle_endtag(self, tag):
        if tag == "p":
            self._inside = False

    def handle_data(self, data):
        if self._inside:
            self.texts[-1] += data


def test_the_page_holds_every_text_and_every_value_and_nothing_from_outside(table):
    page = heatmap_html(TEXTS, table)
    read = Page(page)
    assert read.texts == [TEXTS[0], TEXTS[1], "", TEXTS[3]]
    for row, titles in enumerate(read.titles):
        values = table.tokens.log_probs[table.tokens.offsets[row] : table.tokens.offsets[row + 1]]
        assert titles == [heatmap.UNSCORED if np.isnan(value) else f"{value:.3f}" for value in values]
    assert read.tags <= {"html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "span", "footer"}
    assert read.attributes <= {"lang", "charset", "class", "title"} and "url(" not in page and "@import" not in page
    assert str(table.signature) in page and "missing, the candidate is missing" in page


def test_a_token_never_masked_looks_unlike_text_without_tokens(table):
    tokens = TokenScores(np.array([0, 2]), np.array([[0, 1], [1, 2]]), np.array([-3.0, np.nan]), np.array([1, 0]))
    one = replace(table.take([3]), tokens=tokens)
    page = heatmap_html(["ab" + "c" * 5000], one)
    assert '<span class="s2" title="-3.000">a</span><span class="none" title="never masked: no score">b</span>c' in page
    assert "(4000 more characters)" in page and len(page) < 5000


def test_only_the_first_rows_are_shown_and_the_page_says_so(table):
    read = Page(page := heatmap_html(TEXTS, table, max_rows=2))
    assert len(read.texts) == 2 and "The first 2 of 4 rows." in page
    assert "The first 4 of 900 rows." in heatmap_html(TEXTS, table, rows_in_all=900)
    assert "All 4 rows." in heatmap_html(TEXTS, table)


def test_terminal_shows_the_same_texts_without_their_control_characters(table):
    file = io.StringIO()
    console = Console(file=file, width=200, force_terminal=True, color_system="truecolor")
    console.print(heatmap_terminal(TEXTS, table))
    shown = file.getvalue()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert "\x1b[31m red" not in shown and "plain words \N{REPLACEMENT CHARACTER}[31m red" in plain
    assert '<script>alert("x")</script> & {braces}' in plain and "All 4 rows." in plain
    value = table.tokens.log_probs[table.tokens.offsets[3]]
    colour = heatmap.LOG_PROB_COLOURS[np.searchsorted(-np.array(heatmap.LOG_PROB_EDGES), -value)]
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    assert f"48;2;{red};{green};{blue}mParis" in shown


@pytest.mark.parametrize("colour", [*heatmap.LOG_PROB_COLOURS, *heatmap.DIFFERENCE_COLOURS])
def test_black_text_is_readable_on_every_colour(colour):
    """Contrast of WCAG 2.1: relative luminance by its definition there; 7 is the stricter level AAA."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [item / 12.92 if item <= 0.03928 else ((item + 0.055) / 1.055) ** 2.4 for item in channels]
    assert (np.dot([0.2126, 0.7152, 0.0722], linear) + 0.05) / 0.05 >= 7


def test_differences_have_a_scale_for_both_signs(mini):
    table = mini.score(["Paris in spring."], ["Paris"], direction="pmi", draws=1, levels=2, token_scores=True)
    for value, step in ((5.0, 0), (4.0, 0), (2.0, 1), (0.0, 3), (-0.25, 3), (-2.0, 5), (-9.0, 6)):
        tokens = replace(table.tokens, log_probs=np.array([value]))
        assert f'class="s{step}" title="{value:.3f}"' in heatmap_html(["Paris"], replace(table, tokens=tokens))


def test_wrong_use_is_refused(mini, table):
    with pytest.raises(InputError, match="token_scores=True"):
        heatmap_html([], mini.score([], []))
    with pytest.raises(InputError, match="1 texts but 4 rows"):
        heatmap_terminal(["x"], table)
