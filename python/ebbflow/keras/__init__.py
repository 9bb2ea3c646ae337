"""``ebbflow.keras``: models of Keras 3 as a part of a job, on its backends torch and TensorFlow.

``join`` takes a model and a loop of one's own. ``fit`` takes a compiled model and has the loop.
``Shards`` makes data sets of ``tf.data`` the data of a job.

Import it before TensorFlow computes something: it lets TensorFlow compute with one thread, because
their number changes bits.
"""

from __future__ import annotations

from ebbflow.keras.fit import fit
from ebbflow.keras.session import Session, join
from ebbflow.keras.shards import Shards
from ebbflow.keras.threads import use_one_thread

__all__ = ["Session", "Shards", "fit", "join"]

use_one_thread()
