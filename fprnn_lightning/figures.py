"""The style of all figures: a mixer has the same colour and marker wherever it is drawn, whatever it is drawn with.

A mixer is known by its label, such as "fixed_point GatedDiagonal Householder": its class without "Mixer", its core, its
channel mixer. Those of configs/mixer/ have a colour and a marker of their own; another has a pair that none of them
has, chosen by a checksum of its label. Markers tell apart what colour alone cannot, to whatever eye or printer; all
colours stand out from white and from black (contrast 3 : 1).

Sources of colours: Okabe and Ito, Color Universal Design (2008), as far as they do; the others are as far apart as can
be under simulated red and green blindness (Machado, Oliveira, Fernandes, 2009).
"""

from collections.abc import Mapping
from itertools import product
from typing import Any, NamedTuple
from zlib import crc32

from matplotlib.axes import Axes

from fprnn_lightning.mixers.base import snake_case

BLUE, ORANGE, GREEN, VERMILION, GREY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "0.45"


class Style(NamedTuple):
    """How a line is drawn: a colour #rrggbb and a marker of matplotlib's."""

    colour: str
    marker: str


MIXERS = {
    "dense GatedDiagonal Householder": Style(BLUE, "o"),
    "fixed_point GatedDiagonal Householder": Style(VERMILION, "s"),
    "diagonal GatedDiagonal": Style(GREEN, "^"),
    "lstm": Style("#777777", "D"),
    "diagonal SelectiveSSM": Style("#4a714f", "v"),
    "fixed_point SelectiveSSM Householder": Style("#cc79a7", "P"),
    "fixed_point SelectiveSSM Kronecker": Style("#9449fa", "X"),
    "fixed_point SelectiveSSM LowRank": Style("#d41350", "<"),
    "diagonal StateSpaceDual": Style("#118df1", ">"),
    "fixed_point StateSpaceDual Householder": Style("#b72599", "p"),
    "fixed_point StateSpaceDual Kronecker": Style("#8a6a00", "h"),
}
ACCURACIES = {  # dashed: generated
    "token_accuracy": (BLUE, "o-"),
    "last_token_accuracy": (ORANGE, "o-"),
    "sequence_accuracy": (GREEN, "o-"),
    "generated_token_accuracy": (BLUE, "s--"),
}
TRAINED = "0.93"  # shade of the lengths of training
GRID = "0.85"


def mixer_label(mixer: Mapping[str, Any]) -> str:
    """The label of a mixer.

    Args:
        mixer: its configuration, a class_path and perhaps init_args, as in config.yaml.
    """
    name = snake_case(class_name(mixer).removesuffix("Mixer"))
    arguments = mixer.get("init_args")
    parts = (class_name(arguments.get(part)) for part in ("core", "channel_mixer")) if arguments else ()
    return " ".join(filter(None, (name, *parts)))


def class_name(part: Any) -> str:
    """The name of the class of a part of a configuration, without its modules; "" if it has none."""
    return str(part.get("class_path", "")).rpartition(".")[2] if isinstance(part, Mapping) else ""


def mixer_style(label: str) -> Style:
    """Colour and marker of a mixer, a function of its label alone."""
    if label in MIXERS:
        return MIXERS[label]
    taken = set(MIXERS.values())
    colours, markers = zip(*MIXERS.values(), strict=True)
    free = [style for style in map(Style._make, product(colours, markers)) if style not in taken]
    return free[crc32(label.encode()) % len(free)]


def tidy(axes: Axes) -> None:
    """What all axes have: no frame at the top and at the right, faint horizontal lines."""
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
