"""Draw docs/images/heatmap.svg from real scores, and docs/images/intervals.svg from recorded results.

    python docs/make_pictures.py

images/pipeline.svg is written by hand.
"""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
BLOCK_SIZE = 8
GENERATIONS = ("2 steps", "4 steps", "8 steps", "16 steps", "any-order")
LOWER, EXACT, UPPER = "ELBO_{K+M}", "exact", "TUBE, cross-fitted"
TICKS = (150, 175, 200, 225, 250)
STYLE = """
    .page { fill: #fbfbfa } .text { font-size: 13px; fill: #33383f } .small { font-size: 12px; fill: #5b626d }
    .grid { stroke: #dcdfe3 } .bar { fill: #b9d4ee; stroke: #5b8fc2 } .exact { stroke: #b4560f; stroke-width: 2.5 }
    @media (prefers-color-scheme: dark) {
      .page { fill: #1f2227 } .text { fill: #e3e6ea } .small { fill: #a4abb6 }
      .grid { stroke: #3b4049 } .bar { fill: #34587c; stroke: #7fb0de } .exact { stroke: #ff9847 }
    }
"""


def example_rows() -> list[dict[str, str]]:
    """The rows that getting-started.md writes."""
    page = (ROOT / "docs" / "getting-started.md").read_text("utf-8")
    found = re.search(r"cat > rows.jsonl <<'END'\n(.*?)\nEND", page, re.DOTALL)
    assert found is not None
    return [json.loads(line) for line in found[1].splitlines()]


def draw_heatmap(path: Path) -> None:
    """What `--heatmap -` prints for the example rows."""
    from rich.console import Console
    from rich.terminal_theme import DEFAULT_TERMINAL_THEME

    from diffscore_fast import DiffScorer
    from diffscore_fast.scoring.heatmap import heatmap_terminal

    rows = example_rows()
    candidates = [row["candidate"] for row in rows]
    table = DiffScorer("mini").score([row["source"] for row in rows], candidates, token_scores=True)
    console = Console(record=True, width=112, file=io.StringIO(), color_system="truecolor", force_terminal=True)
    console.print(heatmap_terminal(candidates, table))
    picture = console.export_svg(
        title="diffscore score rows.jsonl -o scored.jsonl --heatmap -", theme=DEFAULT_TERMINAL_THEME
    )
    # No fonts from elsewhere: the reader's own monospaced one. Line ends by one rule.
    picture = re.sub(r"\s*@font-face \{.*?\}\n", "\n", picture, flags=re.DOTALL)
    picture = picture.replace("Fira Code", "ui-monospace, Menlo, Consolas")
    path.write_text("\n".join(line.rstrip() for line in picture.splitlines()) + "\n", "utf-8")


def recorded_intervals() -> list[tuple[str, float, float, float]]:
    """(generation, perplexity by the upper bound, exact, by the lower bound) of the newest record."""
    lines = (ROOT / "bench" / "results" / "bounds.jsonl").read_text("utf-8").splitlines()
    record = json.loads(lines[-1])
    values = {
        (item["generation"], item["name"]): item["value"]
        for item in record["results"]
        if item["section"] == "table" and item["block_size"] == BLOCK_SIZE
    }
    return [
        (generation, values[generation, UPPER], values[generation, EXACT], values[generation, LOWER])
        for generation in GENERATIONS
    ]


def draw_intervals(path: Path) -> None:
    """One bar per generation, from the perplexity by the upper bound to that by the lower one."""
    left, right, top, step = 120, 700, 56, 40
    low, high = math.log(TICKS[0]), math.log(260)
    intervals = recorded_intervals()
    bottom = top + step * len(intervals)

    def across(value: float) -> str:
        return f"{left + (right - left) * (math.log(value) - low) / (high - low):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 730 {bottom + 52}" '
        'font-family="system-ui, -apple-system, sans-serif" role="img" aria-label="Perplexity intervals">',
        f"  <style>{STYLE}  </style>",
        f'  <rect class="page" width="730" height="{bottom + 52}" rx="8"/>',
        f'  <text class="text" x="20" y="30">mini, blocks of {BLOCK_SIZE} tokens, 50 held-out paragraphs: '
        "bars from upper to lower bound, line = exact</text>",
    ]
    for tick in TICKS:
        parts.append(f'  <path class="grid" d="M{across(tick)} {top - 8}V{bottom}"/>')
        parts.append(f'  <text class="small" x="{across(tick)}" y="{bottom + 18}" text-anchor="middle">{tick}</text>')
    middle, label = (left + right) // 2, "perplexity (log scale; lower is better)"
    parts.append(f'  <text class="small" x="{middle}" y="{bottom + 40}" text-anchor="middle">{label}</text>')
    for index, (generation, upper, exact, lower) in enumerate(intervals):
        y = top + step * index
        width = float(across(lower)) - float(across(upper))
        parts.append(f'  <text class="text" x="{left - 16}" y="{y + 18}" text-anchor="end">{generation}</text>')
        parts.append(f'  <rect class="bar" x="{across(upper)}" y="{y + 4}" width="{width:.1f}" height="20" rx="3">')
        parts.append(f"    <title>{upper:.1f} to {lower:.1f}, exact {exact:.1f}</title></rect>")
        parts.append(f'  <path class="exact" d="M{across(exact)} {y}V{y + 28}"/>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", "utf-8")


if __name__ == "__main__":
    draw_heatmap(IMAGES / "heatmap.svg")
    draw_intervals(IMAGES / "intervals.svg")
