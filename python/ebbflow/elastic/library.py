"""What a loop is written in: how its optimizer, its losses and its gradients reach the job."""

from __future__ import annotations

import contextlib
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import ebbflow.keras
from ebbflow import session
from ebbflow.errors import SessionError, UnsupportedError
from ebbflow.tensors import is_keras

if TYPE_CHECKING:
    from ebbflow.elastic.loop import Loop


class Library(ABC):
    """One of the libraries.

    Attributes:
        framework: Its name in ``@elastic_allreduce``.
        step: The call that says that the gradients of a batch are complete.
        losses: What tells the loss of a batch.
        schedule: What to do for another learning rate.
    """

    framework: str
    step: str
    losses: str
    schedule: str

    @abstractmethod
    def join(
        self, loop: Loop, train_data: Any, eval_data: Any, options: Mapping[str, Any]
    ) -> session.Session:
        """Take part in the job with what was registered."""

    @abstractmethod
    def rates(self, optimizer: Any) -> list[float]:
        """Return the learning rates of an optimizer."""

    def begin_batch(self) -> None:  # noqa: B027
        """Forget the batch before."""

    @abstractmethod
    def replaced(self, loop: Loop) -> contextlib.AbstractContextManager[None]:
        """Let the optimizer and the losses of this thread reach the loop."""

    @abstractmethod
    def push(self, job: Any, loss: float) -> None:
        """Hand the gradients of the batch to the job."""

    @abstractmethod
    def before(self, job: Any) -> Callable[[], bool]:
        """Note what a function that runs again must find as it was.

        Returns:
            A function that restores it. It returns whether that was possible.
        """


class Torch(Library):
    """PyTorch: the gradients are in the parameters."""

    framework = "torch"
    step = "optimizer.step()"
    losses = "backward()"
    schedule = (
        "give the scheduler to ElasticBroadcastObject.set_scheduler, and remove scheduler.step()"
    )

    def join(
        self, loop: Loop, train_data: Any, eval_data: Any, options: Mapping[str, Any]
    ) -> session.Session:
        return session.join(
            loop.model,
            loop.optimizer,
            train_data,
            eval_data,
            scheduler=loop.scheduler,
            scheduler_every=loop.scheduler_every,
            **options,
        )

    def rates(self, optimizer: Any) -> list[float]:
        return [float(group["lr"]) for group in optimizer.param_groups]

    @contextlib.contextmanager
    def replaced(self, loop: Loop) -> Iterator[None]:
        # The loop of ElasticDL passes only the optimizer to its step, and a job reports its loss
        # too.
        import torch

        backward = torch.Tensor.backward
        thread = threading.get_ident()

        def step(closure: Callable[[], Any] | None = None) -> Any:
            loop.check_step()
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            loop.stepped = True
            return loss

        def noting(tensor: Any, gradient: Any = None, *args: Any, **options: Any) -> None:
            if threading.get_ident() == thread and gradient is None and tensor.numel() == 1:
                loop.note(float(tensor.detach()))
            backward(tensor, gradient, *args, **options)

        torch.Tensor.backward = noting
        try:
            with _methods(loop.optimizer, step=step):
                yield
        finally:
            torch.Tensor.backward = backward

    def push(self, job: Any, loss: float) -> None:
        job.push(loss)

    def before(self, job: Any) -> Callable[[], bool]:
        import numpy
        import torch

        tensors = job._tensors
        gradients = [
            (tensor, tensor.grad, None if tensor.grad is None else tensor.grad._version)
            for _, tensor in tensors.parameters
        ]
        states = [(tensor, tensor.clone()) for _, tensor in tensors.states]
        drawn = torch.get_rng_state(), numpy.random.get_state(), random.getstate()
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

        def restore() -> bool:
            for tensor, gradient, version in gradients:
                # Gradients are not copied, so one that was written is lost.
                if gradient is not None and gradient._version != version:
                    return False
                tensor.grad = gradient
            for tensor, values in states:
                tensor.data.copy_(values)
            torch.set_rng_state(drawn[0])
            if cuda is not None:
                torch.cuda.set_rng_state_all(cuda)
            numpy.random.set_state(drawn[1])
            random.setstate(drawn[2])
            return True

        return restore


class TensorFlow(Library):
    """Keras on TensorFlow: ``apply_gradients`` gets the gradients of a ``GradientTape``."""

    framework = "tf_v2"
    step = "optimizer.apply_gradients(..)"
    losses = "tape.gradient(..)"
    schedule = "give the optimizer a LearningRateSchedule as its learning rate"

    def __init__(self) -> None:
        self._job: Any = None
        self._gradients: list[Any] = []
        #: What tapes were asked for gradients of in this batch, by id.
        self._targets: dict[int, Any] = {}

    def join(
        self, loop: Loop, train_data: Any, eval_data: Any, options: Mapping[str, Any]
    ) -> session.Session:
        if loop.scheduler is not None:
            raise SessionError(
                "ElasticBroadcastObject.set_scheduler: Keras has no such schedulers; "
                f"{self.schedule}"
            )
        self._job = ebbflow.keras.join(loop.model, loop.optimizer, train_data, eval_data, **options)
        return self._job  # type: ignore[no-any-return]

    def rates(self, optimizer: Any) -> list[float]:
        return [float(optimizer.learning_rate)]

    def begin_batch(self) -> None:
        self._targets = {}

    @contextlib.contextmanager
    def replaced(self, loop: Loop) -> Iterator[None]:
        import tensorflow as tf

        gradient = tf.GradientTape.gradient
        thread = threading.get_ident()

        def noting(tape: Any, target: Any, *args: Any, **options: Any) -> Any:
            if type(tape).__module__.startswith("horovod"):
                raise UnsupportedError(
                    "a tape of Horovod merges gradients itself; remove "
                    "hvd.DistributedGradientTape, and keep tf.GradientTape"
                )
            if threading.get_ident() == thread and tf.executing_eagerly():
                self._note(loop, target)
            return gradient(tape, target, *args, **options)

        def apply_gradients(pairs: Iterable[tuple[Any, Any]], *_: Any, **__: Any) -> Any:
            self._take(loop, list(pairs))
            return loop.optimizer.iterations

        def apply(gradients: Iterable[Any], variables: Iterable[Any] | None = None) -> None:
            known = [variable for _, variable in self._job._tensors.parameters]
            of = known if variables is None else variables
            self._take(loop, list(zip(gradients, of, strict=True)))

        tf.GradientTape.gradient = noting
        try:
            with _methods(loop.optimizer, apply_gradients=apply_gradients, apply=apply):
                yield
        finally:
            tf.GradientTape.gradient = gradient

    def push(self, job: Any, loss: float) -> None:
        request = job._current
        if request is None:
            raise SessionError(f"{self.step} without a batch: call it once for each batch")
        job._check_process()
        job._tensors.collect(request, self._gradients)
        job._engine.check()
        job._hand_over(request, loss)

    def before(self, job: Any) -> Callable[[], bool]:
        import numpy

        variables = job._engine.changing()
        values = [(variable, numpy.array(variable.numpy())) for variable in variables]
        drawn = numpy.random.get_state(), random.getstate()
        targets = dict(self._targets)

        def restore() -> bool:
            for variable, value in values:
                variable.assign(value)
            numpy.random.set_state(drawn[0])
            random.setstate(drawn[1])
            self._targets = dict(targets)
            return True

        return restore

    def _note(self, loop: Loop, target: Any) -> None:
        """Add the target of a tape to the loss. A persistent tape may be asked several times."""
        size = getattr(getattr(target, "shape", None), "num_elements", lambda: None)()
        if size == 1 and id(target) not in self._targets:
            self._targets[id(target)] = target
            loop.note(float(target))

    def _take(self, loop: Loop, pairs: list[tuple[Any, Any]]) -> None:
        import tensorflow as tf

        if not tf.executing_eagerly():
            raise SessionError(
                f"{self.step} is called in a tf.function, which has no values yet; decorate only "
                "the function that computes the loss, and call the tape and the optimizer outside"
            )
        loop.check_step()
        if loop.stepped:
            raise SessionError(
                f"{self.step} is called twice for one batch; give it all gradients in one call"
            )
        found = {id(getattr(variable, "value", variable)): gradient for gradient, variable in pairs}
        gradients = []
        for _, variable in self._job._tensors.parameters:
            gradient = found.pop(id(variable.value), None)
            # Gradients of embeddings are sparse.
            gradients.append(None if gradient is None else tf.convert_to_tensor(gradient).numpy())
        if found:
            raise SessionError(
                f"{self.step} got {len(found)} variables that are no trainable ones of the "
                "registered model; give it model.trainable_variables"
            )
        self._gradients = gradients
        loop.stepped = True


def library_of(model: Any) -> Library:
    """Return the library in which a model is written.

    Raises:
        UnsupportedError: It is Keras with another backend than TensorFlow.
    """
    if not is_keras(model):
        return Torch()
    from keras import config

    if config.backend() != "tensorflow":
        raise UnsupportedError(
            f"ebbflow.elastic: loops of Keras are those with tf.GradientTape, and the backend is "
            f"{config.backend()}; set KERAS_BACKEND=tensorflow, or use ebbflow.keras.join"
        )
    return TensorFlow()


@contextlib.contextmanager
def _methods(optimizer: Any, **methods: Any) -> Iterator[None]:
    """Replace methods of one object for a while."""
    before = {name: vars(optimizer).get(name) for name in methods}
    for name, method in methods.items():
        setattr(optimizer, name, method)
    try:
        yield
    finally:
        for name, method in before.items():
            if method is None:
                delattr(optimizer, name)
            else:
                setattr(optimizer, name, method)
