"""Writes into the connection to its judge what is no answer, or one that names memory that there is not."""

import json
import os
import socket
import stat
import struct

import torch


def write(text, *more):
    for descriptor in range(3, 100):
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
        except OSError:
            continue
        connection = socket.socket(fileno=os.dup(descriptor))
        connection.sendall(struct.pack(">Q", len(text)) + text + b"".join(more))


def says(**answer):
    write(json.dumps({"number": 2, "storages": [], **answer}).encode())


def of_memory_that_is_not_there(*tensors, **arguments):
    tensor = {"storage": 1, "dtype": "float32", "shape": [1 << 40], "strides": [1], "offset": 0}
    says(output={"tensor": tensor})
    return torch.zeros_like(next(iter(arguments.values())))


def of_negative_strides(*tensors, **arguments):
    tensor = {"storage": 1, "dtype": "float32", "shape": [2], "strides": [-1], "offset": 1}
    says(output={"tensor": tensor})
    return torch.zeros_like(next(iter(arguments.values())))


def nothing(*tensors, **arguments):
    write(b"[]")


def no_json(*tensors, **arguments):
    write(b"cos\nsystem\n(S'false'\ntR.")


def too_long(*tensors, **arguments):
    write(b"", b"\xff" * 64)


def of_another_question(*tensors, **arguments):
    says(number=99)
