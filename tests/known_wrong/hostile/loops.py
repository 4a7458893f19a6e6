"""Never returns."""


def kernel(*tensors, **arguments):
    while True:
        pass
