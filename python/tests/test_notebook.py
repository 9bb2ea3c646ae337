"""The notebook, and Ctrl-C in the middle of a job: the process trains the next one."""

from __future__ import annotations

import base64
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from .conftest import needs

needs("torch")

NOTEBOOK = Path(__file__).parents[2] / "examples/python/notebook/mnist.ipynb"

#: Trains until it is interrupted: no job is so long.
ENDLESS = """
import torch, ebbflow

def train(epochs):
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(2))
    source = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    with ebbflow.join(model, optimizer, source, micro=8, epochs=epochs) as job:
        for epoch in job.epochs():
            for x, y in epoch:
                job.step(torch.nn.functional.cross_entropy(model(x), y))
            if epoch.number == 1 and epochs > 2:
                print("in the middle", flush=True)
    return job.model_sha256

"""


def test_an_interrupted_job_ends_and_the_process_trains_the_next_one() -> None:
    code = ENDLESS + (
        "expected = train(2)\n"
        "try:\n    train(1_000_000)\nexcept KeyboardInterrupt:\n    print('interrupted')\n"
        "print(train(2) == expected)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        assert child.stdout.readline() == "in the middle\n", child.stderr.read()
        child.send_signal(signal.SIGINT)
        out, said = child.communicate()
    assert (child.returncode, out) == (0, "interrupted\nTrue\n"), said


def test_the_notebook_has_no_outputs_and_runs_from_its_folder() -> None:
    nbclient, nbformat = needs("nbclient", "ipykernel", "matplotlib"), needs("nbformat")
    text = json.loads(NOTEBOOK.read_text())
    assert all(cell.get("outputs", []) == [] for cell in text["cells"])
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    where = {"metadata": {"path": str(NOTEBOOK.parent)}}
    # The cell `end` fails below the number to reach.
    options = {"timeout": 240, "startup_timeout": 240}
    nbclient.NotebookClient(notebook, resources=where, **options).execute()
    outputs = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    assert "array" not in str(outputs["read"])
    shown = [output["data"] for output in outputs["run"] if output["output_type"] == "display_data"]
    bars = [data["text/html"] for data in shown if "<progress" in data.get("text/html", "")]
    assert len(bars) == 1, shown
    # A bar that is full, with the last epoch below it.
    value, most = re.findall(r'<progress value="(\d+)" max="(\d+)">', bars[0])[0]
    assert int(value) == int(most) > 1 and "epoch 5 done, validation: loss" in bars[0], bars
    figures = [data["image/png"] for data in shown if "image/png" in data]
    assert len(figures) == 1 and base64.b64decode(figures[0]).startswith(b"\x89PNG")


def test_an_interrupted_kernel_is_usable() -> None:
    jupyter_client = needs("jupyter_client", "ipykernel")
    manager, client = jupyter_client.manager.start_new_kernel(240, kernel_name="python3")

    def execute(code: str, interrupts: bool = False) -> tuple[dict[str, Any], str]:
        """Run a cell. Returns its reply and what it printed."""
        printed = ""

        def hear(message: dict[str, Any]) -> None:
            nonlocal printed, interrupts
            if message["msg_type"] != "stream":
                return
            printed += message["content"]["text"]
            if interrupts and "in the middle" in printed:
                # Once: the line may come in two messages.
                interrupts = False
                manager.interrupt_kernel()

        reply = client.execute_interactive(code, output_hook=hear, timeout=120)
        return reply["content"], printed

    try:
        reply, first = execute(ENDLESS + "print(train(2))")
        assert reply["status"] == "ok", reply
        reply, printed = execute("train(1_000_000)", interrupts=True)
        assert (reply["status"], reply["ename"]) == ("error", "KeyboardInterrupt"), printed
        reply, again = execute("print(train(2))")
        assert (reply["status"], again) == ("ok", first)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
