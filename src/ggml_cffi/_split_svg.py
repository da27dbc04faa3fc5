"""Bars of memory, one for each device, in parts for the kinds of tensors: an SVG image."""

from __future__ import annotations

from xml.sax.saxutils import escape

from ._split_report import KINDS, OTHER, Report, size

_COLORS = ("#4e79a7", "#bab0ac", "#f28e2b", "#e15759", "#76b7b2", "#59a14f", "#9c755f")
_WIDTH, _BAR, _GAP, _LEFT, _TOP = 640, 26, 14, 90, 40


def draw(report: Report) -> str:
    """The image; as wide as the longest bar, or as the free memory if that is not far longer."""
    used = max((one.nbytes for one in report.devices), default=0)
    free = [one.free for one in report.devices if one.free]
    scale = max(used, min(max(free, default=0), 2 * used), 1)
    kinds = (*KINDS, OTHER)
    height = _TOP + len(report.devices) * (_BAR + _GAP) + 30 * ((len(kinds) + 3) // 4)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 120}" '
        f'height="{height}" font-family="sans-serif" font-size="12">',
        f'<text x="8" y="22" font-size="14">{escape(report.file)}</text>',
    ]
    for j, room in enumerate(report.devices):
        y, x = _TOP + j * (_BAR + _GAP), float(_LEFT)
        parts.append(f'<text x="8" y="{y + 17}">{j} {escape(room.name)}</text>')
        for kind, color in zip(kinds, _COLORS, strict=True):
            width = room.kinds[kind] * _WIDTH / scale
            if width:
                parts.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{color}">'
                    f"<title>{kind}: {size(room.kinds[kind])}</title></rect>"
                )
            x += width
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 17}">{size(room.nbytes)}</text>')
        if room.free and room.free <= scale:
            at = _LEFT + room.free * _WIDTH / scale
            parts.append(
                f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{y - 3}" y2="{y + _BAR + 3}" '
                f'stroke="#000"><title>free: {size(room.free)}</title></line>'
            )
    top = _TOP + len(report.devices) * (_BAR + _GAP) + 8
    for i, (kind, color) in enumerate(zip(kinds, _COLORS, strict=True)):
        x0, y0 = _LEFT + i % 4 * 150, top + i // 4 * 24
        parts.append(f'<rect x="{x0}" y="{y0}" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="{x0 + 18}" y="{y0 + 11}">{kind}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
