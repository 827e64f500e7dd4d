"""The style of figures: who has which colour and marker, and that one can tell them apart."""

from itertools import combinations
from pathlib import Path

import pytest
import yaml

from fprnn_lightning.figures import MIXERS, Style, mixer_label, mixer_style

PARTS = sorted((Path(__file__).parents[1] / "configs" / "mixer").glob("*.yaml"))


def luminance(colour: str) -> float:
    """Relative luminance as of WCAG 2."""
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_the_shipped_mixers_have_colours_and_markers_of_their_own():
    labels = [mixer_label(yaml.safe_load(part.read_text())["model"]["mixer"]) for part in PARTS]
    assert sorted(labels) == sorted(MIXERS)
    for one, other in combinations(map(mixer_style, labels), 2):
        assert one.colour != other.colour
        assert one.marker != other.marker


@pytest.mark.parametrize("style", MIXERS.values(), ids=MIXERS)
def test_a_colour_stands_out_from_a_light_and_a_dark_page(style: Style):
    assert 1.05 / (luminance(style.colour) + 0.05) >= 3
    assert (luminance(style.colour) + 0.05) / (luminance("#15181c") + 0.05) >= 3


def test_another_mixer_has_a_style_by_its_label_that_no_shipped_one_has():
    assert mixer_style("dense SelectiveSSM Monarch") == Style("#d41350", "D"), "the same in every process"
    styles = {mixer_style(f"{name} GatedDiagonal") for name in "abcdefghijklmnopqrstuvwxyz"}
    assert len(styles) > 20
    assert not styles & set(MIXERS.values())


def test_labels():
    assert mixer_label({"class_path": "fprnn_lightning.mixers.lstm.LSTMMixer"}) == "lstm"
    arguments = {"core": {"class_path": "cores.GatedDiagonal"}, "channel_mixer": None}
    assert mixer_label({"class_path": "DiagonalMixer", "init_args": arguments}) == "diagonal GatedDiagonal"
    assert mixer_label({}) == ""
