"""Writes report.md, report.json and a plot for each part, from what `cargo xtask bench` measured.

    python3 benches/report.py FOLDER < STATE

STATE is {"load": .., "quick": .., "parts": [{"name", "seconds", "error"}]}. `FOLDER/PART.rows` has
one JSON object a line, as `benches/support/report.rs` writes it. `FOLDER/criterion` is Criterion's.
Without matplotlib there are no plots.
"""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from statistics import median

try:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot
except ImportError:
    pyplot = None


def row(name, unit, samples, peer=None, at_least=None):
    """One figure. `peer` is its limit, or what a peer reached in the same run.

    >>> row("push", "GiB/s", [3.0, 1.0], peer=4.0)["ratio"]
    0.5
    """
    value = median(samples) if samples else None
    ratio = value / peer if value is not None and peer else None
    target = None if at_least is None else {"at_least": at_least}
    peer = peer or 0.0
    return dict(name=name, value=value, unit=unit, limit_or_peer=peer, ratio=ratio, target=target, samples=samples)


def met(row):
    """Whether a figure is what it shall be; None without a target. One without a value is not."""
    for kind, bound in (row["target"] or {}).items():
        value = row["value"]
        return value is not None and (value >= bound if kind == "at_least" else value < bound)


def criterion(home):
    """The rows of Criterion's folder. What moves bytes is held against memcpy of its size."""
    measured = {}
    for path in sorted(home.glob("**/new/benchmark.json")):
        benchmark, sample = (json.loads(path.with_name(f"{name}.json").read_text()) for name in ("benchmark", "sample"))
        nanos = [time / calls for time, calls in zip(sample["times"], sample["iters"])]
        size = (benchmark["throughput"] or {}).get("Bytes")
        rates = [size / 2**30 / (each / 1e9) for each in nanos] if size else None
        measured[benchmark["full_id"]] = (rates, nanos)
    for name, (rates, nanos) in sorted(measured.items()):
        limit = (measured.get("memcpy/" + name.rpartition("/")[2]) or [None])[0]
        if rates:
            yield row(name, "GiB/s", rates, median(limit) if limit else None)
        else:
            yield row(name, "us", [each / 1e3 for each in nanos])


def number(value, unit):
    if value is None:
        return "-"
    return f"{value:.3f}" if unit == "ratio" else f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}"


def target(row):
    for kind, bound in (row["target"] or {}).items():
        return f"{'>=' if kind == 'at_least' else '<'} {number(bound, row['unit'])}"
    return "-"


def line(row):
    unit, samples = row["unit"], row["samples"]
    columns = [
        row["name"].strip(),
        f"{number(row['value'], unit)} {'' if unit == 'ratio' else unit}",
        number(row["limit_or_peer"] or None, unit),
        number(row["ratio"], "ratio"),
        target(row),
        f"{number(min(samples, default=None), unit)} to {number(max(samples, default=None), unit)}",
        str(len(samples)),
        "MISSED" if met(row) is False else "",
    ]
    return f"| {' | '.join(columns)} |\n"


def plot(name, rows, path):
    """Samples, medians and targets over their limit or peer. False if there is nothing to draw."""
    rows = [row for row in rows if row["ratio"] is not None][::-1]
    if not rows or not pyplot:
        return False
    figure, axes = pyplot.subplots(figsize=(11, 1 + 0.25 * len(rows)), layout="constrained")
    for at, each in enumerate(rows):
        peer, color = each["limit_or_peer"], "tab:red" if met(each) is False else "tab:blue"
        axes.barh(at, each["ratio"], height=0.4, color=color, alpha=0.35)
        axes.plot([sample / peer for sample in each["samples"]], [at] * len(each["samples"]), ".", color=color)
        for bound in (each["target"] or {}).values():
            axes.plot([bound / peer] * 2, [at - 0.4, at + 0.4], "k", linewidth=2)
    axes.axvline(1, color="0.5", linewidth=1)
    axes.set_yticks(range(len(rows)), [row["name"].strip() for row in rows])
    # Beyond it a sample is left out.
    axes.set(xlim=(0, min(3, max(1.2, axes.get_xlim()[1]))), xlabel="of limit or peer", title=name)
    figure.savefig(path)
    pyplot.close(figure)
    return True


def machine(load):
    """Processor, cores, memory, load, and what was built."""
    processors = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(": ")[2] for line in processors if line.startswith("model name")), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores of {model}, {memory:.0f} GiB; load before it began {load}; commit {git.stdout.strip() or 'unknown'}."


def main():
    folder, state = Path(sys.argv[1]), json.load(sys.stdin)
    rows_of = {}
    for name in (part["name"] for part in state["parts"] if not part["error"]):
        lines = (folder / f"{name}.rows").read_text().splitlines() if name != "micro" else []
        rows_of[name] = [json.loads(line) for line in lines] or list(criterion(folder / "criterion"))
    rows = [row for rows in rows_of.values() for row in rows]
    missed = [row for row in rows if met(row) is False]
    count = sum(row["target"] is not None for row in rows)
    summary = f"{len(rows)} rows, {count - len(missed)} of {count} targets met\n"
    for each in missed:
        summary += f"missed: {each['name']}: {number(each['value'], each['unit'])}, target {target(each)}\n"
    text = f"# Benches\n\n{machine(state['load'])}\n\n"
    if state["quick"]:
        text += "One round of everything: these numbers show that the benches work, and little else.\n\n"
    text += summary + "\n"
    for part in state["parts"]:
        name = part["name"]
        text += f"## {name}\n\n"
        if part["error"]:
            text += f"FAILED: {part['error']}\n\n"
            continue
        text += "| figure | median | limit or peer | ratio | target | least to most | n | |\n"
        text += "| --- | --- | --- | --- | --- | --- | --- | --- |\n"
        text += "".join(map(line, rows_of[name]))
        if plot(name, rows_of[name], folder / f"{name}.svg"):
            text += f"\n![{name}: ratios]({name}.svg)\n"
        text += f"\n{part['seconds']:.0f} s\n\n"
    entries = [{"part": name, **row} for name, rows in rows_of.items() for row in rows]
    (folder / "report.json").write_text(json.dumps(entries, indent=2) + "\n")
    (folder / "report.md").write_text(text)
    print(summary, end="")


if __name__ == "__main__":
    main()
