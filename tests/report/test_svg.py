import xml.etree.ElementTree as ET

from tests.report.sample import played

from tileloom.report.svg import LABEL, ROW, VALUE, WIDTH, Bar, bars, timeline


def drawn(*rows):
    return ET.fromstring(bars(rows, 'a "title" & more'))


def test_bars_are_as_long_as_their_values():
    svg = drawn(Bar("a", 50.0, "50"), Bar("b", 100.0, "100", kind="bar own"), Bar("c", 0.0, "0"))
    lengths = [float(rect.get("width")) for rect in svg.iter("rect")]
    assert lengths == [(WIDTH - LABEL - VALUE) / 2, WIDTH - LABEL - VALUE, 1.0]
    assert [rect.get("class") for rect in svg.iter("rect")] == ["bar", "bar own", "bar"]
    assert svg.get("viewBox") == f"0 0 {WIDTH} {3 * ROW}"
    assert svg.get("aria-label") == 'a "title" & more'


def test_the_range_may_end_beyond_the_bar():
    svg = drawn(Bar("a", 50.0, "50", 40.0, 100.0))
    room = WIDTH - LABEL - VALUE
    (path,) = svg.iter("path")
    assert path.get("d") == f"M{LABEL + 0.4 * room:.1f} {ROW / 2}H{LABEL + room:.1f}"
    value = list(svg.iter("text"))[1]
    assert float(value.get("x")) == LABEL + room + 8


def test_a_row_without_a_value_shows_its_text():
    svg = drawn(Bar("<a>", None, "no & time"))
    assert not list(svg.iter("rect"))
    assert [text.text for text in svg.iter("text")] == ["<a>", "no & time"]


def test_no_rows_give_an_empty_picture():
    assert len(drawn()) == 0


def test_a_timeline_puts_overlapping_spans_above_each_other():
    svg = ET.fromstring(timeline(played().tracks, "steps"))
    rects = list(svg.iter("rect"))
    assert [rect.get("class") for rect in rects] == ["run", "wait", "load", "load"]
    room = WIDTH - LABEL
    starts = [float(rect.get("x")) for rect in rects]
    assert starts == [round(LABEL + room * start / 14, 1) for start in (0, 2, 2, 4)]
    tops = [float(rect.get("y")) for rect in rects]
    heights = [float(rect.get("height")) for rect in rects]
    assert tops[0] == tops[1]
    assert tops[3] > tops[2] + heights[2] > tops[1] + heights[1]
    assert [title.text for title in svg.iter("title")] == ["run <here>", "wait", "a", "b"]
    assert [text.text for text in svg.iter("text")] == ["producer", "copies in flight"]


def test_a_timeline_of_nothing_is_an_empty_picture():
    assert len(ET.fromstring(timeline((), "steps"))) == 0
