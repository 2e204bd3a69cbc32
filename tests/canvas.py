"""Whether the texts of a figure are whole: none over the edge of the canvas."""

from matplotlib.text import Text


def cut_off(figure):
    """Lay a figure out; return the texts that the edge of the canvas cuts, each with its box in pixels."""
    figure.draw_without_rendering()
    axes = [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]
    away = [tick for axis in axes for tick in axis.get_major_ticks() if not _is_in_view(axis, tick.get_loc())]
    hidden = {id(label) for tick in away for label in (tick.label1, tick.label2)}  # they are not drawn
    shown = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
    boxes = [(text.get_text(), Text.get_window_extent(text)) for text in shown if id(text) not in hidden]
    whole = figure.bbox
    return [
        (text, box.extents.round().tolist())
        for text, box in boxes
        if box.x0 < -1 or box.y0 < -1 or box.x1 > whole.x1 + 1 or box.y1 > whole.y1 + 1
    ]


def _is_in_view(axis, place):
    low, high, place = axis.get_transform().transform([*sorted(axis.get_view_interval()), place])
    room = 1e-9 * (high - low)
    return low - room <= place <= high + room
