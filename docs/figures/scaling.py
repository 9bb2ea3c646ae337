"""Draws the efficiency of many workers from `scaling.csv`, the figures of docs/performance.md under "Workers".

    pip install matplotlib
    python docs/figures/scaling.py        # writes docs/figures/scaling.svg
"""

import csv
from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "ebbflow"
from matplotlib import pyplot

HERE = Path(__file__).resolve().parent


def main():
    rows = list(csv.DictReader((HERE / "scaling.csv").open()))
    figure, axes = pyplot.subplots(figsize=(5.4, 3.4), layout="constrained")
    for mode, color in [("sync", "tab:blue"), ("pipelined", "tab:red")]:
        for ps, line in [("1", "-"), ("4", "--")]:
            chosen = [row for row in rows if (row["mode"], row["ps"]) == (mode, ps)]
            workers, efficiency = ([float(row[name]) for row in chosen] for name in ("workers", "efficiency"))
            axes.plot(workers, efficiency, line, marker="o", color=color, label=f"{mode}, {ps} ps")
    axes.set(xlabel="workers", ylabel="samples/s of n workers, over n times one", xscale="log", ylim=(0, 1.05))
    axes.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    axes.minorticks_off()
    axes.legend(loc="lower left")
    figure.savefig(HERE / "scaling.svg", metadata={"Date": None})


main()
