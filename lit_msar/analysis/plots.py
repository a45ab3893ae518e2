"""Figures."""

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from lit_msar.analysis.depth import DepthMaps


def depth_figure(maps: DepthMaps) -> Figure:
    """One panel per stream: reads downwards, sources to the right, the mean softmax weight as colour."""
    n_streams, n_reads, n_sources = maps.weights.shape
    width = max(2.0, 0.22 * n_sources + 0.9)
    height = max(2.4, 0.13 * n_reads + 1.0)
    figure, axes = plt.subplots(
        1, n_streams, figsize=(width * n_streams + 1, height), sharey=True, squeeze=False, layout="constrained"
    )
    for stream, axis in enumerate(axes[0]):
        image = axis.imshow(maps.weights[stream], vmin=0, vmax=1, cmap="magma", aspect="auto", interpolation="none")
        axis.set_title(f"stream {stream + 1}" if n_streams > 1 else "depth attention", fontsize=9)
        axis.set_xlabel("source (0: embedding)", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.set_facecolor("0.85")  # grey: a source that this read does not see
    axes[0, 0].set_ylabel("read (the last is the head's)", fontsize=8)
    figure.colorbar(image, ax=axes[0].tolist(), label="mean weight")
    plt.close(figure)  # the caller keeps it; pyplot need not
    return figure
