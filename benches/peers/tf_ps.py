"""TensorFlow's ParameterServerStrategy: two workers of one thread, one ps, asynchronous, all processes of this host.

    echo | python benches/peers/tf_ps.py convnet MNIST_FOLDER

Each line of input measures one window, of about SECONDS (3): `{"samples_per_second": .., "steps": ..}`, samples of both workers. The
update is the kernel that Keras' SGD calls, run where the variable lies.
"""

import argparse
import math
import os
import socket
import subprocess
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import common
import tensorflow as tf

WORKERS = 2


def one_thread():
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def variable(*shape):
    """As PyTorch's layers begin: uniform, by the number of inputs."""
    bound = 1 / math.sqrt(math.prod(shape[:-1]))
    return tf.Variable(tf.random.uniform(shape, -bound, bound))


def convnet():
    """Variables, and the function of them that gives the logits."""
    shapes = [(3, 3, 1, 32), (32,), (3, 3, 32, 64), (64,), (9216, 128), (128,), (128, 10), (10,)]

    def logits(images, w):
        hidden = tf.nn.relu(tf.nn.conv2d(images, w[0], 1, "VALID") + w[1])
        hidden = tf.nn.relu(tf.nn.conv2d(hidden, w[2], 1, "VALID") + w[3])
        hidden = tf.reshape(tf.nn.max_pool2d(hidden, 2, 2, "VALID"), [-1, 9216])
        return tf.nn.relu(hidden @ w[4] + w[5]) @ w[6] + w[7]

    return shapes, logits


def mlp():
    shapes = [shape for pair in zip(common.MLP, common.MLP[1:]) for shape in (pair, pair[1:])]

    def logits(images, w):
        hidden = tf.reshape(images, [-1, common.MLP[0]])
        for layer in range(0, len(w), 2):
            hidden = hidden @ w[layer] + w[layer + 1]
            if layer + 2 < len(w):
                hidden = tf.nn.relu(hidden)
        return hidden

    return shapes, logits


NETWORKS = {"convnet": convnet, "mlp": mlp}


def serve_role(role, index, addresses):
    one_thread()
    spec = tf.train.ClusterSpec(addresses)
    server = tf.distribute.Server(spec, job_name=role, task_index=index, protocol="grpc", start=True)
    # Until the chief, whose input this is not, kills it.
    server.join()


def start(args):
    free = [socket.create_server(("127.0.0.1", 0)) for _ in range(WORKERS + 1)]
    ports = [f"127.0.0.1:{one.getsockname()[1]}" for one in free]
    for one in free:
        one.close()
    addresses = {"worker": ports[:WORKERS], "ps": ports[WORKERS:]}
    children = []
    for role in addresses:
        for index in range(len(addresses[role])):
            arguments = [sys.executable, __file__, args.network, args.data, "--role", role, "--index", str(index)]
            arguments += ["--workers", *addresses["worker"], "--ps", *addresses["ps"]]
            children.append(subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=sys.stderr))
    return addresses, children


def lead(args, addresses):
    one_thread()
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(addresses), rpc_layer="grpc")
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    shapes, logits = NETWORKS[args.network]()
    with strategy.scope():
        weights = [variable(*shape) for shape in shapes]
        velocities = [tf.Variable(tf.zeros(shape)) for shape in shapes]

    def records():
        images, labels = common.mnist(args.data)
        data = tf.data.Dataset.from_tensor_slices((images.reshape(-1, 28, 28, 1), labels))
        return data.shuffle(len(labels)).repeat().batch(common.BATCH).prefetch(2)

    iterator = iter(coordinator.create_per_worker_dataset(records))

    @tf.function
    def step(iterator):
        images, labels = next(iterator)
        with tf.GradientTape() as tape:
            # Read once, for the way there and back.
            read = [tf.identity(weight) for weight in weights]
            tape.watch(read)
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits(images, read))
            )
        for weight, velocity, gradient in zip(weights, velocities, tape.gradient(loss, read)):
            tf.raw_ops.ResourceApplyKerasMomentum(
                var=weight.handle,
                accum=velocity.handle,
                lr=common.LEARNING_RATE,
                grad=gradient,
                momentum=common.MOMENTUM,
            )
        return loss

    def take(steps):
        for _ in range(steps):
            coordinator.schedule(step, args=(iterator,))
        coordinator.join()

    take(4 * common.WARMUP_STEPS)
    took = common.seconds_of(lambda: take(2 * common.WARMUP_STEPS), 1)
    steps = max(2 * common.WARMUP_STEPS, math.ceil(args.seconds / took * 2 * common.WARMUP_STEPS))

    def measure(_):
        seconds = common.seconds_of(lambda: take(steps), 1)
        return {"samples_per_second": steps * common.BATCH / seconds, "steps": steps}

    common.serve(measure)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("network", choices=NETWORKS)
    parser.add_argument("data")
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--index", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--workers", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--ps", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        serve_role(args.role, args.index, {"worker": args.workers, "ps": args.ps})
        return
    addresses, children = start(args)
    try:
        lead(args, addresses)
    finally:
        for child in children:
            child.kill()


if __name__ == "__main__":
    main()
