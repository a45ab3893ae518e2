"""The figure of `kernels.bench`: time over the byte floor, by number of sources and width, as an SVG."""

import html
import itertools
from pathlib import Path

PANEL_W, PANEL_H, MARGIN = 300, 220, 50
COLORS = ("#1b6ca8", "#d1495b", "#66a182", "#8d6a9f")
LEGEND = 70  # of the width of one of its entries
TICKS = (1, 2, 4, 8, 16, 32, 64)


def write_figure(rows: list[dict], path: Path) -> None:
    """One panel per operation and pass at the longest sequence: ratio (log axis) over N, a line per width.

    An operation measured at one N alone, beside others, has no line and no panel.
    """
    rows = [row for row in rows if row["implementation"] == "triton" and row["ratio"]]
    if not rows:
        return
    tokens = max(int(row["tokens"]) for row in rows)
    rows = [row for row in rows if int(row["tokens"]) == tokens]
    all_ops = list(dict.fromkeys(row["op"] for row in rows))
    ops = [op for op in all_ops if len({row["n"] for row in rows if row["op"] == op}) > 1] or all_ops
    colors = dict(zip(sorted({int(row["d_model"]) for row in rows if row["op"] in ops}), COLORS, strict=False))
    passes = ("forward", "forward_backward")
    width, height = len(ops) * (PANEL_W + MARGIN) + MARGIN, len(passes) * (PANEL_H + MARGIN) + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="11"><rect width="{width}" height="{height}" fill="white"/>'
    ]
    for place, (d_model, color) in enumerate(colors.items()):
        parts.append(f'<text x="{MARGIN + place * LEGEND}" y="18" fill="{color}" font-weight="bold">D={d_model}</text>')
    for column, op in enumerate(ops):
        for line, which in enumerate(passes):
            x, y = MARGIN + column * (PANEL_W + MARGIN), MARGIN + line * (PANEL_H + MARGIN)
            chosen = [row for row in rows if row["op"] == op and row["pass"] == which]
            title = f"{op}, {which.replace('_', ' and ')}: time over byte floor"
            parts.append(panel(chosen, colors, x, y, title))
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def panel(rows: list[dict], colors: dict[int, str], x: float, y: float, title: str) -> str:
    """Axes and lines of one panel whose upper left corner is (x, y); colors by width."""
    counts = sorted({int(row["n"]) for row in rows})
    top = next((tick for tick in TICKS if tick >= max(float(row["ratio"]) for row in rows)), TICKS[-1]) if rows else 2

    def at_x(n: int) -> float:
        return x + PANEL_W * (counts.index(n) + 0.5) / len(counts)

    def at_y(ratio: float) -> float:
        steps = TICKS.index(top) or 1
        position = 0.0
        for low, high in itertools.pairwise(TICKS):
            if ratio > low:
                position += min(1.0, (ratio - low) / (high - low))
        return y + PANEL_H * (1 - position / steps)

    parts = [f'<text x="{x}" y="{y - 8}">{html.escape(title)}</text>']
    parts.append(f'<rect x="{x}" y="{y}" width="{PANEL_W}" height="{PANEL_H}" fill="none" stroke="#888"/>')
    for tick in TICKS[: TICKS.index(top) + 1]:
        parts.append(
            f'<line x1="{x}" x2="{x + PANEL_W}" y1="{at_y(tick):.1f}" y2="{at_y(tick):.1f}" stroke="#ddd"/>'
            f'<text x="{x - 6}" y="{at_y(tick) + 4:.1f}" text-anchor="end">{tick}x</text>'
        )
    for n in counts:
        parts.append(f'<text x="{at_x(n):.1f}" y="{y + PANEL_H + 14}" text-anchor="middle">N={n}</text>')
    for width, color in colors.items():
        line = sorted((int(row["n"]), float(row["ratio"])) for row in rows if int(row["d_model"]) == width)
        points = " ".join(f"{at_x(n):.1f},{at_y(ratio):.1f}" for n, ratio in line)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{at_x(n):.1f}" cy="{at_y(ratio):.1f}" r="3" fill="{color}"/>' for n, ratio in line]
    return "\n".join(parts)
