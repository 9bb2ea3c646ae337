"""Trains a small convolutional network on handwritten digits with Keras: accuracy above 0.92."""

import argparse
import gzip
from pathlib import Path

import ebbflow.keras  # changed: before the model is made
import keras
import numpy as np
from keras import layers

DIGITS = Path(__file__).resolve().parents[2] / "digits"


def digits():
    """Return 1,437 images of 8x8 pixels with their digits to train on, and 360 to test with."""
    images = gzip.decompress((DIGITS / "images.idx3.gz").read_bytes())
    labels = gzip.decompress((DIGITS / "labels.idx1.gz").read_bytes())
    x = np.frombuffer(images, np.uint8, offset=16).reshape(-1, 8, 8, 1) / np.float32(16)
    y = np.frombuffer(labels, np.uint8, offset=8).astype(np.int32)
    return (x[:1437], y[:1437]), (x[1437:], y[1437:])


def network():
    """Return two convolutions, a normalisation, dropout and a dense layer."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.BatchNormalization(momentum=0.9),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(10, activation="softmax"),
        ]
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--save", type=Path, help="file for the trained model, such as model.keras")
    args = parser.parse_args()

    keras.utils.set_random_seed(1)
    train, test = digits()
    model = network()
    rates = keras.optimizers.schedules.CosineDecay(3e-3, decay_steps=23 * args.epochs)
    model.compile(
        keras.optimizers.Adam(rates), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    job = ebbflow.keras.fit(  # changed: was model.fit(x, y, validation_data=test, ..)
        model, train, test, epochs=args.epochs, batch_size=16, effective=64, seed=1, name="keras"
    )
    for row in job.history:
        print(row)
    if args.save and job.elected:  # changed
        model.save(args.save)


if __name__ == "__main__":
    main()
