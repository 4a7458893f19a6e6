"""Write an invalid answer into the connection to the judge, or one that names nonexistent memory."""

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


def says(number=2, **layout):
    memory = {"kind": "TensorLayout", "storage": 1, "dtype": "float32", "strides": [1], "offset": 0, **layout}
    output = {"kind": "TensorResult", "layout": memory, "requires_gradient": False}
    answer({"kind": "Called", "outputs": [output], "several": False, "trespasses": [], "fallbacks": []}, number)


def answer(result, number=2):
    write(json.dumps([{"kind": "Answer", "number": number, "result": result}, []]).encode())


def of_memory_that_is_not_there(*tensors, **arguments):
    says(shape=[1 << 40])
    return torch.zeros_like(next(iter(arguments.values())))


def of_negative_strides(*tensors, **arguments):
    says(shape=[2], strides=[-1], offset=1)
    return torch.zeros_like(next(iter(arguments.values())))


def nothing(*tensors, **arguments):
    write(b"[]")


def no_json(*tensors, **arguments):
    write(b"cos\nsystem\n(S'false'\ntR.")


def too_long(*tensors, **arguments):
    write(b"", b"\xff" * 64)


def of_another_kind(*tensors, **arguments):
    answer({"kind": "Done"})


def of_another_question(*tensors, **arguments):
    says(number=99, shape=[1])
