"""TensorFlow: MirroredStrategy over logical devices of the host, eager and as a function."""

import contextlib
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import _serve as peer
import keras
import tensorflow as tf

tf.get_logger().setLevel("ERROR")
COUNT = int(sys.argv[1])
MERGES = 20


def make_strategy():
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration() for _ in range(COUNT)]
    tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy([f"cpu:{i}" for i in range(COUNT)])


strategy = make_strategy()


def in_mode(mode, call):
    return tf.function(call) if mode == "function" else call


def make(task, mode, **settings):
    return globals()[f"make_{task}"](mode, **settings)


def make_merge(mode):
    def replica():
        context = tf.distribute.get_replica_context()
        for _ in range(MERGES):
            context.merge_call(lambda strategy: None)

    return peer.Work(in_mode(mode, lambda: strategy.run(replica)), MERGES * COUNT)


def make_run(mode):
    return peer.Work(in_mode(mode, lambda: strategy.run(lambda: None)))


def make_all_reduce(mode, size):
    def replica(x):
        return tf.distribute.get_replica_context().all_reduce("SUM", x)

    value = strategy.run(lambda: tf.ones([size // 4], tf.float32))
    call = in_mode(mode, lambda x: strategy.run(replica, args=(x,)))
    return peer.Work(lambda: call(value))


def make_train(mode, optimizer, batch, num_parameters=0):
    images, labels = peer.batch_of(num_parameters, batch)
    batch = len(images)
    with strategy.scope():
        variables = [tf.Variable(array) for array in peer.start_of(num_parameters)]
        rate = peer.LEARNING_RATE[optimizer]
        rule = (
            keras.optimizers.SGD(rate)
            if optimizer == "SGD"
            else keras.optimizers.Adam(rate, epsilon=peer.EPSILON)
        )
        rule.build(variables)

    def network(x, y):
        for weight, bias in zip(variables[:-2:2], variables[1:-2:2], strict=True):
            x = tf.nn.relu(x @ weight + bias)
        scores = x @ variables[-2] + variables[-1]
        return tf.nn.sparse_softmax_cross_entropy_with_logits(y, scores)

    def linear(x, y):
        return tf.square(tf.linalg.matvec(x, variables[0]) - y) / 2

    per_example = linear if num_parameters else network

    def replica(x, y):
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(per_example(x, y)) / batch
        rule.apply_gradients(zip(tape.gradient(value, variables), variables, strict=True))
        return value

    def step(x, y):
        return strategy.reduce("SUM", strategy.run(replica, args=(x, y)), axis=None)

    split = batch // COUNT
    parts = [
        strategy.experimental_distribute_values_from_function(
            lambda context, array=array: tf.constant(
                array[context.replica_id_in_sync_group * split :][:split]
            )
        )
        for array in (images, labels)
    ]
    called = in_mode(mode, step)
    return peer.Work(
        lambda: called(*parts).numpy(),
        parameters=lambda: [variable.numpy() for variable in variables],
        images=images,
        labels=labels,
    )


def make_failure(mode, kind):
    seen = []

    def replica():
        context = tf.distribute.get_replica_context()
        index = context.replica_id_in_sync_group
        if kind == "exception" and index == 1:
            raise ValueError("replica 1 fails")
        context.merge_call(lambda strategy: None)
        if kind == "mismatch" and index == 1:
            context.merge_call(lambda strategy: None)

    def call():
        try:
            strategy.run(replica)
        except (ValueError, RuntimeError) as error:
            seen[:] = [f"{type(error).__name__}: {error}"]

    return peer.Work(call, report=lambda: seen[0])


with contextlib.suppress(BrokenPipeError):
    peer.serve(make)
