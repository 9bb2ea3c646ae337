"""Runs a script that joins a job, and holds it at a gate until a line comes on stdin.

    python gated.py GATE SCRIPT [ARGUMENT ...]

A gate is ``none``, ``join`` (the process takes part, and its loop has not begun), or a number of
steps, after which the loop waits with a batch in its hands. At its gate the process prints ``at
the gate``. A test never depends on speed that way. The last line of stdout is a JSON object.

``held`` there is the hash of the model that the process has in its memory at the end of the script,
written as a file. ``sha`` is what the job says that its file has.
"""

import functools
import hashlib
import json
import os
import runpy
import sys
from typing import Any

import ebbflow
from ebbflow import session as sessions_module
from ebbflow.engine import Engine

if os.environ.get("KERAS_BACKEND") == "torch":
    # Keras imports TensorFlow for 8 s, where it is installed, to set seeds that nothing draws from.
    sys.modules["tensorflow"] = None  # type: ignore[assignment]


def held(model: Any, job: ebbflow.Session) -> str:
    """Return the SHA-256 of the ``model.safetensors`` that a process would write of its model.

    It knows nothing of the job's own weights and files. Wide types are first in such a file.

    Args:
        model: The module of PyTorch or the model of Keras; of no use in JAX.
        job: The session, which has the parameters of a loop in JAX.
    """
    import numpy

    found: dict[str, Any] = {}
    if hasattr(job, "params"):
        from jax.tree_util import tree_flatten_with_path

        for path, array in tree_flatten_with_path(job.params)[0]:
            found[".".join(key.key for key in path)] = array
    elif "keras" in sys.modules and isinstance(model, sys.modules["keras"].Model):
        convert = sys.modules["keras"].ops.convert_to_numpy
        found = {variable.path: convert(variable.value) for variable in model.weights}
    else:
        for name, tensor in model.state_dict().items():
            found[name.replace("_orig_mod.", "")] = tensor.detach().cpu()
    arrays = {name: numpy.asarray(array) for name, array in found.items()}
    kinds = {"float32": "F32", "int64": "I64"}
    header, content = {}, b""
    for name in sorted(arrays, key=lambda name: (-arrays[name].itemsize, name)):
        array, begin = arrays[name], len(content)
        content += array.tobytes()
        header[name] = {
            "dtype": kinds[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [begin, len(content)],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return hashlib.sha256(len(text).to_bytes(8, "little") + text + content).hexdigest()


def main() -> None:
    gate, script, *arguments = sys.argv[1:]
    join, hand_over = ebbflow.join, ebbflow.Session._hand_over
    sessions: list[ebbflow.Session] = []
    models: list[Any] = []
    steps = 0

    def wait() -> None:
        print("at the gate", flush=True)
        sys.stdin.readline()

    @functools.wraps(join)
    def joined(*values: Any, **options: Any) -> ebbflow.Session:
        sessions.append(join(*values, **options))
        # `ebbflow.keras.join` has the model, and gives an engine of it.
        is_engine = isinstance(values[0], Engine)
        models.append(sys._getframe(1).f_locals.get("model") if is_engine else values[0])
        if gate == "join":
            wait()
        return sessions[-1]

    def handed_over(*values: Any) -> None:
        """Hand gradients over, behind the gate."""
        nonlocal steps
        if gate == str(steps):
            wait()
        steps += 1
        hand_over(*values)

    ebbflow.join = sessions_module.join = joined
    # The loops of every library end a batch with it.
    ebbflow.Session._hand_over = handed_over  # type: ignore[method-assign, assignment]
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
    (job,), (model,) = sessions, models
    found: dict[str, Any] = {"sha": job.model_sha256, "held": held(model, job)}
    found |= {"elected": job.elected, "steps": steps}
    found["numerics"] = None if job.summary is None else job.summary["numerics"]
    print(json.dumps({**found, "metrics": job.metrics, "history": job.history}))


if __name__ == "__main__":
    main()
