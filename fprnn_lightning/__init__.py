"""Fixed-point recurrent networks, from diagonal to dense.

Axes in every signature and shape comment: B batch, T time, D channels inside a layer, N state per channel, R rank of
the channel mixer, V vocabulary.
"""

__version__ = "0.1.0"
